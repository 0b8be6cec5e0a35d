#include "tools/answer_time.h"

#include <algorithm>

#include "planner/plan/validate.h"

namespace tessera {
namespace {

// Of an operator of one microbatch, where nothing is known of this machine.
constexpr double kUsualPace = 2e-6;
// How many times fewer microbatches are simulated to find the pace.
constexpr int kShorter = 4;
// How many times as long two take beside each other as one alone, about: a core
// for each there may be, but memory is shared, and perhaps the cores, too.
constexpr double kBeside = 1.5;
// Of the limit: what printing takes, and how far behind it an answer may end,
// as what is kept is no exact time.
constexpr double kPrinting = 0.02;
constexpr double kLate = 0.03;

// The plan with some of its microbatches, if it is a plan with fewer.
std::optional<Plan> Shortened(const SearchSpace& space, const Plan& plan) {
  Plan shorter = plan;
  for (int m = std::max(1, plan.microbatches / kShorter);
       m <= plan.microbatches / 2; ++m) {
    shorter.microbatches = m;
    if (space.index.graph->global_batch % m == 0 &&
        Validate(space.index, *space.cluster, shorter).empty()) {
      return shorter;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<double> AnswerTime::pace() {
  const std::lock_guard lock(mutex_);
  return pace_;
}

Evaluation AnswerTime::Timed(const Plan& plan, bool share_links) {
  const double start = clock_.Seconds();
  Evaluation step = evaluator_.Explain(plan, share_links);
  const double seconds = clock_.Seconds() - start;
  const std::lock_guard lock(mutex_);
  pace_ = seconds / static_cast<double>(evaluator_.OperatorsOf(plan));
  return step;
}

Evaluation AnswerTime::Explain(const Plan& plan, bool share_links) {
  return evaluator_.IsQuickToExplain(plan)
             ? evaluator_.Explain(plan, share_links)
             : Timed(plan, share_links);
}

double AnswerTime::SecondsToExplain(const Plan& plan) {
  const auto seconds = [&](const Plan& of) {
    return pace().value_or(kUsualPace) *
           static_cast<double>(evaluator_.OperatorsOf(of));
  };
  if (!pace() && !evaluator_.IsQuickToExplain(plan) &&
      seconds(plan) < kMostKept * limit_) {
    const auto shorter = Shortened(space_, plan);
    if (shorter) Timed(*shorter, /*share_links=*/true);
  }
  return seconds(plan);
}

double AnswerTime::SecondsToKeep(const Plan& plan) {
  if (limit_ == 0 || evaluator_.IsTooLargeToExplain(plan)) return 0;
  const double seconds = SecondsToExplain(plan);
  if (seconds > kMostKept * limit_) return 0;
  return std::min(kBeside * seconds + kPrinting * limit_, kMostKept * limit_);
}

bool AnswerTime::Allows(const Plan& plan, bool beside_another) {
  if (limit_ == 0 || evaluator_.IsQuickToExplain(plan)) return true;
  const double seconds =
      (beside_another ? kBeside : 1) * SecondsToExplain(plan);
  return clock_.Seconds() + seconds < (1 + kLate) * limit_;
}

}  // namespace tessera
