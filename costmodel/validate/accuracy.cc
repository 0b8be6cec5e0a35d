#include "costmodel/validate/accuracy.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace tessera {
namespace {

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle]
                                : (values[middle - 1] + values[middle]) / 2;
}

std::optional<double> If(double (*of)(const std::vector<double>&),
                         const std::vector<double>& values) {
  if (values.empty()) return std::nullopt;
  return of(values);
}

constexpr size_t kLeastGroup = 3;

}  // namespace

std::optional<double> KendallTau(std::span<const PredictedRun> runs) {
  int64_t agreement = 0;
  int64_t untied_predicted = 0;
  int64_t untied_measured = 0;
  const auto sign = [](double a, double b) { return (a > b) - (a < b); };
  for (size_t i = 0; i < runs.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const int predicted = sign(runs[i].predicted, runs[j].predicted);
      const int measured = sign(runs[i].measured, runs[j].measured);
      agreement += predicted * measured;
      untied_predicted += predicted != 0;
      untied_measured += measured != 0;
    }
  }
  if (untied_predicted == 0 || untied_measured == 0) return std::nullopt;
  return static_cast<double>(agreement) /
         std::sqrt(static_cast<double>(untied_predicted) *
                   static_cast<double>(untied_measured));
}

double RegretOf(std::span<const PredictedRun> runs) {
  const auto chosen =
      std::ranges::min_element(runs, {}, &PredictedRun::predicted);
  const auto best = std::ranges::min_element(runs, {}, &PredictedRun::measured);
  return chosen->measured / best->measured - 1;
}

Accuracy AccuracyOf(std::span<const PredictedRun> runs) {
  std::vector<double> errors;
  std::vector<double> sizes;
  std::map<std::string, std::vector<PredictedRun>> groups;
  for (const PredictedRun& run : runs) {
    errors.push_back(run.Error());
    sizes.push_back(std::abs(run.Error()));
    if (!run.group.empty()) groups[run.group].push_back(run);
  }
  std::vector<double> taus;
  std::vector<double> regrets;
  for (const auto& [name, group] : groups) {
    if (group.size() < kLeastGroup) continue;
    const std::optional<double> tau = KendallTau(group);
    if (!tau) continue;
    taus.push_back(*tau);
    regrets.push_back(RegretOf(group));
  }
  const auto median = [](const std::vector<double>& v) { return Median(v); };
  Accuracy accuracy;
  accuracy.runs = static_cast<int>(runs.size());
  accuracy.mape = If(Mean, sizes);
  accuracy.median_ape = If(median, sizes);
  accuracy.bias = If(Mean, errors);
  accuracy.kendall_tau = If(Mean, taus);
  accuracy.median_regret = If(median, regrets);
  return accuracy;
}

}  // namespace tessera
