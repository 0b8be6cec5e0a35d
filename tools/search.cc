#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>

#include "costmodel/evaluate/evaluator.h"
#include "planner/io/plan_io.h"
#include "planner/plan/strategy.h"
#include "planner/search/mcmc.h"
#include "tools/format.h"
#include "tools/inputs.h"
#include "tools/interrupt.h"
#include "tools/json.h"
#include "tools/step_report.h"
#include "tools/verb.h"

namespace tessera {
namespace {

constexpr double kDefaultTimeLimit = 10;  // seconds

std::string ProgressText(const SearchProgress& progress) {
  std::string text = "searching: " + FormatFixed(progress.seconds, 1) + " s, " +
                     std::to_string(progress.proposals) + " proposals, ";
  if (progress.best == Duration{}) return text + "pricing the starting plans";
  text +=
      progress.feasible ? "best step " : "nothing fits yet; least bad step ";
  return text + FormatTime(progress.best);
}

// Rewrites one line of a terminal; elsewhere prints a line every few seconds.
class ProgressLine {
 public:
  void Show(const SearchProgress& progress) {
    if (terminal_) {
      std::fprintf(stderr, "\r%-78s", ProgressText(progress).c_str());
    } else if (progress.seconds >= next_s_) {
      std::fprintf(stderr, "%s\n", ProgressText(progress).c_str());
      next_s_ = progress.seconds + kSecondsBetweenLines;
    }
    std::fflush(stderr);
  }
  ~ProgressLine() {
    if (terminal_) std::fprintf(stderr, "\r%-78s\r", "");
  }

 private:
  static constexpr double kSecondsBetweenLines = 2;
  const bool terminal_ = isatty(STDERR_FILENO) != 0;
  double next_s_ = 0;
};

Result<SearchOptions> OptionsOf(const Options& options, const Inputs& inputs) {
  SearchOptions search;
  search.seed = options.seed;
  search.chains = options.chains;
  search.proposals = options.proposals.value_or(0);
  search.threads = options.threads;
  search.time_limit = options.proposals ? 0 : kDefaultTimeLimit;
  // Zero means no limit to the search, and no time at all to the user.
  if (options.time_limit_s) {
    search.time_limit = std::max(*options.time_limit_s, 1e-9);
  }
  if (options.proposals == 0) search.time_limit = 1e-9;
  if (inputs.plan) search.starts.push_back(*inputs.plan);
  return search;
}

Json BaselineJson(const Baseline& baseline) {
  return Json::Object({{"name", baseline.name},
                       {"strategy", ToString(baseline.strategy)},
                       {"step_time_s", baseline.evaluation.step_time.seconds()},
                       {"feasible", baseline.evaluation.feasible()}});
}

std::string BaselineTable(const SearchResult& result) {
  std::vector<std::vector<std::string>> rows = {
      {"compared with", "strategy", "step time", "the plan is faster by"}};
  const double best = result.evaluation.step_time.seconds();
  for (const Baseline& baseline : result.baselines) {
    const Evaluation& evaluation = baseline.evaluation;
    const double ratio = evaluation.step_time.seconds() / best;
    rows.push_back({baseline.name, ToString(baseline.strategy),
                    FormatTime(evaluation.step_time),
                    evaluation.feasible() ? FormatFixed(ratio, 3) + " x"
                                          : "does not fit"});
  }
  return FormatTable(rows);
}

}  // namespace

Result<int> RunSearch(const Options& options) {
  if (!options.output.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckProtoOutput(options.output));
  }
  TESSERA_TRY(const Inputs inputs, ReadInputs(options));
  PrintWarnings(inputs);

  const Evaluator evaluator(inputs.graph, inputs.cluster,
                            inputs.profile_or_null(), options.training);
  const SearchSpace space(inputs.graph, inputs.cluster);
  TESSERA_TRY(SearchOptions search, OptionsOf(options, inputs));
  search.stop = &CatchInterrupts();
  std::optional<ProgressLine> line;
  line.emplace();
  search.progress = [&](const SearchProgress& p) { line->Show(p); };
  const Result<SearchResult> searched = Search(space, evaluator, search);
  line.reset();
  const bool interrupted = search.stop->load();
  if (!searched) {
    if (!interrupted) return searched.error();
    return Error{ErrorCode::kInterrupted, "interrupted before there was a plan",
                 "search"};
  }
  const SearchResult& result = *searched;
  if (interrupted) {
    std::cerr << "tessera: search interrupted; the best plan so far follows\n";
  }

  const bool writes = !options.output.empty() && result.evaluation.feasible();
  if (writes) {
    TESSERA_RETURN_IF_ERROR(
        WritePlan(options.output, inputs.graph, result.best));
  }
  // Without sharing of links, as the search priced it.
  const Evaluation step = evaluator.Explain(result.best, /*share_links=*/false);
  if (options.json) {
    TESSERA_TRY(std::string plan, PlanJson(inputs.graph, result.best));
    Json json = StepJson(inputs.graph, inputs.cluster, result.best, step);
    json.Extend(Json::Object(
        {{"strategy", StrategyText(space.index, inputs.cluster, result.best)},
         {"plan", Json::Raw(std::move(plan))},
         {"baselines", Json::ArrayOf(result.baselines, BaselineJson)},
         {"proposals", result.proposals},
         {"accepted", result.accepted},
         {"search_time_s", result.seconds},
         {"seed", options.seed},
         {"interrupted", interrupted}}));
    if (writes) json.Set("plan_file", options.output);
    std::cout << json.ToString() << "\n";
  } else {
    std::cout << StepText(inputs.graph, inputs.cluster, result.best, step)
              << "\n"
              << BaselineTable(result) << "\n  " << result.proposals
              << " proposals in " << FormatTime(result.seconds) << " ("
              << FormatCount(static_cast<double>(result.proposals) /
                             std::max(result.seconds, 1e-9))
              << "/s), " << result.accepted << " accepted, "
              << result.uniform_strategies
              << " uniform strategies swept to start from, seed "
              << options.seed << "\n";
    if (writes) {
      std::cout << "  plan: " << options.output << "\n";
    }
  }
  if (result.evaluation.feasible()) return 0;
  return Error{
      ErrorCode::kInfeasible,
      "no plan was found that fits: " + result.evaluation.violations.front(),
      "search"};
}

}  // namespace tessera
