#include "costmodel/whatif/goodput.h"

#include <algorithm>
#include <cmath>

namespace tessera {

double YoungInterval(double checkpoint, double mtbf) {
  return std::sqrt(2 * checkpoint * mtbf);
}

double DalyInterval(double checkpoint, double mtbf) {
  if (checkpoint >= 2 * mtbf) return mtbf;
  const double ratio = checkpoint / (2 * mtbf);
  return YoungInterval(checkpoint, mtbf) *
             (1 + std::sqrt(ratio) / 3 + ratio / 9) -
         checkpoint;
}

Goodput GoodputOf(const GoodputInput& input) {
  Goodput result;
  result.stall = std::max(0.0, input.load - input.step);
  const double work = input.step + result.stall;
  result.seconds_per_step = work;
  result.fraction = input.step / work;
  if (input.every > 0) {
    result.interval = input.every * work;
  } else if (input.mtbf > 0) {
    // At least one step lies between two checkpoints.
    result.interval =
        std::max(work, DalyInterval(input.checkpoint, input.mtbf));
  }
  if (result.interval == 0) return result;  // Nothing is saved.
  const double t = result.interval;
  const double d = input.checkpoint;
  result.saving = d / (t + d);
  double share = t / (t + d);
  if (input.mtbf > 0) {
    const double m = input.mtbf;
    share = t / (m * std::exp(input.restart / m) * std::expm1((t + d) / m));
  }
  result.fraction *= share;
  result.seconds_per_step = input.step / result.fraction;
  return result;
}

RunCost CostOfRun(double tokens, double tokens_per_step,
                  double seconds_per_step, std::optional<double> usd_per_hour,
                  std::optional<double> watts) {
  RunCost run;
  run.steps = std::ceil(tokens / tokens_per_step);
  const double hours = run.steps * seconds_per_step / 3600;
  run.days = hours / 24;
  if (!std::isfinite(hours)) return run;
  if (usd_per_hour) run.usd = *usd_per_hour * hours;
  if (watts) run.kwh = *watts * hours / 1000;
  return run;
}

}  // namespace tessera
