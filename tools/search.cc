#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <filesystem>
#include <iostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/evaluate/step_bound.h"
#include "costmodel/whatif/parts.h"
#include "planner/base/append.h"
#include "planner/base/file.h"
#include "planner/base/format.h"
#include "planner/io/plan_io.h"
#include "planner/plan/strategy.h"
#include "planner/search/adapt.h"
#include "planner/search/mcmc.h"
#include "planner/search/uniform_strategies.h"
#include "runtime/launch/launch.h"
#include "tools/answer_time.h"
#include "tools/inputs.h"
#include "tools/interrupt.h"
#include "tools/progress_line.h"
#include "tools/search_choice.h"
#include "tools/search_limits.h"
#include "tools/search_output.h"
#include "tools/verb.h"
#include "tools/verify.h"

namespace tessera {
namespace {

std::string ProgressText(const SearchProgress& progress) {
  std::string text = "searching: " + FormatFixed(progress.seconds, 1) + " s, " +
                     std::to_string(progress.proposals) + " proposals, ";
  if (progress.best == Duration{}) return text + "pricing the starting plans";
  text +=
      progress.feasible ? "best step " : "nothing fits yet; least bad step ";
  return text + FormatTime(progress.best);
}

// Plans near that of --from, at most.
constexpr size_t kAdapted = 8;

Result<Constraints> ConstraintsOf(const Options& options,
                                  const GraphIndex& index,
                                  const Cluster& cluster) {
  ConstraintTexts texts;
  for (const std::string& text : options.fix) texts.fix.push_back({text});
  for (const std::string& text : options.forbid) texts.forbid.push_back({text});
  texts.max_microbatch = options.max_microbatch;
  texts.space.text = options.space;
  if (!options.constraints.empty()) {
    TESSERA_TRY(const std::string text, ReadFile(options.constraints));
    TESSERA_RETURN_IF_ERROR(ParseConstraints(text, options.constraints, texts));
  }
  return Constraints::Make(index, cluster, texts);
}

// What constraints the plan breaks, with commas.
std::string BrokenBy(const SearchSpace& space, const Plan& plan) {
  std::string broken;
  for (const std::string& where :
       space.constraints.Broken(space.index, *space.cluster, plan)) {
    AppendTo(broken, ", ", where);
  }
  return broken;
}

// `source` is what the plan is of, a file or --strategy.
void WarnWhereNoStart(const SearchSpace& space, const Plan& plan,
                      const std::string& source, Inputs& inputs) {
  Plan canonical = plan;
  const bool reached = MakeCanonical(space, canonical);
  if (reached && Allowed(space, canonical)) return;
  const std::string broken = BrokenBy(space, reached ? canonical : plan);
  inputs.warnings.push_back(
      source + ": the search does not start from this plan" +
      (reached ? "" : ": its moves lead to no such plan") +
      (broken.empty() ? "" : ", which breaks " + broken));
}

// What became of the plan of --from, `file`: its `microbatches` are those that
// it has there, `old` is what it is for this batch.
std::string FromText(const std::string& file, const SearchSpace& space,
                     const Plan& read, const Plan& old,
                     const std::vector<Plan>& near) {
  if (near.empty())
    return file + ": nothing near this plan is valid and allowed here";
  std::string text = file + ": starting from ";
  if (!SameUpToNames(near[0], old)) {
    text += StrategyText(space.index, *space.cluster, near[0]);
  } else if (old.microbatches == read.microbatches) {
    text += "this plan as it is";
  } else {
    text += "this plan with " + std::to_string(old.microbatches) +
            (old.microbatches == 1 ? " microbatch" : " microbatches");
    if (old.actions != read.actions) {
      text += " by " + old.schedule + ", since its actions are of " +
              std::to_string(read.microbatches);
    }
  }
  if (near.size() > 1) {
    text += " and " + std::to_string(near.size() - 1) + " more near it";
  }
  return text;
}

// The plans of --plan or --strategy, --from and --resume.
Result<std::vector<Plan>> StartsOf(const Options& options,
                                   const SearchSpace& space, Inputs& inputs) {
  std::vector<Plan> starts;
  const auto add = [&](Plan plan, const std::string& source) {
    WarnWhereNoStart(space, plan, source, inputs);
    starts.push_back(std::move(plan));
  };
  if (inputs.plan) {
    if (!options.strategy) WarnOfIdle(*inputs.plan, inputs, options.plan);
    add(*inputs.plan, options.strategy ? "--strategy" : options.plan);
  }
  if (!options.from.empty()) {
    TESSERA_TRY(const PlanOfAnySize read,
                ReadPlanOfAnySize(options.from, inputs.graph));
    const Plan old =
        ForBatch(read.plan, read.global_batch, inputs.graph.global_batch);
    // Of another cluster it need not be valid here.
    if (Plan own = old; MakeCanonical(space, own)) {
      WarnWhereNoStart(space, own, options.from, inputs);
    }
    std::vector<Plan> near = AdaptedPlans(space, old, kAdapted);
    std::cerr << FromText(options.from, space, read.plan, old, near)
              << std::endl;
    std::ranges::move(near, std::back_inserter(starts));
  }
  if (options.resume) {
    if (options.output.empty()) {
      return InvalidInput("needs -o FILE, whose plan it starts from",
                          "--resume");
    }
    // So that a job's command stays the same when the job starts anew.
    std::error_code error;
    if (!std::filesystem::exists(options.output, error) && !error) {
      inputs.warnings.push_back("--resume: there is no '" + options.output +
                                "' yet: the search begins anew");
      return starts;
    }
    TESSERA_TRY(Plan plan, ReadPlanFor(options.output, inputs.graph,
                                       inputs.cluster, inputs.warnings));
    add(std::move(plan), options.output);
  }
  return starts;
}

// Uniform plans that are looked at to say why constraints leave none.
constexpr size_t kMostTried = 500;

// What the uniform plan that breaks fewest constraints breaks, if it does.
std::string BrokenText(const SearchSpace& space) {
  std::string text;
  int fewest = INT_MAX;
  const std::vector<Strategy> strategies = UniformStrategies(space);
  for (const Strategy& strategy :
       std::span(strategies).first(std::min(kMostTried, strategies.size()))) {
    const auto plan = PlanFromStrategy(space.index, *space.cluster, strategy);
    if (!plan) continue;
    const int broken =
        space.constraints.Violations(space.index, *space.cluster, *plan);
    if (broken >= fewest) continue;
    if (broken == 0) {
      return "there was no time to find " + ToString(strategy) +
             ", which is one";
    }
    fewest = broken;
    text = "the nearest uniform plan, " + ToString(strategy) + ", breaks " +
           BrokenBy(space, *plan);
  }
  return text;
}

// Why there is no plan.
Error NoPlan(const SearchSpace& space, const Error& error, bool interrupted) {
  if (interrupted) {
    return {ErrorCode::kInterrupted, "interrupted before there was a plan",
            "search"};
  }
  if (space.constraints.empty()) return error;
  const std::string broken = BrokenText(space);
  return InvalidInput(error.message + (broken.empty() ? "" : "; " + broken),
                      "search");
}

Error NoneFits(const Options& options, const Evaluation& step) {
  const double limit = SearchOptionsOf(options).time_limit;
  const std::string within =
      limit > 0 ? " in " + FormatTime(limit) + " (--time-limit)" : "";
  return {
      ErrorCode::kInfeasible,
      "no plan was found that fits" + within + ": " + step.violations.front(),
      "search"};
}

// Searches with a line of progress.
Result<SearchResult> SearchWithProgress(const SearchSpace& space,
                                        const Evaluator& evaluator,
                                        SearchOptions search) {
  ProgressLine line(std::chrono::seconds(2), /*rewrites=*/true);
  search.progress = [&](const SearchProgress& p) {
    line.Show(ProgressText(p));
  };
  return Search(space, evaluator, search);
}

// All four outlive the search, which `stop` ends. What does not hold of the
// starts is in the inputs' warnings.
Result<SearchOptions> SearchOptionsFor(const Options& options,
                                       const SearchSpace& space, Inputs& inputs,
                                       const std::atomic<bool>& stop) {
  SearchOptions search = SearchOptionsOf(options);
  TESSERA_TRY(search.starts, StartsOf(options, space, inputs));
  search.candidates = static_cast<size_t>(std::max(1, options.confirm));
  search.share_links = options.confirm > 0;
  search.stop = &stop;
  search.more_starts =
      StartsOnParts(inputs.graph, inputs.cluster,
                    {inputs.profile_or_null(), options.training,
                     space.constraints, search.threads, search.stop});
  if (options.output.empty()) return search;
  // So that what is killed leaves what it had. Whether the file can be written
  // is told at the end.
  search.keep = [&](Plan plan) {
    NameAxes(space.index, plan);
    (void)WritePlan(options.output, inputs.graph, plan).has_value();
  };
  return search;
}

Result<void> Print(const Options& options, const SearchAnswer& answer) {
  if (options.json) {
    TESSERA_TRY(const Json json, SearchJson(options, answer));
    std::cout << json.ToString() << "\n";
  } else {
    std::cout << SearchText(options, answer);
  }
  std::cout.flush();
  return {};
}

Result<void> CheckFlags(const Options& options) {
  if (!options.output.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckProtoOutput(options.output));
  }
  if (options.Given("--data") && options.verify == 0) {
    return InvalidInput("has no effect: no plan is run (--verify N)", "--data");
  }
  return {};
}

}  // namespace

Result<int> RunSearch(const Options& options) {
  const SearchClock clock(0, nullptr);
  TESSERA_RETURN_IF_ERROR(CheckFlags(options));
  TESSERA_TRY(Inputs inputs, ReadInputs(options));
  if (options.verify > 0) {
    TESSERA_RETURN_IF_ERROR(
        CheckMeasurable(options, inputs.graph, inputs.cluster));
  }

  // Never taken apart, as the process ends behind it: of large models what it
  // remembers is a million pieces.
  static const Evaluator& evaluator =
      *new Evaluator(inputs.graph, inputs.cluster, inputs.profile_or_null(),
                     options.training, Evaluator::kMostInSearch);
  SearchSpace space(inputs.graph, inputs.cluster);
  TESSERA_TRY(space.constraints,
              ConstraintsOf(options, space.index, inputs.cluster));
  const std::atomic<bool>& interrupts = CatchInterrupts();
  TESSERA_TRY(SearchOptions search,
              SearchOptionsFor(options, space, inputs, interrupts));
  PrintWarnings(inputs);
  // All that is done is within the limit, from reading on.
  AnswerTime time(space, evaluator, clock, search.time_limit);
  if (search.time_limit > 0) {
    search.time_limit = std::max(search.time_limit - clock.Seconds(), kNoTime);
    search.answer_time = [&](const Plan& plan) {
      return time.SecondsToKeep(plan);
    };
  }
  const Result<SearchResult> searched =
      SearchWithProgress(space, evaluator, search);
  bool interrupted = interrupts;
  if (!searched) return NoPlan(space, searched.error(), interrupted);
  const SearchResult& result = *searched;
  if (interrupted) {
    std::cerr << "tessera: search interrupted; the best plan so far follows\n";
  }

  Decided decided =
      Decide(options, inputs, space, evaluator, result, interrupted, time);
  if (options.verify > 0 && !interrupted) {
    TESSERA_RETURN_IF_ERROR(Verify(options, inputs, space, decided));
    interrupted = interrupts;
  }
  const Choice& chosen = decided.choices[decided.chosen];
  SearchAnswer answer = {inputs, space, result, decided, interrupted};
  // The answer is printed whether or not it can be written.
  Result<void> written;
  if (!options.output.empty() && chosen.score.feasible) {
    const PlanPrediction prediction = PredictionOf(decided);
    written = WritePlan(options.output, inputs.graph, chosen.plan, &prediction);
    if (written) answer.plan_file = options.output;
  }
  // As it was confirmed, and as simulate prices it: with shared links. Without
  // that, as the search priced it.
  answer.too_large = evaluator.IsTooLargeToExplain(chosen.plan);
  answer.late = !interrupted && !chosen.step && !answer.too_large &&
                !time.Allows(chosen.plan);
  answer.step = chosen.step ? *chosen.step
                : answer.late
                    ? evaluator.ExplainUnsimulated(chosen.plan)
                    : time.Explain(chosen.plan, chosen.confirmed.has_value());
  if (inputs.profile_or_null() == nullptr && !decided.measured()) {
    answer.bound = LowerBound(inputs.graph, inputs.cluster, options.training);
  }
  if (!decided.measured() && answer.step.feasible()) {
    PrintWarning(FewerCoresText(options, inputs));
    PrintWarning(UnmeasuredText(answer.step.sources, inputs));
  }
  TESSERA_RETURN_IF_ERROR(Print(options, answer));
  TESSERA_RETURN_IF_ERROR(written);
  if (interrupted) return kInterruptedExitCode;
  if (chosen.score.feasible) return 0;
  return NoneFits(options, answer.step);
}

}  // namespace tessera
