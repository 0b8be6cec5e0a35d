// Convolutions as products of matrices that are never stored: a tile's elements
// are read where they lie in images (implicit GEMM; Chetlur et al. 2014). In
// fp32, without tensor cores. Every sum has one order.

#include "runtime/kernels/convolution.h"
#include "runtime/kernels/cuda/reduce.h"
#include "runtime/kernels/cuda/tiled_product.h"
#include "runtime/kernels/window.h"

namespace tessera {
namespace {

struct Convolution : ConvolutionExtents {
  WindowAxis y;
  WindowAxis x;

  __device__ __host__ int64_t window() const { return y.window * x.window; }
  __device__ __host__ int64_t pixels() const { return y.in * x.in; }
  __device__ __host__ int64_t places() const { return y.out * x.out; }

  // The element of the image under element `depth` (channel, k, l) of the
  // window at `place`, or -1.
  __device__ int64_t ImageAt(int64_t sample, int64_t group, int64_t depth,
                             int64_t place) const {
    const int64_t kl = depth % window();
    const int64_t row = y.At(place / x.out, kl / x.window);
    const int64_t column = x.At(place % x.out, kl % x.window);
    if (!y.Inside(row) || !x.Inside(column)) return -1;
    const int64_t channel = (sample * groups + group) * in + depth / window();
    return channel * pixels() + row * x.in + column;
  }
};

template <typename T>
__device__ float GetOrZero(Elements<T> values, int64_t i) {
  return i < 0 ? 0 : values.Get(i);
}

// Each of the three products, as tiled_product.h has them. Rows and columns
// are what lies beside each other in most of their operands.
struct Product {
  Convolution c;

  __device__ __host__ int64_t groups() const { return c.groups; }
  __device__ static constexpr bool a_by_depth() { return false; }
  __device__ static constexpr bool b_by_depth() { return false; }
};

// y: rows are places of all samples, columns channels.
template <typename T>
struct Forward : Product {
  Elements<T> image;
  Elements<T> weight;
  Elements<Any> bias;  // or null
  Elements<T> result;

  __device__ __host__ int64_t rows() const { return c.samples * c.places(); }
  __device__ __host__ int64_t columns() const { return c.out; }
  __device__ __host__ int64_t depth() const { return c.in * c.window(); }
  __device__ float A(int64_t group, int64_t row, int64_t d) const {
    return GetOrZero(image,
                     c.ImageAt(row / c.places(), group, d, row % c.places()));
  }
  __device__ float B(int64_t group, int64_t d, int64_t column) const {
    return weight.Get((group * c.out + column) * depth() + d);
  }
  __device__ void Put(int64_t group, int64_t row, int64_t column,
                      float sum) const {
    const int64_t channel = group * c.out + column;
    if (bias.data != nullptr) sum += bias.Get(channel);
    result.Set((row / c.places() * c.groups * c.out + channel) * c.places() +
                   row % c.places(),
               sum);
  }
};

// dx: rows are pixels of all samples, columns channels.
template <typename T>
struct ImageGradient : Product {
  Elements<T> dy;
  Elements<T> weight;
  Elements<T> dx;

  __device__ __host__ int64_t rows() const { return c.samples * c.pixels(); }
  __device__ __host__ int64_t columns() const { return c.in; }
  __device__ __host__ int64_t depth() const { return c.out * c.window(); }
  __device__ float A(int64_t group, int64_t row, int64_t d) const {
    const int64_t pixel = row % c.pixels();
    const int64_t kl = d % c.window();
    const int64_t y = c.y.WindowAt(pixel / c.x.in, kl / c.x.window);
    const int64_t x = c.x.WindowAt(pixel % c.x.in, kl % c.x.window);
    if (y < 0 || x < 0) return 0;
    const int64_t channel =
        (row / c.pixels() * c.groups + group) * c.out + d / c.window();
    return dy.Get(channel * c.places() + y * c.x.out + x);
  }
  __device__ float B(int64_t group, int64_t d, int64_t column) const {
    const int64_t out = group * c.out + d / c.window();
    return weight.Get((out * c.in + column) * c.window() + d % c.window());
  }
  __device__ void Put(int64_t group, int64_t row, int64_t column,
                      float sum) const {
    const int64_t channel =
        (row / c.pixels() * c.groups + group) * c.in + column;
    dx.Set(channel * c.pixels() + row % c.pixels(), sum);
  }
};

// dw: rows are channels of the result, columns (channel, k, l).
template <typename T>
struct WeightGradient : Product {
  Elements<T> dy;
  Elements<T> image;
  Elements<Any> dw;
  bool accumulate = false;

  __device__ __host__ int64_t rows() const { return c.out; }
  __device__ __host__ int64_t columns() const { return c.in * c.window(); }
  __device__ __host__ int64_t depth() const { return c.samples * c.places(); }
  __device__ float A(int64_t group, int64_t row, int64_t d) const {
    const int64_t channel = (d / c.places() * c.groups + group) * c.out + row;
    return dy.Get(channel * c.places() + d % c.places());
  }
  __device__ float B(int64_t group, int64_t d, int64_t column) const {
    return GetOrZero(image,
                     c.ImageAt(d / c.places(), group, column, d % c.places()));
  }
  __device__ void Put(int64_t group, int64_t row, int64_t column,
                      float sum) const {
    const int64_t to = (group * c.out + row) * columns() + column;
    dw.Set(to, accumulate ? sum + dw.Get(to) : sum);
  }
};

// Summands of a part of the depth.
constexpr int64_t kLeastDepth = 512;

Convolution ConvolutionOf(const KernelCall& call,
                          const ConvolutionCall& tensors) {
  Convolution c = {tensors.extents, {}, {}};
  const Shape& weight = tensors.weight->shape;
  c.y = WindowAxisOf(call, 2, *tensors.image, *tensors.result);
  c.x = WindowAxisOf(call, 1, *tensors.image, *tensors.result);
  if (tensors.tall) {
    c.y.window = weight[weight.size() - 2];
    c.y.dilation = static_cast<int64_t>(call.attribute("dilation_height"));
  }
  c.x.window = weight.back();
  c.x.dilation = static_cast<int64_t>(call.attribute("dilation_width"));
  return c;
}

// x, w [, bias] -> y.
void Conv2d(const KernelCall& call) {
  const ConvolutionCall t = ConvolutionCallOf(call);
  const Convolution c = ConvolutionOf(call, t);
  Elements<Any> bias;
  if (call.operands.size() > 2 && call.operands[2].data != nullptr) {
    bias = Elements<Any>(call.operands[2]);
  }
  ByType({*t.image, *t.weight, *t.result}, [&]<typename T>() {
    RunTiledProduct(Forward<T>{{c},
                               Elements<T>(*t.image),
                               Elements<T>(*t.weight),
                               bias,
                               Elements<T>(*t.result)},
                    kLeastDepth, *call.queue);
  });
}

// dy, w -> dx.
void Conv2dDx(const KernelCall& call) {
  const ConvolutionCall t = ConvolutionCallOf(call);
  const Convolution c = ConvolutionOf(call, t);
  ByType({*t.image, *t.weight, *t.result}, [&]<typename T>() {
    RunTiledProduct(ImageGradient<T>{{c},
                                     Elements<T>(*t.result),
                                     Elements<T>(*t.weight),
                                     Elements<T>(*t.image)},
                    kLeastDepth, *call.queue);
  });
}

// dy, x -> dw.
void Conv2dDw(const KernelCall& call) {
  const ConvolutionCall t = ConvolutionCallOf(call);
  const Convolution c = ConvolutionOf(call, t);
  ByType({*t.image, *t.result}, [&]<typename T>() {
    RunTiledProduct(WeightGradient<T>{{c},
                                      Elements<T>(*t.result),
                                      Elements<T>(*t.image),
                                      Elements<Any>(*t.weight),
                                      call.accumulate},
                    kLeastDepth, *call.queue);
  });
}

// One block for each channel.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    SumChannels(Elements<T> dy, int64_t samples, int64_t channels,
                int64_t places, bool accumulate, Elements<Any> db) {
  const int64_t channel = blockIdx.x;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < samples * places; i += kThreads) {
    const int64_t sample = i / places;
    sum += dy.Get((sample * channels + channel) * places + i % places);
  }
  sum = Sum(sum);
  if (threadIdx.x > 0) return;
  db.Set(channel, accumulate ? sum + db.Get(channel) : sum);
}

// dy -> dbias.
void Conv2dDb(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& db = call.results[0];
  const int64_t channels = db.elements();
  const int64_t samples = dy.shape[0];
  ByType({dy}, [&]<typename T>() {
    Launch(SumChannels<T>, static_cast<unsigned>(channels), kThreads, 0,
           *call.queue, Elements<T>(dy), samples, channels,
           dy.elements() / (samples * channels), call.accumulate,
           Elements<Any>(db));
  });
}

}  // namespace

std::vector<Kernel> CudaConvolutionKernels() {
  return {
      {"conv2d", Conv2d},
      {"conv_transpose2d", Conv2dDx},
      {"conv2d_dx", Conv2dDx},
      {"conv2d_dw", Conv2dDw, true},
      {"conv2d_db", Conv2dDb, true},
  };
}

}  // namespace tessera
