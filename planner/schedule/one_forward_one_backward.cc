// 1F1B, PipeDream-Flush (Narayanan et al. 2021, section 2.2): stage s of p runs
// p - 1 - s forwards, then alternates one forward with one backward, then
// drains. It keeps the activations of at most p - s microbatches.

#include <algorithm>

#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

std::vector<Action> Order(int stage, int stages, int microbatches) {
  const int warmup = std::min(stages - 1 - stage, microbatches);
  std::vector<Action> order;
  for (int m = 0; m < warmup; ++m) order.push_back({Pass::kForward, m});
  for (int m = warmup; m < microbatches; ++m) {
    order.push_back({Pass::kForward, m});
    order.push_back({Pass::kBackward, m - warmup});
  }
  for (int m = microbatches - warmup; m < microbatches; ++m) {
    order.push_back({Pass::kBackward, m});
  }
  return order;
}

int InFlight(int stage, int stages, int microbatches) {
  return std::min(stages - stage, microbatches);
}

double Bubble(int stages, int) {
  return stages - 1;
}

}  // namespace

extern const PipelineSchedule kOneForwardOneBackward;
const PipelineSchedule kOneForwardOneBackward = {
    "1f1b", "one forward, one backward in turn", Order, InFlight, Bubble};

}  // namespace tessera
