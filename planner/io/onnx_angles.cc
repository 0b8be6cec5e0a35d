#include "planner/io/onnx_angles.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>
#include <utility>

namespace tessera::onnx {

namespace {

// Of cosines and sines in fp32 of angles up to some ten thousand.
constexpr double kSameAngle = 1e-3;
// Of the angles of place 1, to each other.
constexpr double kSameRate = 2e-5;
// How far a number of a config may be from a whole one that it then is.
constexpr double kSameNumber = 1e-4;
// Parts of a ramp are within its ends by so much.
constexpr double kWithin = 1e-3;

double Snapped(double value) {
  const double whole = std::round(value);
  return std::abs(value - whole) < kSameNumber * whole ? whole : value;
}

bool Same(double a, double b) {
  return std::abs(a - b) <= kSameRate * std::abs(b);
}

// The angles of place 1, pair by pair, and the length of the turned vectors.
struct Rates {
  std::vector<double> of_pair;
  double magnitude = 1;
};

std::vector<double> Plain(double theta, size_t pairs) {
  std::vector<double> rates;
  for (size_t j = 0; j < pairs; ++j) {
    rates.push_back(
        std::pow(theta, -static_cast<double>(j) / static_cast<double>(pairs)));
  }
  return rates;
}

// The thetas that the rates of neighbouring pairs say: of the most pairs from
// the first on, which may be plain, and of the most up to the last, which may
// all be divided by one number.
std::vector<double> ThetasOf(const std::vector<double>& rates) {
  const size_t pairs = rates.size();
  const auto theta_of = [&](size_t first,
                            size_t last) -> std::optional<double> {
    const double theta = Snapped(std::pow(
        rates[first] / rates[last],
        static_cast<double>(pairs) / static_cast<double>(last - first)));
    if (!(theta > 1)) return std::nullopt;
    const std::vector<double> plain = Plain(theta, pairs);
    for (size_t j = first; j <= last; ++j) {
      if (!Same(rates[j] * plain[first], plain[j] * rates[first])) {
        return std::nullopt;
      }
    }
    return theta;
  };
  std::vector<double> thetas;
  for (size_t last = pairs; last-- > 1 && thetas.empty();) {
    if (const auto theta = theta_of(0, last)) thetas.push_back(*theta);
  }
  std::optional<double> of_last;
  for (size_t first = 1; first + 1 < pairs && !of_last; ++first) {
    of_last = theta_of(first, pairs - 1);
  }
  if (of_last) thetas.push_back(*of_last);
  if (thetas.empty()) thetas.push_back(10000);  // of a single pair
  return thetas;
}

// Where rates go from plain ones, which count 1, to those that are divided by
// `factor`, which count 0.
struct Ramp {
  double theta = 0;
  double factor = 1;
  std::vector<double> plain;
  std::vector<double> kept;
  std::vector<size_t> within;  // pairs on the ramp
};

Ramp RampOf(const Rates& rates, double theta) {
  Ramp ramp;
  ramp.theta = theta;
  ramp.plain = Plain(theta, rates.of_pair.size());
  ramp.factor = Snapped(ramp.plain.back() / rates.of_pair.back());
  for (size_t j = 0; j < ramp.plain.size(); ++j) {
    const double kept = (rates.of_pair[j] / ramp.plain[j] - 1 / ramp.factor) /
                        (1 - 1 / ramp.factor);
    ramp.kept.push_back(kept);
    if (kept > kWithin && kept < 1 - kWithin) ramp.within.push_back(j);
  }
  return ramp;
}

// Llama 3.1's is a ramp over how often a pair turns. Its two ends and the
// number of positions are known but for a factor: the slower end is at 1.
std::optional<Angles> Llama3(const Ramp& ramp) {
  // A line through two points of the ramp, or one that is as good.
  const size_t kept = static_cast<size_t>(std::ranges::count_if(
      ramp.kept, [](double k) { return k >= 1 - kWithin; }));
  if (kept == 0 || kept == ramp.kept.size()) return std::nullopt;
  size_t first = kept - 1;
  size_t last = kept + ramp.within.size();
  if (ramp.within.size() > 1) {
    first = ramp.within.front();
    last = ramp.within.back();
  } else if (!ramp.within.empty() || last >= ramp.kept.size()) {
    return std::nullopt;
  }
  const double slope = (ramp.kept[first] - ramp.kept[last]) /
                       (ramp.plain[first] - ramp.plain[last]);
  const double low = slope * ramp.plain[first] - ramp.kept[first];
  if (!(slope > 0 && low > 0)) return std::nullopt;
  const double high = Snapped(1 + 1 / low);
  return Angles{"rotary_llama3",
                {{"factor", ramp.factor},
                 {"fraction", 1},
                 {"high_frequency", high},
                 {"low_frequency", 1},
                 {"original_positions",
                  Snapped(slope * 2 * std::numbers::pi * (high - 1))},
                 {"theta", ramp.theta}}};
}

// YaRN's is a ramp over the pairs, from one number of a pair to another. How
// often these turn within which positions does not matter beyond that.
std::optional<Angles> Yarn(const Ramp& ramp, double magnitude) {
  if (ramp.within.size() < 2) return std::nullopt;
  const size_t a = ramp.within.front();
  const size_t b = ramp.within.back();
  const double length =
      static_cast<double>(b - a) / (ramp.kept[a] - ramp.kept[b]);
  const double first =
      std::round(static_cast<double>(a) - (1 - ramp.kept[a]) * length);
  const double last = first + std::round(length);
  constexpr double kPositions = 4096;
  const auto turns = [&](double pair) {
    return kPositions / (2 * std::numbers::pi) *
           std::pow(ramp.theta, -pair / static_cast<double>(ramp.kept.size()));
  };
  return Angles{"rotary_yarn",
                {{"beta_fast", turns(first + 0.5)},
                 {"beta_slow", turns(last - 0.5)},
                 {"factor", ramp.factor},
                 {"fraction", 1},
                 {"magnitude", magnitude},
                 {"original_positions", kPositions},
                 {"theta", ramp.theta}}};
}

double AttributeOf(const Angles& angles, std::string_view name) {
  const auto found =
      std::ranges::find(angles.attributes, name, &Attribute::name);
  return found == angles.attributes.end() ? 1 : found->value;
}

// As runtime/kernels/rotary_angles.cc.
Rates RatesOf(const Angles& angles, size_t pairs) {
  const auto of = [&](std::string_view name) {
    return AttributeOf(angles, name);
  };
  Rates rates = {Plain(of("theta"), pairs), of("magnitude")};
  const double half = static_cast<double>(pairs);
  const double per_turn = of("original_positions") / (2 * std::numbers::pi);
  const auto pair_of = [&](double turns) {
    return half * std::log(per_turn / turns) / std::log(of("theta"));
  };
  for (size_t j = 0; j < pairs; ++j) {
    double kept = 0;
    if (angles.op == "rotary_llama3") {
      kept = (per_turn * rates.of_pair[j] - of("low_frequency")) /
             (of("high_frequency") - of("low_frequency"));
    } else if (angles.op == "rotary_yarn") {
      const double first = std::max(std::floor(pair_of(of("beta_fast"))), 0.0);
      double last = std::min(std::ceil(pair_of(of("beta_slow"))), 2 * half - 1);
      if (first == last) last += 0.001;
      kept = 1 - (static_cast<double>(j) - first) / (last - first);
    }
    kept = std::clamp(kept, 0.0, 1.0);
    rates.of_pair[j] *= kept + (1 - kept) / of("factor");
  }
  return rates;
}

}  // namespace

std::optional<Angles> AnglesOf(const OnnxConstant& cos,
                               const OnnxConstant& sin) {
  const size_t rank = cos.shape.size();
  if (rank < 2 || sin.shape != cos.shape) return std::nullopt;
  const int64_t places = cos.shape[rank - 2];
  const int64_t features = cos.shape[rank - 1];
  const int64_t half = features / 2;
  if (places < 2 || half < 1 || features % 2 != 0) return std::nullopt;
  // A dimension in front of them may be of none.
  if (cos.values.empty()) return std::nullopt;
  Rates rates;
  rates.magnitude = cos.values[0];
  if (std::abs(rates.magnitude - 1) < kSameRate) rates.magnitude = 1;
  for (int64_t pair = 0; pair < half; ++pair) {
    // Of one place, which is less than half a turn.
    const auto at = static_cast<size_t>(features + pair);
    rates.of_pair.push_back(std::atan2(sin.values[at], cos.values[at]));
    if (!(rates.of_pair.back() > 0)) return std::nullopt;
  }
  const double divided = Snapped(1 / rates.of_pair[0]);
  std::vector<Angles> candidates;
  for (const double theta : ThetasOf(rates.of_pair)) {
    if (!Same(divided, 1)) {
      if (divided > 1) {
        candidates.push_back(
            {"rotary_linear",
             {{"factor", divided}, {"fraction", 1}, {"theta", theta}}});
      }
      continue;
    }
    candidates.push_back({"rotary", {{"fraction", 1}, {"theta", theta}}});
    const Ramp ramp = RampOf(rates, theta);
    if (!(ramp.factor > 1)) continue;
    if (auto found = Llama3(ramp)) candidates.push_back(*std::move(found));
    if (auto found = Yarn(ramp, rates.magnitude)) {
      candidates.push_back(*std::move(found));
    }
  }
  for (const Angles& candidate : candidates) {
    const Rates made = RatesOf(candidate, rates.of_pair.size());
    if (!std::ranges::equal(made.of_pair, rates.of_pair, Same)) continue;
    bool same = true;
    for (size_t i = 0; same && i < cos.values.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      const double angle =
          static_cast<double>(at / features % places) *
          made.of_pair[static_cast<size_t>(at % features % half)];
      same = std::abs(cos.values[i] - made.magnitude * std::cos(angle)) <=
                 kSameAngle &&
             std::abs(sin.values[i] - made.magnitude * std::sin(angle)) <=
                 kSameAngle;
    }
    if (same) return candidate;
  }
  return std::nullopt;
}

}  // namespace tessera::onnx
