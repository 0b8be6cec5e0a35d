#include "runtime/device/cuda_arena.h"

#include <algorithm>
#include <optional>

#include "planner/base/divide.h"

namespace tessera {
namespace {

// The granularity in which drivers map device memory (that of
// cuMemGetAllocationGranularity on sm_90).
constexpr int64_t kPage = int64_t{2} << 20;

}  // namespace

Result<void*> CudaArena::Allocate(int64_t bytes) {
  std::optional<int64_t> block = free_.TakeGap(bytes);
  if (!block) {
    TESSERA_RETURN_IF_ERROR(AddBlock(std::max<int64_t>(bytes, 1)));
    block = free_.TakeGap(bytes);
  }
  return reinterpret_cast<void*>(*block);  // NOLINT: it was added as one
}

void CudaArena::Free(void* data, int64_t bytes) {
  free_.Give(reinterpret_cast<int64_t>(data), bytes);
}

Result<void> CudaArena::Expect(int64_t bytes) {
  if (bytes == 0) return {};
  const int64_t size = RoundUp(bytes, kPage);
  TESSERA_TRY(void* const chunk, reserve_(size));
  AddChunk(chunk, size);
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
  AddChunk(*chunk, size);
  return {};
}

void CudaArena::AddChunk(void* chunk, int64_t bytes) {
  reserved_bytes_ += bytes;
  free_.Add(reinterpret_cast<int64_t>(chunk), bytes);
}

}  // namespace tessera
