#include "planner/schedule/list_schedule.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "planner/base/check.h"

namespace tessera {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::infinity();

class Scheduler {
 public:
  explicit Scheduler(const ListScheduleOptions& options)
      : options_(options),
        stages_(static_cast<size_t>(options.shape.stages)),
        chunks_(static_cast<size_t>(options.shape.chunks)),
        positions_(options.times.size()),
        microbatches_(static_cast<size_t>(options.shape.microbatches)),
        progress_(positions_),
        forward_ready_(positions_,
                       std::vector<double>(microbatches_, kUnknown)),
        backward_ready_(forward_ready_),
        orders_(stages_),
        free_(stages_, 0),
        in_flight_(stages_, 0) {
    std::ranges::fill(forward_ready_[0], 0);
  }

  StageOrders Run() {
    const size_t actions =
        positions_ * microbatches_ * (options_.splits ? 3 : 2);
    for (size_t done = 0; done < actions; ++done) {
      // What starts first: all that could arrive before it is known.
      std::optional<Choice> next;
      for (size_t s = 0; s < stages_; ++s) {
        const auto choice = ChoiceOf(s);
        if (choice && (!next || choice->start < next->start)) next = choice;
      }
      TESSERA_CHECK(next.has_value()) << "no stage can go on";
      Do(*next);
    }
    return std::move(orders_);
  }

 private:
  // How many microbatches of a position have been through each part.
  struct Progress {
    size_t forward = 0;
    size_t backward = 0;  // whole, or gradients of activations
    size_t weight = 0;
  };
  struct Choice {
    size_t position = 0;
    ActionKind kind = ActionKind::kForward;
    double start = 0;
  };

  double TimeOf(size_t position, ActionKind kind) const {
    const PassTimes& times = options_.times[position];
    switch (kind) {
      case ActionKind::kForward:
        return times.forward;
      case ActionKind::kBackward:
        return times.backward_input + times.backward_weight;
      case ActionKind::kBackwardInput:
        return times.backward_input;
      case ActionKind::kBackwardWeight:
        break;
    }
    return times.backward_weight;
  }

  // What stage `s` does next, as far as it is known; nothing where it waits for
  // what has not begun.
  std::optional<Choice> ChoiceOf(size_t s) const {
    const ActionKind backward =
        options_.splits ? ActionKind::kBackwardInput : ActionKind::kBackward;
    std::optional<Choice> pass;  // forward or backward
    std::optional<Choice> weight;
    const auto offer = [&](std::optional<Choice>& best, size_t p,
                           ActionKind kind, double ready) {
      const double start = std::max(free_[s], ready);
      if (ready < kUnknown && (!best || start < best->start)) {
        best = Choice{p, kind, start};
      }
    };
    // Of equals the first that is offered: backwards, of later chunks first, as
    // these free memory; of forwards the later chunks, too.
    for (size_t c = chunks_; c-- > 0;) {
      const size_t p = c * stages_ + s;
      const size_t m = progress_[p].backward;
      if (m < progress_[p].forward) {
        offer(pass, p, backward, backward_ready_[p][m]);
      }
    }
    for (size_t c = chunks_; c-- > 0;) {
      const size_t p = c * stages_ + s;
      const size_t m = progress_[p].forward;
      if (m < microbatches_ && HasRoom(s, c)) {
        offer(pass, p, ActionKind::kForward, forward_ready_[p][m]);
      }
    }
    if (!options_.splits) return pass;
    for (size_t c = chunks_; c-- > 0;) {
      const size_t p = c * stages_ + s;
      if (progress_[p].weight < progress_[p].backward) {
        offer(weight, p, ActionKind::kBackwardWeight, 0);
      }
    }
    // Rather than to wait.
    return !pass || (weight && weight->start < pass->start) ? weight : pass;
  }

  // A forward of an earlier chunk leaves a place for each later one: what it
  // begins could not end otherwise.
  bool HasRoom(size_t s, size_t chunk) const {
    const auto later = static_cast<int>(chunks_ - 1 - chunk);
    return in_flight_[s] + later < options_.most_in_flight[s];
  }

  void Do(const Choice& choice) {
    const size_t p = choice.position;
    const size_t s = p % stages_;
    Progress& progress = progress_[p];
    const double end = choice.start + TimeOf(p, choice.kind);
    size_t m = 0;
    switch (choice.kind) {
      case ActionKind::kForward:
        m = progress.forward++;
        ++in_flight_[s];
        (p + 1 < positions_ ? forward_ready_[p + 1] : backward_ready_[p])[m] =
            end;
        break;
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        m = progress.backward++;
        if (p > 0) backward_ready_[p - 1][m] = end;
        if (!options_.splits) --in_flight_[s];
        break;
      case ActionKind::kBackwardWeight:
        m = progress.weight++;
        --in_flight_[s];
        break;
    }
    free_[s] = end;
    orders_[s].push_back(
        {choice.kind, static_cast<int>(p / stages_), static_cast<int>(m)});
  }

  const ListScheduleOptions& options_;
  const size_t stages_;
  const size_t chunks_;
  const size_t positions_;
  const size_t microbatches_;
  std::vector<Progress> progress_;  // by position
  // By position and microbatch.
  std::vector<std::vector<double>> forward_ready_;
  std::vector<std::vector<double>> backward_ready_;
  StageOrders orders_;
  std::vector<double> free_;    // by stage
  std::vector<int> in_flight_;  // by stage
};

}  // namespace

StageOrders ListSchedule(const ListScheduleOptions& options) {
  const PipelineShape& shape = options.shape;
  TESSERA_CHECK(std::ssize(options.times) == shape.stages * shape.chunks &&
                std::ssize(options.most_in_flight) == shape.stages)
      << shape.stages << " stages of " << shape.chunks << " chunks";
  for (int most : options.most_in_flight) {
    TESSERA_CHECK(most >= shape.chunks) << most << " in flight";
  }
  return Scheduler(options).Run();
}

}  // namespace tessera
