#include "runtime/data/tokens.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "planner/base/rng.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little,
              "ids are read as they lie in the file");

// llm.c's header: 256 int32, of which magic, version and number of tokens
// come first.
constexpr int64_t kLlmcHeaderBytes = 256 * 4;
constexpr int32_t kLlmcMagic16 = 20240520;
constexpr int32_t kLlmcVersion16 = 1;
constexpr int32_t kLlmcMagic32 = 20240801;
constexpr int32_t kLlmcVersion32 = 7;

// What OpenTokens looks at: enough to catch data of another tokenizer, few
// enough pages to be quick on a file of any size.
constexpr int64_t kCheckedFirst = 1 << 16;
constexpr int64_t kCheckedPlaces = 4096;

int64_t BytesPerToken(TokenFormat format) {
  switch (format) {
    case TokenFormat::kText:
      return 1;
    case TokenFormat::kNanoGpt:
    case TokenFormat::kLlmc16:
      return 2;
    case TokenFormat::kLlmc32:
      return 4;
  }
  return 1;
}

template <typename T>
T Load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

std::string_view NameOf(TokenFormat format) {
  switch (format) {
    case TokenFormat::kText:
      return "text";
    case TokenFormat::kNanoGpt:
      return "nanogpt";
    case TokenFormat::kLlmc16:
      return "llm.c uint16";
    case TokenFormat::kLlmc32:
      return "llm.c uint32";
  }
  return "";
}

int64_t TokenData::operator[](int64_t i) const {
  switch (format_) {
    case TokenFormat::kText:
      return Load<uint8_t>(ids_ + i);
    case TokenFormat::kNanoGpt:
    case TokenFormat::kLlmc16:
      return Load<uint16_t>(ids_ + 2 * i);
    case TokenFormat::kLlmc32:
      return Load<uint32_t>(ids_ + 4 * i);
  }
  return 0;
}

Result<void> TokenData::CheckId(int64_t i) const {
  const int64_t id = (*this)[i];
  if (id < vocab_size_) return {};
  return InvalidInput("token " + std::to_string(i) + " is " +
                          std::to_string(id) +
                          ": expected less than the vocabulary size " +
                          std::to_string(vocab_size_),
                      path_);
}

Result<void> TokenData::ReadFormat() {
  const std::byte* const bytes = file_.bytes().data();
  const int64_t file_bytes = std::ssize(file_.bytes());
  int64_t header_bytes = 0;
  int32_t version = 0;
  int32_t expected_version = 0;
  const int32_t magic =
      file_bytes >= int64_t{sizeof(int32_t)} ? Load<int32_t>(bytes) : 0;
  if (magic == kLlmcMagic16 || magic == kLlmcMagic32) {
    if (file_bytes < kLlmcHeaderBytes) {
      return InvalidInput(
          "ends within llm.c's header: " + std::to_string(file_bytes) +
              " bytes of " + std::to_string(kLlmcHeaderBytes),
          path_);
    }
    const bool wide = magic == kLlmcMagic32;
    format_ = wide ? TokenFormat::kLlmc32 : TokenFormat::kLlmc16;
    version = Load<int32_t>(bytes + 4);
    expected_version = wide ? kLlmcVersion32 : kLlmcVersion16;
    header_bytes = kLlmcHeaderBytes;
  } else {
    format_ =
        path_.ends_with(".bin") ? TokenFormat::kNanoGpt : TokenFormat::kText;
  }
  if (version != expected_version) {
    return InvalidInput("llm.c data of version " + std::to_string(version) +
                            ": expected " + std::to_string(expected_version),
                        path_);
  }
  const int64_t token_bytes = BytesPerToken(format_);
  const int64_t data_bytes = file_bytes - header_bytes;
  if (data_bytes % token_bytes != 0) {
    return InvalidInput("ends within a token: " + std::to_string(data_bytes) +
                            " bytes of " + std::string(NameOf(format_)) +
                            " data",
                        path_);
  }
  size_ = data_bytes / token_bytes;
  ids_ = bytes + header_bytes;
  if (header_bytes > 0) {
    const int64_t promised = Load<int32_t>(bytes + 8);
    if (promised != size_) {
      return InvalidInput("holds " + std::to_string(size_) +
                              (size_ == 1 ? " token" : " tokens") +
                              ": its header says " + std::to_string(promised),
                          path_);
    }
  }
  if (size_ == 0) return InvalidInput("holds no tokens", path_);
  return {};
}

Result<TokenData> OpenTokens(const std::string& path, int64_t vocab_size) {
  TESSERA_TRY(MappedFile file, MappedFile::Open(path));
  TokenData data(std::move(file));
  data.path_ = path;
  data.vocab_size_ = vocab_size;
  TESSERA_RETURN_IF_ERROR(data.ReadFormat());
  for (int64_t i = 0; i < std::min(data.size_, kCheckedFirst); ++i) {
    TESSERA_RETURN_IF_ERROR(data.CheckId(i));
  }
  const int64_t stride = std::max<int64_t>(data.size_ / kCheckedPlaces, 1);
  for (int64_t i = 0; i < data.size_; i += stride) {
    TESSERA_RETURN_IF_ERROR(data.CheckId(i));
  }
  return data;
}

uint64_t FingerprintOf(const TokenData& data) {
  constexpr int64_t kLooks = 1000;
  uint64_t hash = Mix64(static_cast<uint64_t>(data.size()));
  const int64_t stride = std::max<int64_t>(1, data.size() / kLooks);
  for (int64_t i = 0; i < data.size(); i += stride) {
    hash = Mix64(hash ^ static_cast<uint64_t>(data[i]));
  }
  return hash;
}

}  // namespace tessera
