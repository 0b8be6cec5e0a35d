// Memory bandwidth of the GPU and of the bus to it, through CudaDevice.
// Bytes per second count what is written, and in Copy what is read too.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <vector>

#include "runtime/device/cuda_device.h"

namespace tessera {
namespace {

// Made once: the first use of a GPU takes a second.
CudaDevice& Gpu() {
  static const std::unique_ptr<CudaDevice> device = MakeCudaDevice(0).value();
  return *device;
}

// Memory of a benchmark. Random bits: zeros can be faster than real data.
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
      word = bits ^ bits >> 29;
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

void Synchronize(benchmark::State& state) {
  if (auto done = Gpu().Synchronize(); !done) {
    state.SkipWithError(done.error().ToString().c_str());
  }
}

// Several calls per wait, so that the launches hide behind the work.
constexpr int kCallsPerWait = 10;

template <typename Call>
void Run(benchmark::State& state, int64_t bytes_per_call, Call call) {
  Synchronize(state);
  for (auto _ : state) {
    for (int i = 0; i < kCallsPerWait; ++i) call();
    Synchronize(state);
  }
  state.SetBytesProcessed(state.iterations() * kCallsPerWait * bytes_per_call);
}

void Copy(benchmark::State& state) {
  const int64_t bytes = state.range(0);
  const Buffer from(bytes), to(bytes);
  Run(state, 2 * bytes,
      [&] { Gpu().Copy(to.data(), from.data(), {.run_bytes = bytes}); });
}

// The right half of each row, of `row` bytes, as a tensor split by columns has
// it.
void CopyHalfRows(benchmark::State& state) {
  const int64_t bytes = state.range(0);
  const int64_t row = state.range(1);
  const Buffer from(2 * bytes), to(bytes);
  StridedCopy copy;
  copy.run_bytes = row / 2;
  copy.dims = 1;
  copy.extents[0] = bytes / copy.run_bytes;
  copy.from_strides[0] = row;
  copy.to_strides[0] = row / 2;
  Run(state, 2 * bytes,
      [&] { Gpu().Copy(to.data(), from.data() + row / 2, copy); });
}

void Zero(benchmark::State& state) {
  const int64_t bytes = state.range(0);
  const Buffer to(bytes);
  Run(state, bytes, [&] { Gpu().Zero(to.data(), {bytes}); });
}

void Write(benchmark::State& state) {
  const int64_t bytes = state.range(0);
  const Buffer to(bytes);
  const std::vector<char> host(static_cast<size_t>(bytes), 'x');
  Run(state, bytes, [&] { Gpu().Write(to.data(), host.data(), {bytes}); });
}

void Read(benchmark::State& state) {
  const int64_t bytes = state.range(0);
  const Buffer from(bytes);
  std::vector<char> host(static_cast<size_t>(bytes));
  Run(state, bytes, [&] { Gpu().Read(host.data(), from.data(), {bytes}); });
}

void Allocate(benchmark::State& state) {
  for (auto _ : state) {
    void* const data =
        Gpu().Allocate({1 << 20}, MemoryCategory::kWorkspace).value();
    Gpu().Free(data);
  }
}

// From what a launch takes to several times the L2 cache (50 to 60 MB on
// Hopper).
BENCHMARK(Copy)->RangeMultiplier(8)->Range(1 << 12, 1 << 30)->UseRealTime();
BENCHMARK(CopyHalfRows)
    ->Args({256 << 20, 8192})
    ->Args({256 << 20, 64})
    ->UseRealTime();
BENCHMARK(Zero)->Arg(1 << 30)->UseRealTime();
BENCHMARK(Write)->Arg(1 << 16)->Arg(256 << 20)->UseRealTime();
BENCHMARK(Read)->Arg(1 << 16)->Arg(256 << 20)->UseRealTime();
BENCHMARK(Allocate);

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  if (tessera::CudaDeviceCount() == 0) {
    std::cout << "skipped: no CUDA device\n";
    return 0;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
