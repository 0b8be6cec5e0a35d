// Batch norm. The states of all shards of the samples stand behind the
// operands: forward (count, mean, sum of squared deviations) of each channel,
// backward (sum of dy (x - mean) rstd, sum of dy, count). Sums are taken in
// double and merged in rank order.

#include <cmath>

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"

namespace tessera {
namespace {

// A batch of images as (samples, channels, places).
struct Images {
  int64_t samples = 0;
  int64_t channels = 0;
  int64_t places = 0;

  double elements() const {
    return static_cast<double>(samples) * static_cast<double>(places);
  }
};

Images ImagesOf(const LocalTensor& x) {
  const size_t n = x.shape.size();
  Images images = {x.shape[0], 1, x.shape[n - 2] * x.shape[n - 1]};
  for (size_t d = 1; d + 2 < n; ++d) images.channels *= x.shape[d];
  return images;
}

// Calls f(channel) for all channels, on the threads of the call.
template <typename F>
void ForEachChannel(const KernelCall& call, const Images& images, F f) {
  ForEachRange(call, images.channels, RowGrain(images.samples * images.places),
               [&](int64_t begin, int64_t end) {
                 for (int64_t c = begin; c < end; ++c) f(c);
               });
}

// Calls f(first element of a plane) for all samples' planes of a channel.
template <typename F>
void ForEachPlane(const Images& images, int64_t channel, F f) {
  for (int64_t b = 0; b < images.samples; ++b) {
    f((b * images.channels + channel) * images.places);
  }
}

// x, scale, shift -> state[channels, 3].
template <typename T>
void BatchNormState(const KernelCall& call) {
  const Images images = ImagesOf(call.operands[0]);
  const T* const x = call.operands[0].as<const T>();
  ForEachChannel(call, images, [&](int64_t c) {
    double sum = 0;
    ForEachPlane(images, c, [&](int64_t at) {
      sum += Sum(images.places, [&](int64_t p) { return x[at + p]; });
    });
    const double mean = sum / images.elements();
    double squares = 0;
    ForEachPlane(images, c, [&](int64_t at) {
      squares += Sum(images.places, [&](int64_t p) {
        const double d = static_cast<double>(x[at + p]) - mean;
        return d * d;
      });
    });
    const LocalTensor& state = call.results[0];
    Put(state, 3 * c, images.elements());
    Put(state, 3 * c + 1, mean);
    Put(state, 3 * c + 2, squares);
  });
}

// x, scale, shift, states[shards, channels, 3] -> y, mean, rstd.
template <typename T>
void BatchNorm(const KernelCall& call) {
  const Images images = ImagesOf(call.operands[0]);
  const T* const x = call.operands[0].as<const T>();
  const LocalTensor& states = call.operands[3];
  const int64_t shards = states.elements() / (3 * images.channels);
  const double epsilon = call.attribute("epsilon");
  ForEachChannel(call, images, [&](int64_t c) {
    double count = 0;
    double mean = 0;
    double squares = 0;
    for (int64_t shard = 0; shard < shards; ++shard) {
      const int64_t at = 3 * (shard * images.channels + c);
      const double n = Get(states, at);
      const double delta = Get(states, at + 1) - mean;
      squares += Get(states, at + 2) + delta * delta * count * n / (count + n);
      count += n;
      mean += delta * n / count;
    }
    const double rstd = 1 / std::sqrt(squares / count + epsilon);
    Put(call.results[1], c, mean);
    Put(call.results[2], c, rstd);
    const T m = static_cast<T>(mean);
    const T slope = static_cast<T>(rstd) * call.operands[1].as<const T>()[c];
    const T shift = call.operands[2].as<const T>()[c];
    T* const y = call.results[0].as<T>();
    ForEachPlane(images, c, [&](int64_t at) {
      for (int64_t p = at; p < at + images.places; ++p) {
        y[p] = (x[p] - m) * slope + shift;
      }
    });
  });
}

// dy, x, scale, mean, rstd -> state[channels, 3].
template <typename T>
void BatchNormDxState(const KernelCall& call) {
  const Images images = ImagesOf(call.operands[1]);
  const T* const dy = call.operands[0].as<const T>();
  const T* const x = call.operands[1].as<const T>();
  ForEachChannel(call, images, [&](int64_t c) {
    const T mean = static_cast<T>(Get(call.operands[3], c));
    const T rstd = static_cast<T>(Get(call.operands[4], c));
    double slopes = 0;
    double sum = 0;
    ForEachPlane(images, c, [&](int64_t at) {
      slopes += Sum(images.places, [&](int64_t p) {
        return dy[at + p] * ((x[at + p] - mean) * rstd);
      });
      sum += Sum(images.places, [&](int64_t p) { return dy[at + p]; });
    });
    const LocalTensor& state = call.results[0];
    Put(state, 3 * c, slopes);
    Put(state, 3 * c + 1, sum);
    Put(state, 3 * c + 2, images.elements());
  });
}

// dy, x, scale, mean, rstd, states[shards, channels, 3] -> dx, dscale, dshift.
// With h = (x - mean) rstd: dx = scale rstd (dy - avg(dy) - h avg(dy h)).
template <typename T>
void BatchNormDx(const KernelCall& call) {
  const Images images = ImagesOf(call.operands[1]);
  const T* const dy = call.operands[0].as<const T>();
  const T* const x = call.operands[1].as<const T>();
  const LocalTensor& states = call.operands[5];
  const int64_t shards = states.elements() / (3 * images.channels);
  ForEachChannel(call, images, [&](int64_t c) {
    double slopes = 0;
    double sum = 0;
    double count = 0;
    for (int64_t shard = 0; shard < shards; ++shard) {
      const int64_t at = 3 * (shard * images.channels + c);
      slopes += Get(states, at);
      sum += Get(states, at + 1);
      count += Get(states, at + 2);
    }
    PutOrAdd(call, call.results[1], c, slopes);
    PutOrAdd(call, call.results[2], c, sum);
    const T mean = static_cast<T>(Get(call.operands[3], c));
    const T rstd = static_cast<T>(Get(call.operands[4], c));
    const T factor = call.operands[2].as<const T>()[c] * rstd;
    const T average = static_cast<T>(sum / count);
    const T slope = static_cast<T>(slopes / count);
    T* const dx = call.results[0].as<T>();
    ForEachPlane(images, c, [&](int64_t at) {
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
       ByDType<BatchNormState<float>, BatchNormState<double>>},
      {"batch_norm", ByDType<BatchNorm<float>, BatchNorm<double>>},
      {"batch_norm_dx.state",
       ByDType<BatchNormDxState<float>, BatchNormDxState<double>>},
      {"batch_norm_dx", ByDType<BatchNormDx<float>, BatchNormDx<double>>, true},
  };
}

}  // namespace tessera
