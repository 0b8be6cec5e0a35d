// Layer norm and RMS norm over the last dimension: rows by one warp or one
// block each, kept in registers. Formulas: runtime/kernels/cpu/norm.cc.

#include "runtime/kernels/cuda/reduce.h"

namespace tessera {
namespace {

// The mean and the reciprocal deviation of rows; an RMS norm has no mean.
template <bool kCentred>
struct Statistics {
  Elements<Any> mean;
  Elements<Any> rstd;

  __device__ float Mean(int64_t row) const {
    return kCentred ? mean.Get(row) : 0;
  }
};

// x, scale [, shift] -> y, [mean,] rstd.
template <typename T, bool kCentred, bool kWhole>
__global__ void __launch_bounds__(kMostRowThreads)
    Norm(Elements<T> x, Elements<T> scale, Elements<T> shift, Elements<T> y,
         Statistics<kCentred> statistics, int64_t rows, int64_t width,
         float epsilon) {
  const int64_t row = RowOfThread();
  if (row >= rows) return;
  const Elements<T> operands[1] = {x};
  const StoredRow<1, T, kWhole> values(row, width, operands);
  const auto n = static_cast<float>(width);
  float mean = 0;
  if (kCentred) {
    values.ForEach([&](int64_t, int64_t, auto, const float(&v)[1][kVector]) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) mean += v[0][j];
    });
    mean = Sum(mean) / n;
  }
  float squares = 0;
  values.ForEach([&](int64_t, int64_t, auto span, const float(&v)[1][kVector]) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float d = span.Has(j) ? v[0][j] - mean : 0;
      squares += d * d;
    }
  });
  const float rstd = 1 / sqrtf(Sum(squares) / n + epsilon);
  values.ForEach([&](int64_t first, int64_t column, auto span,
                     const float(&v)[1][kVector]) {
    float s[kVector];
    float t[kVector] = {};
    scale.Load(column, span, s);
    if (kCentred) shift.Load(column, span, t);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      t[j] = (v[0][j] - mean) * rstd * s[j] + t[j];
    }
    y.Store(first, span, t);
  });
  if (threadIdx.x > 0) return;
  if (kCentred) statistics.mean.Set(row, mean);
  statistics.rstd.Set(row, rstd);
}

// dy, x, scale, [mean,] rstd -> dx.
template <typename T, bool kCentred, bool kWhole>
__global__ void __launch_bounds__(kMostRowThreads)
    NormDx(Elements<T> dy, Elements<T> x, Elements<T> scale, Elements<T> dx,
           Statistics<kCentred> statistics, int64_t rows, int64_t width) {
  const int64_t row = RowOfThread();
  if (row >= rows) return;
  const float mean = statistics.Mean(row);
  const float rstd = statistics.rstd.Get(row);
  const Elements<T> operands[2] = {dy, x};
  const StoredRow<2, T, kWhole> values(row, width, operands);
  float average = 0;  // of dy scale
  float slope = 0;    // of that times the normalised x
  values.ForEach(
      [&](int64_t, int64_t column, auto span, const float(&v)[2][kVector]) {
        float s[kVector];
        scale.Load(column, span, s);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          average += v[0][j] * s[j];
          slope += v[0][j] * s[j] * ((v[1][j] - mean) * rstd);
        }
      });
  const auto n = static_cast<float>(width);
  average = kCentred ? Sum(average) / n : 0;
  slope = Sum(slope) / n;
  values.ForEach([&](int64_t first, int64_t column, auto span,
                     const float(&v)[2][kVector]) {
    float d[kVector];
    scale.Load(column, span, d);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float normalised = (v[1][j] - mean) * rstd;
      d[j] = rstd * (v[0][j] * d[j] - average - normalised * slope);
    }
    dx.Store(first, span, d);
  });
}

// dy, x, [mean,] rstd -> dscale [, dshift].
template <typename T, bool kCentred>
struct NormDw {
  Elements<T> dy;
  Elements<T> x;
  Statistics<kCentred> statistics;
  int64_t width;

  __device__ void operator()(int64_t row, int64_t column, Span span,
                             float (&sums)[kCentred ? 2 : 1][kVector]) const {
    const float mean = statistics.Mean(row);
    const float rstd = statistics.rstd.Get(row);
    float of_dy[kVector];
    float of_x[kVector];
    dy.Load(row * width + column, span, of_dy);
    x.Load(row * width + column, span, of_x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sums[0][j] += of_dy[j] * ((of_x[j] - mean) * rstd);
      if (kCentred) sums[kCentred][j] += of_dy[j];
    }
  }
};

// ---- Calls ------------------------------------------------------------------

// The statistics are the tensors from `first` on.
template <bool kCentred>
Statistics<kCentred> StatisticsOf(std::span<const LocalTensor> tensors,
                                  size_t first) {
  Statistics<kCentred> result;
  if (kCentred) result.mean = Elements<Any>(tensors[first]);
  result.rstd = Elements<Any>(tensors[first + kCentred]);
  return result;
}

template <bool kCentred>
void CallNorm(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& scale = call.operands[1];
  const LocalTensor& shift = call.operands[kCentred ? 2 : 1];
  const LocalTensor& y = call.results[0];
  const int64_t width = x.shape.back();
  const int64_t rows = call.results[1].elements();
  const RowGrid grid = RowGridFor(rows, width);
  ByType({x, scale, shift, y}, [&]<typename T>() {
    const auto launch = [&](auto kernel) {
      Launch(kernel, grid.grid, grid.block, 0, *call.queue, Elements<T>(x),
             Elements<T>(scale), Elements<T>(shift), Elements<T>(y),
             StatisticsOf<kCentred>(call.results, 1), rows, width,
             static_cast<float>(call.attribute("epsilon")));
    };
    if constexpr (!std::is_same_v<T, Any>) {
      if (HaveWholeRows({x, scale, shift, y}, width)) {
        return launch(Norm<T, kCentred, true>);
      }
    }
    launch(Norm<T, kCentred, false>);
  });
}

template <bool kCentred>
void CallNormDx(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& x = call.operands[1];
  const LocalTensor& scale = call.operands[2];
  const LocalTensor& dx = call.results[0];
  const int64_t width = x.shape.back();
  const int64_t rows = call.operands[3].elements();
  const RowGrid grid = RowGridFor(rows, width);
  ByType({dy, x, scale, dx}, [&]<typename T>() {
    const auto launch = [&](auto kernel) {
      Launch(kernel, grid.grid, grid.block, 0, *call.queue, Elements<T>(dy),
             Elements<T>(x), Elements<T>(scale), Elements<T>(dx),
             StatisticsOf<kCentred>(call.operands, 3), rows, width);
    };
    if constexpr (!std::is_same_v<T, Any>) {
      if (HaveWholeRows({dy, x, scale, dx}, width)) {
        return launch(NormDx<T, kCentred, true>);
      }
    }
    launch(NormDx<T, kCentred, false>);
  });
}

template <bool kCentred>
void CallNormDw(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& x = call.operands[1];
  const int64_t width = x.shape.back();
  ByType({dy, x}, [&]<typename T>() {
    const NormDw<T, kCentred> term = {Elements<T>(dy), Elements<T>(x),
                                      StatisticsOf<kCentred>(call.operands, 2),
                                      width};
    SumColumns<kCentred ? 2 : 1>(call, term, call.operands[2].elements(),
                                 width);
  });
}

}  // namespace

std::vector<Kernel> CudaNormKernels() {
  return {
      {"layer_norm", CallNorm<true>},
      {"layer_norm_dx", CallNormDx<true>},
      {"layer_norm_dw", CallNormDw<true>, true},
      {"rms_norm", CallNorm<false>},
      {"rms_norm_dx", CallNormDx<false>},
      {"rms_norm_dw", CallNormDw<false>, true},
  };
}

}  // namespace tessera
