// Rotary embeddings told by the cosines and sines in an ONNX file, which are
// made here as transformers' modeling_rope_utils makes them, in fp32.

#include "planner/io/onnx_angles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tessera::onnx {
namespace {

constexpr int64_t kPlaces = 8;
constexpr double kTurn = 2 * std::numbers::pi;

std::vector<double> Plain(double theta, int64_t pairs) {
  std::vector<double> rates;
  for (int64_t j = 0; j < pairs; ++j) {
    rates.push_back(
        std::pow(theta, -static_cast<double>(j) / static_cast<double>(pairs)));
  }
  return rates;
}

std::optional<Angles> Told(const std::vector<double>& rates,
                           double magnitude = 1) {
  const auto pairs = std::ssize(rates);
  OnnxConstant cos = {{1, kPlaces, 2 * pairs}, {}, true};
  OnnxConstant sin = cos;
  for (int64_t i = 0; i < kPlaces * 2 * pairs; ++i) {
    const auto rate =
        static_cast<float>(rates[static_cast<size_t>(i % (2 * pairs) % pairs)]);
    const float angle = static_cast<float>(i / (2 * pairs)) * rate;
    const auto of = static_cast<float>(magnitude);
    cos.values.push_back(of * std::cos(angle));
    sin.values.push_back(of * std::sin(angle));
  }
  return AnglesOf(cos, sin);
}

double Of(const Angles& angles, const std::string& name) {
  const auto found =
      std::ranges::find(angles.attributes, name, &Attribute::name);
  EXPECT_NE(found, angles.attributes.end()) << name;
  return found == angles.attributes.end() ? 0 : found->value;
}

TEST(OnnxAngles, PlainAndDivided) {
  for (const double theta : {10000.0, 500000.0, 1000000.0}) {
    std::vector<double> rates = Plain(theta, 64);
    auto found = Told(rates);
    ASSERT_TRUE(found.has_value()) << theta;
    EXPECT_EQ(found->op, "rotary");
    EXPECT_NEAR(Of(*found, "theta"), theta, 1e-4 * theta);
    for (double& rate : rates) rate /= 4;
    found = Told(rates);
    ASSERT_TRUE(found.has_value()) << theta;
    EXPECT_EQ(found->op, "rotary_linear");
    EXPECT_EQ(Of(*found, "factor"), 4);
  }
}

// Llama 3.1 8B, Llama 3.2 1B, and a head of 8 pairs, of which one is plain.
TEST(OnnxAngles, Llama3) {
  struct Config {
    double theta, factor, positions;
    int64_t pairs;
  };
  for (const auto& [theta, factor, positions, pairs] :
       {Config{500000, 8, 8192, 64}, Config{500000, 32, 8192, 32},
        Config{10000, 8, 64, 8}}) {
    std::vector<double> rates = Plain(theta, pairs);
    for (double& rate : rates) {
      const double wavelength = kTurn / rate;
      if (wavelength > positions / 1) {
        rate /= factor;
      } else if (wavelength > positions / 4) {
        const double smooth = (positions / wavelength - 1) / (4 - 1);
        rate = (1 - smooth) * rate / factor + smooth * rate;
      }
    }
    const auto found = Told(rates);
    ASSERT_TRUE(found.has_value()) << pairs;
    EXPECT_EQ(found->op, "rotary_llama3");
    EXPECT_NEAR(Of(*found, "theta"), theta, 1e-4 * theta);
    EXPECT_EQ(Of(*found, "factor"), factor);
    EXPECT_EQ(Of(*found, "low_frequency"), 1);
    EXPECT_NEAR(Of(*found, "high_frequency"), 4, 1e-3);
    EXPECT_NEAR(Of(*found, "original_positions"), positions, 1e-3 * positions);
  }
}

// DeepSeek-V2's positions and Qwen2.5's: the ramp is from one number of a pair
// to another, which is what the attributes found must give, whatever they are.
TEST(OnnxAngles, Yarn) {
  struct Config {
    double theta, factor, positions;
    int64_t pairs;
  };
  for (const auto& [theta, factor, positions, pairs] :
       {Config{10000, 40, 4096, 32}, Config{1000000, 4, 32768, 64},
        Config{10000, 8, 64, 8}}) {
    const double half = static_cast<double>(pairs);
    const auto pair_of = [&](double turns, double within, double base) {
      return half * std::log(within / (turns * kTurn)) / std::log(base);
    };
    const double first =
        std::max(std::floor(pair_of(32, positions, theta)), 0.0);
    const double last =
        std::min(std::ceil(pair_of(1, positions, theta)), 2 * half - 1);
    std::vector<double> rates = Plain(theta, pairs);
    for (int64_t j = 0; j < pairs; ++j) {
      const double slowed = std::clamp(
          (static_cast<double>(j) - first) / (last - first), 0.0, 1.0);
      rates[static_cast<size_t>(j)] *= 1 - slowed + slowed / factor;
    }
    const double magnitude = 0.1 * std::log(factor) + 1;
    const auto found = Told(rates, magnitude);
    ASSERT_TRUE(found.has_value()) << pairs;
    EXPECT_EQ(found->op, "rotary_yarn");
    EXPECT_NEAR(Of(*found, "magnitude"), magnitude, 1e-6);
    EXPECT_EQ(Of(*found, "factor"), factor);
    const double within = Of(*found, "original_positions");
    const double base = Of(*found, "theta");
    EXPECT_EQ(
        std::max(std::floor(pair_of(Of(*found, "beta_fast"), within, base)),
                 0.0),
        first);
    EXPECT_EQ(std::ceil(pair_of(Of(*found, "beta_slow"), within, base)), last);
  }
}

TEST(OnnxAngles, OthersAreNone) {
  std::vector<double> rates = Plain(10000, 16);
  rates[7] *= 1.01;
  EXPECT_FALSE(Told(rates).has_value());
  rates = Plain(10000, 16);
  std::swap(rates[3], rates[4]);
  EXPECT_FALSE(Told(rates).has_value());
  const OnnxConstant none = {{0, 4, 8}, {}, true};
  EXPECT_FALSE(AnglesOf(none, none).has_value());
}

}  // namespace
}  // namespace tessera::onnx
