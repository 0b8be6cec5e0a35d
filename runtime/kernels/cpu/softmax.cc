// Softmax over factor z, which may be split (planner/ops/softmax.cc). Sums are
// taken in double and merged in rank order.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "runtime/kernels/cpu/sum_over.h"
#include "runtime/kernels/softmax_rows.h"

namespace tessera {
namespace {

// x -> state[rows, 2]: maximum, and sum of exp(x - maximum).
template <typename T>
void SoftmaxState(const KernelCall& call) {
  const std::array<Placed, 1> placed = {PlacedOperand(call, 0)};
  const SoftmaxRows rows = SoftmaxRowsOf(call, placed);
  const T* const x = call.operands[0].as<const T>();
  ForEachPoint(call, rows.rows, rows.places.count,
               [&](int64_t row, const Places& start) {
                 T most = x[start[0]];
                 ForEachPoint(rows.places, 0, rows.places.count, start,
                              [&](int64_t, const Places& at) {
                                most = std::max(most, x[at[0]]);
                              });
                 double sum = 0;
                 // A row of which all is masked has no sum.
                 if (most > -std::numeric_limits<T>::infinity()) {
                   ForEachPoint(rows.places, 0, rows.places.count, start,
                                [&](int64_t, const Places& at) {
                                  sum +=
                                      std::exp(static_cast<double>(x[at[0]]) -
                                               static_cast<double>(most));
                                });
                 }
                 Put(call.results[0], 2 * row, most);
                 Put(call.results[0], 2 * row + 1, sum);
               });
}

// The maximum and the sum of all shards' states of a row.
std::array<double, 2> Merged(const LocalTensor& states, int64_t rows,
                             int64_t row) {
  const int64_t shards = states.elements() / (2 * rows);
  double most = -std::numeric_limits<double>::infinity();
  for (int64_t shard = 0; shard < shards; ++shard) {
    most = std::max(most, Get(states, 2 * (shard * rows + row)));
  }
  double sum = 0;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const int64_t at = 2 * (shard * rows + row);
    if (Get(states, at + 1) == 0) continue;
    sum += Get(states, at + 1) * std::exp(Get(states, at) - most);
  }
  return {most, sum};
}

// x, states[shards, rows, 2] -> y.
template <typename T, bool kLog>
void Softmax(const KernelCall& call) {
  const std::array<Placed, 2> placed = {PlacedOperand(call, 0),
                                        PlacedResult(call, 0)};
  const SoftmaxRows rows = SoftmaxRowsOf(call, placed);
  const T* const x = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  ForEachPoint(
      call, rows.rows, rows.places.count,
      [&](int64_t row, const Places& start) {
        const auto [most, sum] = Merged(call.operands[1], rows.rows.count, row);
        const double log_sum = most + std::log(sum);
        ForEachPoint(rows.places, 0, rows.places.count, start,
                     [&](int64_t, const Places& at) {
                       const double v = static_cast<double>(x[at[0]]);
                       y[at[1]] = static_cast<T>(
                           kLog ? v - log_sum : std::exp(v - most) / sum);
                     });
      });
}

// dy, y -> state[rows, 1]: the sum of dy y, or of dy.
template <typename T, bool kLog>
void SoftmaxDxState(const KernelCall& call) {
  const std::array<Placed, 2> placed = {PlacedOperand(call, 0),
                                        PlacedOperand(call, 1)};
  const SoftmaxRows rows = SoftmaxRowsOf(call, placed);
  const T* const dy = call.operands[0].as<const T>();
  const T* const y = call.operands[1].as<const T>();
  ForEachPoint(call, rows.rows, rows.places.count,
               [&](int64_t row, const Places& start) {
                 double sum = 0;
                 ForEachPoint(rows.places, 0, rows.places.count, start,
                              [&](int64_t, const Places& at) {
                                const double d = static_cast<double>(dy[at[0]]);
                                sum += kLog ? d
                                            : d * static_cast<double>(y[at[1]]);
                              });
                 Put(call.results[0], row, sum);
               });
}

// dy, y, states[shards, rows, 1] -> dx = y (dy - sum), or dy - exp(y) sum.
template <typename T, bool kLog>
void SoftmaxDx(const KernelCall& call) {
  const std::array<Placed, 3> placed = {
      PlacedOperand(call, 0), PlacedOperand(call, 1), PlacedResult(call, 0)};
  const SoftmaxRows rows = SoftmaxRowsOf(call, placed);
  const int64_t shards = call.operands[2].elements() / rows.rows.count;
  const T* const dy = call.operands[0].as<const T>();
  const T* const y = call.operands[1].as<const T>();
  T* const dx = call.results[0].as<T>();
  ForEachPoint(call, rows.rows, rows.places.count,
               [&](int64_t row, const Places& start) {
                 double sum = 0;
                 for (int64_t shard = 0; shard < shards; ++shard) {
                   sum += Get(call.operands[2], shard * rows.rows.count + row);
                 }
                 ForEachPoint(rows.places, 0, rows.places.count, start,
                              [&](int64_t, const Places& at) {
                                const double d = static_cast<double>(dy[at[0]]);
                                const double v = static_cast<double>(y[at[1]]);
                                const T value =
                                    static_cast<T>(kLog ? d - std::exp(v) * sum
                                                        : v * (d - sum));
                                T& to = dx[at[2]];
                                to = call.accumulate ? to + value : value;
                              });
               });
}

}  // namespace

std::vector<Kernel> CpuSoftmaxKernels() {
  return {
      {"softmax.state", ByDType<SoftmaxState<float>, SoftmaxState<double>>},
      {"softmax", ByDType<Softmax<float, false>, Softmax<double, false>>},
      {"softmax_dx.state",
       ByDType<SoftmaxDxState<float, false>, SoftmaxDxState<double, false>>},
      {"softmax_dx", ByDType<SoftmaxDx<float, false>, SoftmaxDx<double, false>>,
       true},
      {"log_softmax.state", ByDType<SoftmaxState<float>, SoftmaxState<double>>},
      {"log_softmax", ByDType<Softmax<float, true>, Softmax<double, true>>},
      {"log_softmax_dx.state",
       ByDType<SoftmaxDxState<float, true>, SoftmaxDxState<double, true>>},
      {"log_softmax_dx",
       ByDType<SoftmaxDx<float, true>, SoftmaxDx<double, true>>, true},
  };
}

}  // namespace tessera
