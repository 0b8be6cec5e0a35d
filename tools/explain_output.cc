#include "tools/explain_output.h"

#include <cmath>

#include "planner/base/format.h"

namespace tessera {

std::string ChangeText(double value, double base) {
  const double change = value / base - 1;
  if (change >= 9) return FormatNumber(value / base) + " x";
  if (std::abs(change) < 0.0005) return "equal";
  return (change > 0 ? "+" : "-") + FormatPercent(std::abs(change));
}

std::string NothingNearText(int stages) {
  return std::string("decisions: no uniform plan is near, since none ") +
         (stages > 1 ? "that is a pipeline" : "without a pipeline") +
         " is valid for this cluster and batch";
}

Json ChangesJson(const std::vector<PlanDifference>& changes) {
  return Json::ArrayOf(changes, [](const PlanDifference& change) {
    return Json::Object(
        {{"what", change.what}, {"from", change.from}, {"to", change.to}});
  });
}

}  // namespace tessera
