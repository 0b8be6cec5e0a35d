// ZB-H1 (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.3): 1F1B
// with the backward split. Stage s of p runs the weights' gradients of a
// microbatch s microbatches later, so that the stages before get the gradients
// of their activations sooner and idle time is filled with what was put off.
// Each stage keeps the activations of at most p microbatches, as the first does
// in 1F1B. The bubble is (p - 1)(t_F + t_I - t_W) where t_W is at most t_F and
// t_I, for equal times a third of 1F1B's; each microbatch that lacks to fill
// the pipeline adds a t_W.

#include <algorithm>

#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

std::vector<Action> Order(int stage, const PipelineShape& shape) {
  const int m = shape.microbatches;
  const int warmup = std::min(shape.stages - 1 - stage, m);
  const int late = warmup + stage;
  std::vector<Action> order;
  for (int i = 0; i < m + late; ++i) {
    if (i < m) order.push_back({ActionKind::kForward, 0, i});
    if (i >= warmup && i - warmup < m) {
      order.push_back({ActionKind::kBackwardInput, 0, i - warmup});
    }
    if (i >= late) {
      order.push_back({ActionKind::kBackwardWeight, 0, i - late});
    }
  }
  return order;
}

int InFlight(int, const PipelineShape& shape) {
  return std::min(shape.stages, shape.microbatches);
}

int Ahead(int stage, const PipelineShape& shape) {
  return std::min(shape.stages - stage, shape.microbatches);
}

int PutOff(int stage, const PipelineShape& shape) {
  return std::min(stage + 1, shape.microbatches);
}

double Bubble(const PipelineShape& shape, const PassTimes& times) {
  const int unfilled = std::max(0, shape.stages - shape.microbatches);
  return (shape.stages - 1) *
             (times.forward + times.backward_input - times.backward_weight) +
         unfilled * times.backward_weight;
}

}  // namespace

extern const PipelineSchedule kZeroBubbleH1;
const PipelineSchedule kZeroBubbleH1 = {
    .name = "zb-h1",
    .summary = "1F1B with the weights' gradients put off into the bubble",
    .order = Order,
    .in_flight = InFlight,
    .ahead = Ahead,
    .put_off = PutOff,
    .bubble = Bubble};

}  // namespace tessera
