#include "costmodel/whatif/replan.h"

#include <algorithm>

#include "costmodel/evaluate/evaluator.h"
#include "planner/search/experts.h"
#include "planner/search/mcmc.h"
#include "planner/search/search_space.h"

namespace tessera {
namespace {

constexpr int kMostSamplesTried = 8;
constexpr size_t kRecomputed = 32;

// Evenly `budget` of them, in their order.
std::vector<Strategy> Thinned(std::vector<Strategy> all, size_t budget) {
  if (all.size() > budget) all.resize(budget);  // Beginnings cover them evenly.
  return all;
}

bool IsUsual(const Strategy& strategy) {
  return strategy.sp == (strategy.tp > 1) && strategy.schedule == "1f1b" &&
         strategy.mbs <= kMostSamplesTried && strategy.zero != 2;
}

}  // namespace

Result<Plan> BestPlan(const Case& of, const TrainingOptions& training,
                      const ProfileDb* profile, const ReplanOptions& options) {
  const SearchSpace space(*of.graph, of.cluster);
  const Evaluator evaluator(*of.graph, of.cluster, profile, training);
  std::vector<Strategy> strategies = UniformStrategies(space);
  std::erase_if(strategies, [](const Strategy& s) { return !IsUsual(s); });
  strategies = Thinned(std::move(strategies),
                       static_cast<size_t>(std::max(1, options.budget)));
  if (!of.strategy.empty()) {
    const auto own = ParseStrategy(of.strategy);
    if (own) strategies.push_back(*own);
  }
  std::vector<Candidate> candidates =
      Price(space, evaluator, strategies, 1, nullptr);
  const auto sort = [&] {
    std::ranges::stable_sort(candidates,
                             [](const Candidate& a, const Candidate& b) {
                               return Better(a.score, b.score);
                             });
  };
  sort();
  if (candidates.empty()) {
    return Error{ErrorCode::kInfeasible, "no uniform strategy is valid", ""};
  }
  if (!candidates.front().score.feasible) {
    std::vector<Strategy> again;
    for (size_t i = 0; i < std::min(kRecomputed, candidates.size()); ++i) {
      Strategy strategy = candidates[i].strategy;
      for (const RecomputeLevel level :
           {RecomputeLevel::kSelective, RecomputeLevel::kFull}) {
        strategy.recompute = level;
        again.push_back(strategy);
      }
    }
    for (Candidate& candidate : Price(space, evaluator, again, 1, nullptr)) {
      candidates.push_back(std::move(candidate));
    }
    sort();
  }
  TESSERA_TRY(Plan best, PlanFromStrategy(*of.index, of.cluster,
                                          candidates.front().strategy));
  if (options.proposals == 0) return best;
  SearchOptions search;
  search.seed = options.seed;
  search.proposals = options.proposals;
  search.time_limit = 0;
  search.threads = 1;
  search.chains = 4;
  search.starts = {std::move(best)};
  TESSERA_TRY(SearchResult found, Search(space, evaluator, search));
  return std::move(found.best);
}

}  // namespace tessera
