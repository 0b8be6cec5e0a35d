#include <iostream>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/simulate/simulator.h"
#include "planner/base/file.h"
#include "planner/io/plan_io.h"
#include "planner/io/timeline_io.h"
#include "planner/lower/lower.h"
#include "tools/inputs.h"
#include "tools/json.h"
#include "tools/step_report.h"
#include "tools/trace.h"
#include "tools/verb.h"

namespace tessera {

Result<int> RunSimulate(const Options& options) {
  if (!options.trace.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckWritable(options.trace, "--trace"));
  }
  if (!options.output.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckProtoOutput(options.output));
  }
  if (!options.plan_output.empty()) {
    TESSERA_RETURN_IF_ERROR(
        CheckProtoOutput(options.plan_output, "--plan-out"));
  }
  TESSERA_TRY(Inputs inputs, ReadInputs(options));
  TESSERA_TRY(const Plan plan, PlanOrDataParallel(inputs));
  WarnOfIdle(plan, inputs);
  WarnOfIdleCollective(plan, options.training, inputs);
  PrintWarnings(inputs);

  const Evaluator evaluator(inputs.graph, inputs.cluster,
                            inputs.profile_or_null(), options.training);
  Evaluation step;
  if (options.trace.empty() && options.output.empty()) {
    step = evaluator.Explain(plan);
  } else {
    const TaskGraph tasks =
        Lower(inputs.graph, inputs.cluster, plan, options.training);
    const Timeline timeline = Simulate(evaluator.pricer(), tasks);
    step = evaluator.Explain(plan, tasks, timeline);
    if (!options.trace.empty()) {
      TESSERA_RETURN_IF_ERROR(WriteFileAtomically(
          options.trace,
          ChromeTrace(tasks, inputs.graph, inputs.cluster, timeline)));
    }
    if (!options.output.empty()) {
      TESSERA_RETURN_IF_ERROR(
          WriteTimeline(options.output, tasks, inputs.graph, timeline));
    }
  }
  if (step.feasible()) {
    PrintWarning(FewerCoresText(options, inputs));
    PrintWarning(UnmeasuredText(step.sources, inputs));
  }
  if (!options.plan_output.empty()) {
    TESSERA_RETURN_IF_ERROR(WritePlan(options.plan_output, inputs.graph, plan));
  }
  if (options.json) {
    Json json = StepJson(inputs.graph, inputs.cluster, plan, step);
    json.Set("strategy",
             StrategyText(GraphIndex(inputs.graph), inputs.cluster, plan));
    if (!options.plan_output.empty()) {
      json.Set("plan_file", options.plan_output);
    }
    std::cout << json.ToString() << "\n";
  } else {
    std::cout << StepText(inputs.graph, inputs.cluster, plan, step);
    if (!options.trace.empty()) {
      std::cout << "  trace: " << options.trace
                << " (open it in ui.perfetto.dev)\n";
    }
    if (!options.output.empty()) {
      std::cout << "  timeline: " << options.output << "\n";
    }
    if (!options.plan_output.empty()) {
      std::cout << "  plan: " << options.plan_output << "\n";
    }
  }
  if (step.feasible()) return 0;
  return Error{ErrorCode::kInfeasible,
               "the plan cannot run: " + step.violations.front(), "simulate"};
}

}  // namespace tessera
