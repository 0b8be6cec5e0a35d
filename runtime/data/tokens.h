#pragma once
// Token data on disk, mapped into memory, and the rows of a training step.
//
// Formats, told apart by the first bytes and the ending:
//   llm.c     256 int32 of header: magic 20240520, version 1, tokens; uint16
//             ids (GPT-2). Magic 20240801, version 7: uint32 ids (Llama 3).
//             karpathy/llm.c, dev/data/data_common.py and llmc/dataloader.h.
//   nanoGPT   ".bin" without that header: uint16 ids.
//             karpathy/nanoGPT, data/*/prepare.py.
//   text      any other ending: one id, 0 to 255, for each byte.
// All little-endian.
//
// Immutable once open; const functions may be called from several threads.

#include <cstdint>
#include <string>

#include "planner/base/result.h"

namespace tessera {

enum class TokenFormat : uint8_t { kText, kNanoGpt, kLlmc16, kLlmc32 };

// "text", "nanogpt", "llm.c uint16", "llm.c uint32".
std::string_view NameOf(TokenFormat format);

class TokenData;

// Tells one file's tokens from another's: by their number and a thousand of
// them.
uint64_t FingerprintOf(const TokenData& data);

// Owns the mapping of one file. The file must not be changed while open.
class TokenData {
 public:
  TokenData(TokenData&& other) noexcept;
  TokenData& operator=(TokenData&& other) noexcept;
  ~TokenData();

  TokenFormat format() const { return format_; }
  const std::string& path() const { return path_; }
  // Number of tokens, at least 1.
  int64_t size() const { return size_; }
  // REQUIRES: 0 <= i < size(). May exceed the vocabulary.
  int64_t operator[](int64_t i) const;

  // Token `i`; an error where it exceeds the vocabulary.
  // REQUIRES: 0 <= i < size().
  Result<int32_t> Token(int64_t i) const {
    TESSERA_RETURN_IF_ERROR(CheckId(i));
    return static_cast<int32_t>((*this)[i]);
  }

  // Writes one row of a step: seq_len tokens from a random place, and as
  // labels the token that follows each. The place is a function of (seed,
  // step, sample), with `sample` the index in the global batch, so that every
  // rank makes its own rows and no split changes the data. An error when the
  // data is shorter than seq_len + 1 tokens, or an id of the row exceeds the
  // vocabulary. REQUIRES: seq_len >= 1; step, sample >= 0.
  Result<void> Sample(uint64_t seed, int64_t step, int64_t sample,
                      int64_t seq_len, int32_t* tokens, int32_t* labels) const;

 private:
  friend Result<TokenData> OpenTokens(const std::string& path,
                                      int64_t vocab_size);
  TokenData() = default;
  Result<void> ReadFormat();
  Result<void> CheckId(int64_t i) const;

  std::string path_;
  TokenFormat format_ = TokenFormat::kText;
  int64_t vocab_size_ = 0;
  int64_t size_ = 0;
  const unsigned char* ids_ = nullptr;  // inside the mapping
  void* mapping_ = nullptr;             // owned
  int64_t mapping_bytes_ = 0;
};

// Opens the file at `path` for a model of `vocab_size` tokens. Errors:
// kNotFound for a missing file; kInvalidInput for an empty file, one that its
// header says is longer, an unknown version, half a token at the end, or an id
// of at least vocab_size among those looked at: the beginning and some
// thousand places after it (Sample checks every id that it returns).
Result<TokenData> OpenTokens(const std::string& path, int64_t vocab_size);

}  // namespace tessera
