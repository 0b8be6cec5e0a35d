#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>

#include "costmodel/collective/collective.h"
#include "costmodel/whatif/grid.h"
#include "costmodel/whatif/jitter.h"
#include "costmodel/whatif/questions.h"
#include "planner/base/append.h"
#include "planner/base/file.h"
#include "planner/base/threads.h"
#include "planner/io/cluster_io.h"
#include "planner/io/plan_io.h"
#include "planner/topology/stacks.h"
#include "tools/inputs.h"
#include "tools/interrupt.h"
#include "tools/progress_line.h"
#include "tools/text.h"
#include "tools/verb.h"
#include "tools/whatif_output.h"
#include "tools/whatif_report.h"

namespace tessera {
namespace {

std::vector<std::string> Words(const std::string& text) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : text + ",") {
    if (c != ',') {
      word += c;
      continue;
    }
    if (!word.empty()) words.push_back(word);
    word.clear();
  }
  return words;
}

bool Has(const std::vector<Setting>& settings, const std::string& path) {
  return std::ranges::any_of(settings, [&](const Setting& setting) {
    return FilePathOf(setting.path) == FilePathOf(path);
  });
}

bool IsOfStrategy(const std::string& path) {
  return path.starts_with("strategy.");
}

// A plan has its strategy. Only where it is made anew, as on other devices,
// would another be heeded.
Result<void> CheckBesidePlan(const Options& options, const std::string& flag,
                             const std::string& path) {
  if (options.plan.empty() || !IsOfStrategy(path)) return {};
  return InvalidInput(
      "has no effect on the plan of --plan: give its strategy by --strategy "
      "instead",
      flag + " " + path);
}

Result<Scenario> ScenarioOf(const Options& options) {
  Scenario scenario;
  scenario.model = options.model;
  TESSERA_RETURN_IF_ERROR(CheckModelReadable(options.model));
  TESSERA_RETURN_IF_ERROR(CheckLength(options));
  scenario.cluster = options.cluster;
  const std::vector<std::string> offers = Words(options.cheapest);
  if (scenario.cluster.empty() && !offers.empty()) {
    scenario.cluster = offers.front();
  }
  if (scenario.cluster.empty()) {
    return InvalidInput("needs --cluster NAME[:NODES[xGPUS]]|FILE", "whatif");
  }
  scenario.global_batch = options.global_batch;
  scenario.seq_len = options.seq_len;
  scenario.dtype = options.dtype;
  scenario.end_of_text = options.end_of_text;
  if (!options.stack.empty()) {
    auto stack = ParseStack(options.stack);
    if (!stack) return stack.error().At("--stack");
    scenario.stack = *std::move(stack);
  }
  scenario.strategy = options.strategy;
  if (!options.collective.empty()) {
    if (auto choice = ParseCollectiveChoice(options.collective); !choice) {
      return choice.error().At("--collective");
    }
    scenario.settings.push_back({"collective", options.collective});
  }
  for (const std::string& text : options.set) {
    auto setting = ParseSetting(text);
    if (!setting) return setting.error().At("--set");
    if (Has(scenario.settings, setting->path)) {
      return InvalidInput("given twice", "--set " + setting->path);
    }
    TESSERA_RETURN_IF_ERROR(CheckBesidePlan(options, "--set", setting->path));
    scenario.settings.push_back(*std::move(setting));
  }
  scenario.failed = options.fail;
  // Over many strategies and clusters, and on what failures leave, keys are
  // those of the whole.
  scenario.drops_idle_keys = !options.vary.empty() || !options.fail.empty() ||
                             options.scaling_limit > 0 || offers.size() > 1;
  for (const std::string& text : options.slow) {
    auto setting = ParseSetting(text);
    if (!setting) return setting.error().At("--slow");
    if (Has(scenario.slow, setting->path)) {
      return InvalidInput("given twice", "--slow " + setting->path);
    }
    if (std::ranges::find(options.fail, setting->path) != options.fail.end()) {
      return InvalidInput("has failed (--fail)", "--slow " + setting->path);
    }
    scenario.slow.push_back(*std::move(setting));
  }
  // An axis may give what a key needs.
  const bool completed = std::ranges::any_of(options.vary, IsOfStrategy);
  if (scenario.strategy && !completed) {
    auto strategy = ParseStrategy(*scenario.strategy);
    if (!strategy) return strategy.error().At("--strategy");
  }
  return scenario;
}

Result<std::vector<Axis>> AxesOf(const Options& options,
                                 const Scenario& scenario) {
  std::vector<Axis> axes;
  for (const std::string& text : options.vary) {
    auto axis = ParseAxis(text);
    if (!axis) return axis.error().At("--vary");
    const bool known = std::ranges::any_of(axes, [&](const Axis& other) {
      return FilePathOf(other.path) == FilePathOf(axis->path);
    });
    if (known) return InvalidInput("given twice", "--vary " + axis->path);
    if (Has(scenario.settings, axis->path)) {
      return InvalidInput("has a value already (--set)",
                          "--vary " + axis->path);
    }
    if (axis->path == "stack" && scenario.stack) {
      return InvalidInput("has a value already (--stack)", "--vary stack");
    }
    TESSERA_RETURN_IF_ERROR(CheckBesidePlan(options, "--vary", axis->path));
    if (options.replan && IsOfStrategy(axis->path)) {
      return InvalidInput("has no effect with --replan, which plans each cell",
                          "--vary " + axis->path);
    }
    axes.push_back(*std::move(axis));
  }
  return axes;
}

constexpr size_t kMostCells = 10000;

// The plan of --plan, and where it is uniform its strategy, whose dp follows
// the devices of a cell.
Result<std::optional<Plan>> ReadGridPlan(const Options& options,
                                         Scenario& scenario,
                                         ModelCache& models) {
  if (options.plan.empty()) return std::optional<Plan>();
  if (options.strategy) {
    return InvalidInput("give a plan or a strategy, not both", "--strategy");
  }
  Scenario plain = scenario;
  plain.failed.clear();
  plain.slow.clear();
  TESSERA_TRY(const Case base, MakeCase(plain, models));
  TESSERA_TRY(Plan plan, ReadPlan(options.plan, *base.graph));
  const std::vector<Error> errors = Validate(*base.graph, base.cluster, plan);
  if (!errors.empty()) return errors.front().At(options.plan);
  // As it is given for this cluster, it may leave devices of it idle.
  plan.cluster_name = base.cluster.name;
  if (auto strategy = UniformStrategy(*base.index, base.cluster, plan)) {
    scenario.strategy = FlagTextOf(*strategy);
  }
  return std::optional(std::move(plan));
}

int QuestionsOf(const Options& options) {
  return (options.scaling_limit > 0 ? 1 : 0) +
         (options.cheapest.empty() ? 0 : 1) + (options.fit ? 1 : 0);
}

Result<void> CheckCsv(const Options& options) {
  if (options.json && options.csv) {
    return InvalidInput("give --json or --csv, not both", "--csv");
  }
  const int questions = QuestionsOf(options);
  if (options.csv && questions + (options.vary.empty() ? 0 : 1) > 1) {
    return InvalidInput(
        "prints one table: expected one of --vary, --scaling-limit, "
        "--cheapest and --fit",
        "--csv");
  }
  if (options.csv && (options.jitter > 0 || options.sensitivity)) {
    return InvalidInput("does not have --jitter and --sensitivity; --json has",
                        "--csv");
  }
  return {};
}

// That each flag has what it is of.
Result<void> CheckNeeds(const Options& options) {
  const int questions = QuestionsOf(options);
  if (options.Given("--samples") && options.jitter == 0) {
    return InvalidInput("needs --jitter SHARE", "--samples");
  }
  if (options.scaling_limit > 0 && !options.fail.empty()) {
    return InvalidInput(
        "names a part of one cluster, and --scaling-limit asks of clusters of "
        "many sizes",
        "--fail");
  }
  // Whether it fits says nothing of what comes beside the step.
  for (const std::string_view flag : {"--restart", "--checkpoint-every"}) {
    if (options.fit && questions == 1 && options.vary.empty() &&
        options.Given(flag)) {
      return InvalidInput("has no effect on --fit alone", std::string(flag));
    }
  }
  if (options.Given("--scaling") && options.scaling_limit == 0) {
    return InvalidInput("needs --scaling-limit SHARE", "--scaling");
  }
  for (const std::string_view flag : {"--proposals", "--time-limit"}) {
    if (options.Given(flag) && !options.replan && options.cheapest.empty()) {
      return InvalidInput("needs --replan", std::string(flag));
    }
  }
  if (options.time_limit_s && *options.time_limit_s <= 0) {
    return InvalidInput("expected a time above 0", "--time-limit");
  }
  if (!options.cheapest.empty() && options.tokens == 0) {
    return InvalidInput("needs --tokens N", "--cheapest");
  }
  // Nothing but the question: the offers stand in for a cluster. A plan is
  // checked on it.
  const bool offers_alone = !options.cheapest.empty() && questions == 1 &&
                            options.vary.empty() && options.jitter == 0 &&
                            options.plan.empty();
  if (offers_alone && !options.cluster.empty()) {
    return InvalidInput(
        "has no effect: the clusters are those of --cheapest (unless there is "
        "another question, --vary, --jitter or --plan)",
        "--cluster");
  }
  if (options.days > 0 && options.cheapest.empty()) {
    return InvalidInput("needs --cheapest CLUSTER,CLUSTER", "--days");
  }
  return {};
}

Result<void> CheckOutputs(const Options& options) {
  if (!options.plan_output.empty()) {
    if (QuestionsOf(options) > 0 && options.vary.empty()) {
      return InvalidInput(
          "a question has many plans; give --vary, or no "
          "question",
          "--plan-out");
    }
    TESSERA_RETURN_IF_ERROR(
        CheckProtoOutput(options.plan_output, "--plan-out"));
  }
  if (options.output.empty()) return {};
  if (!options.output.ends_with(".html")) {
    return InvalidInput("'" + options.output + "' does not end in .html", "-o");
  }
  return CheckReplaceable(options.output, "-o");
}

// Where the plan of cell `i` goes: of the only cell to --plan-out, of cell 3 of
// many to "plan-3.json".
std::string PlanFile(const Options& options, size_t i, size_t cells) {
  if (cells == 1) return options.plan_output;
  std::filesystem::path file(options.plan_output);
  file.replace_filename(file.stem().string() + "-" + std::to_string(i + 1) +
                        file.extension().string());
  return file.string();
}

// That each can be written, and is no file of another flag.
Result<void> CheckPlanFiles(const Options& options, size_t cells) {
  if (options.plan_output.empty() || cells == 1) return {};
  for (size_t i = 0; i < cells; ++i) {
    Options own = options;
    own.plan_output = PlanFile(options, i, cells);
    TESSERA_RETURN_IF_ERROR(CheckProtoOutput(own.plan_output, "--plan-out"));
    TESSERA_RETURN_IF_ERROR(CheckPathsDiffer(own, /*writes_plan=*/false));
    std::error_code code;
    if (!options.plan.empty() &&
        std::filesystem::equivalent(own.plan_output, options.plan, code)) {
      return InvalidInput("'" + own.plan_output + "' is --plan too",
                          "--plan-out");
    }
  }
  return {};
}

// Writes the plan of each cell that has one, and says where in the cells.
Result<void> WritePlans(const Options& options, std::vector<Cell>& cells) {
  for (size_t i = 0; i < cells.size(); ++i) {
    Cell& cell = cells[i];
    if (!cell.plan) continue;
    const std::string file = PlanFile(options, i, cells.size());
    TESSERA_RETURN_IF_ERROR(WritePlan(file, *cell.graph, *cell.plan));
    cell.plan_file = file;
  }
  return {};
}

std::string PlanFilesText(const std::vector<Cell>& cells) {
  std::vector<std::string> files;
  for (const Cell& cell : cells) {
    if (!cell.plan_file.empty()) files.push_back(cell.plan_file);
  }
  if (files.empty()) return "";
  return files.size() == 1
             ? "  plan: " + files[0] + "\n"
             : "  plans of " + std::to_string(files.size()) +
                   " rows: " + files.front() + " to " + files.back() + "\n";
}

// What cannot be laid out is an answer in a cell of many. Where there is
// nothing else it is bad input.
Error AsInput(Error error) {
  if (error.code == ErrorCode::kInfeasible) {
    return InvalidInput(error.message, "whatif");
  }
  return error;
}

// Whether none of the cells runs, nor does any not fit.
bool NoneLaidOut(const std::vector<const Cell*>& cells) {
  return std::ranges::all_of(
      cells, [](const Cell* cell) { return cell->done && !cell->prediction; });
}

// "nodes=4, dtype=bf16"; empty where there are no axes.
std::string CellLabel(const std::vector<Axis>& axes, const Cell& cell) {
  std::string label;
  for (size_t a = 0; a < axes.size(); ++a) {
    AppendTo(label, ", ", axes[a].path + "=" + cell.values[a]);
  }
  return label;
}

// The problem of the first of `cells`, none of which `can`.
std::string FirstProblem(const std::vector<Axis>& axes,
                         const std::vector<Cell>& cells,
                         const std::string& can) {
  const Cell& first = cells.front();
  std::string text = CellLabel(axes, first);
  if (!text.empty()) text += ": ";
  text += ProblemText(first);
  if (cells.size() == 1) return text;
  return "none of the " + std::to_string(cells.size()) + " cells can " + can +
         "; " + text;
}

// Of cells without failures, in which nothing is restarted.
void NoteIdleRestart(const Options& options, WhatifResult& result) {
  if (!options.Given("--restart")) return;
  const auto look_at = [](Cell& cell) {
    if (!cell.prediction) return;
    const auto& missing = cell.prediction->missing;
    if (std::ranges::find(missing, "device.mtbf") == missing.end()) return;
    cell.notes.emplace_back(
        "--restart has no effect: device.mtbf is not known (--set gives it)");
  };
  std::ranges::for_each(result.cells, look_at);
  if (result.scaling) {
    std::ranges::for_each(result.scaling->points, look_at, &ScalingPoint::cell);
  }
  if (result.cheapest) {
    std::ranges::for_each(result.cheapest->offers, look_at, &Offer::cell);
  }
}

std::string CommandText(const Options& options) {
  std::string text = "tessera";
  for (const std::string& word : options.arguments) {
    text += " " + ShellWord(word);
  }
  return text;
}

// What the command asks about, and with what.
struct Question {
  const Options& options;
  Scenario scenario;
  std::vector<Axis> axes;
  ModelCache& models;
  GridOptions grid;
  ReplanOptions replan;
  bool asks = false;   // more than what a step takes
  bool alone = false;  // one thing, which has no other answer beside it
};

Result<void> CheckCells(const Options& options, const std::vector<Axis>& axes) {
  size_t cells = 1;
  for (const Axis& axis : axes) {
    cells *= axis.values.size();
    if (cells <= kMostCells) continue;
    return InvalidInput(
        "asks for more than " + std::to_string(kMostCells) + " cells",
        "--vary");
  }
  return CheckPlanFiles(options, cells);
}

GridOptions GridOf(const Options& options, const ProfileDb* profile,
                   const Plan* plan, const ReplanOptions& replan,
                   ProgressLine& line) {
  GridOptions grid;
  grid.predict.training = options.training;
  grid.predict.profile = profile;
  grid.predict.fast = options.fast;
  grid.predict.sensitivity = options.sensitivity || !options.fast;
  grid.predict.run = {options.tokens, options.checkpoint_every,
                      options.restart_s};
  grid.predict.watch = {&CatchInterrupts(),
                        [&](const std::string& text) { line.Show(text); }};
  if (options.replan) grid.replan = replan;
  grid.plan = plan;
  grid.keep_plans = !options.plan_output.empty();
  grid.threads = ThreadCount(options.threads);
  return grid;
}

WhatifResult Unanswered(const Question& of) {
  const Options& options = of.options;
  WhatifResult result;
  result.command = CommandText(options);
  result.axes = of.axes;
  result.replanned = options.replan;
  result.sensitivity = options.sensitivity;
  result.tokens = options.tokens;
  result.days = options.days;
  result.scaling_limit = options.scaling_limit;
  result.weak = options.scaling == "weak";
  return result;
}

Result<void> AnswerCells(const Question& of, WhatifResult& result) {
  if (of.asks && of.axes.empty()) return {};
  TESSERA_TRY(result.cells, RunGrid(of.scenario, of.axes, of.grid, of.models));
  // Nothing runs: the first reason is the answer.
  std::vector<const Cell*> all;
  for (const Cell& cell : result.cells) all.push_back(&cell);
  if (NoneLaidOut(all)) {
    return InvalidInput(FirstProblem(of.axes, result.cells, "be laid out"),
                        "whatif");
  }
  return {};
}

Result<void> AnswerJitter(const Question& of, WhatifResult& result) {
  if (of.options.jitter == 0) return {};
  auto base = MakeCase(of.scenario, of.models);
  if (!base) return AsInput(base.error());
  const auto shaken = PlanForCell(*base, of.grid);
  if (!shaken) return AsInput(shaken.error());
  result.jitter =
      JitterOf(*base, *shaken, of.grid.predict,
               {of.options.jitter, of.options.samples, of.options.seed});
  return {};
}

Result<void> AnswerScaling(const Question& of, WhatifResult& result) {
  if (of.options.scaling_limit == 0) return {};
  auto scaling =
      ScalingOf(of.scenario,
                {.efficiency = of.options.scaling_limit, .weak = result.weak},
                of.grid, of.models);
  if (!scaling) return AsInput(scaling.error());
  const auto& points = scaling->points;
  if (of.alone && !points.empty() && NoneLaidOut({&points.front().cell})) {
    return InvalidInput(points.front().cell.problem, "whatif");
  }
  result.scaling = *std::move(scaling);
  return {};
}

// That one of them is laid out, and that none lacks but a price; as far as that
// is known where it was interrupted.
Result<void> CheckOffers(const Cheapest& cheapest) {
  const std::vector<Offer>& offers = cheapest.offers;
  const auto refused = [](const Offer& offer) {
    return InvalidInput(offer.cluster + ": " + offer.refused, "whatif");
  };
  std::vector<const Cell*> all;
  for (const Offer& offer : offers) all.push_back(&offer.cell);
  if (NoneLaidOut(all)) return refused(offers.front());
  const auto is_done = [](const Offer& offer) { return offer.cell.done; };
  if (cheapest.best || !std::ranges::all_of(offers, is_done)) return {};
  const auto unpriced = std::ranges::find_if(offers, [](const Offer& offer) {
    return GoodPrediction(offer.cell) && !offer.cell.prediction->run->usd;
  });
  if (unpriced != offers.end()) return refused(*unpriced);
  return {};
}

Result<void> AnswerCheapest(const Question& of, WhatifResult& result) {
  const Options& options = of.options;
  if (options.cheapest.empty()) return {};
  GridOptions own = of.grid;
  const bool has_strategy =
      options.strategy ||
      std::ranges::any_of(of.scenario.settings, IsOfStrategy, &Setting::path);
  if (!has_strategy && options.plan.empty()) own.replan = of.replan;
  TESSERA_TRY(Cheapest cheapest,
              CheapestOf(of.scenario, Words(options.cheapest), options.days,
                         own, of.models));
  if (of.alone) TESSERA_RETURN_IF_ERROR(CheckOffers(cheapest));
  result.cheapest = std::move(cheapest);
  return {};
}

Result<void> AnswerFit(const Question& of, WhatifResult& result) {
  if (!of.options.fit) return {};
  auto base = MakeCase(of.scenario, of.models);
  if (!base) return AsInput(base.error());
  auto fit = FitOf(*std::move(base), of.grid);
  if (!fit) return AsInput(fit.error());
  result.fit = *std::move(fit);
  return {};
}

// Whether a question that comes behind others or cells can be answered, as far
// as that is known before.
Result<void> CheckQuestions(const Question& of) {
  const Options& options = of.options;
  for (const std::string& cluster : Words(options.cheapest)) {
    if (auto found = LoadCluster(cluster); !found) {
      return found.error().At("cluster");
    }
  }
  const bool of_plan = options.jitter > 0 || options.fit;
  if (of.alone || (!of_plan && options.scaling_limit == 0)) return {};
  auto base = MakeCase(of.scenario, of.models);
  if (!base) return AsInput(base.error());
  if (!of_plan || options.replan) return {};
  const auto plan = PlanForCell(*base, of.grid);
  return plan ? Result<void>() : AsInput(plan.error());
}

// Whether anything is done: what was interrupted may have nothing that is.
bool HasAnswer(const WhatifResult& result) {
  const auto any_done = [](const std::vector<Offer>& offers) {
    return std::ranges::any_of(
        offers, [](const Offer& offer) { return offer.cell.done; });
  };
  return std::ranges::any_of(result.cells, &Cell::done) || result.jitter ||
         (result.scaling && !result.scaling->points.empty()) ||
         (result.cheapest && any_done(result.cheapest->offers)) || result.fit;
}

Error InterruptedError(const WhatifResult& result) {
  return {ErrorCode::kInterrupted,
          HasAnswer(result) ? "interrupted; what was done is above"
                            : "interrupted before there was an answer",
          "whatif"};
}

// All answers up to the first that is an error.
Result<void> Answer(const Question& of, WhatifResult& result) {
  TESSERA_RETURN_IF_ERROR(AnswerJitter(of, result));
  TESSERA_RETURN_IF_ERROR(AnswerScaling(of, result));
  TESSERA_RETURN_IF_ERROR(AnswerCheapest(of, result));
  return AnswerFit(of, result);
}

// What the answers are about.
void Name(const Question& of, WhatifResult& result) {
  // Parts that fail or are slow may be in larger cells alone.
  Scenario plain = of.scenario;
  plain.failed.clear();
  plain.slow.clear();
  const auto base = MakeCase(plain, of.models);
  // An axis may give what it takes to make it.
  result.model = base ? base->graph->name : of.scenario.model;
  // Offers stand in for a cluster.
  if (!of.options.cheapest.empty() && of.alone) {
    result.cluster = of.options.cheapest;
  } else {
    result.cluster = base ? base->cluster.name : of.scenario.cluster;
  }
}

Result<void> WriteReport(const Options& options, const WhatifResult& result) {
  if (options.output.empty()) return {};
  return WriteFileAtomically(options.output, WhatifReport(result));
}

void Print(const Options& options, const WhatifResult& result,
           bool has_report) {
  if (options.json) {
    std::cout << WhatifJson(result).ToString() << "\n";
    return;
  }
  if (options.csv) {
    // The table has no place for them.
    for (const std::string& note : NoteLines(result)) {
      std::cerr << "tessera: note: " << note << std::endl;
    }
    std::cout << WhatifCsv(result);
    return;
  }
  std::cout << WhatifText(result);
  std::cout << PlanFilesText(result.cells);
  if (has_report) {
    std::cout << "\n  report: " << options.output << "\n";
  }
}

// Whether the answer, which is printed, is one.
Result<void> CheckAnswer(const Question& of, const WhatifResult& result) {
  const auto infeasible = [](std::string why) {
    return Error{ErrorCode::kInfeasible, std::move(why), "whatif"};
  };
  if (result.interrupted) return InterruptedError(result);
  // One plan that does not fit is `simulate`'s answer, too.
  const bool any_runs = std::ranges::any_of(
      result.cells, [](const Cell& cell) { return GoodPrediction(cell); });
  if (!of.asks && !any_runs) {
    const std::string problem = FirstProblem(of.axes, result.cells, "run");
    return infeasible(
        result.cells.size() == 1 ? "the plan cannot run: " + problem : problem);
  }
  if (result.fit && !result.fit->fits) {
    return infeasible("the plan does not fit");
  }
  if (result.scaling && result.scaling->devices == 0) {
    return infeasible("the plan does not run at the start");
  }
  if (result.cheapest && !result.cheapest->best) {
    return infeasible("none of the clusters is an answer");
  }
  return {};
}

}  // namespace

Result<int> RunWhatif(const Options& options) {
  TESSERA_RETURN_IF_ERROR(CheckCsv(options));
  TESSERA_RETURN_IF_ERROR(CheckNeeds(options));
  TESSERA_RETURN_IF_ERROR(CheckOutputs(options));
  TESSERA_TRY(Scenario scenario, ScenarioOf(options));
  TESSERA_TRY(std::vector<Axis> axes, AxesOf(options, scenario));
  TESSERA_RETURN_IF_ERROR(CheckCells(options, axes));
  TESSERA_TRY(const std::optional<ProfileDb> profile,
              ReadProfiles(options.profiles));
  ModelCache models;
  TESSERA_TRY(const std::optional<Plan> plan,
              ReadGridPlan(options, scenario, models));
  ProgressLine line(std::chrono::seconds(10));
  const ReplanOptions replan = {.proposals = options.proposals.value_or(0),
                                .seed = options.seed,
                                .time_limit = options.time_limit_s.value_or(0)};
  const int questions = QuestionsOf(options);
  const bool alone = questions == 1 && axes.empty() && options.jitter == 0;
  const Question asked = {options,
                          std::move(scenario),
                          std::move(axes),
                          models,
                          GridOf(options, profile ? &*profile : nullptr,
                                 plan ? &*plan : nullptr, replan, line),
                          replan,
                          questions > 0,
                          alone};

  WhatifResult result = Unanswered(asked);
  TESSERA_RETURN_IF_ERROR(CheckQuestions(asked));
  TESSERA_RETURN_IF_ERROR(AnswerCells(asked, result));
  // What was computed is told all the same where the rest cannot be, or files
  // cannot be written.
  const Result<void> written = WritePlans(options, result.cells);
  const Result<void> answered = Answer(asked, result);
  result.interrupted = asked.grid.predict.watch.stopped();
  if (!answered && !HasAnswer(result)) return answered.error();
  NoteIdleRestart(options, result);
  Name(asked, result);
  const Result<void> reported = WriteReport(options, result);
  Print(options, result, reported && !options.output.empty());
  TESSERA_RETURN_IF_ERROR(answered);
  TESSERA_RETURN_IF_ERROR(written);
  TESSERA_RETURN_IF_ERROR(reported);
  TESSERA_RETURN_IF_ERROR(CheckAnswer(asked, result));
  return 0;
}

}  // namespace tessera
