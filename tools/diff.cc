// `tessera diff`: two plans side by side.

#include <iostream>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/predict.h"
#include "planner/base/format.h"
#include "planner/plan/strategy.h"
#include "planner/search/explain.h"
#include "tools/explain_output.h"
#include "tools/inputs.h"
#include "tools/step_report.h"
#include "tools/text.h"
#include "tools/verb.h"

namespace tessera {

namespace {

struct Side {
  std::string path;
  Plan plan;
  Evaluation evaluation;
  MemoryUse memory;  // of the fullest device
};

Result<Side> ReadSide(const Options& options, Inputs& inputs,
                      const Evaluator& evaluator, size_t number) {
  Side side;
  side.path = options.positional[number];
  TESSERA_TRY(side.plan, ReadPlanFor(side.path, inputs.graph, inputs.cluster,
                                     inputs.warnings));
  side.evaluation = evaluator.Explain(side.plan);
  side.memory = FullestOf(inputs.cluster, side.plan, side.evaluation).use;
  return side;
}

std::string CostTable(const Side& a, const Side& b) {
  std::vector<std::vector<std::string>> rows = {{"cost", "a", "b", "b to a"}};
  const auto add = [&](std::string_view name, double x, double y, auto format) {
    if (x == 0 && y == 0) return;
    rows.push_back({std::string(name), format(x), format(y),
                    x == 0 ? "-" : ChangeText(y, x)});
  };
  const auto time = [](double seconds) { return FormatTime(seconds); };
  const auto bytes = [](double value) {
    return FormatBytes({static_cast<int64_t>(value)});
  };
  add("step time", a.evaluation.step_time.seconds(),
      b.evaluation.step_time.seconds(), time);
  const auto a_parts = PartsOf(a.evaluation.breakdown);
  const auto b_parts = PartsOf(b.evaluation.breakdown);
  for (size_t i = 0; i < a_parts.size(); ++i) {
    add(a_parts[i].name, a_parts[i].time.seconds(), b_parts[i].time.seconds(),
        time);
  }
  add("memory", static_cast<double>(a.memory.total.value),
      static_cast<double>(b.memory.total.value), bytes);
  const auto a_memory = MemoryParts(a.memory);
  const auto b_memory = MemoryParts(b.memory);
  for (size_t i = 0; i < a_memory.size(); ++i) {
    add(a_memory[i].name, static_cast<double>(a_memory[i].bytes.value),
        static_cast<double>(b_memory[i].bytes.value), bytes);
  }
  return FormatTable(rows);
}

Json SideJson(const Inputs& inputs, const SearchSpace& space,
              const Side& side) {
  return Json::Object(
      {{"plan_file", side.path},
       {"name", TextbookName(space, side.plan)},
       {"strategy", StrategyText(space.index, inputs.cluster, side.plan)},
       {"step_time_s", StepTimeJson(side.evaluation.step_time)},
       {"breakdown", BreakdownJson(side.evaluation.breakdown)},
       {"memory", MemoryJson(side.memory)},
       {"feasible", side.evaluation.feasible()}});
}

}  // namespace

Result<int> RunDiff(const Options& options) {
  if (options.positional.size() != 2) {
    return InvalidInput("needs two plan files, A and B", "diff");
  }
  TESSERA_TRY(Inputs inputs, ReadInputs(options));
  const Evaluator evaluator(inputs.graph, inputs.cluster,
                            inputs.profile_or_null(), options.training);
  const SearchSpace space(inputs.graph, inputs.cluster);
  TESSERA_TRY(const Side a, ReadSide(options, inputs, evaluator, 0));
  TESSERA_TRY(const Side b, ReadSide(options, inputs, evaluator, 1));
  for (const Side* side : {&a, &b}) WarnOfIdle(side->plan, inputs, side->path);
  PrintWarnings(inputs);
  const bool equal = SameUpToNames(a.plan, b.plan);
  const auto changes = NamedChanges(space, a.plan, b.plan);
  if (options.json) {
    std::cout << Json::Object({{"a", SideJson(inputs, space, a)},
                               {"b", SideJson(inputs, space, b)},
                               {"equal", equal},
                               {"changes", ChangesJson(changes)}})
                     .ToString()
              << "\n";
    return 0;
  }
  for (const auto& [name, side] : {std::pair("a", &a), std::pair("b", &b)}) {
    std::cout << name << ": " << side->path << "\n   "
              << Wrap(TextbookName(space, side->plan), 3) << "\n   "
              << StrategyText(space.index, inputs.cluster, side->plan) << "\n";
    for (const std::string& violation : side->evaluation.violations) {
      std::cout << "   cannot run: " << violation << "\n";
    }
  }
  std::cout << "\n";
  for (const PlanDifference& change : changes) {
    std::cout << change.what << "\n  a: " << Wrap(change.from, 5)
              << "\n  b: " << Wrap(change.to, 5) << "\n";
  }
  if (changes.empty()) {
    std::cout << (equal ? "the plans are equal\n"
                        : "the plans differ in nothing that has a name\n");
  }
  std::cout << "\n" << CostTable(a, b);
  return 0;
}

}  // namespace tessera
