// Inverted dropout; its gradient is the same operator on dy.

#include "planner/plan/graph_index.h"
#include "planner/plan/sequence_order.h"
#include "runtime/kernels/counter.h"
#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

// The sequence in a call's operand, where it is not in its own order: elements
// are counted as if it were, so that a reordered run drops the same ones.
struct ReorderedSequence {
  int ranks = 0;       // of the zigzag order; 0 where there is none
  int64_t length = 0;  // of the sequence
  int64_t inner = 1;   // elements of a position

  explicit ReorderedSequence(const KernelCall& call) {
    const int factor = call.rule->FactorOf(kSequenceFactor);
    if (call.zigzag <= 1 || factor < 0) return;
    const Indices& indices = call.rule->operands[0];
    const Shape& shape = call.operands[0].global_shape;
    for (size_t d = indices.size(); d-- > 0;) {
      if (indices[d] == factor) {
        ranks = call.zigzag;
        length = shape[d];
        return;
      }
      inner *= shape[d];
    }
  }

  // The index of an element in the sequence's own order.
  int64_t Original(int64_t index) const {
    if (ranks == 0) return index;
    const int64_t row = index / (inner * length);
    const int64_t position = index / inner % length;
    return (row * length + ZigzagPosition(length, ranks, position)) * inner +
           index % inner;
  }
};

template <typename T>
void Dropout(const KernelCall& call) {
  const double probability = call.attribute("probability");
  const uint64_t key =
      DropoutKey(call.seed, call.step_argument().Get().step,
                 static_cast<uint64_t>(call.attribute("salt")));
  const T scale = static_cast<T>(1 / (1 - probability));
  const T* const x = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  const ReorderedSequence sequence(call);
  const LocalTensor& block = call.operands[0];
  const auto run = [&](int64_t local, int64_t global, int64_t length) {
    for (int64_t i = 0; i < length; ++i) {
      const double draw = CounterUniform01(
          key, static_cast<uint64_t>(sequence.Original(global + i)));
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
