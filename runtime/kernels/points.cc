#include "runtime/kernels/points.h"

#include <algorithm>

namespace tessera {
namespace {

// f(tensor, dimension) of a tensor of the call that has the factor; 1 where
// none has.
template <typename F>
int64_t OfFactor(const KernelCall& call, uint8_t factor, F f) {
  const auto find = [&](const std::vector<Indices>& sides,
                        std::span<const LocalTensor> tensors) -> int64_t {
    for (size_t i = 0; i < sides.size(); ++i) {
      const auto at = std::ranges::find(sides[i], factor);
      if (at != sides[i].end()) return f(tensors[i], at - sides[i].begin());
    }
    return 0;
  };
  const int64_t of_operand = find(call.rule->operands, call.operands);
  if (of_operand > 0) return of_operand;
  return std::max<int64_t>(1, find(call.rule->results, call.results));
}

int64_t LocalExtent(const KernelCall& call, uint8_t factor) {
  return OfFactor(call, factor, [](const LocalTensor& t, int64_t d) {
    return t.shape[static_cast<size_t>(d)];
  });
}

// Of a tensor along a factor; 0 where it lacks it.
int64_t StrideOf(const Placed& placed, uint8_t factor) {
  int64_t stride = 1;
  for (size_t d = placed.indices->size(); d-- > 0;) {
    if ((*placed.indices)[d] == factor) return stride;
    stride *= placed.tensor->shape[d];
  }
  return 0;
}

}  // namespace

int64_t GlobalExtent(const KernelCall& call, uint8_t factor) {
  return OfFactor(call, factor, [](const LocalTensor& t, int64_t d) {
    return t.global_shape[static_cast<size_t>(d)];
  });
}

Points PointsOver(const KernelCall& call, std::span<const uint8_t> factors,
                  std::span<const Placed> tensors) {
  TESSERA_CHECK(tensors.size() <= kMostPlaces) << tensors.size();
  Points points;
  for (uint8_t factor : factors) {
    const int64_t extent = LocalExtent(call, factor);
    points.count *= extent;
    if (extent == 1) continue;
    int64_t strides[kMostPlaces] = {};
    bool joins = points.dims > 0;
    for (size_t t = 0; t < tensors.size(); ++t) {
      strides[t] = StrideOf(tensors[t], factor);
      joins =
          joins && points.strides[points.dims - 1][t] == strides[t] * extent;
    }
    if (!joins) ++points.dims;
    const int at = points.dims - 1;
    points.extents[at] = joins ? points.extents[at] * extent : extent;
    std::ranges::copy(strides, points.strides[at]);
  }
  return points;
}

Indices FactorsBut(const IndexRule& rule, const Indices& indices) {
  Indices others;
  for (size_t f = 0; f < rule.factors.size(); ++f) {
    if (!Holds(indices, static_cast<int>(f))) {
      others.push_back(static_cast<uint8_t>(f));
    }
  }
  return others;
}

NestedPoints NestedOver(const KernelCall& call, const Indices& kept,
                        std::span<const Placed> tensors) {
  return {PointsOver(call, kept, tensors),
          PointsOver(call, FactorsBut(*call.rule, kept), tensors)};
}

MatrixBatch AsMatrixBatch(const KernelCall& call) {
  const Indices& a = call.rule->operands[0];
  const Indices& b = call.rule->operands[1];
  const Indices& d = call.rule->results[0];
  const auto holds = [](const Indices& indices, uint8_t f) {
    return Holds(indices, f);
  };
  Indices batch;
  Indices of_a;  // of the result's, those of a alone, in its order
  Indices of_b;
  Indices depth;
  for (uint8_t f : d) {
    const bool in_a = holds(a, f);
    const bool in_b = holds(b, f);
    (in_a && in_b ? batch : in_a ? of_a : of_b).push_back(f);
  }
  for (uint8_t f : a) {
    if (!holds(d, f)) depth.push_back(f);
  }
  for (uint8_t f : b) {
    if (!holds(d, f) && !holds(a, f)) return {};
  }
  const auto joined = [](const Indices& x, const Indices& y, const Indices& z) {
    Indices all = x;
    all.insert(all.end(), y.begin(), y.end());
    all.insert(all.end(), z.begin(), z.end());
    return all;
  };
  const auto extent = [&](const Indices& factors) {
    int64_t product = 1;
    for (uint8_t f : factors) product *= LocalExtent(call, f);
    return product;
  };
  MatrixBatch product;
  product.batch = extent(batch);
  product.k = extent(depth);
  product.swapped = d != joined(batch, of_a, of_b);
  if (product.swapped && d != joined(batch, of_b, of_a)) return {};
  const Indices& left = product.swapped ? b : a;
  const Indices& right = product.swapped ? a : b;
  const Indices& rows = product.swapped ? of_b : of_a;
  const Indices& columns = product.swapped ? of_a : of_b;
  product.m = extent(rows);
  product.n = extent(columns);
  product.transpose_a = left != joined(batch, rows, depth);
  if (product.transpose_a && left != joined(batch, depth, rows)) return {};
  product.transpose_b = right != joined(batch, depth, columns);
  if (product.transpose_b && right != joined(batch, columns, depth)) return {};
  product.exists = true;
  return product;
}

}  // namespace tessera
