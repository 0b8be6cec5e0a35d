#pragma once
// CudaArena: blocks of memory out of few large chunks. A step that repeats the
// allocations of the step before finds room for them and asks for no chunk.
//
// Best fit, the lowest address first among equals; free neighbours merge. The
// arena only keeps books: it never touches the memory, which may be a device's.
// Not thread-safe.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>

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
  // REQUIRES: `data` came from Allocate and has not been freed.
  void Free(void* data);

  int64_t reserved_bytes() const { return reserved_bytes_; }

  // cudaMalloc aligns to at least 256 bytes (CUDA C++ Programming Guide 13.0,
  // "Device Memory Accesses"); cuBLASLt is fastest with as much.
  static constexpr int64_t kAlignment = 256;

 private:
  struct Block {
    int64_t bytes = 0;
    bool free = true;
    bool starts_chunk = false;  // no neighbour before it
  };
  using Blocks = std::map<std::byte*, Block>;

  Result<void> AddBlock(int64_t bytes);
  void AddChunk(std::byte* chunk, int64_t bytes);
  void AddFree(Blocks::iterator block);
  void RemoveFree(Blocks::iterator block);

  const int64_t chunk_bytes_;
  const Reserve reserve_;
  int64_t reserved_bytes_ = 0;
  Blocks blocks_;  // all, by address
  std::set<std::pair<int64_t, std::byte*>> free_;
};

}  // namespace tessera
