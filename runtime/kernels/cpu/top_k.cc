// The best elements of rows, and their places.

#include "runtime/kernels/top_k.h"

#include "runtime/kernels/cpu/sum_over.h"

namespace tessera {
namespace {

// The place behind `before`, or the first one where that is -1.
template <typename T>
int64_t NextPlace(const TopKRows& rows, const T* row, int64_t before) {
  const auto at = [&](int64_t i) { return row[i * rows.stride]; };
  int64_t next = -1;
  for (int64_t i = 0; i < rows.places; ++i) {
    if (before >= 0 && !IsInFront(rows, at(before), before, at(i), i)) continue;
    if (next < 0 || IsInFront(rows, at(i), i, at(next), next)) next = i;
  }
  return next;
}

// x -> y, ids.
template <typename T>
void TopK(const KernelCall& call) {
  const TopKRows rows = TopKRowsOf(call);
  const T* const x = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  int32_t* const ids = call.results[1].as<int32_t>();
  ForEachPoint(call, rows.rows, rows.places * rows.choices,
               [&](int64_t, const Places& at) {
                 const T* const row = x + at[0];
                 int64_t place = -1;
                 for (int64_t k = 0; k < rows.choices; ++k) {
                   place = NextPlace(rows, row, place);
                   y[at[1] + k * rows.step] = row[place * rows.stride];
                   ids[at[2] + k * rows.step] = static_cast<int32_t>(place);
                 }
               });
}

}  // namespace

std::vector<Kernel> CpuTopKKernels() {
  return {{"top_k", ByDType<TopK<float>, TopK<double>>}};
}

}  // namespace tessera
