#include "runtime/data/tokens.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
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
T Load(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

Error SystemError(const std::string& path, int error) {
  return {error == ENOENT ? ErrorCode::kNotFound : ErrorCode::kUnavailable,
          std::string("cannot open: ") + std::strerror(error), path};
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

TokenData::TokenData(TokenData&& other) noexcept {
  *this = std::move(other);
}

TokenData& TokenData::operator=(TokenData&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(format_, other.format_);
  std::swap(vocab_size_, other.vocab_size_);
  std::swap(size_, other.size_);
  std::swap(ids_, other.ids_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  return *this;
}

TokenData::~TokenData() {
  if (mapping_ != nullptr) {
    ::munmap(mapping_, static_cast<size_t>(mapping_bytes_));
  }
}

int64_t TokenData::operator[](int64_t i) const {
  switch (format_) {
    case TokenFormat::kText:
      return ids_[i];
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
  const auto* bytes = static_cast<const unsigned char*>(mapping_);
  int64_t header_bytes = 0;
  int32_t version = 0;
  int32_t expected_version = 0;
  const int32_t magic =
      mapping_bytes_ >= kLlmcHeaderBytes ? Load<int32_t>(bytes) : 0;
  if (magic == kLlmcMagic16 || magic == kLlmcMagic32) {
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
  const int64_t data_bytes = mapping_bytes_ - header_bytes;
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
                              " tokens: its header says " +
                              std::to_string(promised),
                          path_);
    }
  }
  if (size_ == 0) return InvalidInput("holds no tokens", path_);
  return {};
}

Result<void> TokenData::Sample(uint64_t seed, int64_t step, int64_t sample,
                               int64_t seq_len, int32_t* tokens,
                               int32_t* labels) const {
  if (size_ < seq_len + 1) {
    return InvalidInput("holds " + std::to_string(size_) +
                            " tokens: a sequence length of " +
                            std::to_string(seq_len) + " needs at least " +
                            std::to_string(seq_len + 1),
                        path_);
  }
  const int64_t places = size_ - seq_len;
  const uint64_t key = Mix64(Mix64(seed) ^ static_cast<uint64_t>(step));
  const double draw = CounterUniform01(key, static_cast<uint64_t>(sample));
  const int64_t start = std::min(
      static_cast<int64_t>(draw * static_cast<double>(places)), places - 1);
  for (int64_t i = 0; i <= seq_len; ++i) {
    TESSERA_RETURN_IF_ERROR(CheckId(start + i));
  }
  for (int64_t i = 0; i < seq_len; ++i) {
    tokens[i] = static_cast<int32_t>((*this)[start + i]);
    labels[i] = static_cast<int32_t>((*this)[start + i + 1]);
  }
  return {};
}

Result<TokenData> OpenTokens(const std::string& path, int64_t vocab_size) {
  TokenData data;
  data.path_ = path;
  data.vocab_size_ = vocab_size;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return SystemError(path, errno);
  struct stat status = {};
  const bool known = ::fstat(file, &status) == 0;
  const bool regular = known && S_ISREG(status.st_mode);
  if (regular && status.st_size > 0) {
    void* mapping = ::mmap(nullptr, static_cast<size_t>(status.st_size),
                           PROT_READ, MAP_PRIVATE, file, 0);
    if (mapping != MAP_FAILED) {
      data.mapping_ = mapping;
      data.mapping_bytes_ = status.st_size;
    }
  }
  const int map_error = errno;
  ::close(file);
  if (!regular) return InvalidInput("not a file of tokens", path);
  if (status.st_size == 0) return InvalidInput("holds no tokens", path);
  if (data.mapping_ == nullptr) return SystemError(path, map_error);
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
