#pragma once
// What a training of tiny_training.h leaves: losses and weights, to compare
// with those of another plan.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "tests/support/tiny_training.h"

namespace tessera {

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, std::vector<double>> weights;
  bool operator==(const Outcome&) const = default;
};

// Trains on TinyTokens. Errors are test failures, and give an empty outcome.
inline Outcome OutcomeOf(const Graph& graph, const TaskGraph& tasks,
                         TinyRun run) {
  static const TokenData* const data = new TokenData(TinyTokens());
  run.save_path = TempPath("weights.safetensors");
  const auto result = TrainTiny(graph, tasks, *data, run);
  if (!result) {
    ADD_FAILURE() << result.error().ToString();
    return {};
  }
  Outcome outcome;
  outcome.losses = result->losses;
  const auto file = SafetensorsFile::Open(run.save_path).value();
  for (TensorId id : Weights(graph)) {
    const Tensor& tensor = graph.tensor(id);
    outcome.weights[tensor.name] = ReadTensor(file, tensor.name, tensor);
  }
  std::remove(run.save_path.c_str());
  return outcome;
}

// The same of a strategy's plan for local-cpu:`ranks`.
inline Outcome OutcomeOf(const Graph& graph, int ranks,
                         const std::string& strategy, const TinyRun& run) {
  const auto tasks = LowerStrategy(graph, ranks, strategy, run.options);
  if (!tasks) {
    ADD_FAILURE() << strategy << ": " << tasks.error().ToString();
    return {};
  }
  return OutcomeOf(graph, *tasks, run);
}

// How far two lists are apart, and how long the second is (Euclidean norms).
struct Apart {
  double difference = 0;
  double norm = 0;
};
inline Apart ApartOf(const std::vector<double>& actual,
                     const std::vector<double>& expected) {
  double difference = 0;
  double square = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    square += expected[i] * expected[i];
  }
  return {std::sqrt(difference), std::sqrt(square)};
}

// Of losses absolute, of weights relative to their norms; and absolute for
// tensors whose gradient is mathematically zero, such as a key's bias (the
// softmax does not see it): what rounding leaves of it is below 1e-16, and
// AdamW's step below lr * 1e-16 / epsilon = 3e-12.
struct OutcomeTolerance {
  double relative = 1e-9;
  double absolute = 1e-10;
};

// The first difference beyond the tolerance, or "".
inline std::string Difference(const Outcome& a, const Outcome& b,
                              const OutcomeTolerance& tolerance = {}) {
  if (a.losses.size() != b.losses.size()) return "numbers of steps";
  for (size_t i = 0; i < a.losses.size(); ++i) {
    if (!(std::abs(a.losses[i] - b.losses[i]) <= tolerance.relative)) {
      return "loss of step " + std::to_string(i) + ": " +
             std::to_string(a.losses[i]) + " and " +
             std::to_string(b.losses[i]);
    }
  }
  for (const auto& [name, expected] : b.weights) {
    const Apart apart = ApartOf(a.weights.at(name), expected);
    if (!(apart.difference <=
          std::max(tolerance.relative * apart.norm, tolerance.absolute))) {
      char text[64];
      std::snprintf(text, sizeof(text), ": %.3g of %.3g", apart.difference,
                    apart.norm);
      return name + text;
    }
  }
  return "";
}

}  // namespace tessera
