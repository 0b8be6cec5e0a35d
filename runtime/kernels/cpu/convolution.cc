// Convolutions as matrix products: for each sample and group, the windows of
// the image are the columns of a matrix of (K k l) rows (im2col; Chellapilla et
// al. 2006). A block of an image and of a result may begin anywhere in the
// whole ones; rows and columns that a block does not hold count as padding.

#include "runtime/kernels/convolution.h"

#include <algorithm>
#include <vector>

#include "planner/base/divide.h"
#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/gemm.h"
#include "runtime/kernels/cpu/vector.h"
#include "runtime/kernels/window.h"

namespace tessera {
namespace {

// The windows [begin, end) whose element `k` is inside.
struct Run {
  int64_t begin = 0;
  int64_t end = 0;

  Run(const WindowAxis& axis, int64_t k) {
    const int64_t first = axis.At(0, k);
    const int64_t least = first < 0 ? DivideUp(-first, axis.stride) : 0;
    const int64_t most =
        first < axis.in ? (axis.in - 1 - first) / axis.stride + 1 : 0;
    begin = std::min(least, axis.out);
    end = std::clamp(most, begin, axis.out);
  }
};

struct Convolution : ConvolutionExtents {
  WindowAxis y;
  WindowAxis x;

  int64_t depth() const { return in * y.window * x.window; }
  int64_t places() const { return y.out * x.out; }
  int64_t image() const { return in * y.in * x.in; }  // of a group
};

Convolution ConvolutionOf(const KernelCall& call,
                          const ConvolutionCall& tensors) {
  const Shape& weight = tensors.weight->shape;
  Convolution c = {tensors.extents, {}, {}};
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

// columns[(K k l), (y x)] = the windows of one group of one image.
template <typename T>
void ToColumns(const Convolution& c, const T* image, T* columns) {
  for (int64_t channel = 0; channel < c.in; ++channel) {
    const T* const plane = image + channel * c.y.in * c.x.in;
    for (int64_t k = 0; k < c.y.window; ++k) {
      for (int64_t l = 0; l < c.x.window; ++l) {
        const Run inside(c.x, l);
        for (int64_t y = 0; y < c.y.out; ++y, columns += c.x.out) {
          const int64_t row = c.y.At(y, k);
          if (!c.y.Inside(row)) {
            std::fill_n(columns, c.x.out, T{0});
            continue;
          }
          const T* const from = plane + row * c.x.in + c.x.At(0, l);
          std::fill_n(columns, inside.begin, T{0});
          for (int64_t x = inside.begin; x < inside.end; ++x) {
            columns[x] = from[x * c.x.stride];
          }
          std::fill(columns + inside.end, columns + c.x.out, T{0});
        }
      }
    }
  }
}

// The adjoint: adds the columns to the image.
template <typename T>
void FromColumns(const Convolution& c, const T* columns, T* image) {
  for (int64_t channel = 0; channel < c.in; ++channel) {
    T* const plane = image + channel * c.y.in * c.x.in;
    for (int64_t k = 0; k < c.y.window; ++k) {
      for (int64_t l = 0; l < c.x.window; ++l) {
        const Run inside(c.x, l);
        for (int64_t y = 0; y < c.y.out; ++y, columns += c.x.out) {
          const int64_t row = c.y.At(y, k);
          if (!c.y.Inside(row)) continue;
          T* const to = plane + row * c.x.in + c.x.At(0, l);
          for (int64_t x = inside.begin; x < inside.end; ++x) {
            to[x * c.x.stride] += columns[x];
          }
        }
      }
    }
  }
}

// Calls f(sample and group, memory for columns), on the threads of the call.
template <typename T, typename F>
void ForEachGroup(const KernelCall& call, const Convolution& c, F f) {
  ForEachRange(call, c.samples * c.groups, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> columns(c.depth() * c.places());
    for (int64_t i = begin; i < end; ++i) f(i, columns.data());
  });
}

// x, w [, bias] -> y.
template <typename T>
void Conv2d(const KernelCall& call) {
  const ConvolutionCall tensors = ConvolutionCallOf(call);
  const Convolution c = ConvolutionOf(call, tensors);
  const T* bias = nullptr;
  if (call.operands.size() > 2) bias = call.operands[2].as<const T>();
  ForEachGroup<T>(call, c, [&](int64_t i, T* columns) {
    const int64_t group = i % c.groups;
    ToColumns(c, tensors.image->as<const T>() + i * c.image(), columns);
    const T* const w =
        tensors.weight->as<const T>() + group * c.out * c.depth();
    T* const y = tensors.result->as<T>() + i * c.out * c.places();
    Gemm(c.out, c.places(), c.depth(), MatrixView<T>{w, c.depth(), 1},
         MatrixView<T>{columns, c.places(), 1}, nullptr, false, y, nullptr);
    if (bias == nullptr) return;
    for (int64_t n = 0; n < c.out; ++n) {
      const T b = bias[group * c.out + n];
      T* const row = y + n * c.places();
      for (int64_t p = 0; p < c.places(); ++p) row[p] += b;
    }
  });
}

// dy, w -> dx.
template <typename T>
void Conv2dDx(const KernelCall& call) {
  const ConvolutionCall tensors = ConvolutionCallOf(call);
  const Convolution c = ConvolutionOf(call, tensors);
  ForEachGroup<T>(call, c, [&](int64_t i, T* columns) {
    const MatrixView<T> w = {
        tensors.weight->as<const T>() + i % c.groups * c.out * c.depth(),
        c.depth(), 1};
    const T* const dy = tensors.result->as<const T>() + i * c.out * c.places();
    Gemm(c.depth(), c.places(), c.out, w.Transposed(),
         MatrixView<T>{dy, c.places(), 1}, nullptr, false, columns, nullptr);
    T* const dx = tensors.image->as<T>() + i * c.image();
    std::fill_n(dx, c.image(), T{0});
    FromColumns(c, columns, dx);
  });
}

// dy, x -> dw, summed over the samples in their order.
template <typename T>
void Conv2dDw(const KernelCall& call) {
  const ConvolutionCall tensors = ConvolutionCallOf(call);
  const Convolution c = ConvolutionOf(call, tensors);
  ForEachRange(call, c.groups, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> columns(c.depth() * c.places());
    for (int64_t group = begin; group < end; ++group) {
      T* const dw = tensors.weight->as<T>() + group * c.out * c.depth();
      for (int64_t sample = 0; sample < c.samples; ++sample) {
        const int64_t i = sample * c.groups + group;
        ToColumns(c, tensors.image->as<const T>() + i * c.image(),
                  columns.data());
        const MatrixView<T> dy = {
            tensors.result->as<const T>() + i * c.out * c.places(), c.places(),
            1};
        // Groups are shared by the threads where there are several.
        Gemm(c.out, c.depth(), c.places(), dy,
             MatrixView<T>{columns.data(), c.places(), 1}.Transposed(), nullptr,
             call.accumulate || sample > 0, dw,
             c.groups == 1 ? call.threads : nullptr);
      }
    }
  });
}

// dy -> dbias: sums over samples and places, in double.
template <typename T>
void Conv2dDb(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& db = call.results[0];
  const int64_t channels = db.elements();
  const int64_t samples = dy.shape[0];
  const int64_t places = dy.elements() / (samples * channels);
  ForEachRange(call, channels, RowGrain(samples * places),
               [&](int64_t begin, int64_t end) {
                 for (int64_t n = begin; n < end; ++n) {
                   double sum = 0;
                   for (int64_t b = 0; b < samples; ++b) {
                     const T* const row =
                         dy.as<const T>() + (b * channels + n) * places;
                     sum += Sum(places, [row](int64_t p) { return row[p]; });
                   }
                   PutOrAdd(call, db, n, sum);
                 }
               });
}

}  // namespace

std::vector<Kernel> CpuConvolutionKernels() {
  return {
      {"conv2d", ByDType<Conv2d<float>, Conv2d<double>>},
      {"conv_transpose2d", ByDType<Conv2dDx<float>, Conv2dDx<double>>},
      {"conv2d_dx", ByDType<Conv2dDx<float>, Conv2dDx<double>>},
      {"conv2d_dw", ByDType<Conv2dDw<float>, Conv2dDw<double>>, true},
      {"conv2d_db", ByDType<Conv2dDb<float>, Conv2dDb<double>>, true},
  };
}

}  // namespace tessera
