#include "costmodel/whatif/replan.h"

#include <utility>

#include "costmodel/evaluate/evaluator.h"
#include "planner/search/mcmc.h"
#include "planner/search/search_space.h"

namespace tessera {

Result<Plan> BestPlan(const Case& of, const PredictOptions& predict,
                      const ReplanOptions& options) {
  const SearchSpace space(*of.graph, of.cluster);
  const Evaluator evaluator(*of.graph, of.cluster, predict.profile,
                            predict.training, Evaluator::kMostInSearch);
  SearchOptions search;
  search.seed = options.seed;
  search.proposals = options.proposals;
  search.time_limit = 0;
  search.threads = 1;
  search.share_links = !predict.fast && options.proposals > 0;
  search.stop = predict.watch.stop;
  search.progress = [&](const SearchProgress&) {
    predict.watch.Tell("planning for " + of.cluster.name);
  };
  if (!of.strategy.empty()) {
    const auto own = ParseStrategy(of.strategy);
    if (own) {
      auto plan = PlanFromStrategy(*of.index, of.cluster, *own);
      if (plan) search.starts.push_back(*std::move(plan));
    }
  }
  auto found = Search(space, evaluator, search);
  if (!found) {
    return Error{ErrorCode::kInfeasible, found.error().message, ""};
  }
  return std::move(found->best);
}

}  // namespace tessera
