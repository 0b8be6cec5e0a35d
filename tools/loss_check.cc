#include "tools/loss_check.h"

#include <cmath>
#include <cstdio>
#include <utility>

#include "planner/base/check.h"

namespace tessera {
namespace {

std::string Rounded(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2g", number);
  return text;
}

}  // namespace

double LossTolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-9;
    case DType::kFloat32:
      return 1e-5;
    default:
      return 0.05;
  }
}

LossCheck CheckLosses(std::span<const double> losses,
                      std::vector<double> expected, DType dtype) {
  TESSERA_CHECK(!expected.empty() && expected.size() <= losses.size())
      << expected.size() << " of " << losses.size() << " losses";
  LossCheck check{std::move(expected), 0, LossTolerance(dtype)};
  for (size_t i = 0; i < check.losses.size(); ++i) {
    const double difference = std::abs(losses[i] - check.losses[i]);
    // Once not a number, always.
    if (std::isnan(difference) || difference > check.max_difference) {
      check.max_difference = difference;
    }
  }
  return check;
}

std::string CheckText(const LossCheck& check) {
  const size_t steps = check.losses.size();
  return "max |difference| to one rank of the CPU over the first " +
         (steps == 1 ? "step" : std::to_string(steps) + " steps") + ": " +
         Rounded(check.max_difference) +
         (check.agrees() ? " (at most " : " (MORE THAN ") +
         Rounded(check.tolerance) + ")";
}

Json CheckJson(const LossCheck& check) {
  return Json::Object(
      {{"steps", std::ssize(check.losses)},
       {"losses",
        Json::ArrayOf(check.losses, [](double loss) { return Json(loss); })},
       {"max_difference", check.max_difference},
       {"tolerance", check.tolerance},
       {"agrees", check.agrees()}});
}

}  // namespace tessera
