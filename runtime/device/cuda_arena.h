#pragma once
// CudaArena: blocks of memory out of few large chunks. A step that repeats the
// allocations of the step before finds room for them and asks for no chunk.
//
// Best fit, the lowest address first among equals; free neighbours of one chunk
// merge (FreeList). The arena only keeps books: it never touches the memory,
// which may be a device's. Not thread-safe.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "planner/base/free_list.h"
#include "planner/base/result.h"

namespace tessera {

class CudaArena {
 public:
  // Asks the system for a chunk. The arena never gives one back: who made it
  // frees it after the arena.
  using Reserve = std::function<Result<void*>(int64_t bytes)>;

  // Chunks have at least `chunk_bytes`, or as much as there still is, where it
  // is not known what follows.
  CudaArena(int64_t chunk_bytes, Reserve reserve)
      : chunk_bytes_(chunk_bytes), reserve_(std::move(reserve)) {}

  // Memory for at least one byte, aligned to kAlignment as chunks are.
  Result<void*> Allocate(int64_t bytes);
  // Has a chunk of just so many bytes for blocks that follow.
  Result<void> Expect(int64_t bytes);
  // REQUIRES: `data` came from Allocate(bytes) and has not been freed.
  void Free(void* data, int64_t bytes);

  int64_t reserved_bytes() const { return reserved_bytes_; }

  // cudaMalloc aligns to at least 256 bytes (CUDA C++ Programming Guide 13.0,
  // "Device Memory Accesses"); cuBLASLt is fastest with as much.
  static constexpr int64_t kAlignment = 256;

 private:
  Result<void> AddBlock(int64_t bytes);
  void AddChunk(void* chunk, int64_t bytes);

  const int64_t chunk_bytes_;
  const Reserve reserve_;
  int64_t reserved_bytes_ = 0;
  FreeList free_{kAlignment};  // by address
};

}  // namespace tessera
