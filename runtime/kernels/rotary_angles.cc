#include "runtime/kernels/rotary_angles.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tessera {
namespace {

bool Has(const KernelCall& call, std::string_view name) {
  return std::ranges::any_of(call.attributes, [&](const Attribute& attribute) {
    return attribute.name == name;
  });
}

// YaRN (Peng et al. 2023, section 3.2, as in transformers' modeling_rope_utils
// and DeepSeek's models): pairs that turn more than beta_fast times within the
// original positions stay as they are, those that turn less than beta_slow
// times are slowed by `factor`, and between them it is a ramp over the pairs.
void Yarn(const KernelCall& call, double turned, RotaryAngles& angles) {
  const double theta = call.attribute("theta");
  const double factor = call.attribute("factor");
  const auto pair_of = [&](double turns) {
    return turned *
           std::log(call.attribute("original_positions") /
                    (turns * 2 * std::numbers::pi)) /
           (2 * std::log(theta));
  };
  const double first =
      std::max(std::floor(pair_of(call.attribute("beta_fast"))), 0.0);
  double last =
      std::min(std::ceil(pair_of(call.attribute("beta_slow"))), turned - 1);
  if (first == last) last += 0.001;
  for (size_t j = 0; j < angles.of_pair.size(); ++j) {
    const double slowed =
        std::clamp((static_cast<double>(j) - first) / (last - first), 0.0, 1.0);
    angles.of_pair[j] *= (1 - slowed) + slowed / factor;
  }
  angles.magnitude = call.attribute("magnitude");
}

// Llama 3.1 (transformers' modeling_rope_utils, "llama3"): pairs that turn more
// than high_frequency times within the original positions stay as they are,
// those that turn less than low_frequency times are slowed by `factor`, and
// between them it is a ramp over how often they turn.
void Llama3(const KernelCall& call, RotaryAngles& angles) {
  const double low = call.attribute("low_frequency");
  const double high = call.attribute("high_frequency");
  for (double& angle : angles.of_pair) {
    const double turns =
        call.attribute("original_positions") * angle / (2 * std::numbers::pi);
    const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    angle *= kept + (1 - kept) / call.attribute("factor");
  }
}

// LongRoPE (Ding et al. 2024, equation 2): each pair is slowed by a number of
// its own.
void LongRope(const KernelCall& call, RotaryAngles& angles) {
  size_t pair = 0;
  for (const Attribute& attribute : call.attributes) {
    if (attribute.name != "divisor") continue;
    TESSERA_CHECK(pair < angles.of_pair.size()) << "more divisors than pairs";
    angles.of_pair[pair++] /= attribute.value;
  }
  angles.magnitude = call.attribute("magnitude");
}

}  // namespace

RotaryAngles RotaryAnglesOf(const KernelCall& call, int64_t width) {
  const auto turned =
      std::llround(call.attribute("fraction") * static_cast<double>(width));
  TESSERA_CHECK(turned % 2 == 0 && turned <= width)
      << turned << " of " << width << " features";
  RotaryAngles angles;
  const auto features = static_cast<double>(turned);
  for (int64_t j = 0; j < turned / 2; ++j) {
    angles.of_pair.push_back(std::pow(
        call.attribute("theta"), -2.0 * static_cast<double>(j) / features));
  }
  if (Has(call, "beta_fast")) {
    Yarn(call, features, angles);
  } else if (Has(call, "low_frequency")) {
    Llama3(call, angles);
  } else if (Has(call, "divisor")) {
    LongRope(call, angles);
  } else if (Has(call, "factor")) {
    for (double& angle : angles.of_pair) angle /= call.attribute("factor");
  }
  return angles;
}

}  // namespace tessera
