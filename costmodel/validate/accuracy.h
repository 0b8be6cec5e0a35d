#pragma once
// How good predictions are, against what was measured.

#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

struct PredictedRun {
  std::string group;  // alternatives of one model on one cluster; may be empty
  double predicted = 0;
  double measured = 0;  // positive

  // Signed: (predicted - measured) / measured.
  double Error() const { return (predicted - measured) / measured; }
};

// Fractions. Nothing where there is nothing to tell it from.
struct Accuracy {
  int runs = 0;
  std::optional<double> mape;        // mean of |error|
  std::optional<double> median_ape;  // median of |error|
  std::optional<double> bias;        // mean of the signed error
  // Over groups of at least three runs with different times.
  std::optional<double> kendall_tau;    // mean over the groups
  std::optional<double> median_regret;  // median over the groups
};
Accuracy AccuracyOf(std::span<const PredictedRun> runs);

// Kendall's tau-b of two rankings of the same things (Kendall 1945): agreeing
// less disagreeing pairs over the root of the pairs untied in one times those
// untied in the other. Nothing where one is tied throughout.
std::optional<double> KendallTau(std::span<const PredictedRun> runs);
// How much slower than the best the run is that is predicted best.
// REQUIRES: not empty.
double RegretOf(std::span<const PredictedRun> runs);

}  // namespace tessera
