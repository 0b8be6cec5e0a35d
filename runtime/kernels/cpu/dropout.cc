// Inverted dropout; its gradient is the same operator on dy.

#include "runtime/kernels/counter.h"
#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

template <typename T>
void Dropout(const KernelCall& call) {
  const double probability = call.attribute("probability");
  const uint64_t key = DropoutKey(call.seed, call.step, call.attribute("salt"));
  const T scale = static_cast<T>(1 / (1 - probability));
  const T* const x = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  const LocalTensor& block = call.operands[0];
  const auto run = [&](int64_t local, int64_t global, int64_t length) {
    for (int64_t i = 0; i < length; ++i) {
      const double draw =
          CounterUniform01(key, static_cast<uint64_t>(global + i));
      y[local + i] = draw >= probability ? x[local + i] * scale : T{0};
    }
  };
  ForEachRange(
      call, RunCount(block), RowGrain(RunLength(block)),
      [&](int64_t begin, int64_t end) { ForEachRun(block, begin, end, run); });
}

}  // namespace

std::vector<Kernel> CpuDropoutKernels() {
  return {{"dropout", ByDType<Dropout<float>, Dropout<double>>}};
}

}  // namespace tessera
