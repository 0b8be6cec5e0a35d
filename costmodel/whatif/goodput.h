#pragma once
// Time besides the step, money and energy: pure functions of plain numbers.
//
// Goodput is the share of the time in which a job does steps that count. With
// checkpoints of length d every t seconds of work, a mean time between failures
// M of the whole machine (exponentially distributed, as many times shorter than
// a device's as there are devices) and a restart of R seconds, a job that needs
// T seconds of work takes
//   M * e^(R/M) * (e^((t + d)/M) - 1) * T / t
// (Daly, "A higher order estimate of the optimum checkpoint interval for
// restart dumps", FGCS 22(3), 2006), so its goodput is t over the rest. The
// best interval is Daly's
//   sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + d / 18M) - d  for d < 2M, else M,
// whose first term is Young's (CACM 17(9), 1974). Without failures it is
// t / (t + d).

#include <optional>

namespace tessera {

// `checkpoint` and `mtbf` in seconds; mtbf > 0.
double YoungInterval(double checkpoint, double mtbf);
double DalyInterval(double checkpoint, double mtbf);

struct GoodputInput {
  double step = 0;        // s, of work
  double load = 0;        // s to read the data of a step, beside the one before
  double checkpoint = 0;  // s in which the job stands still to write one
  double restart = 0;     // s until work goes on behind a failure
  double mtbf = 0;        // s, of the whole machine; 0: no failures
  int every = 0;          // steps between checkpoints; 0: the best interval
};
struct Goodput {
  double stall = 0;     // s of each step in which the data is waited for
  double interval = 0;  // s of work between checkpoints; 0: none
  double saving = 0;    // share of the time that goes into checkpoints
  double fraction = 1;  // of steps that count, of all time
  // All in all; infinite where no step ever counts.
  double seconds_per_step = 0;
};
Goodput GoodputOf(const GoodputInput& input);

// Of a run of `tokens`, from what one step takes. Prices in USD, power in W;
// nothing where it is not known, or the run never ends.
struct RunCost {
  double steps = 0;
  double days = 0;  // infinite where no step ever counts
  std::optional<double> usd;
  std::optional<double> kwh;
};
RunCost CostOfRun(double tokens, double tokens_per_step,
                  double seconds_per_step, std::optional<double> usd_per_hour,
                  std::optional<double> watts);

}  // namespace tessera
