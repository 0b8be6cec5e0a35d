#pragma once
// A grid of cases: every combination of the values of some axes, each
// predicted on its own.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "costmodel/whatif/predict.h"
#include "costmodel/whatif/replan.h"
#include "costmodel/whatif/scenario.h"

namespace tessera {

struct GridOptions {
  PredictOptions predict;
  // Each cell's best plan instead of the scenario's strategy.
  std::optional<ReplanOptions> replan;
  // Of the scenario without settings; where it is valid for a cell, and uses
  // the devices that were added, it is the cell's plan.
  const Plan* plan = nullptr;
  bool keep_plans = false;  // in the cells
  int threads = 1;
};

struct Cell {
  std::vector<std::string> values;  // one for each axis
  bool done = false;
  std::string problem;     // why there is no prediction; empty if there is one
  std::string wrong_path;  // of a setting whose value is wrong here; or empty
  std::optional<Prediction> prediction;
  std::vector<std::string> notes;
  // The plan that is predicted and its graph, where they are kept.
  std::optional<Plan> plan;
  std::shared_ptr<const Graph> graph;
  std::string plan_file;  // where the plan was written; empty: nowhere
};

// What each scenario predicts, in their order, with the scenarios' cells empty
// of values; once options.predict.watch stops, cells stay undone. An error
// where the setting of the only one is wrong; else that is the cell's problem.
// The same input gives the same cells on any number of threads.
Result<std::vector<Cell>> RunScenarios(const std::vector<Scenario>& scenarios,
                                       const GridOptions& options,
                                       ModelCache& models);

// A scenario for every combination, in row-major order: the last axis runs
// fastest.
Result<std::vector<Cell>> RunGrid(const Scenario& scenario,
                                  const std::vector<Axis>& axes,
                                  const GridOptions& options,
                                  ModelCache& models);

// A plan for the case, by `options`. kInfeasible where there is none.
Result<Plan> PlanForCell(Case& of, const GridOptions& options);

}  // namespace tessera
