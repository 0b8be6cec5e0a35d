// GPipe (Huang et al. 2019): all forwards, then all backwards. Backwards run in
// the microbatches' order, so that gradients accumulate as in every schedule.
// The bubble is (p - 1)(t_F + t_B) (Narayanan et al. 2021, section 2.2.1).

#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

std::vector<Action> Order(int, const PipelineShape& shape) {
  std::vector<Action> order;
  for (ActionKind kind : {ActionKind::kForward, ActionKind::kBackward}) {
    for (int m = 0; m < shape.microbatches; ++m) order.push_back({kind, 0, m});
  }
  return order;
}

int InFlight(int, const PipelineShape& shape) {
  return shape.microbatches;
}

double Bubble(const PipelineShape& shape, const PassTimes& times) {
  return (shape.stages - 1) *
         (times.forward + times.backward_input + times.backward_weight);
}

}  // namespace

extern const PipelineSchedule kGpipe;
const PipelineSchedule kGpipe = {.name = "gpipe",
                                 .summary = "all forwards, then all backwards",
                                 .order = Order,
                                 .in_flight = InFlight,
                                 .ahead = InFlight,
                                 .bubble = Bubble};

}  // namespace tessera
