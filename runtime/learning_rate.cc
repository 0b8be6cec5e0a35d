#include "runtime/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "planner/base/table.h"

namespace tessera {

std::span<const Decay> Decays() {
  static constexpr Decay kTable[] = {
      {"constant", "the peak throughout", [](double) { return 1.0; }},
      {"cosine", "half a cosine (Loshchilov and Hutter 2017)",
       [](double passed) {
         return 0.5 * (1 + std::cos(std::numbers::pi * passed));
       }},
      {"linear", "a straight line", [](double passed) { return 1 - passed; }},
      {"step",
       "a tenth after half, a hundredth after three quarters (He et "
       "al. 2016)",
       [](double passed) {
         return passed < 0.5 ? 1.0 : passed < 0.75 ? 0.1 : 0.01;
       }},
  };
  return kTable;
}

Result<const Decay*> FindDecay(std::string_view name) {
  return Find("decay", Decays(), name);
}

double RateAt(const LearningRate& rate, int64_t step) {
  if (step < rate.warmup) {
    return rate.peak * static_cast<double>(step + 1) /
           static_cast<double>(rate.warmup);
  }
  if (rate.decay == nullptr) return rate.peak;
  const int64_t length = rate.steps - rate.warmup;
  const double passed =
      length <= 0 ? 1
                  : std::min(1.0, static_cast<double>(step - rate.warmup) /
                                      static_cast<double>(length));
  return rate.least + (rate.peak - rate.least) * rate.decay->factor(passed);
}

}  // namespace tessera
