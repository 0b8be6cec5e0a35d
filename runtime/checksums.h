#pragma once
// CRC-32, that of zlib, PNG and Python's zlib.crc32, which finds bits that have
// flipped and blocks that have become zeros; not those who want a collision.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

// Of `bytes` that follow others whose checksum is `before`.
uint32_t Crc32(std::span<const std::byte> bytes, uint32_t before = 0);

// What is checked alone, so that who reads a part reads little more, and what
// takes 1/16384 of it for its checksum.
constexpr int64_t kChecksumBlock = int64_t{64} << 10;

// The checksums of a stream's blocks of kChecksumBlock bytes, of which the last
// may be shorter.
class BlockChecksums {
 public:
  // What follows in the stream.
  void Add(std::span<const std::byte> bytes);
  // Of all blocks, at the end of the stream.
  std::vector<uint32_t> Take();

 private:
  std::vector<uint32_t> whole_;
  uint32_t begun_ = 0;  // of the block that is not whole yet
  int64_t filled_ = 0;  // its bytes
};

}  // namespace tessera
