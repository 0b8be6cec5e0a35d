// Inverted dropout; its gradient is the same operator on dy.

#include "runtime/kernels/dropout.h"

#include "runtime/kernels/counter.h"
#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

template <typename T>
void Dropout(const KernelCall& call) {
  const double probability = call.attribute("probability");
  const uint64_t key =
      DropoutKey(call.seed, call.step_argument().Get().step,
                 static_cast<uint64_t>(call.attribute("salt")));
  const uint64_t threshold = DropoutThreshold(probability);
  const T scale = static_cast<T>(1 / (1 - probability));
  const T* const x = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  const ReorderedSequence sequence(call);
  const LocalTensor& block = call.operands[0];
  const auto run = [&](int64_t local, int64_t global, int64_t length) {
    for (int64_t i = 0; i < length; ++i) {
      const auto index = static_cast<uint64_t>(sequence.Original(global + i));
      const bool kept = DropoutBits(key, index) >= threshold;
      y[local + i] = kept ? x[local + i] * scale : T{0};
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
