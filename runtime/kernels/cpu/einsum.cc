// Products of two tensors: a batch of matrix products where they are stored as
// such, or else after they are copied into that order.

#include <array>
#include <vector>

#include "runtime/kernels/cpu/gemm.h"
#include "runtime/kernels/cpu/sum_over.h"

namespace tessera {
namespace {

template <typename T>
void Products(const KernelCall& call, const MatrixBatch& p, const T* a,
              const T* b, bool accumulate, T* d) {
  for (int64_t i = 0; i < p.batch; ++i) {
    const T* const left = a + i * p.m * p.k;
    const T* const right = b + i * p.k * p.n;
    Gemm(p.m, p.n, p.k,
         p.transpose_a ? MatrixView<T>{left, 1, p.m}
                       : MatrixView<T>{left, p.k, 1},
         p.transpose_b ? MatrixView<T>{right, 1, p.k}
                       : MatrixView<T>{right, p.n, 1},
         static_cast<const T*>(nullptr), accumulate, d + i * p.m * p.n,
         call.threads);
  }
}

template <typename T>
void Einsum(const KernelCall& call) {
  MatrixBatch p = AsMatrixBatch(call);
  T* const d = call.results[0].as<T>();
  if (p.exists) {
    const auto of = [&](bool left) {
      return call.operands[left == p.swapped ? 1 : 0].template as<const T>();
    };
    return Products(call, p, of(true), of(false), call.accumulate, d);
  }
  const IndexRule& rule = *call.rule;
  Indices batch;
  Indices rows;
  Indices columns;
  Indices depth;
  for (size_t i = 0; i < rule.factors.size(); ++i) {
    const auto f = static_cast<uint8_t>(i);
    const bool in_a = Holds(rule.operands[0], f);
    const bool in_b = Holds(rule.operands[1], f);
    if (!Holds(rule.results[0], f)) {
      depth.push_back(f);
    } else {
      (in_a && in_b ? batch : in_a ? rows : columns).push_back(f);
    }
  }
  // The elements of operand `i` in the order of the factors.
  const auto packed = [&](size_t i, const Indices& outer) {
    Indices order = batch;
    order.insert(order.end(), outer.begin(), outer.end());
    for (uint8_t f : depth) {
      if (Holds(rule.operands[i], f)) order.push_back(f);
    }
    const std::array<Placed, 1> placed = {PlacedOperand(call, i)};
    const Points points = PointsOver(call, order, placed);
    std::vector<T> values(static_cast<size_t>(points.count));
    const T* const from = call.operands[i].template as<const T>();
    ForEachPoint(call, points, 1, [&](int64_t at, const Places& places) {
      values[static_cast<size_t>(at)] = from[places[0]];
    });
    return values;
  };
  const auto extent = [&](const Indices& factors) {
    return PointsOver(call, factors, {}).count;
  };
  const std::vector<T> a = packed(0, rows);
  const std::vector<T> b = packed(1, columns);
  p.batch = extent(batch);
  p.m = extent(rows);
  p.n = extent(columns);
  p.k = extent(depth);
  p.transpose_a = false;
  p.transpose_b = true;
  std::vector<T> product(static_cast<size_t>(p.batch * p.m * p.n));
  Products(call, p, a.data(), b.data(), /*accumulate=*/false, product.data());
  Indices order = batch;
  order.insert(order.end(), rows.begin(), rows.end());
  order.insert(order.end(), columns.begin(), columns.end());
  const std::array<Placed, 1> placed = {PlacedResult(call, 0)};
  const Points points = PointsOver(call, order, placed);
  ForEachPoint(call, points, 1, [&](int64_t at, const Places& places) {
    const T value = product[static_cast<size_t>(at)];
    T& to = d[places[0]];
    to = call.accumulate ? to + value : value;
  });
}

}  // namespace

std::vector<Kernel> CpuEinsumKernels() {
  return {{"einsum", ByDType<Einsum<float>, Einsum<double>>, true}};
}

}  // namespace tessera
