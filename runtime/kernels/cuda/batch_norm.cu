// Batch norm, a block for each channel. States and formulas:
// runtime/kernels/cpu/batch_norm.cc.

#include "runtime/kernels/cuda/reduce.h"

namespace tessera {
namespace {

constexpr unsigned kChannelThreads = 512;

// A batch of images as (samples, channels, places).
struct Images {
  int64_t samples = 0;
  int64_t channels = 1;
  int64_t places = 0;

  explicit Images(const LocalTensor& x) {
    const size_t n = x.shape.size();
    samples = x.shape[0];
    places = x.shape[n - 2] * x.shape[n - 1];
    for (size_t d = 1; d + 2 < n; ++d) channels *= x.shape[d];
  }

  __device__ float elements() const {
    return static_cast<float>(samples * places);
  }
  // Calls f(i) for this thread's elements i of the block's channel.
  template <typename F>
  __device__ void ForEach(F f) const {
    for (int64_t j = threadIdx.x; j < samples * places; j += blockDim.x) {
      f((j / places * channels + blockIdx.x) * places + j % places);
    }
  }
};

// x -> (count, mean, sum of squared deviations).
template <typename T>
__global__ void __launch_bounds__(kChannelThreads)
    ForwardState(Images images, Elements<T> x, Elements<Any> state) {
  float mean = 0;
  images.ForEach([&](int64_t i) { mean += x.Get(i); });
  mean = Sum(mean) / images.elements();
  float squares = 0;
  images.ForEach([&](int64_t i) {
    const float d = x.Get(i) - mean;
    squares += d * d;
  });
  squares = Sum(squares);
  if (threadIdx.x > 0) return;
  state.Set(3 * blockIdx.x, images.elements());
  state.Set(3 * blockIdx.x + 1, mean);
  state.Set(3 * blockIdx.x + 2, squares);
}

// x, scale, shift, states -> y, mean, rstd.
template <typename T>
__global__ void __launch_bounds__(kChannelThreads)
    Forward(Images images, Elements<T> x, Elements<T> scale, Elements<T> shift,
            Elements<Any> states, int64_t shards, float epsilon, Elements<T> y,
            Elements<Any> means, Elements<Any> rstds) {
  float count = 0;
  float mean = 0;
  float squares = 0;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const int64_t at = 3 * (shard * images.channels + blockIdx.x);
    const float n = states.Get(at);
    const float delta = states.Get(at + 1) - mean;
    squares += states.Get(at + 2) + delta * delta * count * (n / (count + n));
    count += n;
    mean += delta * (n / count);
  }
  const float rstd = 1 / sqrtf(squares / count + epsilon);
  if (threadIdx.x == 0) {
    means.Set(blockIdx.x, mean);
    rstds.Set(blockIdx.x, rstd);
  }
  const float slope = rstd * scale.Get(blockIdx.x);
  const float constant = shift.Get(blockIdx.x);
  images.ForEach(
      [&](int64_t i) { y.Set(i, (x.Get(i) - mean) * slope + constant); });
}

// dy, x, mean, rstd -> (sum of dy (x - mean) rstd, sum of dy, count).
template <typename T>
__global__ void __launch_bounds__(kChannelThreads)
    BackwardState(Images images, Elements<T> dy, Elements<T> x,
                  Elements<Any> means, Elements<Any> rstds,
                  Elements<Any> state) {
  const float mean = means.Get(blockIdx.x);
  const float rstd = rstds.Get(blockIdx.x);
  float slopes = 0;
  float sum = 0;
  images.ForEach([&](int64_t i) {
    const float d = dy.Get(i);
    slopes += d * ((x.Get(i) - mean) * rstd);
    sum += d;
  });
  slopes = Sum(slopes);
  sum = Sum(sum);
  if (threadIdx.x > 0) return;
  state.Set(3 * blockIdx.x, slopes);
  state.Set(3 * blockIdx.x + 1, sum);
  state.Set(3 * blockIdx.x + 2, images.elements());
}

// dy, x, scale, mean, rstd, states -> dx, dscale, dshift.
template <typename T>
__global__ void __launch_bounds__(kChannelThreads)
    Backward(Images images, Elements<T> dy, Elements<T> x, Elements<T> scale,
             Elements<Any> means, Elements<Any> rstds, Elements<Any> states,
             int64_t shards, bool accumulate, Elements<T> dx,
             Elements<Any> dscale, Elements<Any> dshift) {
  float slopes = 0;
  float sum = 0;
  float count = 0;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const int64_t at = 3 * (shard * images.channels + blockIdx.x);
    slopes += states.Get(at);
    sum += states.Get(at + 1);
    count += states.Get(at + 2);
  }
  if (threadIdx.x == 0) {
    const float before = accumulate ? dscale.Get(blockIdx.x) : 0;
    dscale.Set(blockIdx.x, before + slopes);
    const float shift_before = accumulate ? dshift.Get(blockIdx.x) : 0;
    dshift.Set(blockIdx.x, shift_before + sum);
  }
  const float mean = means.Get(blockIdx.x);
  const float rstd = rstds.Get(blockIdx.x);
  const float factor = scale.Get(blockIdx.x) * rstd;
  const float average = sum / count;
  const float slope = slopes / count;
  images.ForEach([&](int64_t i) {
    dx.Set(i,
           factor * (dy.Get(i) - average - (x.Get(i) - mean) * rstd * slope));
  });
}

int64_t ShardsOf(const LocalTensor& states, const Images& images) {
  return states.elements() / (3 * images.channels);
}

void BatchNormState(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const Images images(x);
  ByType({x}, [&]<typename T>() {
    Launch(ForwardState<T>, static_cast<unsigned>(images.channels),
           kChannelThreads, 0, *call.queue, images, Elements<T>(x),
           Elements<Any>(call.results[0]));
  });
}

void BatchNorm(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& scale = call.operands[1];
  const LocalTensor& shift = call.operands[2];
  const LocalTensor& states = call.operands[3];
  const Images images(x);
  ByType({x, scale, shift, call.results[0]}, [&]<typename T>() {
    Launch(Forward<T>, static_cast<unsigned>(images.channels), kChannelThreads,
           0, *call.queue, images, Elements<T>(x), Elements<T>(scale),
           Elements<T>(shift), Elements<Any>(states), ShardsOf(states, images),
           static_cast<float>(call.attribute("epsilon")),
           Elements<T>(call.results[0]), Elements<Any>(call.results[1]),
           Elements<Any>(call.results[2]));
  });
}

void BatchNormDxState(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& x = call.operands[1];
  const Images images(x);
  ByType({dy, x}, [&]<typename T>() {
    Launch(BackwardState<T>, static_cast<unsigned>(images.channels),
           kChannelThreads, 0, *call.queue, images, Elements<T>(dy),
           Elements<T>(x), Elements<Any>(call.operands[3]),
           Elements<Any>(call.operands[4]), Elements<Any>(call.results[0]));
  });
}

void BatchNormDx(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& x = call.operands[1];
  const LocalTensor& scale = call.operands[2];
  const LocalTensor& states = call.operands[5];
  const Images images(x);
  ByType({dy, x, scale, call.results[0]}, [&]<typename T>() {
    Launch(Backward<T>, static_cast<unsigned>(images.channels), kChannelThreads,
           0, *call.queue, images, Elements<T>(dy), Elements<T>(x),
           Elements<T>(scale), Elements<Any>(call.operands[3]),
           Elements<Any>(call.operands[4]), Elements<Any>(states),
           ShardsOf(states, images), call.accumulate,
           Elements<T>(call.results[0]), Elements<Any>(call.results[1]),
           Elements<Any>(call.results[2]));
  });
}

}  // namespace

std::vector<Kernel> CudaBatchNormKernels() {
  return {
      {"batch_norm.state", BatchNormState},
      {"batch_norm", BatchNorm},
      {"batch_norm_dx.state", BatchNormDxState},
      {"batch_norm_dx", BatchNormDx, true},
  };
}

}  // namespace tessera
