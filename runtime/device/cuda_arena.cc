#include "runtime/device/cuda_arena.h"

#include <algorithm>
#include <iterator>

namespace tessera {
namespace {

// The granularity in which drivers map device memory (that of
// cuMemGetAllocationGranularity on sm_90).
constexpr int64_t kPage = int64_t{2} << 20;

int64_t RoundUp(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

Result<void*> CudaArena::Allocate(int64_t bytes) {
  const int64_t size = RoundUp(std::max<int64_t>(bytes, 1), kAlignment);
  auto fit = free_.lower_bound({size, nullptr});
  if (fit == free_.end()) {
    TESSERA_RETURN_IF_ERROR(AddBlock(size));
    fit = free_.lower_bound({size, nullptr});
  }
  const auto block = blocks_.find(fit->second);
  RemoveFree(block);
  std::byte* const data = block->first;
  if (block->second.bytes > size) {
    const auto rest =
        blocks_.emplace(data + size, Block{block->second.bytes - size}).first;
    block->second.bytes = size;
    AddFree(rest);
  }
  return static_cast<void*>(data);
}

void CudaArena::Free(void* data) {
  auto block = blocks_.find(static_cast<std::byte*>(data));
  TESSERA_CHECK(block != blocks_.end() && !block->second.free)
      << "not in use: " << data;
  const auto next = std::next(block);
  if (next != blocks_.end() && next->second.free &&
      !next->second.starts_chunk) {
    RemoveFree(next);
    block->second.bytes += next->second.bytes;
    blocks_.erase(next);
  }
  if (!block->second.starts_chunk && std::prev(block)->second.free) {
    const auto previous = std::prev(block);
    RemoveFree(previous);
    previous->second.bytes += block->second.bytes;
    blocks_.erase(block);
    block = previous;
  }
  AddFree(block);
}

Result<void> CudaArena::Expect(int64_t bytes) {
  if (bytes == 0) return {};
  const int64_t size = RoundUp(bytes, kPage);
  TESSERA_TRY(void* const chunk, reserve_(size));
  AddChunk(static_cast<std::byte*>(chunk), size);
  return {};
}

// A chunk for one block of `bytes`. Near the end of the memory a full chunk may
// be too much to ask for where the block itself is not.
Result<void> CudaArena::AddBlock(int64_t bytes) {
  int64_t size = std::max(RoundUp(bytes, kPage), chunk_bytes_);
  Result<void*> chunk = reserve_(size);
  if (!chunk && size > RoundUp(bytes, kPage)) {
    size = RoundUp(bytes, kPage);
    chunk = reserve_(size);
  }
  if (!chunk) return chunk.error();
  AddChunk(static_cast<std::byte*>(*chunk), size);
  return {};
}

void CudaArena::AddChunk(std::byte* chunk, int64_t bytes) {
  reserved_bytes_ += bytes;
  AddFree(blocks_.emplace(chunk, Block{.bytes = bytes, .starts_chunk = true})
              .first);
}

void CudaArena::AddFree(Blocks::iterator block) {
  block->second.free = true;
  free_.emplace(block->second.bytes, block->first);
}

void CudaArena::RemoveFree(Blocks::iterator block) {
  block->second.free = false;
  free_.erase({block->second.bytes, block->first});
}

}  // namespace tessera
