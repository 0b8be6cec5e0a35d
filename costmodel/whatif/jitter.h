#pragma once
// Jitter: step times when every device is a little slower or faster.

#include <cstdint>

#include "costmodel/whatif/predict.h"

namespace tessera {

struct JitterOptions {
  double sigma = 0;  // of a device's time over its usual one
  int samples = 100;
  uint64_t seed = 0;
};

// Seconds. Quantiles by nearest rank.
struct Jitter {
  double p50 = 0;
  double p95 = 0;
  double mean = 0;
  int samples = 0;  // fewer than were asked for where the watch stopped
};

// In each sample every device takes 1 + sigma * z times as long for its
// kernels, z normal and cut at +-3 (and the factor at 0.1); links are as they
// are. A group waits for the device on which its kernels then take longest.
// Through the evaluator. The same options give the same result. REQUIRES:
// `plan` is valid for the case, samples >= 1; at least one is drawn.
Jitter JitterOf(const Case& of, const Plan& plan, const PredictOptions& predict,
                const JitterOptions& options);

}  // namespace tessera
