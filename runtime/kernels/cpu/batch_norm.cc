// Batch norm. The states of all shards of the samples stand behind the
// operands: forward (count, mean, sum of squared deviations) of each channel,
// backward (sum of dy (x - mean) rstd, sum of dy, count). Sums are taken in
// double and merged in rank order. Ghost batch norm has states for each group
// of the samples, those of groups that a shard has no sample of zero.

#include <algorithm>
#include <cmath>

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"

namespace tessera {
namespace {

// A batch of images as (samples, channels, places), its samples in groups.
struct Images {
  int64_t samples = 0;
  int64_t channels = 0;
  int64_t places = 0;
  int64_t groups = 1;      // of the states
  int64_t group_size = 0;  // samples
  int64_t before = 0;      // samples of the first group on other shards
};

// A group of samples' part of a channel. Of plain batch norm, all samples.
struct Part {
  int64_t channel = 0;
  int64_t group = 0;
  int64_t begin = 0;  // samples; `end` may be before it: there are none
  int64_t end = 0;
};

// `operand`: the images, behind which the scale is.
Images ImagesOf(const KernelCall& call, size_t operand,
                const LocalTensor& state, bool ghost) {
  const LocalTensor& x = call.operands[operand];
  const LocalTensor& scale = call.operands[operand + 1];
  Images images = {.samples = x.shape[0],
                   .channels = scale.elements(),
                   .places = x.elements() / (x.shape[0] * scale.elements()),
                   .group_size = x.shape[0]};
  if (ghost) {
    // In front of the channels.
    const size_t d = state.shape.size() - scale.shape.size() - 2;
    images.groups = state.shape[d];
    images.group_size = x.global_shape[0] / state.global_shape[d];
    images.before = x.offset[0] - state.offset[d] * images.group_size;
  }
  return images;
}

// Where the statistics of a part are: one for each channel, or sample of it.
template <bool kGhost>
int64_t StatisticOf(const Images& images, const Part& part) {
  return kGhost ? part.begin * images.channels + part.channel : part.channel;
}

// Calls f(part) for all channels and groups, on the threads of the call.
template <typename F>
void ForEachPart(const KernelCall& call, const Images& images, F f) {
  ForEachRange(
      call, images.channels * images.groups,
      RowGrain(std::min(images.samples, images.group_size) * images.places),
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t group = i / images.channels;
          const int64_t first = group * images.group_size - images.before;
          f(Part{i % images.channels, group, std::max<int64_t>(0, first),
                 std::min(images.samples, first + images.group_size)});
        }
      });
}

// Calls f(first element of a plane) for all samples' planes of a part.
template <typename F>
void ForEachPlane(const Images& images, const Part& part, F f) {
  for (int64_t b = part.begin; b < part.end; ++b) {
    f((b * images.channels + part.channel) * images.places);
  }
}

// The first of the three numbers of a part's state.
int64_t StateOf(const Images& images, const Part& part, int64_t shard = 0) {
  return 3 * ((shard * images.groups + part.group) * images.channels +
              part.channel);
}

int64_t ShardsOf(const Images& images, const LocalTensor& states) {
  return states.elements() / (3 * images.channels * images.groups);
}

// x, scale, shift -> state[groups, channels, 3].
template <typename T, bool kGhost>
void BatchNormState(const KernelCall& call) {
  const LocalTensor& state = call.results[0];
  const Images images = ImagesOf(call, 0, state, kGhost);
  const T* const x = call.operands[0].as<const T>();
  ForEachPart(call, images, [&](const Part& part) {
    const auto count = static_cast<double>(
        std::max<int64_t>(0, part.end - part.begin) * images.places);
    double sum = 0;
    ForEachPlane(images, part, [&](int64_t at) {
      sum += Sum(images.places, [&](int64_t p) { return x[at + p]; });
    });
    const double mean = count > 0 ? sum / count : 0;
    double squares = 0;
    ForEachPlane(images, part, [&](int64_t at) {
      squares += Sum(images.places, [&](int64_t p) {
        const double d = static_cast<double>(x[at + p]) - mean;
        return d * d;
      });
    });
    const int64_t at = StateOf(images, part);
    Put(state, at, count);
    Put(state, at + 1, mean);
    Put(state, at + 2, squares);
  });
}

// x, scale, shift, states[shards, groups, channels, 3] -> y, mean, rstd.
template <typename T, bool kGhost>
void BatchNorm(const KernelCall& call) {
  const LocalTensor& states = call.operands[3];
  const Images images = ImagesOf(call, 0, states, kGhost);
  const T* const x = call.operands[0].as<const T>();
  const int64_t shards = ShardsOf(images, states);
  const double epsilon = call.attribute("epsilon");
  ForEachPart(call, images, [&](const Part& part) {
    if (part.begin >= part.end) return;
    const int64_t c = part.channel;
    double count = 0;
    double mean = 0;
    double squares = 0;
    for (int64_t shard = 0; shard < shards; ++shard) {
      const int64_t at = StateOf(images, part, shard);
      const double n = Get(states, at);
      if (n == 0) continue;
      const double delta = Get(states, at + 1) - mean;
      squares += Get(states, at + 2) + delta * delta * count * n / (count + n);
      count += n;
      mean += delta * n / count;
    }
    const double rstd = 1 / std::sqrt(squares / count + epsilon);
    const int64_t statistic = StatisticOf<kGhost>(images, part);
    const int64_t copies = kGhost ? part.end - part.begin : 1;
    for (int64_t i = 0; i < copies; ++i) {
      Put(call.results[1], statistic + i * images.channels, mean);
      Put(call.results[2], statistic + i * images.channels, rstd);
    }
    const T m = static_cast<T>(mean);
    const T slope = static_cast<T>(rstd) * call.operands[1].as<const T>()[c];
    const T shift = call.operands[2].as<const T>()[c];
    T* const y = call.results[0].as<T>();
    ForEachPlane(images, part, [&](int64_t at) {
      for (int64_t p = at; p < at + images.places; ++p) {
        y[p] = (x[p] - m) * slope + shift;
      }
    });
  });
}

// dy, x, scale, mean, rstd -> state[groups, channels, 3].
template <typename T, bool kGhost>
void BatchNormDxState(const KernelCall& call) {
  const LocalTensor& state = call.results[0];
  const Images images = ImagesOf(call, 1, state, kGhost);
  const T* const dy = call.operands[0].as<const T>();
  const T* const x = call.operands[1].as<const T>();
  ForEachPart(call, images, [&](const Part& part) {
    double slopes = 0;
    double sum = 0;
    double count = 0;
    if (part.begin < part.end) {
      const int64_t statistic = StatisticOf<kGhost>(images, part);
      const T mean = static_cast<T>(Get(call.operands[3], statistic));
      const T rstd = static_cast<T>(Get(call.operands[4], statistic));
      ForEachPlane(images, part, [&](int64_t at) {
        slopes += Sum(images.places, [&](int64_t p) {
          return dy[at + p] * ((x[at + p] - mean) * rstd);
        });
        sum += Sum(images.places, [&](int64_t p) { return dy[at + p]; });
      });
      count = static_cast<double>((part.end - part.begin) * images.places);
    }
    const int64_t at = StateOf(images, part);
    Put(state, at, slopes);
    Put(state, at + 1, sum);
    Put(state, at + 2, count);
  });
}

// dy, x, scale, mean, rstd, states[shards, groups, channels, 3] -> dx, dscale,
// dshift.
// With h = (x - mean) rstd: dx = scale rstd (dy - avg(dy) - h avg(dy h)).
template <typename T, bool kGhost>
void BatchNormDx(const KernelCall& call) {
  const LocalTensor& states = call.operands[5];
  const Images images = ImagesOf(call, 1, states, kGhost);
  const T* const dy = call.operands[0].as<const T>();
  const T* const x = call.operands[1].as<const T>();
  const int64_t shards = ShardsOf(images, states);
  const auto sum_of = [&](const Part& part, int64_t number) {
    double sum = 0;
    for (int64_t shard = 0; shard < shards; ++shard) {
      sum += Get(states, StateOf(images, part, shard) + number);
    }
    return sum;
  };
  ForEachPart(call, images, [&](const Part& part) {
    const int64_t c = part.channel;
    if (part.group == 0) {
      double slopes = 0;
      double sum = 0;
      for (int64_t group = 0; group < images.groups; ++group) {
        slopes += sum_of({c, group}, 0);
        sum += sum_of({c, group}, 1);
      }
      PutOrAdd(call, call.results[1], c, slopes);
      PutOrAdd(call, call.results[2], c, sum);
    }
    if (part.begin >= part.end) return;
    const int64_t statistic = StatisticOf<kGhost>(images, part);
    const double count = sum_of(part, 2);
    const T mean = static_cast<T>(Get(call.operands[3], statistic));
    const T rstd = static_cast<T>(Get(call.operands[4], statistic));
    const T factor = call.operands[2].as<const T>()[c] * rstd;
    const T average = static_cast<T>(sum_of(part, 1) / count);
    const T slope = static_cast<T>(sum_of(part, 0) / count);
    T* const dx = call.results[0].as<T>();
    ForEachPlane(images, part, [&](int64_t at) {
      for (int64_t p = at; p < at + images.places; ++p) {
        dx[p] = factor * (dy[p] - average - (x[p] - mean) * rstd * slope);
      }
    });
  });
}

}  // namespace

std::vector<Kernel> CpuBatchNormKernels() {
  return {
      {"batch_norm.state",
       ByDType<BatchNormState<float, false>, BatchNormState<double, false>>},
      {"batch_norm",
       ByDType<BatchNorm<float, false>, BatchNorm<double, false>>},
      {"batch_norm_dx.state", ByDType<BatchNormDxState<float, false>,
                                      BatchNormDxState<double, false>>},
      {"batch_norm_dx",
       ByDType<BatchNormDx<float, false>, BatchNormDx<double, false>>, true},
      {"ghost_batch_norm.state",
       ByDType<BatchNormState<float, true>, BatchNormState<double, true>>},
      {"ghost_batch_norm",
       ByDType<BatchNorm<float, true>, BatchNorm<double, true>>},
      {"ghost_batch_norm_dx.state",
       ByDType<BatchNormDxState<float, true>, BatchNormDxState<double, true>>},
      {"ghost_batch_norm_dx",
       ByDType<BatchNormDx<float, true>, BatchNormDx<double, true>>, true},
  };
}

}  // namespace tessera
