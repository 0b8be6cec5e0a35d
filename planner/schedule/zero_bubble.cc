// ZB-H1 and ZB-H2 (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section
// 2.3): 1F1B with the backward split. Stage s of p runs the weights' gradients
// of a microbatch later, so that the stages before get the gradients of their
// activations sooner and idle time is filled with what was put off.
//
// ZB-H1 puts them off by s microbatches. Each stage keeps the activations of at
// most p microbatches, as the first does in 1F1B. The bubble is
// (p - 1)(t_F + t_I - t_W) where t_W is at most t_F and t_I, for equal times a
// third of 1F1B's; each microbatch that lacks to fill the pipeline adds a t_W.
//
// ZB-H2 also runs twice as many forwards ahead and puts off twice as far: at
// most 2p - 1 microbatches, and with u lacking to fill as many a bubble of
//   max((p - 1)(t_F + t_I - 2 t_W) + u t_W,
//       (p - 1) t_F + floor(u / 2) t_I + (u mod 2)(t_I - t_W)).
// The paper's is (p - 1)(t_F + t_I - 2 t_W), none for equal times: its next
// step begins on a stage before this one has ended on the others, which takes
// back the (p - 1) t_F by which the last stage begins later.

#include <algorithm>

#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

// `ahead` times as many forwards run ahead of the first backward as in 1F1B.
template <int ahead>
std::vector<Action> Order(int stage, const PipelineShape& shape) {
  const int m = shape.microbatches;
  const int warmup = std::min(ahead * (shape.stages - 1 - stage), m);
  const int late = warmup + ahead * stage;
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

template <int ahead>
int InFlight(int, const PipelineShape& shape) {
  return std::min(ahead * (shape.stages - 1) + 1, shape.microbatches);
}

template <int ahead>
int Ahead(int stage, const PipelineShape& shape) {
  return std::min(ahead * (shape.stages - 1 - stage) + 1, shape.microbatches);
}

template <int ahead>
int PutOff(int stage, const PipelineShape& shape) {
  return std::min(ahead * stage + 1, shape.microbatches);
}

double BubbleH1(const PipelineShape& shape, const PassTimes& times) {
  const int unfilled = std::max(0, shape.stages - shape.microbatches);
  return (shape.stages - 1) *
             (times.forward + times.backward_input - times.backward_weight) +
         unfilled * times.backward_weight;
}

double BubbleH2(const PipelineShape& shape, const PassTimes& times) {
  const int later = shape.stages - 1;
  const int unfilled = std::max(0, 2 * later + 1 - shape.microbatches);
  const double filled = later * (times.forward + times.backward_input -
                                 2 * times.backward_weight) +
                        unfilled * times.backward_weight;
  const double skewed =
      later * times.forward + (unfilled / 2) * times.backward_input +
      (unfilled % 2) * (times.backward_input - times.backward_weight);
  return std::max(filled, skewed);
}

}  // namespace

extern const PipelineSchedule kZeroBubbleH1;
const PipelineSchedule kZeroBubbleH1 = {
    .name = "zb-h1",
    .summary = "1F1B with the weights' gradients put off into the bubble",
    .order = Order<1>,
    .in_flight = InFlight<1>,
    .ahead = Ahead<1>,
    .put_off = PutOff<1>,
    .bubble = BubbleH1};

extern const PipelineSchedule kZeroBubbleH2;
const PipelineSchedule kZeroBubbleH2 = {
    .name = "zb-h2",
    .summary = "zb-h1 with twice the microbatches in flight and less bubble",
    .order = Order<2>,
    .in_flight = InFlight<2>,
    .ahead = Ahead<2>,
    .put_off = PutOff<2>,
    .bubble = BubbleH2};

}  // namespace tessera
