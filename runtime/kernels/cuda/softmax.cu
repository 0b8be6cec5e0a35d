// Softmax over factor z, a warp for each row. States and formulas:
// runtime/kernels/cpu/softmax.cc.

#include "runtime/kernels/cuda/sum_over.h"
#include "runtime/kernels/softmax_rows.h"

namespace tessera {
namespace {

// x -> (maximum, sum of exp(x - maximum)).
template <typename T>
__global__ void ForwardState(SoftmaxRows rows, Elements<T> x,
                             Elements<Any> state) {
  const int64_t row = RowOfThread();
  if (row >= rows.rows.count) return;
  LoopPlaces start;
  start.Add(rows.rows, row);
  float most = x.Get(start.of[0]);
  ForEachOfRow(rows.places, start, [&](const LoopPlaces& at) {
    const float value = x.Get(at.of[0]);
    most = value > most ? value : most;
  });
  most = Largest(most);
  float sum = 0;
  if (most > -INFINITY) {
    ForEachOfRow(rows.places, start, [&](const LoopPlaces& at) {
      sum += expf(x.Get(at.of[0]) - most);
    });
  }
  sum = Sum(sum);
  if (threadIdx.x > 0) return;
  state.Set(2 * row, most);
  state.Set(2 * row + 1, sum);
}

// x, states -> y.
template <typename T, bool kLog>
__global__ void Forward(SoftmaxRows rows, Elements<T> x, Elements<Any> states,
                        int64_t shards, Elements<T> y) {
  const int64_t row = RowOfThread();
  if (row >= rows.rows.count) return;
  float most = -INFINITY;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const float value = states.Get(2 * (shard * rows.rows.count + row));
    most = value > most ? value : most;
  }
  float sum = 0;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const int64_t at = 2 * (shard * rows.rows.count + row);
    const float of_shard = states.Get(at + 1);
    if (of_shard > 0) sum += of_shard * expf(states.Get(at) - most);
  }
  LoopPlaces start;
  start.Add(rows.rows, row);
  const float log_sum = kLog ? logf(sum) : 0.0f;
  ForEachOfRow(rows.places, start, [&](const LoopPlaces& at) {
    const float value = x.Get(at.of[0]) - most;
    y.Set(at.of[1], kLog ? value - log_sum : expf(value) / sum);
  });
}

// dy, y -> the sum of dy y, or of dy.
template <typename T, bool kLog>
__global__ void BackwardState(SoftmaxRows rows, Elements<T> dy, Elements<T> y,
                              Elements<Any> state) {
  const int64_t row = RowOfThread();
  if (row >= rows.rows.count) return;
  LoopPlaces start;
  start.Add(rows.rows, row);
  float sum = 0;
  ForEachOfRow(rows.places, start, [&](const LoopPlaces& at) {
    const float d = dy.Get(at.of[0]);
    sum += kLog ? d : d * y.Get(at.of[1]);
  });
  sum = Sum(sum);
  if (threadIdx.x == 0) state.Set(row, sum);
}

// dy, y, states -> dx.
template <typename T, bool kLog>
__global__ void Backward(SoftmaxRows rows, Elements<T> dy, Elements<T> y,
                         Elements<Any> states, int64_t shards, Elements<T> dx,
                         bool accumulate) {
  const int64_t row = RowOfThread();
  if (row >= rows.rows.count) return;
  float sum = 0;
  for (int64_t shard = 0; shard < shards; ++shard) {
    sum += states.Get(shard * rows.rows.count + row);
  }
  LoopPlaces start;
  start.Add(rows.rows, row);
  ForEachOfRow(rows.places, start, [&](const LoopPlaces& at) {
    const float d = dy.Get(at.of[0]);
    const float v = y.Get(at.of[1]);
    const float value = kLog ? d - expf(v) * sum : v * (d - sum);
    dx.Set(at.of[2], accumulate ? dx.Get(at.of[2]) + value : value);
  });
}

void SoftmaxState(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const std::array<Placed, 1> placed = {PlacedOperand(call, 0)};
  const SoftmaxRows rows = SoftmaxRowsOf(call, placed);
  ByType({x}, [&]<typename T>() {
    Launch(ForwardState<T>, GridOfRows(rows.rows.count), BlockOfRows(), 0,
           *call.queue, rows, Elements<T>(x), Elements<Any>(call.results[0]));
  });
}

template <bool kLog>
void Softmax(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const std::array<Placed, 2> placed = {PlacedOperand(call, 0),
                                        PlacedResult(call, 0)};
  const SoftmaxRows rows = SoftmaxRowsOf(call, placed);
  ByType({x, y}, [&]<typename T>() {
    Launch(Forward<T, kLog>, GridOfRows(rows.rows.count), BlockOfRows(), 0,
           *call.queue, rows, Elements<T>(x), Elements<Any>(call.operands[1]),
           call.operands[1].elements() / (2 * rows.rows.count), Elements<T>(y));
  });
}

template <bool kLog>
void SoftmaxDxState(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& y = call.operands[1];
  const std::array<Placed, 2> placed = {PlacedOperand(call, 0),
                                        PlacedOperand(call, 1)};
  const SoftmaxRows rows = SoftmaxRowsOf(call, placed);
  ByType({dy, y}, [&]<typename T>() {
    Launch(BackwardState<T, kLog>, GridOfRows(rows.rows.count), BlockOfRows(),
           0, *call.queue, rows, Elements<T>(dy), Elements<T>(y),
           Elements<Any>(call.results[0]));
  });
}

template <bool kLog>
void SoftmaxDx(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& y = call.operands[1];
  const LocalTensor& dx = call.results[0];
  const std::array<Placed, 3> placed = {
      PlacedOperand(call, 0), PlacedOperand(call, 1), PlacedResult(call, 0)};
  const SoftmaxRows rows = SoftmaxRowsOf(call, placed);
  ByType({dy, y, dx}, [&]<typename T>() {
    Launch(Backward<T, kLog>, GridOfRows(rows.rows.count), BlockOfRows(), 0,
           *call.queue, rows, Elements<T>(dy), Elements<T>(y),
           Elements<Any>(call.operands[2]),
           call.operands[2].elements() / rows.rows.count, Elements<T>(dx),
           call.accumulate);
  });
}

}  // namespace

std::vector<Kernel> CudaSoftmaxKernels() {
  return {
      {"softmax.state", SoftmaxState},
      {"softmax", Softmax<false>},
      {"softmax_dx.state", SoftmaxDxState<false>},
      {"softmax_dx", SoftmaxDx<false>, true},
      {"log_softmax.state", SoftmaxState},
      {"log_softmax", Softmax<true>},
      {"log_softmax_dx.state", SoftmaxDxState<true>},
      {"log_softmax_dx", SoftmaxDx<true>, true},
  };
}

}  // namespace tessera
