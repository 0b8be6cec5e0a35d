// Elements by whole numbers, and their sums (planner/ops/gather.cc).

#include "runtime/kernels/cuda/sum_over.h"
#include "runtime/kernels/gather.h"

namespace tessera {
namespace {

template <typename T>
__global__ void GatherElements(Points points, IdAxis axis, Elements<T> x,
                               const int32_t* ids, Elements<T> y,
                               bool accumulate) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < points.count; i += step) {
    Places at;
    at.Add(points, i);
    const int64_t element = axis.At(ids[at.of[1]]);
    const float value = element < 0 ? 0.0f : x.Get(at.of[0] + element);
    y.Set(at.of[2], accumulate ? y.Get(at.of[2]) + value : value);
  }
}

// A thread adds all that goes to one row of the result, in order, to `sums`,
// which has the result's elements.
template <typename T>
__global__ void AddByIds(Points outer, Points inner, IdAxis axis, Elements<T> x,
                         const int32_t* ids, float* sums) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       row < outer.count; row += step) {
    Places start;
    start.Add(outer, row);
    for (int64_t i = 0; i < axis.places; ++i) {
      sums[start.of[2] + i * axis.stride] = 0;
    }
    for (int64_t j = 0; j < inner.count; ++j) {
      Places at = start;
      at.Add(inner, j);
      const int64_t element = axis.At(ids[at.of[1]]);
      if (element >= 0) sums[at.of[2] + element] += x.Get(at.of[0]);
    }
  }
}

template <typename T>
__global__ void StoreSums(const float* sums, Elements<T> y, int64_t n,
                          bool accumulate) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += step) {
    y.Set(i, accumulate ? y.Get(i) + sums[i] : sums[i]);
  }
}

// A thread writes the row of an id.
template <typename T>
__global__ void WriteOneHot(Points rows, IdAxis axis, const int32_t* ids,
                            int64_t first, Elements<T> y) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       row < rows.count; row += step) {
    Places at;
    at.Add(rows, row);
    const int64_t element = axis.At(ids[at.of[0]] - first);
    for (int64_t i = 0; i < axis.places; ++i) {
      y.Set(at.of[1] + i * axis.stride, i * axis.stride == element ? 1 : 0);
    }
  }
}

void CallGather(const KernelCall& call) {
  const IndexRule& rule = *call.rule;
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const Placed table = PlacedOperand(call, 0);
  const IdAxis axis = AxisOf(table, AxisFactor(rule, rule.operands[0]));
  const std::array<Placed, 3> placed = {table, PlacedOperand(call, 1),
                                        PlacedResult(call, 0)};
  const Points points = PointsOver(call, rule.results[0], placed);
  ByType({x, y}, [&]<typename T>() {
    Launch(GatherElements<T>, BlocksFor(*call.queue, points.count), kThreads, 0,
           *call.queue, points, axis, Elements<T>(x),
           call.operands[1].as<const int32_t>(), Elements<T>(y),
           call.accumulate);
  });
}

void CallScatterAdd(const KernelCall& call) {
  const IndexRule& rule = *call.rule;
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const Placed table = PlacedResult(call, 0);
  const uint8_t factor = AxisFactor(rule, rule.results[0]);
  const IdAxis axis = AxisOf(table, factor);
  const std::array<Placed, 3> placed = {PlacedOperand(call, 0),
                                        PlacedOperand(call, 1), table};
  Indices rows = rule.results[0];
  std::erase(rows, factor);
  const Points outer = PointsOver(call, rows, placed);
  const Points inner =
      PointsOver(call, FactorsBut(rule, rule.results[0]), placed);
  const int64_t n = y.elements();
  auto* const sums = reinterpret_cast<float*>(
      call.queue->Workspace(n * int64_t{sizeof(float)}, "sums by id"));
  if (sums == nullptr) return;
  ByType({x}, [&]<typename T>() {
    Launch(AddByIds<T>, BlocksFor(*call.queue, outer.count), kThreads, 0,
           *call.queue, outer, inner, axis, Elements<T>(x),
           call.operands[1].as<const int32_t>(), sums);
  });
  ByType({y}, [&]<typename T>() {
    Launch(StoreSums<T>, BlocksFor(*call.queue, n), kThreads, 0, *call.queue,
           static_cast<const float*>(sums), Elements<T>(y), n, call.accumulate);
  });
}

void CallOneHot(const KernelCall& call) {
  const IndexRule& rule = *call.rule;
  const LocalTensor& y = call.results[0];
  const Placed table = PlacedResult(call, 0);
  const IdAxis axis = AxisOf(table, static_cast<uint8_t>(rule.FactorOf('v')));
  const std::array<Placed, 2> placed = {PlacedOperand(call, 0), table};
  const Points rows = PointsOver(call, rule.operands[0], placed);
  const auto first = static_cast<int64_t>(call.attribute("first"));
  ByType({y}, [&]<typename T>() {
    Launch(WriteOneHot<T>, BlocksFor(*call.queue, rows.count), kThreads, 0,
           *call.queue, rows, axis, call.operands[0].as<const int32_t>(), first,
           Elements<T>(y));
  });
}

}  // namespace

std::vector<Kernel> CudaGatherKernels() {
  return {
      {"gather", CallGather, true},
      {"gather_dx", CallScatterAdd, true},
      {"scatter_add", CallScatterAdd, true},
      {"one_hot", CallOneHot},
  };
}

}  // namespace tessera
