#include "costmodel/whatif/replan.h"

#include <string>
#include <utility>
#include <vector>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/parts.h"
#include "planner/base/format.h"
#include "planner/plan/idle_keys.h"
#include "planner/plan/stages.h"
#include "planner/plan/validate.h"
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

// The plan of the case's strategy, without keys that have no effect here.
Result<Plan> StartOf(const Case& of) {
  const auto strategy = ReadStrategy(of.strategy);
  if (!strategy) return strategy.error().At("strategy");
  std::vector<std::string> idle;  // of one start among many
  return PlanFromStrategy(
      *of.index, of.cluster,
      WithoutIdleKeys(*of.index, of.cluster, *strategy, idle));
}

// Those that the case has besides what any search starts from.
Result<void> AddOwnStarts(const Plan* plan, Case& of,
                          std::vector<Plan>& starts) {
  const bool planned = plan != nullptr && IsValid(*of.index, of.cluster, *plan);
  if (planned) starts.push_back(*plan);
  if (plan != nullptr && !planned && of.strategy.empty()) {
    of.notes.push_back("the plan is not compared: it is for " +
                       std::to_string(World(*plan).devices.size()) +
                       " devices of " + plan->cluster_name);
  }
  if (of.strategy.empty()) return {};
  auto start = StartOf(of);
  if (start) {
    starts.push_back(*std::move(start));
    return {};
  }
  if (planned) return {};
  if (!of.drops_idle_keys) {
    return Error{ErrorCode::kInfeasible, start.error().ToString(), ""};
  }
  of.notes.push_back("the strategy is not compared: " +
                     start.error().ToString());
  return {};
}

}  // namespace

Result<Plan> BestPlan(Case& of, const PredictOptions& predict,
                      const ReplanOptions& options, const Plan* plan) {
  const SearchSpace space(*of.graph, of.cluster);
  const Evaluator evaluator(*of.graph, of.cluster, predict.profile,
                            predict.training, Evaluator::kMostInSearch,
                            of.whole.get());
  SearchOptions search;
  search.seed = options.seed;
  search.proposals = options.proposals;
  search.time_limit = options.time_limit;
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
  TESSERA_RETURN_IF_ERROR(AddOwnStarts(plan, of, search.starts));
  auto found = Search(space, evaluator, search);
  if (!found) {
    return Error{ErrorCode::kInfeasible, found.error().message, ""};
  }
  return std::move(found->best);
}

}  // namespace tessera
