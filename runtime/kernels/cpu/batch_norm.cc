// Batch norm. The states of all shards of the samples stand behind the
// operands: forward (count, mean, sum of squared deviations) of each channel,
// backward (sum of dy (x - mean) rstd, sum of dy, count). Sums are taken in
// double and merged in rank order. Ghost batch norm has states for each group
// of the samples, those of groups that a shard has no sample of zero.
//
// A tracked one has the averages of mean and variance behind its shift, and
// backward count times mean and variance behind the state. With a negative
// momentum, which no graph has, its state is that of a batch which has the
// averages for statistics.

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
  int64_t width = 3;       // numbers of a state
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
                   .group_size = x.shape[0],
                   .width = state.shape.back()};
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

// The first of the numbers of a part's state.
int64_t StateOf(const Images& images, const Part& part, int64_t shard = 0) {
  return images.width *
         ((shard * images.groups + part.group) * images.channels +
          part.channel);
}

int64_t ShardsOf(const Images& images, const LocalTensor& states) {
  return states.elements() / (images.width * images.channels * images.groups);
}

// Of the averages, as a batch that has them.
void StateOfAverages(const KernelCall& call, const Images& images) {
  ForEachPart(call, images, [&](const Part& part) {
    const auto count = static_cast<double>(
        std::max<int64_t>(0, part.end - part.begin) * images.places);
    const int64_t at = StateOf(images, part);
    Put(call.results[0], at, count);
    Put(call.results[0], at + 1, Get(call.operands[3], part.channel));
    Put(call.results[0], at + 2, count * Get(call.operands[4], part.channel));
  });
}

// x, scale, shift[, averages] -> state[groups, channels, 3].
template <typename T, bool kGhost, bool kTracked>
void BatchNormState(const KernelCall& call) {
  const LocalTensor& state = call.results[0];
  const Images images = ImagesOf(call, 0, state, kGhost);
  if (kTracked && call.attribute("momentum") < 0) {
    return StateOfAverages(call, images);
  }
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

// x, scale, shift[, averages], states[shards, groups, channels, 3] -> y, mean,
// rstd.
template <typename T, bool kGhost>
void BatchNorm(const KernelCall& call) {
  const LocalTensor& states = call.operands.back();
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

// dy, x, scale[, averages], mean, rstd -> state[groups, channels, 3 or 5].
template <typename T, bool kGhost, bool kTracked>
void BatchNormDxState(const KernelCall& call) {
  const LocalTensor& state = call.results[0];
  const LocalTensor& means = call.operands[kTracked ? 5 : 3];
  const LocalTensor& rstds = call.operands[kTracked ? 6 : 4];
  const Images images = ImagesOf(call, 1, state, kGhost);
  const T* const dy = call.operands[0].as<const T>();
  const T* const x = call.operands[1].as<const T>();
  ForEachPart(call, images, [&](const Part& part) {
    double slopes = 0;
    double sum = 0;
    double count = 0;
    const int64_t at = StateOf(images, part);
    if (kTracked) {
      Put(state, at + 3, 0);
      Put(state, at + 4, 0);
    }
    if (part.begin < part.end) {
      const int64_t statistic = StatisticOf<kGhost>(images, part);
      const T mean = static_cast<T>(Get(means, statistic));
      const T rstd = static_cast<T>(Get(rstds, statistic));
      ForEachPlane(images, part, [&](int64_t at) {
        slopes += Sum(images.places, [&](int64_t p) {
          return dy[at + p] * ((x[at + p] - mean) * rstd);
        });
        sum += Sum(images.places, [&](int64_t p) { return dy[at + p]; });
      });
      count = static_cast<double>((part.end - part.begin) * images.places);
      if (kTracked) {
        const double root = Get(rstds, statistic);
        const double variance = 1 / (root * root) - call.attribute("epsilon");
        Put(state, at + 3, count * Get(means, statistic));
        Put(state, at + 4, count * std::max(0.0, variance));
      }
    }
    Put(state, at, slopes);
    Put(state, at + 1, sum);
    Put(state, at + 2, count);
  });
}

// How far the averages of a channel are from what the batch has, of the groups
// that are in the states; `sum_of`: number n of a group's state over all
// shards.
template <typename F>
void PutDistances(const KernelCall& call, const Images& images, int64_t c,
                  F sum_of) {
  const LocalTensor& x = call.operands[1];
  double batch = 1;  // the elements of a channel of all microbatches
  for (int64_t extent : x.global_shape) batch *= static_cast<double>(extent);
  for (int64_t extent : call.operands[2].global_shape) {
    batch /= static_cast<double>(extent);
  }
  double of_mean = 0;
  double of_variance = 0;
  for (int64_t group = 0; group < images.groups; ++group) {
    const Part part = {c, group};
    const double count = sum_of(part, 2);
    if (count == 0) continue;
    // Unbiased, as PyTorch keeps it.
    const double variance = sum_of(part, 4) / std::max(count - 1, 1.0);
    const double share = count / batch;
    of_mean += share * (Get(call.operands[3], c) - sum_of(part, 3) / count);
    of_variance += share * (Get(call.operands[4], c) - variance);
  }
  PutOrAdd(call, call.results[3], c, of_mean);
  PutOrAdd(call, call.results[4], c, of_variance);
}

// dy, x, scale[, averages], mean, rstd, states[shards, groups, channels, 3 or
// 5] -> dx, dscale, dshift[, distances of the averages].
// With h = (x - mean) rstd: dx = scale rstd (dy - avg(dy) - h avg(dy h)).
template <typename T, bool kGhost, bool kTracked>
void BatchNormDx(const KernelCall& call) {
  const LocalTensor& states = call.operands.back();
  const LocalTensor& means = call.operands[kTracked ? 5 : 3];
  const LocalTensor& rstds = call.operands[kTracked ? 6 : 4];
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
      if (kTracked) PutDistances(call, images, c, sum_of);
    }
    if (part.begin >= part.end) return;
    const int64_t statistic = StatisticOf<kGhost>(images, part);
    const double count = sum_of(part, 2);
    const T mean = static_cast<T>(Get(means, statistic));
    const T rstd = static_cast<T>(Get(rstds, statistic));
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
      {"batch_norm.state", ByDType<BatchNormState<float, false, false>,
                                   BatchNormState<double, false, false>>},
      {"batch_norm",
       ByDType<BatchNorm<float, false>, BatchNorm<double, false>>},
      {"batch_norm_dx.state", ByDType<BatchNormDxState<float, false, false>,
                                      BatchNormDxState<double, false, false>>},
      {"batch_norm_dx",
       ByDType<BatchNormDx<float, false, false>,
               BatchNormDx<double, false, false>>,
       true},
      {"ghost_batch_norm.state", ByDType<BatchNormState<float, true, false>,
                                         BatchNormState<double, true, false>>},
      {"ghost_batch_norm",
       ByDType<BatchNorm<float, true>, BatchNorm<double, true>>},
      {"ghost_batch_norm_dx.state",
       ByDType<BatchNormDxState<float, true, false>,
               BatchNormDxState<double, true, false>>},
      {"ghost_batch_norm_dx",
       ByDType<BatchNormDx<float, true, false>,
               BatchNormDx<double, true, false>>,
       true},
      {"tracked_batch_norm.state",
       ByDType<BatchNormState<float, false, true>,
               BatchNormState<double, false, true>>},
      {"tracked_batch_norm",
       ByDType<BatchNorm<float, false>, BatchNorm<double, false>>},
      {"tracked_batch_norm_dx.state",
       ByDType<BatchNormDxState<float, false, true>,
               BatchNormDxState<double, false, true>>},
      {"tracked_batch_norm_dx",
       ByDType<BatchNormDx<float, false, true>,
               BatchNormDx<double, false, true>>,
       true},
      {"tracked_ghost_batch_norm.state",
       ByDType<BatchNormState<float, true, true>,
               BatchNormState<double, true, true>>},
      {"tracked_ghost_batch_norm",
       ByDType<BatchNorm<float, true>, BatchNorm<double, true>>},
      {"tracked_ghost_batch_norm_dx.state",
       ByDType<BatchNormDxState<float, true, true>,
               BatchNormDxState<double, true, true>>},
      {"tracked_ghost_batch_norm_dx",
       ByDType<BatchNormDx<float, true, true>, BatchNormDx<double, true, true>>,
       true},
  };
}

}  // namespace tessera
