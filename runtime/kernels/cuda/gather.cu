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
    LoopPlaces at;
    at.Add(points, i);
    const int64_t element = axis.At(ids[at.of[1]]);
    const float value = element < 0 ? 0.0f : x.Get(at.of[0] + element);
    y.Set(at.of[2], accumulate ? y.Get(at.of[2]) + value : value);
  }
}

// Some rows of a result by ids, of each of which the sums are at these places
// of the axis: as many as there is workspace for. A place's sums of all rows
// lie side by side.
struct SummedRows {
  int64_t first = 0;
  int64_t count = 0;
  int64_t first_place = 0;
  int64_t places = 0;
};

// A thread adds all that goes to one row of the result, in order, to `sums`.
template <typename T>
__global__ void AddByIds(Points outer, Points inner, IdAxis axis,
                         SummedRows rows, Elements<T> x, const int32_t* ids,
                         float* sums) {
  const IdAxis here = {axis.first + rows.first_place, rows.places, rows.count};
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       row < rows.count; row += step) {
    LoopPlaces start;
    start.Add(outer, rows.first + row);
    for (int64_t i = 0; i < rows.places; ++i) sums[row + i * rows.count] = 0;
    for (int64_t j = 0; j < inner.count; ++j) {
      LoopPlaces at = start;
      at.Add(inner, j);
      const int64_t sum = here.At(ids[at.of[1]]);
      if (sum >= 0) sums[row + sum] += x.Get(at.of[0]);
    }
  }
}

template <typename T>
__global__ void StoreSums(Points outer, IdAxis axis, SummedRows rows,
                          const float* sums, Elements<T> y, bool accumulate) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < rows.count * rows.places; i += step) {
    LoopPlaces at;
    at.Add(outer, rows.first + i % rows.count);
    const int64_t place =
        at.of[2] + (rows.first_place + i / rows.count) * axis.stride;
    y.Set(place, accumulate ? y.Get(place) + sums[i] : sums[i]);
  }
}

// A thread writes the row of an id.
template <typename T>
__global__ void WriteOneHot(Points rows, IdAxis axis, const int32_t* ids,
                            int64_t first, Elements<T> y) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       row < rows.count; row += step) {
    LoopPlaces at;
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
  if (y.elements() == 0) return;
  CudaQueue& queue = *call.queue;
  auto* const sums = reinterpret_cast<float*>(queue.workspace);
  const int64_t room = queue.workspace_bytes / int64_t{sizeof(float)};
  const auto sum = [&](const SummedRows& rows) {
    ByType({x}, [&]<typename T>() {
      Launch(AddByIds<T>, BlocksFor(queue, rows.count), kThreads, 0, queue,
             outer, inner, axis, rows, Elements<T>(x),
             call.operands[1].as<const int32_t>(), sums);
    });
    ByType({y}, [&]<typename T>() {
      Launch(StoreSums<T>, BlocksFor(queue, rows.count * rows.places), kThreads,
             0, queue, outer, axis, rows, static_cast<const float*>(sums),
             Elements<T>(y), call.accumulate);
    });
  };
  const int64_t places = std::min(axis.places, room);
  const int64_t count = std::min(outer.count, room / places);
  for (int64_t place = 0; place < axis.places; place += places) {
    for (int64_t row = 0; row < outer.count; row += count) {
      sum({row, std::min(count, outer.count - row), place,
           std::min(places, axis.places - place)});
    }
  }
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
