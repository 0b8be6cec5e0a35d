#include "costmodel/collective/sampled_steps.h"

#include <cmath>

namespace tessera {

// Of each of so many equal stretches of steps one, by the golden ratio's
// multiples modulo 1, which fill the stretches evenly (Weyl's
// equidistribution), so that whatever hosts and leaves have, as many steps as
// should be lead to each place in them.
std::vector<int> SampledSteps(int count) {
  constexpr double kGolden = 0.6180339887498949;
  std::vector<int> steps;
  for (int i = 0; i < kSampledSteps; ++i) {
    const double within = i * kGolden - std::floor(i * kGolden);
    steps.push_back(
        1 + static_cast<int>((i + within) * (count - 1) / kSampledSteps));
  }
  return steps;
}

}  // namespace tessera
