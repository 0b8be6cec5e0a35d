// Pooling over the last two dimensions, plane by plane; over the last one of
// signals, which are planes of one row.

#include <algorithm>
#include <cmath>

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"
#include "runtime/kernels/window.h"

namespace tessera {
namespace {

// Of the image there may be a shard; it holds all of each window that is looked
// at.
struct Planes {
  int64_t count = 0;
  WindowAxis y;
  WindowAxis x;
  int64_t in() const { return y.in * x.in; }
  int64_t out() const { return y.out * x.out; }
};

// Of images like `image` with results like `result`.
Planes PlanesOf(const KernelCall& call, const LocalTensor& image,
                const LocalTensor& result) {
  Planes planes;
  planes.y = WindowAxisOf(call, 2, image, result);
  planes.x = WindowAxisOf(call, 1, image, result);
  planes.y.window = static_cast<int64_t>(call.attribute("window_height"));
  planes.x.window = static_cast<int64_t>(call.attribute("window_width"));
  planes.count = image.elements() / planes.in();
  return planes;
}

// Calls f(plane) for all planes, on the threads of the call.
template <typename F>
void ForEachPlane(const KernelCall& call, const Planes& planes, F f) {
  ForEachRange(call, planes.count, RowGrain(planes.in()),
               [&](int64_t begin, int64_t end) {
                 for (int64_t plane = begin; plane < end; ++plane) f(plane);
               });
}

// The place of the first of the largest elements of window (y, x), or as in
// PyTorch of the last one that is not a number.
template <typename T>
int64_t LargestOf(const Planes& planes, const T* plane, int64_t y, int64_t x) {
  int64_t largest = planes.y.Begin(y) * planes.x.in + planes.x.Begin(x);
  T most = plane[largest];
  for (int64_t i = planes.y.Begin(y); i < planes.y.End(y); ++i) {
    for (int64_t j = planes.x.Begin(x); j < planes.x.End(x); ++j) {
      const int64_t at = i * planes.x.in + j;
      const T value = plane[at];
      if (value <= most) continue;  // so two numbers take one comparison
      if (std::isnan(most) && !std::isnan(value)) continue;
      most = value;
      largest = at;
    }
  }
  return largest;
}

// x -> y.
template <typename T>
void MaxPool(const KernelCall& call) {
  const LocalTensor& result = call.results[0];
  const Planes planes = PlanesOf(call, call.operands[0], result);
  ForEachPlane(call, planes, [&](int64_t plane) {
    const T* const in = call.operands[0].as<const T>() + plane * planes.in();
    T* out = result.as<T>() + plane * planes.out();
    for (int64_t y = 0; y < planes.y.out; ++y) {
      for (int64_t x = 0; x < planes.x.out; ++x) {
        *out++ = in[LargestOf(planes, in, y, x)];
      }
    }
  });
}

// The rows (or columns) of `a` under window `o` that are in the shard.
struct Run {
  int64_t begin = 0;
  int64_t end = 0;

  Run(const WindowAxis& a, int64_t o)
      : begin(std::max<int64_t>(0, a.Begin(o))),
        end(std::min(a.in, a.End(o))) {}
  bool empty() const { return begin >= end; }
};

// dy, x -> dx. There may be more of x than of dx.
template <typename T>
void MaxPoolDx(const KernelCall& call) {
  const LocalTensor& dx = call.results[0];
  const LocalTensor& image = call.operands[1];
  const Planes planes = PlanesOf(call, image, call.operands[0]);
  const Planes made = PlanesOf(call, dx, call.operands[0]);
  const int64_t down = made.y.low - planes.y.low;
  const int64_t right = made.x.low - planes.x.low;
  ForEachPlane(call, made, [&](int64_t plane) {
    const T* dy = call.operands[0].as<const T>() + plane * planes.out();
    const T* const in = image.as<const T>() + plane * planes.in();
    T* const to = dx.as<T>() + plane * made.in();
    std::fill_n(to, made.in(), T{0});
    for (int64_t y = 0; y < made.y.out; ++y) {
      for (int64_t x = 0; x < made.x.out; ++x, ++dy) {
        if (Run(made.y, y).empty() || Run(made.x, x).empty()) continue;
        const int64_t at = LargestOf(planes, in, y, x);
        const int64_t row = at / planes.x.in + down;
        const int64_t column = at % planes.x.in + right;
        if (row < 0 || row >= made.y.in || column < 0 || column >= made.x.in) {
          continue;
        }
        to[row * made.x.in + column] += *dy;
      }
    }
  });
}

// How many elements the mean of window (y, x) is over: those inside, or those
// of the padded image, which ends where the last window of full padding does.
int64_t Counted(const Planes& planes, bool count_pad, int64_t y, int64_t x) {
  if (count_pad) {
    const auto length = [](const WindowAxis& a, int64_t o) {
      return std::min(a.At(o, 0) + a.window, a.high + a.pad) - a.At(o, 0);
    };
    return length(planes.y, y) * length(planes.x, x);
  }
  return (planes.y.End(y) - planes.y.Begin(y)) *
         (planes.x.End(x) - planes.x.Begin(x));
}

// x -> y.
template <typename T>
void AveragePool(const KernelCall& call) {
  const LocalTensor& result = call.results[0];
  const Planes planes = PlanesOf(call, call.operands[0], result);
  const bool count_pad = call.attribute("count_pad") != 0;
  ForEachPlane(call, planes, [&](int64_t plane) {
    const T* const in = call.operands[0].as<const T>() + plane * planes.in();
    T* out = result.as<T>() + plane * planes.out();
    for (int64_t y = 0; y < planes.y.out; ++y) {
      for (int64_t x = 0; x < planes.x.out; ++x) {
        double sum = 0;
        for (int64_t i = planes.y.Begin(y); i < planes.y.End(y); ++i) {
          for (int64_t j = planes.x.Begin(x); j < planes.x.End(x); ++j) {
            sum += in[i * planes.x.in + j];
          }
        }
        *out++ = static_cast<T>(
            sum / static_cast<double>(Counted(planes, count_pad, y, x)));
      }
    }
  });
}

// dy -> dx.
template <typename T>
void AveragePoolDx(const KernelCall& call) {
  const LocalTensor& dx = call.results[0];
  const Planes planes = PlanesOf(call, dx, call.operands[0]);
  const bool count_pad = call.attribute("count_pad") != 0;
  ForEachPlane(call, planes, [&](int64_t plane) {
    const T* dy = call.operands[0].as<const T>() + plane * planes.out();
    T* const to = dx.as<T>() + plane * planes.in();
    std::fill_n(to, planes.in(), T{0});
    for (int64_t y = 0; y < planes.y.out; ++y) {
      for (int64_t x = 0; x < planes.x.out; ++x) {
        const T share =
            *dy++ / static_cast<T>(Counted(planes, count_pad, y, x));
        const Run rows(planes.y, y);
        const Run columns(planes.x, x);
        for (int64_t i = rows.begin; i < rows.end; ++i) {
          for (int64_t j = columns.begin; j < columns.end; ++j) {
            to[i * planes.x.in + j] += share;
          }
        }
      }
    }
  });
}

// Elements of a plane of the whole image, which may be split.
double WholePlane(const LocalTensor& image) {
  const Shape& shape = image.global_shape;
  return static_cast<double>(shape[shape.size() - 2] * shape.back());
}

int64_t LocalPlane(const LocalTensor& image) {
  const Shape& shape = image.shape;
  return shape[shape.size() - 2] * shape.back();
}

// x -> the part of the mean that this shard of the image has.
template <typename T>
void ImageMean(const KernelCall& call) {
  const LocalTensor& image = call.operands[0];
  const int64_t size = LocalPlane(image);
  const double whole = WholePlane(image);
  ForEachRange(call, call.results[0].elements(), RowGrain(size),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const T* const x = image.as<const T>() + i * size;
                   call.results[0].as<T>()[i] = static_cast<T>(
                       Sum(size, [x](int64_t j) { return x[j]; }) / whole);
                 }
               });
}

// dy -> dx.
template <typename T>
void ImageMeanDx(const KernelCall& call) {
  const LocalTensor& dx = call.results[0];
  const int64_t size = LocalPlane(dx);
  const T whole = static_cast<T>(WholePlane(dx));
  ForEachRange(call, call.operands[0].elements(), RowGrain(size),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   std::fill_n(dx.as<T>() + i * size, size,
                               call.operands[0].as<const T>()[i] / whole);
                 }
               });
}

}  // namespace

std::vector<Kernel> CpuPoolingKernels() {
  return {
      {"max_pool", ByDType<MaxPool<float>, MaxPool<double>>},
      {"max_pool_dx", ByDType<MaxPoolDx<float>, MaxPoolDx<double>>},
      {"average_pool", ByDType<AveragePool<float>, AveragePool<double>>},
      {"average_pool_dx", ByDType<AveragePoolDx<float>, AveragePoolDx<double>>},
      {"image_mean", ByDType<ImageMean<float>, ImageMean<double>>},
      {"image_mean_dx", ByDType<ImageMeanDx<float>, ImageMeanDx<double>>},
  };
}

}  // namespace tessera
