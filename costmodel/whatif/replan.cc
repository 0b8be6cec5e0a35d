#include "costmodel/whatif/replan.h"

#include <string>
#include <utility>
#include <vector>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/parts.h"
#include "planner/base/format.h"
#include "planner/plan/idle_keys.h"
#include "planner/search/mcmc.h"
#include "planner/search/search_space.h"

namespace tessera {
namespace {

// "128 of 1000 proposals, best step 1.25 s".
std::string ProgressText(const SearchProgress& progress, int64_t proposals) {
  std::string text = std::to_string(progress.proposals) + " of " +
                     std::to_string(proposals) + " proposals, ";
  if (proposals == 0) text.clear();
  if (progress.best == Duration{}) return text + "pricing the starting plans";
  text +=
      progress.feasible ? "best step " : "nothing fits yet; least bad step ";
  return text + FormatTime(progress.best);
}

}  // namespace

Result<Plan> BestPlan(const Case& of, const PredictOptions& predict,
                      const ReplanOptions& options) {
  const SearchSpace space(*of.graph, of.cluster);
  const Evaluator evaluator(*of.graph, of.cluster, predict.profile,
                            predict.training, Evaluator::kMostInSearch,
                            of.whole.get());
  SearchOptions search;
  search.seed = options.seed;
  search.proposals = options.proposals;
  search.time_limit = 0;
  search.threads = 1;
  search.share_links = !predict.fast && options.proposals > 0;
  search.stop = predict.watch.stop;
  search.more_starts =
      StartsOnParts(*of.graph, of.cluster,
                    {predict.profile, predict.training, Constraints(),
                     search.threads, search.stop, of.whole.get()});
  search.progress = [&](const SearchProgress& progress) {
    predict.watch.Tell("planning for " + of.cluster.name + ": " +
                       ProgressText(progress, options.proposals));
  };
  if (!of.strategy.empty()) {
    if (const auto own = ReadStrategy(of.strategy)) {
      std::vector<std::string> idle;  // of one start among many
      auto plan =
          PlanFromStrategy(*of.index, of.cluster,
                           WithoutIdleKeys(*of.index, of.cluster, *own, idle));
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
