// 1F1B, PipeDream-Flush (Narayanan et al. 2021, section 2.2.1): stage s of p
// runs p - 1 - s forwards, then alternates one forward with one backward, then
// drains. It keeps the activations of at most p - s microbatches. The bubble is
// GPipe's, (p - 1)(t_F + t_B).

#include <algorithm>

#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

std::vector<Action> Order(int stage, const PipelineShape& shape) {
  const int m = shape.microbatches;
  const int warmup = std::min(shape.stages - 1 - stage, m);
  std::vector<Action> order;
  for (int i = 0; i < m + warmup; ++i) {
    if (i < m) order.push_back({ActionKind::kForward, 0, i});
    if (i >= warmup) order.push_back({ActionKind::kBackward, 0, i - warmup});
  }
  return order;
}

int InFlight(int stage, const PipelineShape& shape) {
  return std::min(shape.stages - stage, shape.microbatches);
}

double Bubble(const PipelineShape& shape, const PassTimes& times) {
  return (shape.stages - 1) *
         (times.forward + times.backward_input + times.backward_weight);
}

}  // namespace

extern const PipelineSchedule kOneForwardOneBackward;
const PipelineSchedule kOneForwardOneBackward = {
    .name = "1f1b",
    .summary = "one forward, one backward in turn",
    .order = Order,
    .in_flight = InFlight,
    .ahead = InFlight,
    .bubble = Bubble};

}  // namespace tessera
