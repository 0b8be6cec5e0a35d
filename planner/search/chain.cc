#include "planner/search/chain.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tessera {
namespace {

// Bytes that an infeasible plan lacks; at least one, since the violation may
// be of another kind.
double OverflowOf(const Score& score) {
  return static_cast<double>(std::max<int64_t>(1, score.overflow.value));
}

}  // namespace

Chain::Chain(const SearchSpace& space, const Objective& objective,
             std::span<const Move> moves, Plan start, double temperature,
             Rng rng, Duration unit, bool folded)
    : objective_(objective),
      moves_(moves),
      folded_(folded),
      draft_(space, std::move(start)),
      time_unit_(static_cast<double>(unit.picoseconds)),
      rng_(rng) {
  draft_.Fold(folded);
  PriceStart();
  bests_ = {{draft_.plan(), evaluation_}};
  statistics_.temperature = temperature;
  statistics_.moves.resize(moves.size());
  statistics_.start = evaluation_;
}

void Chain::PriceStart() {
  basis_ = nullptr;
  evaluation_ =
      objective_.EvaluateChange(draft_.plan(), {true, {}, {}}, basis_);
  shared_ = std::nullopt;
  if (shares_links_ && evaluation_.feasible()) {
    shared_ = objective_.QuickSharedStepTime(draft_.plan());
  }
  priced_share_ = objective_.PricedShare(draft_.plan());
  SetUnit();
}

void Chain::SetUnit() {
  const Score score = this->score();
  if (!score.feasible) {
    unit_ = OverflowOf(score);
    return;
  }
  if (time_unit_ == 0) {
    time_unit_ =
        static_cast<double>(std::max<int64_t>(1, score.step_time.picoseconds));
  }
  unit_ = time_unit_;
}

double Chain::Cost(const Score& score) const {
  return (score.feasible ? static_cast<double>(score.step_time.picoseconds)
                         : OverflowOf(score)) /
         unit_;
}

bool Chain::Accepts(const Score& candidate, double log_ratio,
                    std::optional<double>& uniform) {
  const Score current = score();
  if (candidate.feasible != current.feasible) return candidate.feasible;
  const double exponent =
      (Cost(current) - Cost(candidate)) / statistics_.temperature + log_ratio;
  if (exponent >= 0) return true;
  if (!uniform) uniform = rng_.Uniform01();
  return *uniform < std::exp(exponent);
}

bool Chain::Step() {
  ++statistics_.proposals;
  const Move& move = DrawMove(moves_, rng_);
  MoveStatistics& of_move =
      statistics_.moves[static_cast<size_t>(&move - moves_.data())];
  ++of_move.proposals;
  const auto log_ratio = move.Propose(draft_, rng_);
  if (!log_ratio.has_value()) return false;
  // As seldom to and fro, so that where the chain stays does not depend on it.
  const double priced_share = objective_.PricedShare(draft_.plan());
  const double share = std::min(priced_share, priced_share_);
  if (share < 1 && rng_.Uniform01() >= share) {
    draft_.Undo();
    return false;
  }
  ++statistics_.applicable;
  ++of_move.applicable;
  std::shared_ptr<const PlanBasis> basis = basis_;
  Evaluation evaluation =
      objective_.EvaluateChange(draft_.plan(), draft_.change(), basis);
  std::optional<Duration> shared;
  std::optional<double> uniform;
  bool accepted = Accepts(ScoreOf(evaluation), *log_ratio, uniform);
  if (accepted && shares_links_ && evaluation.feasible()) {
    shared = objective_.QuickSharedStepTime(draft_.plan());
    accepted =
        shared && Accepts(ScoreWith(evaluation, shared), *log_ratio, uniform);
  }
  if (!accepted) {
    draft_.Undo();
    return false;
  }
  draft_.Keep();
  const bool becomes_feasible =
      evaluation.feasible() && !evaluation_.feasible();
  evaluation_ = std::move(evaluation);
  shared_ = shared;
  priced_share_ = priced_share;
  basis_ = std::move(basis);
  ++statistics_.accepted;
  ++of_move.accepted;
  if (becomes_feasible) SetUnit();
  SeeBest();
  return true;
}

bool Chain::IsBest() const {
  if (!shares_links_) {
    return Better(score(), ScoreOf(bests_.back().evaluation));
  }
  const FoundPlan& best = this->best();
  const bool is_better = Better(score(), best.score());
  return shared_ ? !best.shared || is_better : !best.shared && is_better;
}

void Chain::SeeBest() {
  if (!IsBest()) return;
  if (bests_.size() == kMostBests) bests_.erase(bests_.begin());
  bests_.push_back({draft_.plan(), evaluation_, shared_});
  if (evaluation_.feasible()) {
    trace_.push_back(
        {0, statistics_.proposals, evaluation_.step_time, shared_});
  }
}

void Chain::ShareLinks() {
  shares_links_ = true;
  if (evaluation_.feasible()) {
    shared_ = objective_.QuickSharedStepTime(draft_.plan());
  }
  PriceBest();
  SeeBest();
}

void Chain::PriceBest() {
  PriceShared(objective_, bests_.back());
}

const FoundPlan& Chain::best() const {
  const FoundPlan* best = &bests_.back();
  for (const FoundPlan& found : bests_) {
    if (!found.shared) continue;
    if (!best->shared || Better(found.score(), best->score())) best = &found;
  }
  return *best;
}

ChainStatistics Chain::statistics() const {
  ChainStatistics statistics = statistics_;
  statistics.best = best().evaluation;
  statistics.best_shared = best().shared;
  return statistics;
}

void Chain::Restart(Plan start) {
  draft_ = Draft(draft_.space(), std::move(start));
  draft_.Fold(folded_);
  PriceStart();
  SeeBest();
}

bool Chain::Exchange(Chain& a, Chain& b, Rng& rng) {
  const double draw = rng.Uniform01();
  if (!a.evaluation_.feasible() || !b.evaluation_.feasible()) return false;
  const auto inverse = [](const Chain& c) {
    return 1 / (c.statistics_.temperature * c.unit_);
  };
  const double exponent = (inverse(a) - inverse(b)) *
                          static_cast<double>(a.score().step_time.picoseconds -
                                              b.score().step_time.picoseconds);
  if (exponent < 0 && draw >= std::exp(exponent)) return false;
  std::swap(a.draft_, b.draft_);
  a.draft_.Fold(a.folded_);
  b.draft_.Fold(b.folded_);
  std::swap(a.evaluation_, b.evaluation_);
  std::swap(a.shared_, b.shared_);
  std::swap(a.priced_share_, b.priced_share_);
  std::swap(a.basis_, b.basis_);
  return true;
}

}  // namespace tessera
