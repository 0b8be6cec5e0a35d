// A layer norm in parts over the last dimension. Formulas:
// runtime/kernels/cpu/statistics.cc.

#include "runtime/kernels/cuda/reduce.h"

namespace tessera {
namespace {

// The sum of f(v[0][j], ..., v[n - 1][j]) over a row.
template <typename Row, typename F>
__device__ float SumOf(const Row& row, F f) {
  float sum = 0;
  row.ForEach([&](int64_t, int64_t, Span span, const auto& v) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum += span.Has(j) ? f(v, j) : 0;
  });
  return Sum(sum);
}

template <typename Row>
__device__ float MeanOf(const Row& row, int64_t width) {
  return SumOf(row, [](const auto& v, int j) { return v[0][j]; }) /
         static_cast<float>(width);
}

// ---- Statistics of rows -----------------------------------------------------

// x -> mean over `columns`, of which the rows may hold some.
template <typename T>
__global__ void __launch_bounds__(kMostRowThreads)
    RowMean(Elements<T> x, Elements<Any> mean, int64_t rows, int64_t width,
            float columns) {
  const int64_t row = RowOfThread();
  if (row >= rows) return;
  const auto values = RowOf(x, row, width);
  const float sum = SumOf(values, [](const auto& v, int j) { return v[0][j]; });
  if (threadIdx.x == 0) mean.Set(row, sum / columns);
}

// dmean -> dx.
template <typename T>
__global__ void RowMeanDx(Elements<Any> dmean, Elements<T> dx, int64_t n,
                          int64_t width, float columns) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float d[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      d[j] = span.Has(j) ? dmean.Get((first + j) / width) / columns : 0;
    }
    dx.Store(first, span, d);
  });
}

// x -> std.
template <typename T>
__global__ void __launch_bounds__(kMostRowThreads)
    RowStd(Elements<T> x, Elements<Any> std, int64_t rows, int64_t width,
           float epsilon) {
  const int64_t row = RowOfThread();
  if (row >= rows) return;
  const auto values = RowOf(x, row, width);
  const float mean = MeanOf(values, width);
  const float squares = SumOf(values, [mean](const auto& v, int j) {
    return (v[0][j] - mean) * (v[0][j] - mean);
  });
  if (threadIdx.x > 0) return;
  std.Set(row, sqrtf(squares / static_cast<float>(width) + epsilon));
}

// dstd, x, std -> dx.
template <typename T>
__global__ void __launch_bounds__(kMostRowThreads)
    RowStdDx(Elements<Any> dstd, Elements<T> x, Elements<Any> std,
             Elements<T> dx, int64_t rows, int64_t width) {
  const int64_t row = RowOfThread();
  if (row >= rows) return;
  const auto values = RowOf(x, row, width);
  const float mean = MeanOf(values, width);
  const float slope =
      dstd.Get(row) / (static_cast<float>(width) * std.Get(row));
  values.ForEach([&](int64_t first, int64_t, Span span, const auto& v) {
    float d[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) d[j] = slope * (v[0][j] - mean);
    dx.Store(first, span, d);
  });
}

// ---- Normalisation by given statistics --------------------------------------

// x, mean, std, scale, shift -> y.
template <typename T>
__global__ void __launch_bounds__(kMostRowThreads)
    Normalize(Elements<T> x, Elements<Any> mean, Elements<Any> std,
              Elements<T> scale, Elements<T> shift, Elements<T> y, int64_t rows,
              int64_t width) {
  const int64_t row = RowOfThread();
  if (row >= rows) return;
  const float m = mean.Get(row);
  const float rstd = 1 / std.Get(row);
  const auto values = RowOf(x, row, width);
  values.ForEach([&](int64_t first, int64_t column, Span span, const auto& v) {
    float s[kVector];
    float t[kVector];
    scale.Load(column, span, s);
    shift.Load(column, span, t);
#pragma unroll
    for (int j = 0; j < kVector; ++j) t[j] += (v[0][j] - m) * rstd * s[j];
    y.Store(first, span, t);
  });
}

// A row of dy scale.
template <typename T>
__device__ auto ScaledRow(Elements<T> dy, Elements<T> scale, int64_t row,
                          int64_t width) {
  return MakeRow<1>(row, width,
                    [dy, scale](int64_t first, int64_t column, Span span,
                                float(&v)[1][kVector]) {
                      float s[kVector];
                      dy.Load(first, span, v[0]);
                      scale.Load(column, span, s);
#pragma unroll
                      for (int j = 0; j < kVector; ++j) v[0][j] *= s[j];
                    });
}

// dy, std, scale -> dx.
template <typename T>
__global__ void __launch_bounds__(kMostRowThreads)
    NormalizeDx(Elements<T> dy, Elements<Any> std, Elements<T> scale,
                Elements<T> dx, int64_t rows, int64_t width) {
  const int64_t row = RowOfThread();
  if (row >= rows) return;
  const float rstd = 1 / std.Get(row);
  const auto values = ScaledRow(dy, scale, row, width);
  values.ForEach([&](int64_t first, int64_t, Span span, const auto& v) {
    float d[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) d[j] = v[0][j] * rstd;
    dx.Store(first, span, d);
  });
}

// dy, std, scale -> dmean.
template <typename T>
__global__ void __launch_bounds__(kMostRowThreads)
    NormalizeDmean(Elements<T> dy, Elements<Any> std, Elements<T> scale,
                   Elements<Any> dmean, int64_t rows, int64_t width) {
  const int64_t row = RowOfThread();
  if (row >= rows) return;
  const auto values = ScaledRow(dy, scale, row, width);
  const float sum = SumOf(values, [](const auto& v, int j) { return v[0][j]; });
  if (threadIdx.x == 0) dmean.Set(row, -sum / std.Get(row));
}

// dy, x, mean, std, scale -> dstd.
template <typename T>
__global__ void __launch_bounds__(kMostRowThreads)
    NormalizeDstd(Elements<T> dy, Elements<T> x, Elements<Any> mean,
                  Elements<Any> std, Elements<T> scale, Elements<Any> dstd,
                  int64_t rows, int64_t width) {
  const int64_t row = RowOfThread();
  if (row >= rows) return;
  const float m = mean.Get(row);
  const auto values = MakeRow<2>(
      row, width,
      [=](int64_t first, int64_t column, Span span, float(&v)[2][kVector]) {
        float s[kVector];
        dy.Load(first, span, v[0]);
        x.Load(first, span, v[1]);
        scale.Load(column, span, s);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          v[0][j] *= s[j];
          v[1][j] -= m;
        }
      });
  const float sum =
      SumOf(values, [](const auto& v, int j) { return v[0][j] * v[1][j]; });
  const float s = std.Get(row);
  if (threadIdx.x == 0) dstd.Set(row, -sum / (s * s));
}

// dy, x, mean, std -> dscale, dshift.
template <typename T>
struct NormalizeDw {
  Elements<T> dy;
  Elements<T> x;
  Elements<Any> mean;
  Elements<Any> std;
  int64_t width;

  __device__ void operator()(int64_t row, int64_t column, Span span,
                             float (&sums)[2][kVector]) const {
    const float m = mean.Get(row);
    const float rstd = 1 / std.Get(row);
    float of_dy[kVector];
    float of_x[kVector];
    dy.Load(row * width + column, span, of_dy);
    x.Load(row * width + column, span, of_x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sums[0][j] += of_dy[j] * ((of_x[j] - m) * rstd);
      sums[1][j] += of_dy[j];
    }
  }
};

// ---- Calls ------------------------------------------------------------------

void CallRowMean(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const int64_t rows = call.results[0].elements();
  const RowGrid grid = RowGridFor(rows, x.shape.back());
  ByType({x}, [&]<typename T>() {
    Launch(RowMean<T>, grid.grid, grid.block, 0, *call.queue, Elements<T>(x),
           Elements<Any>(call.results[0]), rows, x.shape.back(),
           static_cast<float>(x.global_shape.back()));
  });
}

void CallRowMeanDx(const KernelCall& call) {
  const LocalTensor& dx = call.results[0];
  const int64_t n = dx.elements();
  ByType({dx}, [&]<typename T>() {
    Launch(RowMeanDx<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<Any>(call.operands[0]), Elements<T>(dx), n,
           dx.shape.back(), static_cast<float>(dx.global_shape.back()));
  });
}

void CallRowStd(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const int64_t rows = call.results[0].elements();
  const RowGrid grid = RowGridFor(rows, x.shape.back());
  ByType({x}, [&]<typename T>() {
    Launch(RowStd<T>, grid.grid, grid.block, 0, *call.queue, Elements<T>(x),
           Elements<Any>(call.results[0]), rows, x.shape.back(),
           static_cast<float>(call.attribute("epsilon")));
  });
}

void CallRowStdDx(const KernelCall& call) {
  const LocalTensor& x = call.operands[1];
  const LocalTensor& dx = call.results[0];
  const int64_t rows = call.operands[0].elements();
  const RowGrid grid = RowGridFor(rows, x.shape.back());
  ByType({x, dx}, [&]<typename T>() {
    Launch(RowStdDx<T>, grid.grid, grid.block, 0, *call.queue,
           Elements<Any>(call.operands[0]), Elements<T>(x),
           Elements<Any>(call.operands[2]), Elements<T>(dx), rows,
           x.shape.back());
  });
}

void CallNormalize(const KernelCall& call) {
  const auto& in = call.operands;
  const int64_t width = in[0].shape.back();
  const int64_t rows = in[1].elements();
  const RowGrid grid = RowGridFor(rows, width);
  ByType({in[0], in[3], in[4], call.results[0]}, [&]<typename T>() {
    Launch(Normalize<T>, grid.grid, grid.block, 0, *call.queue,
           Elements<T>(in[0]), Elements<Any>(in[1]), Elements<Any>(in[2]),
           Elements<T>(in[3]), Elements<T>(in[4]), Elements<T>(call.results[0]),
           rows, width);
  });
}

void CallNormalizeDx(const KernelCall& call) {
  const auto& in = call.operands;
  const int64_t width = in[0].shape.back();
  const int64_t rows = in[1].elements();
  const RowGrid grid = RowGridFor(rows, width);
  ByType({in[0], in[2], call.results[0]}, [&]<typename T>() {
    Launch(NormalizeDx<T>, grid.grid, grid.block, 0, *call.queue,
           Elements<T>(in[0]), Elements<Any>(in[1]), Elements<T>(in[2]),
           Elements<T>(call.results[0]), rows, width);
  });
}

void CallNormalizeDmean(const KernelCall& call) {
  const auto& in = call.operands;
  const int64_t width = in[0].shape.back();
  const int64_t rows = in[1].elements();
  const RowGrid grid = RowGridFor(rows, width);
  ByType({in[0], in[2]}, [&]<typename T>() {
    Launch(NormalizeDmean<T>, grid.grid, grid.block, 0, *call.queue,
           Elements<T>(in[0]), Elements<Any>(in[1]), Elements<T>(in[2]),
           Elements<Any>(call.results[0]), rows, width);
  });
}

void CallNormalizeDstd(const KernelCall& call) {
  const auto& in = call.operands;
  const int64_t width = in[0].shape.back();
  const int64_t rows = in[2].elements();
  const RowGrid grid = RowGridFor(rows, width);
  ByType({in[0], in[1], in[4]}, [&]<typename T>() {
    Launch(NormalizeDstd<T>, grid.grid, grid.block, 0, *call.queue,
           Elements<T>(in[0]), Elements<T>(in[1]), Elements<Any>(in[2]),
           Elements<Any>(in[3]), Elements<T>(in[4]),
           Elements<Any>(call.results[0]), rows, width);
  });
}

void CallNormalizeDw(const KernelCall& call) {
  const auto& in = call.operands;
  const int64_t width = in[0].shape.back();
  ByType({in[0], in[1]}, [&]<typename T>() {
    const NormalizeDw<T> term = {Elements<T>(in[0]), Elements<T>(in[1]),
                                 Elements<Any>(in[2]), Elements<Any>(in[3]),
                                 width};
    SumColumns<2>(call, term, in[2].elements(), width);
  });
}

}  // namespace

std::vector<Kernel> CudaStatisticsKernels() {
  return {
      {"row_mean", CallRowMean},
      {"row_mean_dx", CallRowMeanDx},
      {"row_std", CallRowStd},
      {"row_std_dx", CallRowStdDx},
      {"normalize", CallNormalize},
      {"normalize_dx", CallNormalizeDx},
      {"normalize_dmean", CallNormalizeDmean},
      {"normalize_dstd", CallNormalizeDstd},
      {"normalize_dw", CallNormalizeDw, true},
  };
}

}  // namespace tessera
