#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <iostream>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/evaluate/step_bound.h"
#include "costmodel/whatif/band.h"
#include "planner/base/threads.h"
#include "planner/io/file.h"
#include "planner/io/plan_io.h"
#include "planner/plan/strategy.h"
#include "planner/search/adapt.h"
#include "planner/search/experts.h"
#include "planner/search/explain.h"
#include "planner/search/mcmc.h"
#include "runtime/launch/launch.h"
#include "tools/answer_time.h"
#include "tools/format.h"
#include "tools/inputs.h"
#include "tools/interrupt.h"
#include "tools/json.h"
#include "tools/search_limits.h"
#include "tools/step_report.h"
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
  double next_s_ = kSecondsBetweenLines;
};

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

// The plans of --plan or --strategy, --from and --resume.
Result<std::vector<Plan>> StartsOf(const Options& options,
                                   const SearchSpace& space, Inputs& inputs) {
  std::vector<Plan> starts;
  const auto add = [&](Plan plan, const std::string& path) {
    Plan canonical = plan;
    if (!MakeCanonical(space, canonical) || !Allowed(space, canonical)) {
      inputs.warnings.push_back(
          path +
          ": the search does not start from this plan: its moves "
          "lead to no such plan, or the constraints do not allow it");
    }
    starts.push_back(std::move(plan));
  };
  if (inputs.plan) add(*inputs.plan, options.plan);
  if (!options.from.empty()) {
    TESSERA_TRY(const Plan old, ReadPlan(options.from, inputs.graph));
    for (Plan& plan : AdaptedPlans(space, old, kAdapted)) {
      starts.push_back(std::move(plan));
    }
  }
  if (options.resume) {
    if (options.output.empty()) {
      return InvalidInput("needs -o FILE, whose plan it starts from",
                          "--resume");
    }
    TESSERA_TRY(Plan plan, ReadPlanFor(options.output, inputs.graph,
                                       inputs.cluster, inputs.warnings));
    add(std::move(plan), options.output);
  }
  return starts;
}

// The plan of --plan or --strategy is no start where constraints forbid it.
void WarnOfForbidden(const SearchSpace& space, Inputs& inputs) {
  if (!inputs.plan || Allowed(space, *inputs.plan)) return;
  std::string broken;
  for (const std::string& where :
       space.constraints.Broken(space.index, *space.cluster, *inputs.plan)) {
    broken += (broken.empty() ? "" : ", ") + where;
  }
  inputs.warnings.push_back(
      "the search does not start from the plan that is "
      "given, which breaks " +
      broken);
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
    std::string all;
    for (const std::string& where :
         space.constraints.Broken(space.index, *space.cluster, *plan)) {
      all += (all.empty() ? "" : ", ") + where;
    }
    text =
        "the nearest uniform plan, " + ToString(strategy) + ", breaks " + all;
  }
  return text;
}

// A plan that may be the answer.
struct Choice {
  std::string kind;  // "search", "uniform", or the baseline's name
  Plan plan;
  Score score;
  std::optional<Duration> confirmed;  // with the time lost on shared links
  std::optional<Evaluation> step;     // as it was confirmed here
  std::optional<Duration> measured;   // on this host
  bool no_time = false;  // may be the answer, but was not confirmed in time

  Duration time() const { return confirmed.value_or(score.step_time); }
};

// What is chosen among the plans that were found, and why.
struct Decided {
  std::vector<Choice> choices;  // what the search found first, best first
  size_t fastest = 0;
  size_t chosen = 0;
  std::optional<size_t> baseline;  // the best that is allowed
  double margin = 0;               // of its time over the fastest's, at least
  std::optional<ErrorBand> band;   // of predictions; none of what was run

  bool measured() const { return choices[fastest].measured.has_value(); }
  // Without shared links the baseline is faster than the fastest with them.
  // REQUIRES: there is a baseline.
  bool baseline_is_open() const {
    return !measured() && margin < 0 && !choices[*baseline].confirmed;
  }
  int64_t no_time() const {
    return std::ranges::count_if(choices, &Choice::no_time);
  }
};

const Baseline* BestBaseline(const SearchSpace& space,
                             const SearchResult& result) {
  const Baseline* best = nullptr;
  for (const Baseline& baseline : result.baselines) {
    if (!Allowed(space, baseline.plan)) continue;
    if (best == nullptr || Better(baseline.evaluation, best->evaluation)) {
      best = &baseline;
    }
  }
  return best;
}

// Plans whose simulations run beside each other: each takes the memory of a
// step's tasks.
constexpr size_t kAtOnce = 2;

// Simulates what may be the answer with shared links, the likeliest first, as
// long as there is time.
void Confirm(const Options& options, const Evaluator& evaluator,
             const std::vector<size_t>& simple, AnswerTime& time,
             Decided& decided) {
  std::vector<Choice>& choices = decided.choices;
  const bool prefers_simple = options.prefer == "simple";
  const auto is_simple = [&](size_t i) {
    return std::ranges::find(simple, i) != simple.end();
  };
  std::vector<size_t> order = {0};
  const auto add = [&](bool of_simple) {
    for (size_t i = 1; i < choices.size(); ++i) {
      if (is_simple(i) == of_simple) order.push_back(i);
    }
  };
  add(prefers_simple);
  add(!prefers_simple);
  // Sharing makes no plan faster: what is slower without it than a plan with
  // it, and no simpler answer either, needs no simulation.
  const auto may_be_answer = [&](size_t i) {
    const Choice& choice = choices[i];
    if (!choice.score.feasible || choice.confirmed ||
        evaluator.IsTooLargeToExplain(choice.plan)) {
      return false;
    }
    std::optional<Duration> fastest;
    for (const Choice& other : choices) {
      if (!other.confirmed) continue;
      fastest = std::min(fastest.value_or(*other.confirmed), *other.confirmed);
    }
    if (!fastest && !is_simple(i)) return true;
    const double within = is_simple(i) ? 1 + decided.band->median : 1;
    return choice.score.step_time.seconds() <
           within * fastest.value_or(choices[0].score.step_time).seconds();
  };
  const int threads = ThreadCount(options.threads);
  // By proposals the answer is the same on any number of threads.
  const bool by_proposals =
      options.proposals.value_or(0) > 0 && !options.time_limit_s;
  const size_t at_once = threads == 1 && !by_proposals ? 1 : kAtOnce;
  while (true) {
    std::vector<size_t> round;
    for (const size_t i : order) {
      if (round.size() < at_once && may_be_answer(i) &&
          time.Allows(choices[i].plan, !round.empty())) {
        round.push_back(i);
      }
    }
    if (round.empty()) break;
    ForEach(threads, round.size(), [&](size_t r) {
      Choice& choice = choices[round[r]];
      choice.step = time.Explain(choice.plan, /*share_links=*/true);
      choice.confirmed = choice.step->step_time;
    });
  }
  for (size_t i = 0; i < choices.size(); ++i) {
    choices[i].no_time = may_be_answer(i);
  }
}

Decided Decide(const Options& options, const Inputs& inputs,
               const SearchSpace& space, const Evaluator& evaluator,
               const SearchResult& result, bool interrupted, AnswerTime& time) {
  Decided decided;
  std::vector<Choice>& choices = decided.choices;
  const auto add = [&](std::string kind, const Plan& plan,
                       const Evaluation& evaluation,
                       std::optional<Duration> shared = {}) {
    for (size_t i = 0; i < choices.size(); ++i) {
      if (!SameUpToNames(choices[i].plan, plan)) continue;
      choices[i].kind = std::move(kind);
      return i;
    }
    choices.push_back(
        {std::move(kind), plan, ScoreOf(evaluation), shared, {}, {}});
    return choices.size() - 1;
  };
  for (const FoundPlan& found : result.candidates) {
    add("search", found.plan, found.evaluation, found.shared);
  }
  std::vector<size_t> simple;  // the simplest first
  const Baseline* baseline = BestBaseline(space, result);
  std::optional<size_t> uniform;
  if (result.uniform) {
    uniform = add("uniform", result.uniform->plan, result.uniform->evaluation);
  }
  if (baseline != nullptr) {
    decided.baseline =
        add(baseline->name, baseline->plan, baseline->evaluation);
    simple.push_back(*decided.baseline);
  }
  if (uniform && uniform != decided.baseline) simple.push_back(*uniform);

  decided.band = StepTimeBand(inputs.cluster, result.evaluation.sources);
  if (options.confirm > 0 && !interrupted) {
    Confirm(options, evaluator, simple, time, decided);
  }
  // An interrupted search confirms no more than its walks did, a late one not
  // all: what is known comes first.
  const bool cut_short = interrupted || decided.no_time() > 0;
  const auto unknown = [&](size_t i) {
    return cut_short && !choices[i].confirmed;
  };
  const auto better = [&](size_t a, size_t b) {
    if (!choices[a].score.feasible || !choices[b].score.feasible) {
      return Better(choices[a].score, choices[b].score);
    }
    if (unknown(a) != unknown(b)) return unknown(b);
    return choices[a].time() < choices[b].time();
  };
  for (size_t i = 1; i < choices.size(); ++i) {
    if (better(i, decided.fastest)) decided.fastest = i;
  }
  decided.chosen = decided.fastest;
  const Choice& fastest = choices[decided.fastest];
  const auto over = [&](size_t i) {
    return choices[i].time().seconds() / fastest.time().seconds() - 1;
  };
  if (decided.baseline) decided.margin = over(*decided.baseline);
  if (options.prefer != "simple" || !fastest.score.feasible) return decided;
  for (const size_t i : simple) {
    if (!choices[i].score.feasible || over(i) >= decided.band->median ||
        unknown(i) != unknown(decided.fastest)) {
      continue;
    }
    decided.chosen = i;
    break;
  }
  return decided;
}

// Runs the plans that are fastest by prediction, and the best baseline, and
// takes what was fastest here.
Result<void> Verify(const Options& options, const Inputs& inputs,
                    const SearchSpace& space, Decided& decided) {
  std::vector<size_t> order;
  for (size_t i = 0; i < decided.choices.size(); ++i) {
    if (decided.choices[i].score.feasible) order.push_back(i);
  }
  std::ranges::stable_sort(order, {},
                           [&](size_t i) { return decided.choices[i].time(); });
  order.resize(std::min(order.size(), static_cast<size_t>(options.verify)));
  const bool has_baseline =
      decided.baseline && decided.choices[*decided.baseline].score.feasible;
  if (has_baseline &&
      std::ranges::find(order, *decided.baseline) == order.end()) {
    order.push_back(*decided.baseline);
  }
  std::optional<Error> failure;
  std::optional<size_t> fastest;
  for (const size_t i : order) {
    Choice& choice = decided.choices[i];
    std::cerr << "measuring "
              << StrategyText(space.index, *space.cluster, choice.plan)
              << std::endl;
    auto measured =
        MeasureStep(options, inputs.graph, inputs.cluster, choice.plan);
    if (!measured) {
      // What was found is the answer all the same.
      if (measured.error().code == ErrorCode::kInterrupted) break;
      if (measured.error().code != ErrorCode::kUnavailable) {
        return measured.error();
      }
      std::cerr << "tessera: " << measured.error().ToString() << std::endl;
      failure = measured.error();
      continue;
    }
    choice.measured = *measured;
    if (!fastest || *measured < *decided.choices[*fastest].measured) {
      fastest = i;
    }
  }
  if (!fastest) {
    return failure ? Result<void>(*failure) : Result<void>();
  }
  decided.fastest = decided.chosen = *fastest;
  decided.band.reset();
  if (has_baseline && decided.choices[*decided.baseline].measured) {
    decided.margin = decided.choices[*decided.baseline].measured->seconds() /
                         decided.choices[*fastest].measured->seconds() -
                     1;
  } else {
    decided.baseline.reset();
  }
  return {};
}

// Of the chosen plan, for its file.
PlanPrediction PredictionOf(const Decided& decided) {
  const Choice& chosen = decided.choices[decided.chosen];
  PlanPrediction prediction;
  prediction.step_time = chosen.measured.value_or(chosen.time());
  prediction.measured = chosen.measured.has_value();
  if (decided.baseline && decided.choices[*decided.baseline].score.feasible) {
    const Choice& baseline = decided.choices[*decided.baseline];
    prediction.baseline = baseline.kind;
    prediction.baseline_step_time = baseline.measured.value_or(baseline.time());
  }
  if (decided.band) prediction.error_band = decided.band->median;
  return prediction;
}

std::string DecidedText(const SearchSpace& space, const Decided& decided) {
  const Choice& fastest = decided.choices[decided.fastest];
  const Choice& chosen = decided.choices[decided.chosen];
  std::string text;
  if (fastest.confirmed || decided.measured()) {
    std::vector<std::vector<std::string>> rows = {{"confirmed by the simulator",
                                                   "found by", "step time",
                                                   "with shared links"}};
    if (decided.measured()) rows[0].push_back("measured");
    for (const Choice& choice : decided.choices) {
      const bool slower =
          fastest.confirmed && choice.score.step_time >= *fastest.confirmed;
      rows.push_back(
          {(&choice == &chosen ? "> " : "  ") +
               StrategyText(space.index, *space.cluster, choice.plan),
           choice.kind, FormatTime(choice.score.step_time),
           choice.confirmed         ? FormatTime(*choice.confirmed)
           : !choice.score.feasible ? "does not fit"
           : choice.no_time         ? "no time for it"
           : slower                 ? "slower already"
                                    : "not simulated"});
      if (decided.measured()) {
        rows.back().push_back(choice.measured ? FormatTime(*choice.measured)
                                              : "");
      }
    }
    text += FormatTable(rows) + "\n";
  }
  if (const int64_t plans = decided.no_time(); plans > 0) {
    const std::string late =
        "there was no time (--time-limit) to simulate " +
        (plans == 1 ? std::string("a plan")
                    : std::to_string(plans) + " plans") +
        " with shared links that may be the better answer" +
        (fastest.confirmed ? "" : ": times are without these");
    text += "  " + Wrap(late, 4) + "\n";
  }
  if (!decided.baseline) return text;
  const Choice& baseline = decided.choices[*decided.baseline];
  std::string margin;
  if (!baseline.score.feasible) {
    margin = "no baseline fits";
  } else if (*decided.baseline == decided.fastest) {
    margin = "the fastest plan found is a baseline, " + baseline.kind;
  } else if (decided.baseline_is_open()) {
    margin = "whether the best baseline, " + baseline.kind +
             ", is faster is not known: without shared links it takes " +
             FormatTime(baseline.time());
  } else {
    // Where it is slower without shared links than the fastest with them, it is
    // known without alone.
    const bool at_least = fastest.confirmed && !baseline.confirmed;
    margin = "the best baseline, " + baseline.kind + ", takes " +
             (at_least ? "at least " : "") + FormatPercent(decided.margin) +
             " longer than the fastest plan found (" +
             FormatTime(fastest.measured.value_or(fastest.time())) + ")";
    if (decided.band) {
      margin += decided.margin < decided.band->median ? ", no more" : ", more";
      margin += " than predictions are off (" +
                FormatPercent(decided.band->median) + ")";
    }
  }
  if (decided.chosen != decided.fastest) {
    margin += "; a simpler plan that is as fast but for that is preferred (" +
              chosen.kind + "), --prefer fastest takes the other";
  }
  return text + "  " + Wrap(margin, 4) + "\n";
}

Json DecidedJson(const SearchSpace& space, const Decided& decided) {
  Json json = Json::Object();
  const Choice& fastest = decided.choices[decided.fastest];
  if (decided.baseline && decided.choices[*decided.baseline].score.feasible) {
    json.Set("baseline", decided.choices[*decided.baseline].kind);
    if (!decided.baseline_is_open()) {
      json.Set("over_best_baseline", decided.margin);
    }
  }
  if (decided.band) json.Set("band", decided.band->median);
  json.Set("chosen", decided.choices[decided.chosen].kind);
  json.Set("fastest", fastest.kind);
  json.Set("fastest_step_time_s",
           fastest.measured.value_or(fastest.time()).seconds());
  json.Set("measured", decided.measured());
  json.Set(
      "candidates", Json::ArrayOf(decided.choices, [&](const Choice& c) {
        Json choice = Json::Object(
            {{"found_by", c.kind},
             {"strategy", StrategyText(space.index, *space.cluster, c.plan)},
             {"step_time_s", c.score.step_time.seconds()},
             {"feasible", c.score.feasible}});
        if (c.confirmed) {
          choice.Set("confirmed_step_time_s", c.confirmed->seconds());
        }
        if (c.no_time) choice.Set("no_time_to_confirm", true);
        if (c.measured) {
          choice.Set("measured_step_time_s", c.measured->seconds());
        }
        return choice;
      }));
  return json;
}

// An object, and a step time on shared links where it is known.
Json WithShared(Json json, const char* name, std::optional<Duration> shared) {
  if (shared) json.Set(name, shared->seconds());
  return json;
}

Json StatisticsJson(const SearchResult& result) {
  Json moves = Json::Array();
  for (size_t m = 0; m < result.moves.size(); ++m) {
    const MoveStatistics& of = result.moves[m];
    moves.Append(Json::Object({{"move", Moves()[m].name},
                               {"proposals", of.proposals},
                               {"applicable", of.applicable},
                               {"accepted", of.accepted}}));
  }
  return Json::Object(
      {{"moves", std::move(moves)},
       {"swaps", Json::ArrayOf(result.swaps,
                               [](const SwapStatistics& swap) {
                                 return Json::Object(
                                     {{"colder", swap.colder},
                                      {"hotter", swap.hotter},
                                      {"attempts", swap.attempts},
                                      {"accepted", swap.accepted}});
                               })},
       {"restarts", result.restarts},
       {"chains",
        Json::ArrayOf(
            result.chains,
            [](const ChainStatistics& chain) {
              return WithShared(
                  Json::Object(
                      {{"temperature", chain.temperature},
                       {"proposals", chain.proposals},
                       {"applicable", chain.applicable},
                       {"accepted", chain.accepted},
                       {"start_step_time_s", chain.start.step_time.seconds()},
                       {"best_step_time_s", chain.best.step_time.seconds()}}),
                  "best_shared_step_time_s", chain.best_shared);
            })},
       {"trace",
        Json::ArrayOf(result.trace,
                      [](const TracePoint& point) {
                        return WithShared(
                            Json::Object(
                                {{"chain", point.chain},
                                 {"proposal", point.proposal},
                                 {"step_time_s", point.step_time.seconds()}}),
                            "shared_step_time_s", point.shared);
                      })},
       {"shared_links", result.shares_links},
       {"stalled", result.stalled}});
}

// "within 41 % of the bound", or how many times as long, where one is known.
std::string BoundText(const Cluster& cluster, const StepBound& bound,
                      Duration time) {
  if (bound.step_time == Duration{}) return "";
  const double over = time.seconds() / bound.step_time.seconds() - 1;
  std::string text = over <= 1
                         ? "within " + FormatPercent(over) + " of the bound"
                         : FormatNumber(1 + over) + " times the bound";
  text += ": no plan takes less than " + FormatTime(bound.step_time) +
          " (work at the rate that large kernels reach)";
  if (bound.memory > cluster.TypeOf(DeviceId(0)).memory) {
    text += "; parameters and state are " + FormatBytes(bound.memory) +
            " a device: some must be offloaded";
  }
  return text;
}

// Why nothing says what the step's time goes to, where nothing does.
std::string NotSimulatedText(bool too_large, bool late) {
  if (!too_large && !late) return "";
  return std::string("  ") +
         (too_large ? "too large to be simulated here"
                    : "there was no time to simulate it (--time-limit)") +
         ": no breakdown, and links are not shared\n"
         "    ('tessera simulate --plan FILE' takes its time)\n\n";
}

// Why the search ended, where that is no limit that was given.
std::string EndText(const Options& options, const SearchResult& result) {
  if (result.proposals == 0) {
    return options.proposals == 0 || options.time_limit_s == 0.0
               ? ""
               : ", the time went to the starting plans";
  }
  return result.stalled ? ", nothing improved any more" : "";
}

Json BaselineJson(const Baseline& baseline) {
  return Json::Object({{"name", baseline.name},
                       {"strategy", ToString(baseline.strategy)},
                       {"step_time_s", baseline.evaluation.step_time.seconds()},
                       {"feasible", baseline.evaluation.feasible()}});
}

// All as they are priced without sharing of links.
std::string BaselineTable(const SearchSpace& space, const SearchResult& result,
                          const Choice& chosen) {
  std::vector<std::vector<std::string>> rows = {
      {"compared with", "strategy", "links not shared", "over the plan's"},
      {"the plan", StrategyText(space.index, *space.cluster, chosen.plan),
       FormatTime(chosen.score.step_time),
       chosen.score.feasible ? "1.000 x" : "does not fit"}};
  const double best = chosen.score.step_time.seconds();
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
  const SearchClock clock(0, nullptr);
  if (!options.output.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckProtoOutput(options.output));
  }
  if (options.Given("--data") && options.verify == 0) {
    return InvalidInput("has no effect: no plan is run (--verify N)", "--data");
  }
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
  WarnOfForbidden(space, inputs);
  SearchOptions search = SearchOptionsOf(options);
  TESSERA_TRY(search.starts, StartsOf(options, space, inputs));
  PrintWarnings(inputs);
  // All that is done is within the limit, from reading on. Without proposals
  // there is none to the answer.
  const bool limits_answer = options.time_limit_s || options.proposals != 0;
  AnswerTime time(space, evaluator, clock,
                  limits_answer ? search.time_limit : 0);
  if (limits_answer && search.time_limit > 0) {
    search.time_limit = std::max(search.time_limit - clock.Seconds(), kNoTime);
    search.answer_time = [&](const Plan& plan) {
      return time.SecondsToKeep(plan);
    };
  }
  search.candidates = static_cast<size_t>(std::max(1, options.confirm));
  search.share_links = options.confirm > 0;
  search.stop = &CatchInterrupts();
  if (!options.output.empty()) {
    // So that what is killed leaves what it had. Whether the file can be
    // written is told at the end.
    search.keep = [&](Plan plan) {
      NameAxes(space.index, plan);
      (void)WritePlan(options.output, inputs.graph, plan).has_value();
    };
  }
  std::optional<ProgressLine> line;
  line.emplace();
  search.progress = [&](const SearchProgress& p) { line->Show(p); };
  const Result<SearchResult> searched = Search(space, evaluator, search);
  line.reset();
  bool interrupted = search.stop->load();
  if (!searched) {
    if (!interrupted && space.constraints.empty()) return searched.error();
    if (!interrupted) {
      const std::string broken = BrokenText(space);
      return InvalidInput(
          searched.error().message + (broken.empty() ? "" : "; " + broken),
          "search");
    }
    return Error{ErrorCode::kInterrupted, "interrupted before there was a plan",
                 "search"};
  }
  const SearchResult& result = *searched;
  if (interrupted) {
    std::cerr << "tessera: search interrupted; the best plan so far follows\n";
  }

  Decided decided =
      Decide(options, inputs, space, evaluator, result, interrupted, time);
  if (options.verify > 0 && !interrupted) {
    TESSERA_RETURN_IF_ERROR(Verify(options, inputs, space, decided));
    interrupted = search.stop->load();
  }
  const Choice& chosen = decided.choices[decided.chosen];
  // The answer is printed whether or not it can be written.
  const bool writes = !options.output.empty() && chosen.score.feasible;
  Result<void> written;
  if (writes) {
    const PlanPrediction prediction = PredictionOf(decided);
    written = WritePlan(options.output, inputs.graph, chosen.plan, &prediction);
  }
  // As it was confirmed, and as simulate prices it: with shared links. Without
  // that, as the search priced it.
  const bool late = !interrupted && !chosen.step &&
                    !evaluator.IsTooLargeToExplain(chosen.plan) &&
                    !time.Allows(chosen.plan);
  const Evaluation step =
      chosen.step ? *chosen.step
      : late      ? evaluator.ExplainUnsimulated(chosen.plan)
                  : time.Explain(chosen.plan, chosen.confirmed.has_value());
  StepBound bound;
  if (inputs.profile_or_null() == nullptr && !decided.measured()) {
    bound = LowerBound(inputs.graph, inputs.cluster, options.training);
  }
  if (options.json) {
    TESSERA_TRY(std::string plan, PlanJson(inputs.graph, chosen.plan));
    Json json = StepJson(inputs.graph, inputs.cluster, chosen.plan, step);
    json.Extend(Json::Object(
        {{"strategy", StrategyText(space.index, inputs.cluster, chosen.plan)},
         {"name", TextbookName(space, chosen.plan)},
         {"unshared_step_time_s", chosen.score.step_time.seconds()},
         {"plan", Json::Raw(std::move(plan))},
         {"baselines", Json::ArrayOf(result.baselines, BaselineJson)},
         {"margin", DecidedJson(space, decided)},
         {"statistics", StatisticsJson(result)},
         {"proposals", result.proposals},
         {"accepted", result.accepted},
         {"search_time_s", result.seconds},
         {"seed", options.seed},
         {"interrupted", interrupted},
         {"simulated", step.breakdown != Breakdown{}}}));
    if (bound.step_time > Duration{}) {
      json.Set("bound",
               Json::Object({{"step_time_s", bound.step_time.seconds()},
                             {"share_of_products", bound.products},
                             {"memory_bytes", bound.memory.value}}));
    }
    if (writes && written) json.Set("plan_file", options.output);
    std::cout << json.ToString() << "\n";
  } else {
    std::cout << StepText(inputs.graph, inputs.cluster, chosen.plan, step)
              << "\n"
              << NotSimulatedText(evaluator.IsTooLargeToExplain(chosen.plan),
                                  late)
              << BaselineTable(space, result, chosen) << "\n"
              << DecidedText(space, decided);
    const std::string within = BoundText(inputs.cluster, bound, step.step_time);
    if (chosen.score.feasible && !within.empty()) {
      std::cout << "  " << Wrap(within, 4) << "\n";
    }
    std::cout << "  " << result.proposals << " proposals in "
              << FormatTime(result.seconds) << " ("
              << FormatCount(static_cast<double>(result.proposals) /
                             std::max(result.seconds, 1e-9))
              << "/s), " << result.accepted << " accepted, "
              << result.uniform_strategies
              << " uniform strategies swept to start from, seed "
              << options.seed << EndText(options, result) << "\n";
    if (writes && written) {
      std::cout << "  plan: " << options.output << "\n";
    }
  }
  std::cout.flush();
  TESSERA_RETURN_IF_ERROR(written);
  if (interrupted) return kInterruptedExitCode;
  if (chosen.score.feasible) return 0;
  const std::string within =
      search.time_limit > 0 && options.proposals != 0
          ? " in " + FormatTime(SearchOptionsOf(options).time_limit) +
                " (--time-limit)"
          : "";
  return Error{
      ErrorCode::kInfeasible,
      "no plan was found that fits" + within + ": " + step.violations.front(),
      "search"};
}

}  // namespace tessera
