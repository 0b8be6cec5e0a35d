// A layer norm in parts over the last dimension; sums are taken in double.

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/rows.h"
#include "runtime/kernels/cpu/vector.h"

namespace tessera {
namespace {

// x -> mean. The columns may be a shard: the sum is divided by all of them.
template <typename T>
void RowMean(const KernelCall& call) {
  const int64_t width = call.operands[0].shape.back();
  const auto columns =
      static_cast<double>(call.operands[0].global_shape.back());
  const int64_t rows = call.results[0].elements();
  T* const mean = call.results[0].as<T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    const T* const x = call.operands[0].as<const T>() + row * width;
    mean[row] =
        static_cast<T>(Sum(width, [x](int64_t j) { return x[j]; }) / columns);
  });
}

// dmean -> dx.
template <typename T>
void RowMeanDx(const KernelCall& call) {
  const int64_t width = call.results[0].shape.back();
  const auto columns = static_cast<T>(call.results[0].global_shape.back());
  const int64_t rows = call.operands[0].elements();
  const T* const dmean = call.operands[0].as<const T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    std::fill_n(call.results[0].as<T>() + row * width, width,
                dmean[row] / columns);
  });
}

template <typename T>
double MeanOf(const T* x, int64_t width) {
  return Sum(width, [x](int64_t j) { return x[j]; }) /
         static_cast<double>(width);
}

// x -> std.
template <typename T>
void RowStd(const KernelCall& call) {
  const int64_t width = call.operands[0].shape.back();
  const int64_t rows = call.results[0].elements();
  const double epsilon = call.attribute("epsilon");
  T* const std = call.results[0].as<T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    const T* const x = call.operands[0].as<const T>() + row * width;
    const double mean = MeanOf(x, width);
    const double variance =
        Sum(width,
            [x, mean](int64_t j) { return (x[j] - mean) * (x[j] - mean); }) /
        static_cast<double>(width);
    std[row] = static_cast<T>(std::sqrt(variance + epsilon));
  });
}

// dstd, x, std -> dx = dstd (x - avg(x)) / (n std).
template <typename T>
void RowStdDx(const KernelCall& call) {
  const int64_t width = call.operands[1].shape.back();
  const int64_t rows = call.operands[0].elements();
  const T* const dstd = call.operands[0].as<const T>();
  const T* const std = call.operands[2].as<const T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    const T* const x = call.operands[1].as<const T>() + row * width;
    T* const dx = call.results[0].as<T>() + row * width;
    const T mean = static_cast<T>(MeanOf(x, width));
    const T slope = dstd[row] / (static_cast<T>(width) * std[row]);
    for (int64_t j = 0; j < width; ++j) dx[j] = slope * (x[j] - mean);
  });
}

// x, mean, std, scale, shift -> y.
template <typename T>
void Normalize(const KernelCall& call) {
  const int64_t width = call.operands[0].shape.back();
  const int64_t rows = call.operands[1].elements();
  const T* const mean = call.operands[1].as<const T>();
  const T* const std = call.operands[2].as<const T>();
  const T* const scale = call.operands[3].as<const T>();
  const T* const shift = call.operands[4].as<const T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    const T* const x = call.operands[0].as<const T>() + row * width;
    T* const y = call.results[0].as<T>() + row * width;
    const T rstd = 1 / std[row];
    for (int64_t j = 0; j < width; ++j) {
      y[j] = (x[j] - mean[row]) * rstd * scale[j] + shift[j];
    }
  });
}

// dy, std, scale -> dx.
template <typename T>
void NormalizeDx(const KernelCall& call) {
  const int64_t width = call.operands[0].shape.back();
  const int64_t rows = call.operands[1].elements();
  const T* const std = call.operands[1].as<const T>();
  const T* const scale = call.operands[2].as<const T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    const T* const dy = call.operands[0].as<const T>() + row * width;
    T* const dx = call.results[0].as<T>() + row * width;
    const T rstd = 1 / std[row];
    for (int64_t j = 0; j < width; ++j) dx[j] = dy[j] * rstd * scale[j];
  });
}

// dy, std, scale -> dmean = -sum(dy scale) / std.
template <typename T>
void NormalizeDmean(const KernelCall& call) {
  const int64_t width = call.operands[0].shape.back();
  const int64_t rows = call.operands[1].elements();
  const T* const std = call.operands[1].as<const T>();
  const T* const scale = call.operands[2].as<const T>();
  T* const dmean = call.results[0].as<T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    const T* const dy = call.operands[0].as<const T>() + row * width;
    const double sum =
        Sum(width, [dy, scale](int64_t j) { return dy[j] * scale[j]; });
    dmean[row] = static_cast<T>(-sum / static_cast<double>(std[row]));
  });
}

// dy, x, mean, std, scale -> dstd = -sum(dy scale (x - mean)) / std^2.
template <typename T>
void NormalizeDstd(const KernelCall& call) {
  const int64_t width = call.operands[0].shape.back();
  const int64_t rows = call.operands[2].elements();
  const T* const mean = call.operands[2].as<const T>();
  const T* const std = call.operands[3].as<const T>();
  const T* const scale = call.operands[4].as<const T>();
  T* const dstd = call.results[0].as<T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    const T* const dy = call.operands[0].as<const T>() + row * width;
    const T* const x = call.operands[1].as<const T>() + row * width;
    const T m = mean[row];
    const double sum = Sum(width, [dy, x, scale, m](int64_t j) {
      return dy[j] * scale[j] * (x[j] - m);
    });
    const auto s = static_cast<double>(std[row]);
    dstd[row] = static_cast<T>(-sum / (s * s));
  });
}

// dy, x, mean, std -> dscale, dshift.
template <typename T>
void NormalizeDw(const KernelCall& call) {
  const int64_t width = call.operands[0].shape.back();
  const int64_t rows = call.operands[2].elements();
  const T* const mean = call.operands[2].as<const T>();
  const T* const std = call.operands[3].as<const T>();
  ForEachRange(call, width, RowGrain(rows), [&](int64_t begin, int64_t end) {
    const T* dy = call.operands[0].as<const T>() + begin;
    const T* x = call.operands[1].as<const T>() + begin;
    std::vector<double> dscale(static_cast<size_t>(end - begin));
    std::vector<double> dshift(static_cast<size_t>(end - begin));
    for (int64_t row = 0; row < rows; ++row, dy += width, x += width) {
      const T rstd = 1 / std[row];
      for (int64_t j = 0; j < end - begin; ++j) {
        const auto at = static_cast<size_t>(j);
        dscale[at] += dy[j] * ((x[j] - mean[row]) * rstd);
        dshift[at] += dy[j];
      }
    }
    for (int64_t j = begin; j < end; ++j) {
      const auto at = static_cast<size_t>(j - begin);
      PutOrAdd(call, call.results[0], j, dscale[at]);
      PutOrAdd(call, call.results[1], j, dshift[at]);
    }
  });
}

}  // namespace

std::vector<Kernel> CpuStatisticsKernels() {
  return {
      {"row_mean", ByDType<RowMean<float>, RowMean<double>>},
      {"row_mean_dx", ByDType<RowMeanDx<float>, RowMeanDx<double>>},
      {"row_std", ByDType<RowStd<float>, RowStd<double>>},
      {"row_std_dx", ByDType<RowStdDx<float>, RowStdDx<double>>},
      {"normalize", ByDType<Normalize<float>, Normalize<double>>},
      {"normalize_dx", ByDType<NormalizeDx<float>, NormalizeDx<double>>},
      {"normalize_dmean",
       ByDType<NormalizeDmean<float>, NormalizeDmean<double>>},
      {"normalize_dstd", ByDType<NormalizeDstd<float>, NormalizeDstd<double>>},
      {"normalize_dw", ByDType<NormalizeDw<float>, NormalizeDw<double>>, true},
  };
}

}  // namespace tessera
