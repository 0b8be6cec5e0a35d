#include "costmodel/whatif/replan.h"

#include <algorithm>

#include "costmodel/evaluate/evaluator.h"
#include "planner/search/mcmc.h"
#include "planner/search/search_space.h"
#include "planner/search/sweep.h"
#include "planner/search/uniform_strategies.h"

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
  return strategy.recompute == RecomputeLevel::kNone &&
         strategy.sp == (strategy.tp > 1) && strategy.schedule == "1f1b" &&
         strategy.mbs <= kMostSamplesTried && strategy.zero != 2;
}

}  // namespace

Result<Plan> BestPlan(const Case& of, const PredictOptions& predict,
                      const ReplanOptions& options) {
  const SearchSpace space(*of.graph, of.cluster);
  const Evaluator evaluator(*of.graph, of.cluster, predict.profile,
                            predict.training);
  const auto stop = [&] {
    predict.watch.Tell("comparing strategies on " + of.cluster.name);
    return predict.watch.stopped();
  };
  std::vector<Strategy> strategies = UniformStrategies(space);
  std::erase_if(strategies, [](const Strategy& s) { return !IsUsual(s); });
  strategies = Thinned(std::move(strategies),
                       static_cast<size_t>(std::max(1, options.budget)));
  if (!of.strategy.empty()) {
    const auto own = ParseStrategy(of.strategy);
    if (own) strategies.push_back(*own);
  }
  std::vector<Candidate> candidates =
      Sweep(space, evaluator, strategies, kRecomputed, 1, stop).best;
  if (candidates.empty()) {
    return Error{ErrorCode::kInfeasible, "no uniform strategy is valid", ""};
  }
  Candidate fastest = candidates.front();
  if (!fastest.score.feasible) {
    std::vector<Strategy> again;
    for (Candidate& candidate : candidates) {
      for (const RecomputeLevel level :
           {RecomputeLevel::kSelective, RecomputeLevel::kFull}) {
        candidate.strategy.recompute = level;
        again.push_back(candidate.strategy);
      }
    }
    const auto best = Sweep(space, evaluator, again, 1, 1, stop).best;
    if (!best.empty() && Better(best[0].score, fastest.score)) {
      fastest = best[0];
    }
  }
  TESSERA_TRY(Plan best,
              PlanFromStrategy(*of.index, of.cluster, fastest.strategy));
  if (options.proposals == 0) return best;
  SearchOptions search;
  search.seed = options.seed;
  search.proposals = options.proposals;
  search.time_limit = 0;
  search.threads = 1;
  search.chains = 4;
  search.share_links = !predict.fast;
  search.stop = predict.watch.stop;
  search.starts = {std::move(best)};
  // It spends no more on a plan than other searches do.
  const Evaluator of_search(*of.graph, of.cluster, predict.profile,
                            predict.training, Evaluator::kMostInSearch);
  TESSERA_TRY(SearchResult found, Search(space, of_search, search));
  return std::move(found.best);
}

}  // namespace tessera
