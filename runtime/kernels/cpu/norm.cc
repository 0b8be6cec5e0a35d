// Layer norm and RMS norm over the last dimension; sums are taken in double.

#include <cmath>

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/rows.h"
#include "runtime/kernels/cpu/vector.h"

namespace tessera {
namespace {

int64_t Width(const LocalTensor& x) {
  return x.shape.back();
}

// x, scale, shift -> y, mean, rstd.
template <typename T>
void LayerNorm(const KernelCall& call) {
  const int64_t width = Width(call.operands[0]);
  const int64_t rows = call.operands[0].elements() / width;
  const double epsilon = call.attribute("epsilon");
  const T* const scale = call.operands[1].as<const T>();
  const T* const shift = call.operands[2].as<const T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    const T* const x = call.operands[0].as<const T>() + row * width;
    T* const y = call.results[0].as<T>() + row * width;
    const double n = static_cast<double>(width);
    const double mean = Sum(width, [x](int64_t j) { return x[j]; }) / n;
    const double variance =
        Sum(width,
            [x, mean](int64_t j) { return (x[j] - mean) * (x[j] - mean); }) /
        n;
    const double rstd = 1 / std::sqrt(variance + epsilon);
    const T m = static_cast<T>(mean);
    const T r = static_cast<T>(rstd);
    for (int64_t j = 0; j < width; ++j) {
      y[j] = (x[j] - m) * r * scale[j] + shift[j];
    }
    Put(call.results[1], row, mean);
    Put(call.results[2], row, rstd);
  });
}

// dy, x, scale, mean, rstd -> dx. With h = (x - mean) rstd and g = dy scale:
// dx = rstd (g - avg(g) - h avg(g h)).
template <typename T>
void LayerNormDx(const KernelCall& call) {
  const int64_t width = Width(call.operands[1]);
  const int64_t rows = call.operands[1].elements() / width;
  const T* const scale = call.operands[2].as<const T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    const T* const dy = call.operands[0].as<const T>() + row * width;
    const T* const x = call.operands[1].as<const T>() + row * width;
    T* const dx = call.results[0].as<T>() + row * width;
    const T mean = static_cast<T>(Get(call.operands[3], row));
    const T rstd = static_cast<T>(Get(call.operands[4], row));
    const double n = static_cast<double>(width);
    const T average = static_cast<T>(
        Sum(width, [=](int64_t j) { return dy[j] * scale[j]; }) / n);
    const T slope =
        static_cast<T>(Sum(width,
                           [=](int64_t j) {
                             return dy[j] * scale[j] * ((x[j] - mean) * rstd);
                           }) /
                       n);
    for (int64_t j = 0; j < width; ++j) {
      dx[j] =
          rstd * (dy[j] * scale[j] - average - (x[j] - mean) * rstd * slope);
    }
  });
}

// dy, x, mean, rstd -> dscale, dshift.
template <typename T>
void LayerNormDw(const KernelCall& call) {
  const int64_t width = Width(call.operands[1]);
  const int64_t rows = call.operands[1].elements() / width;
  ForEachRange(call, width, RowGrain(rows), [&](int64_t begin, int64_t end) {
    const T* dy = call.operands[0].as<const T>();
    const T* x = call.operands[1].as<const T>();
    std::vector<double> dscale(width);
    std::vector<double> dshift(width);
    for (int64_t row = 0; row < rows; ++row, dy += width, x += width) {
      const T mean = static_cast<T>(Get(call.operands[2], row));
      const T rstd = static_cast<T>(Get(call.operands[3], row));
      for (int64_t j = begin; j < end; ++j) {
        dscale[j] += dy[j] * ((x[j] - mean) * rstd);
        dshift[j] += dy[j];
      }
    }
    for (int64_t j = begin; j < end; ++j) {
      PutOrAdd(call, call.results[0], j, dscale[j]);
      PutOrAdd(call, call.results[1], j, dshift[j]);
    }
  });
}

// x, scale -> y, rrms.
template <typename T>
void RmsNorm(const KernelCall& call) {
  const int64_t width = Width(call.operands[0]);
  const int64_t rows = call.operands[0].elements() / width;
  const double epsilon = call.attribute("epsilon");
  const T* const scale = call.operands[1].as<const T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    const T* const x = call.operands[0].as<const T>() + row * width;
    T* const y = call.results[0].as<T>() + row * width;
    const double mean_square =
        Sum(width,
            [x](int64_t j) { return static_cast<double>(x[j]) * x[j]; }) /
        static_cast<double>(width);
    const double rrms = 1 / std::sqrt(mean_square + epsilon);
    const T r = static_cast<T>(rrms);
    for (int64_t j = 0; j < width; ++j) y[j] = x[j] * r * scale[j];
    Put(call.results[1], row, rrms);
  });
}

// dy, x, scale, rrms -> dx. With h = x rrms and g = dy scale:
// dx = rrms (g - h avg(g h)).
template <typename T>
void RmsNormDx(const KernelCall& call) {
  const int64_t width = Width(call.operands[1]);
  const int64_t rows = call.operands[1].elements() / width;
  const T* const scale = call.operands[2].as<const T>();
  ForEachRow(call, rows, width, [&](int64_t row) {
    const T* const dy = call.operands[0].as<const T>() + row * width;
    const T* const x = call.operands[1].as<const T>() + row * width;
    T* const dx = call.results[0].as<T>() + row * width;
    const T rrms = static_cast<T>(Get(call.operands[3], row));
    const T slope = static_cast<T>(
        Sum(width,
            [=](int64_t j) { return dy[j] * scale[j] * (x[j] * rrms); }) /
        static_cast<double>(width));
    for (int64_t j = 0; j < width; ++j) {
      dx[j] = rrms * (dy[j] * scale[j] - x[j] * rrms * slope);
    }
  });
}

// dy, x, rrms -> dscale.
template <typename T>
void RmsNormDw(const KernelCall& call) {
  const int64_t width = Width(call.operands[1]);
  const int64_t rows = call.operands[1].elements() / width;
  ForEachRange(call, width, RowGrain(rows), [&](int64_t begin, int64_t end) {
    const T* dy = call.operands[0].as<const T>();
    const T* x = call.operands[1].as<const T>();
    std::vector<double> dscale(width);
    for (int64_t row = 0; row < rows; ++row, dy += width, x += width) {
      const T rrms = static_cast<T>(Get(call.operands[2], row));
      for (int64_t j = begin; j < end; ++j) {
        dscale[j] += dy[j] * (x[j] * rrms);
      }
    }
    for (int64_t j = begin; j < end; ++j) {
      PutOrAdd(call, call.results[0], j, dscale[j]);
    }
  });
}

}  // namespace

std::vector<Kernel> CpuNormKernels() {
  return {
      {"layer_norm", ByDType<LayerNorm<float>, LayerNorm<double>>},
      {"layer_norm_dx", ByDType<LayerNormDx<float>, LayerNormDx<double>>},
      {"layer_norm_dw", ByDType<LayerNormDw<float>, LayerNormDw<double>>, true},
      {"rms_norm", ByDType<RmsNorm<float>, RmsNorm<double>>},
      {"rms_norm_dx", ByDType<RmsNormDx<float>, RmsNormDx<double>>},
      {"rms_norm_dw", ByDType<RmsNormDw<float>, RmsNormDw<double>>, true},
  };
}

}  // namespace tessera
