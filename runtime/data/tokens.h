#pragma once
// Token data on disk, mapped into memory.
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

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "planner/base/result.h"
#include "runtime/mapped_file.h"

namespace tessera {

enum class TokenFormat : uint8_t { kText, kNanoGpt, kLlmc16, kLlmc32 };

// "text", "nanogpt", "llm.c uint16", "llm.c uint32".
std::string_view NameOf(TokenFormat format);

class TokenData;

// Tells one file's tokens from another's: by their number and a thousand of
// them.
uint64_t FingerprintOf(const TokenData& data);

// Owns the mapping of one file. The file must not be changed while open; that
// it is cut CheckWhole sees.
class TokenData {
 public:
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

  // As MappedFile::CheckWhole.
  Result<void> CheckWhole() const { return file_.CheckWhole(); }

 private:
  friend Result<TokenData> OpenTokens(const std::string& path,
                                      int64_t vocab_size);
  explicit TokenData(MappedFile file) : file_(std::move(file)) {}
  Result<void> ReadFormat();
  Result<void> CheckId(int64_t i) const;

  MappedFile file_;
  std::string path_;
  TokenFormat format_ = TokenFormat::kText;
  int64_t vocab_size_ = 0;
  int64_t size_ = 0;
  const std::byte* ids_ = nullptr;  // in the file
};

// Opens the file at `path` for a model of `vocab_size` tokens. Errors:
// kNotFound for a missing file; kInvalidInput for an empty file, one that its
// header says is longer, an unknown version, half a token at the end, or an id
// of at least vocab_size among those looked at: the beginning and some
// thousand places after it (Token checks every id that it returns).
Result<TokenData> OpenTokens(const std::string& path, int64_t vocab_size);

}  // namespace tessera
