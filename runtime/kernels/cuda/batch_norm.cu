// Batch norm, a block for each channel, of ghost batch norm for each channel of
// a group of samples. States and formulas: runtime/kernels/cpu/batch_norm.cc.

#include "runtime/kernels/cuda/reduce.h"

namespace tessera {
namespace {

constexpr unsigned kChannelThreads = 512;

// A batch of images as (samples, channels, places), its samples in groups.
struct Images {
  int64_t samples = 0;
  int64_t channels = 1;
  int64_t places = 0;
  int64_t groups = 1;      // of the states
  int64_t group_size = 0;  // samples
  int64_t before = 0;      // samples of the first group on other shards
  int64_t width = 3;       // numbers of a state
  bool ghost = false;

  Images(const LocalTensor& x, const LocalTensor& scale,
         const LocalTensor& state, bool is_ghost)
      : samples(x.shape[0]),
        channels(scale.elements()),
        places(x.elements() / (samples * channels)),
        group_size(samples),
        width(state.shape.back()),
        ghost(is_ghost) {
    if (ghost) {
      // In front of the channels.
      const size_t d = state.shape.size() - scale.shape.size() - 2;
      groups = state.shape[d];
      group_size = x.global_shape[0] / state.global_shape[d];
      before = x.offset[0] - state.offset[d] * group_size;
    }
  }

  unsigned blocks() const { return static_cast<unsigned>(channels * groups); }
  int64_t ShardsOf(const LocalTensor& states) const {
    return states.elements() / (width * channels * groups);
  }

  // Of the running block.
  __device__ int64_t channel() const { return blockIdx.x % channels; }
  __device__ int64_t group() const { return blockIdx.x / channels; }
  __device__ int64_t begin() const {
    const int64_t first = group() * group_size - before;
    return first > 0 ? first : 0;
  }
  __device__ int64_t end() const {
    const int64_t last = (group() + 1) * group_size - before;
    return last < samples ? last : samples;
  }
  // Whether this shard has samples of the group.
  __device__ bool empty() const { return begin() >= end(); }
  __device__ float elements() const {
    return empty() ? 0 : static_cast<float>((end() - begin()) * places);
  }
  // The first of the numbers of the channel's state in a group.
  __device__ int64_t StateOf(int64_t shard, int64_t of_group) const {
    return width * ((shard * groups + of_group) * channels + channel());
  }
  // Where the statistics are: of the channel, or of each sample's.
  __device__ int64_t statistic() const {
    return ghost ? begin() * channels + channel() : channel();
  }
  __device__ int64_t statistics() const { return ghost ? end() - begin() : 1; }

  // Calls f(i) for this thread's elements i of the block's part.
  template <typename F>
  __device__ void ForEach(F f) const {
    if (empty()) return;
    const int64_t first = begin();
    const int64_t c = channel();
    const int64_t n = (end() - first) * places;
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
      f(((first + j / places) * channels + c) * places + j % places);
    }
  }
};

// x -> (count, mean, sum of squared deviations).
template <typename T>
__global__ void __launch_bounds__(kChannelThreads)
    ForwardState(Images images, Elements<T> x, Elements<Any> state) {
  const float count = images.elements();
  float mean = 0;
  images.ForEach([&](int64_t i) { mean += x.Get(i); });
  mean = Sum(mean);
  mean = count > 0 ? mean / count : 0;
  float squares = 0;
  images.ForEach([&](int64_t i) {
    const float d = x.Get(i) - mean;
    squares += d * d;
  });
  squares = Sum(squares);
  if (threadIdx.x > 0) return;
  const int64_t at = images.StateOf(0, images.group());
  state.Set(at, count);
  state.Set(at + 1, mean);
  state.Set(at + 2, squares);
}

// The averages, as the state of a batch that has them.
template <typename T>
__global__ void AveragesState(Images images, Elements<T> mean,
                              Elements<T> variance, Elements<Any> state) {
  const float count = images.elements();
  const int64_t at = images.StateOf(0, images.group());
  state.Set(at, count);
  state.Set(at + 1, mean.Get(images.channel()));
  state.Set(at + 2, count * variance.Get(images.channel()));
}

// x, scale, shift, states -> y, mean, rstd.
template <typename T>
__global__ void __launch_bounds__(kChannelThreads)
    Forward(Images images, Elements<T> x, Elements<T> scale, Elements<T> shift,
            Elements<Any> states, int64_t shards, float epsilon, Elements<T> y,
            Elements<Any> means, Elements<Any> rstds) {
  if (images.empty()) return;
  float count = 0;
  float mean = 0;
  float squares = 0;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const int64_t at = images.StateOf(shard, images.group());
    const float n = states.Get(at);
    if (n == 0) continue;
    const float delta = states.Get(at + 1) - mean;
    squares += states.Get(at + 2) + delta * delta * count * (n / (count + n));
    count += n;
    mean += delta * (n / count);
  }
  const float rstd = 1 / sqrtf(squares / count + epsilon);
  for (int64_t i = threadIdx.x; i < images.statistics(); i += blockDim.x) {
    means.Set(images.statistic() + i * images.channels, mean);
    rstds.Set(images.statistic() + i * images.channels, rstd);
  }
  const float slope = rstd * scale.Get(images.channel());
  const float constant = shift.Get(images.channel());
  images.ForEach(
      [&](int64_t i) { y.Set(i, (x.Get(i) - mean) * slope + constant); });
}

// dy, x, mean, rstd -> (sum of dy (x - mean) rstd, sum of dy, count), of a
// tracked norm also count times mean and variance.
template <typename T>
__global__ void __launch_bounds__(kChannelThreads)
    BackwardState(Images images, Elements<T> dy, Elements<T> x,
                  Elements<Any> means, Elements<Any> rstds, float epsilon,
                  Elements<Any> state) {
  const bool empty = images.empty();
  const float mean = empty ? 0 : means.Get(images.statistic());
  const float rstd = empty ? 0 : rstds.Get(images.statistic());
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
  const int64_t at = images.StateOf(0, images.group());
  state.Set(at, slopes);
  state.Set(at + 1, sum);
  state.Set(at + 2, images.elements());
  if (images.width == 3) return;
  const float variance = empty ? 0 : 1 / (rstd * rstd) - epsilon;
  state.Set(at + 3, images.elements() * mean);
  state.Set(at + 4, images.elements() * (variance > 0 ? variance : 0));
}

// Of a tracked norm.
template <typename T>
struct Averages {
  Elements<T> mean;
  Elements<T> variance;
  Elements<Any> mean_distance;
  Elements<Any> variance_distance;
  float batch = 1;  // the elements of a channel of all microbatches
};

// How far a channel's averages are from the batch's, of the states' groups;
// `sum_of(group, n)`: number n of a group's state over all shards.
template <typename T, typename F>
__device__ void SetDistances(const Images& images, const Averages<T>& averages,
                             bool accumulate, F sum_of) {
  const int64_t channel = images.channel();
  float of_mean = 0;
  float of_variance = 0;
  for (int64_t group = 0; group < images.groups; ++group) {
    const float count = sum_of(group, 2);
    if (count == 0) continue;
    const float variance = sum_of(group, 4) / (count > 2 ? count - 1 : 1);
    const float share = count / averages.batch;
    of_mean += share * (averages.mean.Get(channel) - sum_of(group, 3) / count);
    of_variance += share * (averages.variance.Get(channel) - variance);
  }
  if (accumulate) {
    of_mean += averages.mean_distance.Get(channel);
    of_variance += averages.variance_distance.Get(channel);
  }
  averages.mean_distance.Set(channel, of_mean);
  averages.variance_distance.Set(channel, of_variance);
}

// dy, x, scale, mean, rstd, states -> dx, dscale, dshift, and of a tracked norm
// the averages' distances.
template <typename T>
__global__ void __launch_bounds__(kChannelThreads)
    Backward(Images images, Elements<T> dy, Elements<T> x, Elements<T> scale,
             Elements<Any> means, Elements<Any> rstds, Elements<Any> states,
             int64_t shards, bool accumulate, Elements<T> dx,
             Elements<Any> dscale, Elements<Any> dshift, Averages<T> averages) {
  const int64_t channel = images.channel();
  // Number `of` of the states of a group, over all shards.
  const auto sum_of = [&](int64_t group, int64_t of) {
    float sum = 0;
    for (int64_t shard = 0; shard < shards; ++shard) {
      sum += states.Get(images.StateOf(shard, group) + of);
    }
    return sum;
  };
  if (images.group() == 0 && threadIdx.x == 0) {
    float slopes = 0;
    float sum = 0;
    for (int64_t group = 0; group < images.groups; ++group) {
      slopes += sum_of(group, 0);
      sum += sum_of(group, 1);
    }
    const float before = accumulate ? dscale.Get(channel) : 0;
    dscale.Set(channel, before + slopes);
    const float shift_before = accumulate ? dshift.Get(channel) : 0;
    dshift.Set(channel, shift_before + sum);
    if (images.width > 3) SetDistances(images, averages, accumulate, sum_of);
  }
  if (images.empty()) return;
  const float mean = means.Get(images.statistic());
  const float rstd = rstds.Get(images.statistic());
  const float factor = scale.Get(channel) * rstd;
  const float count = sum_of(images.group(), 2);
  const float average = sum_of(images.group(), 1) / count;
  const float slope = sum_of(images.group(), 0) / count;
  images.ForEach([&](int64_t i) {
    dx.Set(i,
           factor * (dy.Get(i) - average - (x.Get(i) - mean) * rstd * slope));
  });
}

template <bool kGhost, bool kTracked>
void BatchNormState(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const Images images(x, call.operands[1], call.results[0], kGhost);
  if (kTracked && call.attribute("momentum") < 0) {
    ByType({call.operands[3], call.operands[4]}, [&]<typename T>() {
      Launch(AveragesState<T>, images.blocks(), 1, 0, *call.queue, images,
             Elements<T>(call.operands[3]), Elements<T>(call.operands[4]),
             Elements<Any>(call.results[0]));
    });
    return;
  }
  ByType({x}, [&]<typename T>() {
    Launch(ForwardState<T>, images.blocks(), kChannelThreads, 0, *call.queue,
           images, Elements<T>(x), Elements<Any>(call.results[0]));
  });
}

template <bool kGhost>
void BatchNorm(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& scale = call.operands[1];
  const LocalTensor& shift = call.operands[2];
  const LocalTensor& states = call.operands.back();
  const Images images(x, scale, states, kGhost);
  ByType({x, scale, shift, call.results[0]}, [&]<typename T>() {
    Launch(Forward<T>, images.blocks(), kChannelThreads, 0, *call.queue, images,
           Elements<T>(x), Elements<T>(scale), Elements<T>(shift),
           Elements<Any>(states), images.ShardsOf(states),
           static_cast<float>(call.attribute("epsilon")),
           Elements<T>(call.results[0]), Elements<Any>(call.results[1]),
           Elements<Any>(call.results[2]));
  });
}

template <bool kGhost, bool kTracked>
void BatchNormDxState(const KernelCall& call) {
  constexpr size_t kMeans = kTracked ? 5 : 3;
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& x = call.operands[1];
  const Images images(x, call.operands[2], call.results[0], kGhost);
  ByType({dy, x}, [&]<typename T>() {
    Launch(BackwardState<T>, images.blocks(), kChannelThreads, 0, *call.queue,
           images, Elements<T>(dy), Elements<T>(x),
           Elements<Any>(call.operands[kMeans]),
           Elements<Any>(call.operands[kMeans + 1]),
           kTracked ? static_cast<float>(call.attribute("epsilon")) : 0,
           Elements<Any>(call.results[0]));
  });
}

// Of a call of a tracked norm's adjoint.
template <typename T>
Averages<T> AveragesOf(const KernelCall& call) {
  float batch = 1;
  for (int64_t extent : call.operands[1].global_shape) {
    batch *= static_cast<float>(extent);
  }
  for (int64_t extent : call.operands[2].global_shape) {
    batch /= static_cast<float>(extent);
  }
  return {Elements<T>(call.operands[3]), Elements<T>(call.operands[4]),
          Elements<Any>(call.results[3]), Elements<Any>(call.results[4]),
          batch};
}

template <bool kGhost, bool kTracked>
void BatchNormDx(const KernelCall& call) {
  constexpr size_t kMeans = kTracked ? 5 : 3;
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& x = call.operands[1];
  const LocalTensor& scale = call.operands[2];
  const LocalTensor& states = call.operands.back();
  const Images images(x, scale, states, kGhost);
  ByType({dy, x, scale, call.results[0]}, [&]<typename T>() {
    Launch(Backward<T>, images.blocks(), kChannelThreads, 0, *call.queue,
           images, Elements<T>(dy), Elements<T>(x), Elements<T>(scale),
           Elements<Any>(call.operands[kMeans]),
           Elements<Any>(call.operands[kMeans + 1]), Elements<Any>(states),
           images.ShardsOf(states), call.accumulate,
           Elements<T>(call.results[0]), Elements<Any>(call.results[1]),
           Elements<Any>(call.results[2]),
           kTracked ? AveragesOf<T>(call) : Averages<T>());
  });
}

}  // namespace

std::vector<Kernel> CudaBatchNormKernels() {
  return {
      {"batch_norm.state", BatchNormState<false, false>},
      {"batch_norm", BatchNorm<false>},
      {"batch_norm_dx.state", BatchNormDxState<false, false>},
      {"batch_norm_dx", BatchNormDx<false, false>, true},
      {"ghost_batch_norm.state", BatchNormState<true, false>},
      {"ghost_batch_norm", BatchNorm<true>},
      {"ghost_batch_norm_dx.state", BatchNormDxState<true, false>},
      {"ghost_batch_norm_dx", BatchNormDx<true, false>, true},
      {"tracked_batch_norm.state", BatchNormState<false, true>},
      {"tracked_batch_norm", BatchNorm<false>},
      {"tracked_batch_norm_dx.state", BatchNormDxState<false, true>},
      {"tracked_batch_norm_dx", BatchNormDx<false, true>, true},
      {"tracked_ghost_batch_norm.state", BatchNormState<true, true>},
      {"tracked_ghost_batch_norm", BatchNorm<true>},
      {"tracked_ghost_batch_norm_dx.state", BatchNormDxState<true, true>},
      {"tracked_ghost_batch_norm_dx", BatchNormDx<true, true>, true},
  };
}

}  // namespace tessera
