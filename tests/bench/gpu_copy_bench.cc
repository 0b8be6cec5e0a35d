// Memory bandwidth of the GPU and of the bus to it, through CudaDevice. Bytes
// per second count what is written, and in Copy what is read too. And what the
// host takes to enqueue what it hands over.

#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <iostream>
#include <vector>

#include "runtime/comm/nccl_world.h"
#include "runtime/comm/store.h"
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

// What the inputs of some microbatches, three each, take of the host's time
// behind work that goes on.
void WriteBehindWork(benchmark::State& state) {
  constexpr int64_t kInput = 1 << 16;
  const int64_t inputs = state.range(0);
  const Buffer work(1 << 30);
  const Buffer to(kInput);
  const std::vector<char> host(kInput, 'x');
  for (auto _ : state) {
    for (int i = 0; i < kCallsPerWait; ++i) Gpu().Zero(work.data(), {1 << 30});
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < inputs; ++i) {
      Gpu().Write(to.data(), host.data(), {kInput});
    }
    const std::chrono::duration<double> taken =
        std::chrono::steady_clock::now() - begin;
    state.SetIterationTime(taken.count());
    Synchronize(state);
  }
}

// What the host takes to enqueue an operation of NCCL.
void EnqueueAllReduce(benchmark::State& state) {
  const auto store = Store::Open({}).value();
  const auto world = MakeNcclWorld(0, 1, *store, Gpu()).value();
  const std::vector<int> everyone = {0};
  Communicator* const all = world->Group(everyone).value();
  const Buffer data(1 << 12);
  for (auto _ : state) {
    if (auto done = all->AllReduce(data.data(), 1 << 10, DType::kFloat32);
        !done) {
      state.SkipWithError(done.error().ToString().c_str());
    }
  }
  Synchronize(state);
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
BENCHMARK(WriteBehindWork)->Arg(3)->Arg(12)->UseManualTime();
BENCHMARK(EnqueueAllReduce)->UseRealTime();
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
