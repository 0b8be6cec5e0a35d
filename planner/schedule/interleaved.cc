// Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2): a stage has v chunks
// of the model and takes turns among them, a group of p microbatches at a time:
// all of the group through the first chunk, then through the second, …. Stage s
// runs (v - 1)g + 2(p - 1 - s) forwards ahead of its first backward, where g is
// p, or of a larger last group (below) its microbatches. The bubble
// is (p - 1)(t_F + t_B) / v, for v times the messages.
//
// Where the microbatches are not a multiple of p, the last group takes the rest
// too (a smaller one would deadlock: a stage would wait for what comes behind
// its own backward). Fewer microbatches than stages cannot fill the pipeline:
// all forwards run first, and each of the v - 1 turns lasts p instead of m.

#include <algorithm>
#include <limits>

#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

// The (chunk, microbatch) pairs in the order of the forwards, or with `reverse`
// in that of the backwards.
std::vector<Action> Turns(ActionKind kind, const PipelineShape& shape,
                          bool reverse) {
  std::vector<Action> turns;
  for (int begin = 0; begin < shape.microbatches;) {
    const int rest = shape.microbatches - begin;
    const int end = begin + (rest < 2 * shape.stages ? rest : shape.stages);
    for (int c = 0; c < shape.chunks; ++c) {
      const int chunk = reverse ? shape.chunks - 1 - c : c;
      for (int m = begin; m < end; ++m) turns.push_back({kind, chunk, m});
    }
    begin = end;
  }
  return turns;
}

int Warmup(int stage, const PipelineShape& shape) {
  const int total = shape.chunks * shape.microbatches;
  if (shape.microbatches < shape.stages) return total;
  const int largest = shape.stages + shape.microbatches % shape.stages;
  return std::min(
      total, (shape.chunks - 1) * largest + 2 * (shape.stages - 1 - stage));
}

std::vector<Action> Order(int stage, const PipelineShape& shape) {
  const auto forwards = Turns(ActionKind::kForward, shape, false);
  const auto backwards = Turns(ActionKind::kBackward, shape, true);
  const auto warmup = static_cast<size_t>(Warmup(stage, shape));
  std::vector<Action> order;
  for (size_t i = 0; i < forwards.size() + warmup; ++i) {
    if (i < forwards.size()) order.push_back(forwards[i]);
    if (i >= warmup) order.push_back(backwards[i - warmup]);
  }
  return order;
}

int InFlight(int stage, const PipelineShape& shape) {
  return std::min(shape.chunks * shape.microbatches, Warmup(stage, shape) + 1);
}

double Bubble(const PipelineShape& shape, const PassTimes& times) {
  const int unfilled =
      (shape.chunks - 1) * std::max(0, shape.stages - shape.microbatches);
  return (shape.stages - 1 + unfilled) *
         (times.forward + times.backward_input + times.backward_weight) /
         shape.chunks;
}

}  // namespace

extern const PipelineSchedule kInterleaved;
const PipelineSchedule kInterleaved = {
    .name = "interleaved",
    .summary = "1F1B over several chunks of each stage",
    .order = Order,
    .in_flight = InFlight,
    .ahead = InFlight,
    .bubble = Bubble,
    .least_chunks = 2,
    .most_chunks = std::numeric_limits<int>::max()};

}  // namespace tessera
