// Products of all pairs of a sample's vectors. Sums are in double.

#include <algorithm>

#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

// x[b,n,h] -> y[b,p].
template <typename T>
void PairwiseDot(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const int64_t vectors = x.shape[1];
  const int64_t width = x.shape[2];
  const int64_t pairs = call.results[0].shape[1];
  ForEachRange(call, x.shape[0], RowGrain(pairs * width),
               [&](int64_t begin, int64_t end) {
                 for (int64_t b = begin; b < end; ++b) {
                   const T* const of = x.as<const T>() + b * vectors * width;
                   T* y = call.results[0].as<T>() + b * pairs;
                   for (int64_t i = 1; i < vectors; ++i) {
                     for (int64_t j = 0; j < i; ++j) {
                       double sum = 0;
                       for (int64_t h = 0; h < width; ++h) {
                         sum += static_cast<double>(of[i * width + h]) *
                                static_cast<double>(of[j * width + h]);
                       }
                       *y++ = static_cast<T>(sum);
                     }
                   }
                 }
               });
}

// dy, x -> dx[b,i,:] = sum over j of dy[b, pair of i and j] x[b,j,:].
template <typename T>
void PairwiseDotDx(const KernelCall& call) {
  const LocalTensor& x = call.operands[1];
  const int64_t vectors = x.shape[1];
  const int64_t width = x.shape[2];
  const int64_t pairs = call.operands[0].shape[1];
  ForEachRange(call, x.shape[0], RowGrain(pairs * width),
               [&](int64_t begin, int64_t end) {
                 for (int64_t b = begin; b < end; ++b) {
                   const T* dy = call.operands[0].as<const T>() + b * pairs;
                   const T* const of = x.as<const T>() + b * vectors * width;
                   T* const dx = call.results[0].as<T>() + b * vectors * width;
                   std::fill_n(dx, vectors * width, T{0});
                   for (int64_t i = 1; i < vectors; ++i) {
                     for (int64_t j = 0; j < i; ++j, ++dy) {
                       for (int64_t h = 0; h < width; ++h) {
                         dx[i * width + h] += *dy * of[j * width + h];
                         dx[j * width + h] += *dy * of[i * width + h];
                       }
                     }
                   }
                 }
               });
}

}  // namespace

std::vector<Kernel> CpuPairwiseDotKernels() {
  return {
      {"pairwise_dot", ByDType<PairwiseDot<float>, PairwiseDot<double>>},
      {"pairwise_dot_dx", ByDType<PairwiseDotDx<float>, PairwiseDotDx<double>>},
  };
}

}  // namespace tessera
