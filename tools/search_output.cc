#include "tools/search_output.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "planner/base/format.h"
#include "planner/io/plan_io.h"
#include "planner/plan/strategy.h"
#include "planner/search/baselines.h"
#include "planner/search/explain.h"
#include "planner/search/move.h"
#include "tools/inputs.h"
#include "tools/step_report.h"
#include "tools/text.h"

namespace tessera {
namespace {

std::string DecidedText(const SearchSpace& space, const Decided& decided,
                        const std::vector<Baseline>& baselines) {
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
    const bool any = std::ranges::any_of(
        baselines, [](const Baseline& of) { return of.evaluation.feasible(); });
    margin = any ? "no baseline that the constraints allow fits"
                 : "no baseline fits";
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
    // Percents of several times are hard to read.
    const std::string longer =
        decided.margin < 1
            ? FormatPercent(decided.margin) + " longer than"
            : FormatNumber(1 + decided.margin) + " times as long as";
    margin = "the best baseline, " + baseline.kind + ", takes " +
             (at_least ? "at least " : "") + longer +
             " the fastest plan found (" +
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
             {"step_time_s", StepTimeJson(c.score.step_time)},
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
std::string EndText(const Options& options, const SearchAnswer& answer) {
  const SearchResult& result = answer.result;
  if (answer.interrupted) return ", interrupted";
  if (result.proposals == 0) {
    return options.proposals == 0 || options.time_limit_s == 0.0
               ? ""
               : ", the time went to the starting plans";
  }
  return result.stalled ? ", nothing improved any more" : "";
}

Json BaselineJson(const Baseline& baseline) {
  return Json::Object(
      {{"name", baseline.name},
       {"strategy", ToString(baseline.strategy)},
       {"step_time_s", StepTimeJson(baseline.evaluation.step_time)},
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
  std::string text = FormatTable(rows);
  const int64_t batch = space.index.graph->global_batch;
  if (batch % space.devices() != 0) {
    text +=
        "  " +
        Wrap("data parallelism over all " + std::to_string(space.devices()) +
                 " devices is no baseline: they do not divide the batch "
                 "of " +
                 std::to_string(batch),
             4) +
        "\n";
  }
  return text;
}

}  // namespace

Result<Json> SearchJson(const Options& options, const SearchAnswer& answer) {
  const Inputs& inputs = answer.inputs;
  const SearchSpace& space = answer.space;
  const SearchResult& result = answer.result;
  const Choice& chosen = answer.decided.choices[answer.decided.chosen];
  const StepBound& bound = answer.bound;
  TESSERA_TRY(std::string plan, PlanJson(inputs.graph, chosen.plan));
  Json json = StepJson(inputs.graph, inputs.cluster, chosen.plan, answer.step);
  json.Extend(Json::Object(
      {{"strategy", StrategyText(space.index, inputs.cluster, chosen.plan)},
       {"name", TextbookName(space, chosen.plan)},
       {"unshared_step_time_s", StepTimeJson(chosen.score.step_time)},
       {"plan", Json::Raw(std::move(plan))},
       {"baselines", Json::ArrayOf(result.baselines, BaselineJson)},
       {"margin", DecidedJson(space, answer.decided)},
       {"statistics", StatisticsJson(result)},
       {"proposals", result.proposals},
       {"accepted", result.accepted},
       {"uniform_strategies", result.uniform_strategies},
       {"swept_all", result.swept_all},
       {"search_time_s", result.seconds},
       {"seed", options.seed},
       {"interrupted", answer.interrupted},
       {"simulated", answer.step.breakdown != Breakdown{}}}));
  if (bound.step_time > Duration{}) {
    json.Set("bound", Json::Object({{"step_time_s", bound.step_time.seconds()},
                                    {"share_of_products", bound.products},
                                    {"memory_bytes", bound.memory.value}}));
  }
  if (!answer.plan_file.empty()) json.Set("plan_file", answer.plan_file);
  return json;
}

std::string SearchText(const Options& options, const SearchAnswer& answer) {
  const Inputs& inputs = answer.inputs;
  const SearchSpace& space = answer.space;
  const SearchResult& result = answer.result;
  const Choice& chosen = answer.decided.choices[answer.decided.chosen];
  std::string text =
      StepText(inputs.graph, inputs.cluster, chosen.plan, answer.step) + "\n" +
      NotSimulatedText(answer.too_large, answer.late) +
      BaselineTable(space, result, chosen) + "\n" +
      DecidedText(space, answer.decided, result.baselines);
  const std::string within =
      BoundText(inputs.cluster, answer.bound, answer.step.step_time);
  if (chosen.score.feasible && !within.empty()) {
    text += "  " + Wrap(within, 4) + "\n";
  }
  if (const std::string idle = IdleText(chosen.plan, inputs.cluster);
      !idle.empty()) {
    text += "  " + idle + "\n";
  }
  text += "  " + std::to_string(result.proposals) + " proposals in " +
          FormatTime(result.seconds) + " (" +
          FormatCount(static_cast<double>(result.proposals) /
                      std::max(result.seconds, 1e-9)) +
          "/s), " + std::to_string(result.accepted) + " accepted, " +
          std::to_string(result.uniform_strategies) +
          " uniform strategies swept to start from" +
          (result.swept_all ? "" : ", not to the end for want of time") +
          ", seed " + std::to_string(options.seed) + EndText(options, answer) +
          "\n";
  if (!answer.plan_file.empty()) text += "  plan: " + answer.plan_file + "\n";
  return text;
}

}  // namespace tessera
