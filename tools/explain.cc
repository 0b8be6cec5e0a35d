#include "planner/search/explain.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <memory>
#include <utility>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/band.h"
#include "costmodel/whatif/degrade.h"
#include "costmodel/whatif/predict.h"
#include "planner/base/append.h"
#include "planner/base/format.h"
#include "planner/base/threads.h"
#include "planner/plan/describe.h"
#include "planner/plan/stages.h"
#include "planner/plan/used_part.h"
#include "tools/explain_output.h"
#include "tools/inputs.h"
#include "tools/interrupt.h"
#include "tools/json.h"
#include "tools/search_limits.h"
#include "tools/step_report.h"
#include "tools/text.h"
#include "tools/trainers.h"
#include "tools/verb.h"
#include "tools/which_strategy.h"

namespace tessera {
namespace {

// Draws of each move to find the nearest other plans.
constexpr int kDraws = 24;
// Of a decision, in text.
constexpr size_t kMostShown = 3;

struct Explanation {
  std::string name;  // the textbook's
  std::string strategy;
  Prediction prediction;
  Score own;                           // by the evaluator
  std::optional<Strategy> nearest;     // uniform
  std::optional<Score> nearest_score;  // where that is another plan
  std::vector<Decision> decisions;
  std::vector<Neighbour> neighbours;
  bool alone = false;    // priced as if there were no devices but the plan's
  bool complete = true;  // not ended by the time limit or Ctrl-C
};

// The part of the time limit for the decisions; the rest is for what moves lead
// to.
constexpr double kDecisionsEnd = 0.7;

// A case that lends what `inputs` owns.
Case CaseOf(const Inputs& inputs, const GraphIndex& index) {
  Case of;
  of.cluster = inputs.cluster;
  of.graph = std::shared_ptr<const Graph>(&inputs.graph, [](const Graph*) {});
  of.index =
      std::shared_ptr<const GraphIndex>(&index, [](const GraphIndex*) {});
  return of;
}

// "+3.1 %" and the time, or what is lacking.
std::string CostText(const Score& score, const Score& own) {
  if (score.step_time == Duration{}) return "cannot be priced";
  if (!score.feasible) {
    return score.overflow > Bytes{}
               ? "does not fit, by " + FormatBytes(score.overflow)
               : "cannot run";
  }
  // More or less time than what cannot run says nothing.
  if (!own.feasible) return "fits (" + FormatTime(score.step_time) + ")";
  return ChangeText(score.step_time.seconds(), own.step_time.seconds()) + " (" +
         FormatTime(score.step_time) + ")";
}

// How an alternative stands to the uniform plan that it is one of.
std::string_view KindText(const Score& other, const Score& uniform) {
  const bool equal = other.feasible && uniform.feasible &&
                     ChangeText(other.step_time.seconds(),
                                uniform.step_time.seconds()) == "equal";
  if (equal || !Better(other, uniform)) return ". Otherwise ";
  if (!other.feasible) return ". Nearer to fitting: ";
  return ". Better: ";
}

// Costs are over the uniform plan's whose decision it is.
std::string DecisionText(const Decision& decision, const Score& uniform) {
  std::string text = std::string(decision.name) + ": " + decision.chosen;
  const size_t shown = std::min(kMostShown, decision.alternatives.size());
  std::string_view last;
  for (size_t i = 0; i < shown; ++i) {
    const Alternative& other = decision.alternatives[i];
    const std::string_view kind = KindText(other.score, uniform);
    text += (kind == last ? "; " : std::string(kind)) + other.choice +
            (other.with.empty() ? "" : " with " + other.with) + " " +
            CostText(other.score, uniform);
    last = kind;
  }
  if (shown < decision.alternatives.size()) {
    text += "; and " + std::to_string(decision.alternatives.size() - shown) +
            " more, none better than these";
  }
  if (decision.invalid > 0) {
    text += "; " + std::to_string(decision.invalid) + " not valid";
  }
  return text;
}

// The parts of a description: what stands between commas and semicolons outside
// of brackets.
std::vector<std::string> PartsOfText(const std::string& text) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    depth += text[i] == '(' ? 1 : text[i] == ')' ? -1 : 0;
    const bool ends = depth == 0 && (text[i] == ',' || text[i] == ';') &&
                      text.substr(i + 1, 1) == " ";
    if (!ends) {
      parts.back() += text[i];
      continue;
    }
    parts.emplace_back();
    ++i;
  }
  return parts;
}

// What a description has and another one lacks, of many things the first.
std::string OnlyIn(const std::string& text, const std::string& other) {
  constexpr size_t kMostParts = 2;
  const std::vector<std::string> known = PartsOfText(other);
  std::string only;
  size_t count = 0;
  for (const std::string& part : PartsOfText(text)) {
    if (std::ranges::find(known, part) != known.end()) continue;
    if (++count > kMostParts) continue;
    AppendTo(only, ", ", part);
  }
  if (count > kMostParts) only += ", …";
  return only;
}

// The first change in a line, and how many more there are.
std::string ChangesText(const std::vector<PlanDifference>& changes) {
  if (changes.empty()) return "";
  const PlanDifference& first = changes[0];
  std::string now = OnlyIn(first.to, first.from);
  if (now.empty()) now = "without " + OnlyIn(first.from, first.to);
  std::string text = first.what + " to " + now;
  if (changes.size() > 1) {
    text += ", and " + std::to_string(changes.size() - 1) + " more";
  }
  return text;
}

constexpr std::string_view kUnexplained = "unexplained";
// Shares that are shown as 0.0 %.
constexpr double kNoShare = 0.0005;

// The parts that are shown, largest first, and the rest. They add up to 1.
std::vector<StepPart> ShownParts(const Prediction& prediction) {
  std::vector<StepPart> parts = BindingParts(prediction);
  std::erase_if(parts, [](const auto& part) { return part.share < kNoShare; });
  std::ranges::stable_sort(parts, std::ranges::greater(), &StepPart::share);
  double rest = 1;
  for (const StepPart& part : parts) rest -= part.share;
  parts.push_back({kUnexplained, rest});
  return parts;
}

std::string SharesText(const std::vector<StepPart>& parts) {
  std::string text;
  for (const auto& [name, share] : parts) {
    if (std::abs(share) < kNoShare) continue;
    AppendTo(text, ", ", std::string(name) + " " + FormatPercent(share));
  }
  return text;
}

std::string BindsText(const Prediction& prediction) {
  std::string text =
      "what binds: " + (prediction.bottleneck.empty() ? "nothing, it cannot run"
                                                      : prediction.bottleneck);
  if (prediction.evaluation.feasible()) {
    text += ", " + FormatPercent(prediction.bottleneck_share) + " of the step";
  }
  std::string violations;
  for (const std::string& violation : prediction.evaluation.violations) {
    violations += "  cannot run: " + violation + "\n";
  }
  if (!prediction.priced()) return text + "\n" + violations;
  std::string out =
      text + "\n  " +
      Wrap("step time " + FormatTime(prediction.evaluation.step_time) +
               ", by how it falls as each gets faster: " +
               SharesText(ShownParts(prediction)),
           4) +
      "\n";
  std::vector<StepPart> exposed;
  for (const BreakdownPart& part : PartsOf(prediction.evaluation.breakdown)) {
    if (part.time == Duration{}) continue;
    exposed.push_back(
        {part.name,
         part.time.seconds() / prediction.evaluation.step_time.seconds()});
  }
  out += "  " + Wrap("a device's time: " + SharesText(exposed), 4) + "\n";
  const std::string memory = "memory " + FormatBytes(prediction.memory) +
                             " of " + FormatBytes(prediction.capacity) +
                             " on the fullest device: ";
  std::string parts;
  for (const MemoryPart& part : MemoryParts(prediction.memory_use)) {
    if (part.bytes == Bytes{}) continue;
    AppendTo(parts, ", ",
             std::string(part.name) + " " + FormatBytes(part.bytes));
  }
  return out + "  " + Wrap(memory + parts, 4) + "\n" + violations;
}

// What alternatives are priced as, and the time of the plan itself where that
// is another one than the simulator's.
std::string BasisText(const Explanation& e) {
  const std::string as =
      e.alone ? "its devices alone, links not shared" : "links not shared";
  const std::string time = FormatTime(e.own.step_time);
  return time == FormatTime(e.prediction.evaluation.step_time)
             ? as
             : as + ": the plan takes " + time;
}

std::string DecisionsHeading(const Explanation& e) {
  std::string of;
  if (e.nearest_score) {
    of = " of the nearest uniform plan, " + ToString(*e.nearest) + ": " +
         CostText(*e.nearest_score, e.own) + "; changes are over that one";
  }
  return "\n" +
         Wrap("decisions" + of +
                  ", each with all else equal (data parallelism makes up the "
                  "devices, the microbatch is chosen anew; " +
                  BasisText(e) + ")",
              0) +
         "\n";
}

std::string NeighboursText(const Explanation& e) {
  if (e.neighbours.empty()) return "";
  std::string out =
      "\n" +
      Wrap("nearest other plans, by the search's moves (" + BasisText(e) + ")",
           0) +
      "\n";
  for (const Neighbour& neighbour : e.neighbours) {
    out += "  " +
           Wrap(std::string(neighbour.move->name) + " " +
                    CostText(ScoreOf(neighbour.evaluation), e.own) + ": " +
                    ChangesText(neighbour.changes),
                4) +
           "\n";
  }
  return out;
}

std::string EndText(const Explanation& e, bool interrupted) {
  std::string out;
  if (interrupted) {
    out += "\nNot all was priced: interrupted.\n";
  } else if (!e.complete) {
    out += "\nNot all was priced: --time-limit gives it more time.\n";
  }
  const ErrorBand& band = e.prediction.band;
  out += "\n" +
         Wrap("Predictions are off by " + FormatPercent(band.median) +
                  " in the median (" + band.source +
                  "): less than that is no difference.",
              0) +
         "\n";
  return out;
}

Json ScoreJson(const Score& score) {
  const bool priced = score.step_time > Duration{};
  return Json::Object(
      {{"step_time_s", StepTimeJson(score.step_time)},
       {"feasible", score.feasible},
       {"lacks_bytes", priced ? Json(score.overflow.value) : Json()}});
}

Json ExplainJson(const Inputs& inputs, const Plan& plan, const Explanation& e) {
  Json json =
      StepJson(inputs.graph, inputs.cluster, plan, e.prediction.evaluation);
  json.Set("name", e.name);
  json.Set("strategy", e.strategy);
  json.Set("complete", e.complete);
  json.Set("bottleneck", e.prediction.bottleneck);
  Json binds = Json::Object();
  if (e.prediction.priced()) {
    for (const auto& [name, share] : ShownParts(e.prediction)) {
      binds.Set(std::string(name), share);
    }
  }
  json.Set("binds", std::move(binds));
  // What decisions and neighbours are to be compared with.
  json.Set("unshared_step_time_s", StepTimeJson(e.own.step_time));
  if (e.nearest_score) {
    Json nearest = ScoreJson(*e.nearest_score);
    nearest.Set("strategy", ToString(*e.nearest));
    json.Set("nearest_uniform", std::move(nearest));
  }
  json.Set("decisions", Json::ArrayOf(e.decisions, [](const Decision& d) {
             return Json::Object(
                 {{"decision", d.name},
                  {"chosen", d.chosen},
                  {"alternatives",
                   Json::ArrayOf(d.alternatives,
                                 [](const Alternative& a) {
                                   Json other =
                                       Json::Object({{"choice", a.choice},
                                                     {"with", a.with}});
                                   other.Extend(ScoreJson(a.score));
                                   return other.Set("strategy",
                                                    ToString(a.strategy));
                                 })},
                  {"invalid", d.invalid}});
           }));
  json.Set("neighbours", Json::ArrayOf(e.neighbours, [&](const Neighbour& n) {
             Json other = Json::Object(
                 {{"move", n.move->name}, {"candidates", n.candidates}});
             other.Extend(ScoreJson(ScoreOf(n.evaluation)));
             return other.Set("changes", ChangesJson(n.changes));
           }));
  return json;
}

// What alternatives to a plan are of: the devices that it uses, unless these do
// not reach each other without the others.
struct Used {
  Cluster cluster;
  Plan plan;  // on it
  bool all = true;
};
Used UsedBy(const Cluster& cluster, const Plan& plan) {
  auto part = UsedPartOf(cluster, plan);
  if (!part) return {cluster, plan};
  Cluster alone = OnlyDevices(cluster, UsedDevices(cluster, plan));
  if (!Validate(alone).empty()) return {cluster, plan};
  return {std::move(alone), std::move(part->plan), /*all=*/false};
}

Result<int> PrintSettings(const Options& options, const Inputs& inputs,
                          const Plan& plan) {
  for (const std::string_view flag : {"--time-limit", "--threads", "--seed"}) {
    if (options.Given(flag)) {
      return InvalidInput("does nothing beside --as", std::string(flag));
    }
  }
  const GraphIndex index(inputs.graph);
  TESSERA_TRY(const TrainerSettings settings,
              SettingsOf(options.trainer, index, inputs.cluster, plan,
                         options.training));
  if (options.json) {
    std::cout << Json::Object(
                     {{"trainer", options.trainer},
                      {"devices", World(plan).devices.size()},
                      {"settings", settings.settings},
                      {"notes", Json::ArrayOf(settings.notes,
                                              [](const std::string& note) {
                                                return Json(note);
                                              })}})
                     .ToString()
              << "\n";
    return 0;
  }
  std::cout << settings.text << "\n" << std::flush;
  for (const std::string& note : settings.notes) {
    std::cerr << "tessera: note: " << note << "\n";
  }
  return 0;
}

Result<int> ExitCodeOf(const Explanation& e, bool interrupted) {
  if (interrupted) {
    return Error{ErrorCode::kInterrupted, "interrupted; what was done is above",
                 "explain"};
  }
  if (e.prediction.evaluation.feasible()) return 0;
  return Error{
      ErrorCode::kInfeasible,
      "the plan cannot run: " + e.prediction.evaluation.violations.front(),
      "explain"};
}

// Adds the decisions of the nearest uniform plan until `stop`. Each is said as
// soon as it is there.
void AddDecisions(const SearchSpace& space, const Evaluator& evaluator,
                  int threads, const std::function<bool()>& stop,
                  const std::function<void(const std::string&)>& say,
                  Explanation& e) {
  const auto score =
      evaluator.EvaluateUniform(space.index, *space.cluster, *e.nearest);
  if (score && !(*score == e.own)) e.nearest_score = score;
  const Score uniform = score.value_or(e.own);
  e.decisions =
      DecisionsOf(space, evaluator, *e.nearest, threads, stop,
                  [&, first = true](const Decision& decision) mutable {
                    if (std::exchange(first, false)) say(DecisionsHeading(e));
                    say("  " + Wrap(DecisionText(decision, uniform), 4) + "\n");
                  });
  e.complete = !stop();
}

// Says why the plan is as it is, what else would cost, and where moves lead.
Result<int> ExplainPlan(const Options& options, Inputs& inputs, Plan plan) {
  const Used used = UsedBy(inputs.cluster, plan);
  WarnOfIdleCollective(plan, options.training, inputs);
  PrintWarnings(inputs);
  const SearchSpace space(inputs.graph, used.cluster);
  const Evaluator evaluator(inputs.graph, used.cluster,
                            inputs.profile_or_null(), options.training);
  const std::atomic<bool>& interrupted = CatchInterrupts();
  const double limit = options.time_limit_s.value_or(kDefaultSearchTime);
  auto start = std::chrono::steady_clock::now();
  const auto ended = [&](double share) {
    const std::chrono::duration<double> passed =
        std::chrono::steady_clock::now() - start;
    return interrupted || passed.count() >= share * limit;
  };
  // Each part as soon as it is there.
  const auto say = [&](const std::string& text) {
    if (!options.json) std::cout << text << std::flush;
  };
  NameAxes(space.index, plan);

  Explanation e;
  e.alone = !used.all;
  e.name = TextbookName(space, used.plan);
  e.strategy = StrategyText(space.index, inputs.cluster, plan);
  say(Wrap(e.name, 2) + "\n\n" + Describe(inputs.graph, inputs.cluster, plan) +
      "\n");
  PredictOptions predict;
  predict.training = options.training;
  predict.profile = inputs.profile_or_null();
  e.prediction = Predict(CaseOf(inputs, space.index), plan, predict);
  say(BindsText(e.prediction));
  // The limit is that of the alternatives.
  start = std::chrono::steady_clock::now();
  e.own = ScoreOf(evaluator.Evaluate(used.plan));
  e.nearest = NearestStrategy(space, used.plan);
  if (e.nearest) {
    AddDecisions(
        space, evaluator, ThreadCount(options.threads),
        [&] { return ended(kDecisionsEnd); }, say, e);
  } else {
    const int stages = StagesOf(inputs.graph, used.plan).count();
    say("\n" + Wrap(NothingNearText(stages), 0) + "\n");
  }
  // Some plans that run are no state of the search.
  Plan canonical = used.plan;
  if (MakeCanonical(space, canonical) && SameUpToNames(canonical, used.plan)) {
    const auto stop = [&] { return ended(1); };
    e.neighbours =
        NeighboursOf(space, evaluator, used.plan, kDraws, options.seed, stop);
    e.complete = e.complete && !stop();
    say(NeighboursText(e));
  }
  say(EndText(e, interrupted));
  if (options.json) {
    std::cout << ExplainJson(inputs, plan, e).ToString() << "\n";
  }
  return ExitCodeOf(e, interrupted);
}

}  // namespace

Result<int> RunExplain(const Options& options) {
  if (options.proposals && !options.which_strategy) {
    return InvalidInput("is of the search of --which-strategy", "--proposals");
  }
  if (options.which_strategy && options.Given("--as")) {
    return InvalidInput("is not for --which-strategy", "--as");
  }
  TESSERA_TRY(Inputs inputs, ReadInputs(options));
  if (!options.Given("--as")) PrintWarning(FewerCoresText(options, inputs));
  if (options.which_strategy) {
    PrintWarnings(inputs);
    return ExplainWhichStrategy(options, inputs);
  }
  TESSERA_TRY(Plan plan, PlanOrDataParallel(inputs));
  WarnOfIdle(plan, inputs);
  if (options.Given("--as")) {
    PrintWarnings(inputs);
    return PrintSettings(options, inputs, plan);
  }
  return ExplainPlan(options, inputs, std::move(plan));
}

}  // namespace tessera
