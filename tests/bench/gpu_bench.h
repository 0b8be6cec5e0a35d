#pragma once
// What the benchmarks of a GPU share: the device, memory of it, and the loop.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/device/cuda_device.h"

namespace tessera {

// Made once: the first use of a GPU takes a second.
inline CudaDevice& Gpu() {
  static const std::unique_ptr<CudaDevice> device = MakeCudaDevice(0).value();
  return *device;
}

// Memory of a benchmark. Random, as zeros can be faster than real data; numbers
// between 0.5 and 2 and their negatives, whichever floating-point type reads
// them.
class Buffer {
 public:
  explicit Buffer(int64_t bytes)
      : data_(static_cast<std::byte*>(
            Gpu().Allocate({bytes}, MemoryCategory::kActivation).value())) {
    std::vector<uint64_t> noise(static_cast<size_t>(1 << 20) / 8);
    uint64_t bits = 1;
    for (uint64_t& word : noise) {
      // Knuth's MMIX generator.
      bits = bits * 6364136223846793005u + 1442695040888963407u;
      word = ((bits ^ bits >> 29) & 0x80ff80ff80ff80ffu) | 0x3f003f003f003f00u;
    }
    for (int64_t at = 0; at < bytes; at += 1 << 20) {
      Gpu().Write(data_ + at, noise.data(),
                  {std::min<int64_t>(bytes - at, 1 << 20)});
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { Gpu().Free(data_); }
  std::byte* data() const { return data_; }

 private:
  std::byte* const data_;
};

inline void Synchronize(benchmark::State& state) {
  if (auto done = Gpu().Synchronize(); !done) {
    state.SkipWithError(done.error().ToString().c_str());
  }
}

// Several calls per wait, so that the launches hide behind the work.
inline constexpr int kCallsPerWait = 10;

template <typename Call>
void Run(benchmark::State& state, Call call) {
  call();  // what is done once
  Synchronize(state);
  for (auto _ : state) {
    for (int i = 0; i < kCallsPerWait; ++i) call();
    Synchronize(state);
  }
}

// Of `per_call` in each call, so many in a second.
inline benchmark::Counter PerSecond(double per_call) {
  return benchmark::Counter(per_call * kCallsPerWait,
                            benchmark::Counter::kIsIterationInvariantRate);
}

}  // namespace tessera
