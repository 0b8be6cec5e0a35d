// Pooling over the last two dimensions, a thread an element of what is made:
// backward each pixel looks at the windows that it is in, so that no two
// threads add to one. Formulas: runtime/kernels/cpu/pooling.cc.

#include <algorithm>
#include <cmath>

#include "runtime/kernels/cuda/reduce.h"
#include "runtime/kernels/window.h"

namespace tessera {
namespace {

struct Planes {
  int64_t count = 0;
  WindowAxis y;
  WindowAxis x;

  __device__ __host__ int64_t in() const { return y.in * x.in; }
  __device__ __host__ int64_t out() const { return y.out * x.out; }
};

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

// Calls f(i) for all i below n, on all threads of the grid.
template <typename F>
__device__ void ForEachElement(int64_t n, F f) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += step) {
    f(i);
  }
}

// The place in its plane of the first of the largest elements of window (y, x),
// or of the last one that is not a number; the plane begins at `plane`.
template <typename T>
__device__ int64_t LargestOf(const Planes& p, Elements<T> image, int64_t plane,
                             int64_t y, int64_t x) {
  int64_t largest = p.y.Begin(y) * p.x.in + p.x.Begin(x);
  float value = image.Get(plane + largest);
  for (int64_t i = p.y.Begin(y); i < p.y.End(y); ++i) {
    for (int64_t j = p.x.Begin(x); j < p.x.End(x); ++j) {
      const float other = image.Get(plane + i * p.x.in + j);
      if (!(other > value || std::isnan(other))) continue;
      value = other;
      largest = i * p.x.in + j;
    }
  }
  return largest;
}

// The windows [begin, end) that `place` is in.
struct Windows {
  int64_t begin;
  int64_t end;

  __device__ Windows(const WindowAxis& axis, int64_t place) {
    const int64_t last = place - axis.first;  // may be negative with shards
    const int64_t first = last - axis.window;
    begin = first < 0 ? 0 : first / axis.stride + 1;
    end = last < 0 ? 0 : last / axis.stride + 1;
    if (end > axis.out) end = axis.out;
  }
};

template <typename T>
__global__ void MaxPoolForward(Planes p, Elements<T> image, Elements<T> y) {
  ForEachElement(p.count * p.out(), [&](int64_t i) {
    const int64_t plane = i / p.out() * p.in();
    const int64_t at = i % p.out();
    y.Set(i, image.Get(plane +
                       LargestOf(p, image, plane, at / p.x.out, at % p.x.out)));
  });
}

// `p` of the image, which holds all windows that touch dx, and `made` of dx.
template <typename T>
__global__ void MaxPoolBackward(Planes p, Planes made, Elements<T> dy,
                                Elements<T> image, Elements<T> dx) {
  const int64_t down = made.y.low - p.y.low;
  const int64_t right = made.x.low - p.x.low;
  ForEachElement(made.count * made.in(), [&](int64_t i) {
    const int64_t plane = i / made.in();
    const int64_t row = i % made.in() / made.x.in;
    const int64_t column = i % made.in() % made.x.in;
    const int64_t at = (row - down) * p.x.in + column - right;
    const Windows rows(made.y, row);
    const Windows columns(made.x, column);
    float sum = 0;
    for (int64_t y = rows.begin; y < rows.end; ++y) {
      for (int64_t x = columns.begin; x < columns.end; ++x) {
        if (LargestOf(p, image, plane * p.in(), y, x) != at) continue;
        sum += dy.Get(plane * p.out() + y * p.x.out + x);
      }
    }
    dx.Set(i, sum);
  });
}

// How many elements the mean of window (y, x) is over.
__device__ float Counted(const Planes& p, bool count_pad, int64_t y,
                         int64_t x) {
  const auto length = [count_pad](const WindowAxis& axis, int64_t o) {
    if (!count_pad) return axis.End(o) - axis.Begin(o);
    const int64_t end = axis.At(o, 0) + axis.window;
    const int64_t padded = axis.high + axis.pad;
    return (end < padded ? end : padded) - axis.At(o, 0);
  };
  return static_cast<float>(length(p.y, y) * length(p.x, x));
}

template <typename T>
__global__ void AveragePoolForward(Planes p, bool count_pad, Elements<T> image,
                                   Elements<T> y) {
  ForEachElement(p.count * p.out(), [&](int64_t i) {
    const int64_t plane = i / p.out() * p.in();
    const int64_t row = i % p.out() / p.x.out;
    const int64_t column = i % p.out() % p.x.out;
    float sum = 0;
    for (int64_t k = p.y.Begin(row); k < p.y.End(row); ++k) {
      for (int64_t l = p.x.Begin(column); l < p.x.End(column); ++l) {
        sum += image.Get(plane + k * p.x.in + l);
      }
    }
    y.Set(i, sum / Counted(p, count_pad, row, column));
  });
}

template <typename T>
__global__ void AveragePoolBackward(Planes p, bool count_pad, Elements<T> dy,
                                    Elements<T> dx) {
  ForEachElement(p.count * p.in(), [&](int64_t i) {
    const int64_t plane = i / p.in();
    const int64_t at = i % p.in();
    const Windows rows(p.y, at / p.x.in);
    const Windows columns(p.x, at % p.x.in);
    float sum = 0;
    for (int64_t y = rows.begin; y < rows.end; ++y) {
      for (int64_t x = columns.begin; x < columns.end; ++x) {
        sum += dy.Get(plane * p.out() + y * p.x.out + x) /
               Counted(p, count_pad, y, x);
      }
    }
    dx.Set(i, sum);
  });
}

// x -> y.
void MaxPool(const KernelCall& call) {
  const LocalTensor& image = call.operands[0];
  const LocalTensor& y = call.results[0];
  ByType({image, y}, [&]<typename T>() {
    Launch(MaxPoolForward<T>, BlocksFor(*call.queue, y.elements()), kThreads, 0,
           *call.queue, PlanesOf(call, image, y), Elements<T>(image),
           Elements<T>(y));
  });
}

// dy, x -> dx.
void MaxPoolDx(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& image = call.operands[1];
  const LocalTensor& dx = call.results[0];
  ByType({dy, image, dx}, [&]<typename T>() {
    Launch(MaxPoolBackward<T>, BlocksFor(*call.queue, dx.elements()), kThreads,
           0, *call.queue, PlanesOf(call, image, dy), PlanesOf(call, dx, dy),
           Elements<T>(dy), Elements<T>(image), Elements<T>(dx));
  });
}

// x -> y.
void AveragePool(const KernelCall& call) {
  const LocalTensor& image = call.operands[0];
  const LocalTensor& y = call.results[0];
  ByType({image, y}, [&]<typename T>() {
    Launch(AveragePoolForward<T>, BlocksFor(*call.queue, y.elements()),
           kThreads, 0, *call.queue, PlanesOf(call, image, y),
           call.attribute("count_pad") != 0, Elements<T>(image),
           Elements<T>(y));
  });
}

// dy -> dx.
void AveragePoolDx(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& dx = call.results[0];
  ByType({dy, dx}, [&]<typename T>() {
    Launch(AveragePoolBackward<T>, BlocksFor(*call.queue, dx.elements()),
           kThreads, 0, *call.queue, PlanesOf(call, dx, dy),
           call.attribute("count_pad") != 0, Elements<T>(dy), Elements<T>(dx));
  });
}

// ---- The mean of the whole image --------------------------------------------

struct Plane {
  int64_t local = 1;  // elements
  float whole = 1;    // of the whole image, which may be split

  explicit Plane(const LocalTensor& image) {
    const size_t n = image.shape.size();
    local = image.shape[n - 2] * image.shape[n - 1];
    whole = static_cast<float>(image.global_shape[n - 2] *
                               image.global_shape[n - 1]);
  }
};

// One warp for each plane.
template <typename T>
__global__ void ImageMeanForward(Plane plane, Elements<T> image,
                                 Elements<T> y) {
  const int64_t i = blockIdx.x;
  float sum = 0;
  for (int64_t j = threadIdx.x; j < plane.local; j += kWarp) {
    sum += image.Get(i * plane.local + j);
  }
  sum = Sum(sum);
  if (threadIdx.x == 0) y.Set(i, sum / plane.whole);
}

template <typename T>
__global__ void ImageMeanBackward(Plane plane, int64_t elements, Elements<T> dy,
                                  Elements<T> dx) {
  ForEachElement(elements, [&](int64_t i) {
    dx.Set(i, dy.Get(i / plane.local) / plane.whole);
  });
}

// x -> y.
void ImageMean(const KernelCall& call) {
  const LocalTensor& image = call.operands[0];
  const LocalTensor& y = call.results[0];
  ByType({image, y}, [&]<typename T>() {
    Launch(ImageMeanForward<T>, static_cast<unsigned>(y.elements()), kWarp, 0,
           *call.queue, Plane(image), Elements<T>(image), Elements<T>(y));
  });
}

// dy -> dx.
void ImageMeanDx(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& dx = call.results[0];
  ByType({dy, dx}, [&]<typename T>() {
    Launch(ImageMeanBackward<T>, BlocksFor(*call.queue, dx.elements()),
           kThreads, 0, *call.queue, Plane(dx), dx.elements(), Elements<T>(dy),
           Elements<T>(dx));
  });
}

}  // namespace

std::vector<Kernel> CudaPoolingKernels() {
  return {
      {"max_pool", MaxPool},         {"max_pool_dx", MaxPoolDx},
      {"average_pool", AveragePool}, {"average_pool_dx", AveragePoolDx},
      {"image_mean", ImageMean},     {"image_mean_dx", ImageMeanDx},
  };
}

}  // namespace tessera
