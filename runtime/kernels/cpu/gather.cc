// Elements by whole numbers, and their sums.

#include "runtime/kernels/gather.h"

#include "runtime/kernels/cpu/sum_over.h"

namespace tessera {
namespace {

// x, ids -> y. An element that no id of the shard addresses is 0.
template <typename T>
void Gather(const KernelCall& call) {
  const IndexRule& rule = *call.rule;
  const Placed x = PlacedOperand(call, 0);
  const IdAxis axis = AxisOf(x, AxisFactor(rule, rule.operands[0]));
  const std::array<Placed, 3> placed = {x, PlacedOperand(call, 1),
                                        PlacedResult(call, 0)};
  const Points points = PointsOver(call, rule.results[0], placed);
  const T* const from = call.operands[0].as<const T>();
  const int32_t* const ids = call.operands[1].as<const int32_t>();
  T* const to = call.results[0].as<T>();
  ForEachPoint(call, points, 1, [&](int64_t, const Places& at) {
    const int64_t element = axis.At(ids[at[1]]);
    const T value = element < 0 ? T{0} : from[at[0] + element];
    to[at[2]] = call.accumulate ? to[at[2]] + value : value;
  });
}

// x, ids -> y: adds in the order of the factors that the result lacks.
template <typename T>
void ScatterAdd(const KernelCall& call) {
  const IndexRule& rule = *call.rule;
  const Placed y = PlacedResult(call, 0);
  const uint8_t factor = AxisFactor(rule, rule.results[0]);
  const IdAxis axis = AxisOf(y, factor);
  const std::array<Placed, 3> placed = {PlacedOperand(call, 0),
                                        PlacedOperand(call, 1), y};
  Indices rows = rule.results[0];
  std::erase(rows, factor);
  Indices added = FactorsBut(rule, rule.results[0]);
  const Points outer = PointsOver(call, rows, placed);
  const Points inner = PointsOver(call, added, placed);
  const T* const from = call.operands[0].as<const T>();
  const int32_t* const ids = call.operands[1].as<const int32_t>();
  T* const to = call.results[0].as<T>();
  ForEachPoint(call, outer, inner.count + axis.places,
               [&](int64_t, const Places& start) {
                 for (int64_t i = 0; !call.accumulate && i < axis.places; ++i) {
                   to[start[2] + i * axis.stride] = 0;
                 }
                 ForEachPoint(inner, 0, inner.count, start,
                              [&](int64_t, const Places& at) {
                                const int64_t element = axis.At(ids[at[1]]);
                                if (element >= 0) {
                                  to[at[2] + element] += from[at[0]];
                                }
                              });
               });
}

// ids -> y.
template <typename T>
void OneHot(const KernelCall& call) {
  const IndexRule& rule = *call.rule;
  const Placed y = PlacedResult(call, 0);
  const auto factor = static_cast<uint8_t>(rule.FactorOf('v'));
  const IdAxis axis = AxisOf(y, factor);
  const std::array<Placed, 2> placed = {PlacedOperand(call, 0), y};
  const Points rows = PointsOver(call, rule.operands[0], placed);
  const int32_t* const ids = call.operands[0].as<const int32_t>();
  T* const to = call.results[0].as<T>();
  const auto first = static_cast<int64_t>(call.attribute("first"));
  ForEachPoint(call, rows, axis.places, [&](int64_t, const Places& at) {
    const int64_t element = axis.At(ids[at[0]] - first);
    for (int64_t i = 0; i < axis.places; ++i) {
      to[at[1] + i * axis.stride] = T{0};
    }
    if (element >= 0) to[at[1] + element] = T{1};
  });
}

}  // namespace

std::vector<Kernel> CpuGatherKernels() {
  return {
      {"gather", ByDType<Gather<float>, Gather<double>>, true},
      {"gather_dx", ByDType<ScatterAdd<float>, ScatterAdd<double>>, true},
      {"scatter_add", ByDType<ScatterAdd<float>, ScatterAdd<double>>, true},
      {"one_hot", ByDType<OneHot<float>, OneHot<double>>},
  };
}

}  // namespace tessera
