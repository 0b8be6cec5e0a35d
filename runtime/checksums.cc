#include "runtime/checksums.h"

#include <zlib.h>

#include <algorithm>
#include <utility>

namespace tessera {

uint32_t Crc32(std::span<const std::byte> bytes, uint32_t before) {
  return static_cast<uint32_t>(crc32_z(
      before, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

void BlockChecksums::Add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const int64_t count = std::min(std::ssize(bytes), kChecksumBlock - filled_);
    begun_ = Crc32(bytes.first(static_cast<size_t>(count)), begun_);
    bytes = bytes.subspan(static_cast<size_t>(count));
    filled_ += count;
    if (filled_ < kChecksumBlock) continue;
    whole_.push_back(std::exchange(begun_, 0));
    filled_ = 0;
  }
}

std::vector<uint32_t> BlockChecksums::Take() {
  if (filled_ > 0) whole_.push_back(std::exchange(begun_, 0));
  filled_ = 0;
  return std::move(whole_);
}

}  // namespace tessera
