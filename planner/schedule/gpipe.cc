// GPipe (Huang et al. 2019): all forwards, then all backwards. Backwards run in
// the microbatches' order, so that gradients accumulate as in every schedule.

#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

std::vector<Action> Order(int, int, int microbatches) {
  std::vector<Action> order;
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (int m = 0; m < microbatches; ++m) order.push_back({pass, m});
  }
  return order;
}

int InFlight(int, int, int microbatches) {
  return microbatches;
}

double Bubble(int stages, int) {
  return stages - 1;
}

}  // namespace

extern const PipelineSchedule kGpipe;
const PipelineSchedule kGpipe = {"gpipe", "all forwards, then all backwards",
                                 Order, InFlight, Bubble};

}  // namespace tessera
