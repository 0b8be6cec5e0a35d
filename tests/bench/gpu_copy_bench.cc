// Memory bandwidth of the GPU and of the bus to it, through CudaDevice.
// Bytes per second count what is written, and in Copy what is read too.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <iostream>
#include <vector>

#include "tests/bench/gpu_bench.h"

namespace tessera {
namespace {

template <typename Call>
void Run(benchmark::State& state, int64_t bytes_per_call, Call call) {
  tessera::Run(state, call);
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
