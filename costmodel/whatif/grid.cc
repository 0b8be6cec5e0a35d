#include "costmodel/whatif/grid.h"

#include <algorithm>
#include <atomic>

#include "costmodel/whatif/idle_collective.h"
#include "costmodel/whatif/rent.h"
#include "planner/base/threads.h"
#include "planner/plan/stages.h"
#include "planner/plan/used_part.h"
#include "planner/plan/validate.h"
#include "planner/search/explain.h"
#include "planner/search/search_space.h"

namespace tessera {
namespace {

std::vector<std::vector<std::string>> Products(const std::vector<Axis>& axes) {
  std::vector<std::vector<std::string>> products(1);
  for (const Axis& axis : axes) {
    std::vector<std::vector<std::string>> longer;
    for (const auto& product : products) {
      for (const std::string& value : axis.values) {
        longer.push_back(product);
        longer.back().push_back(value);
      }
    }
    products = std::move(longer);
  }
  return products;
}

Result<void> RunCell(const Scenario& scenario, const GridOptions& options,
                     ModelCache& models, Cell& cell) {
  TESSERA_TRY(Case made, MakeCase(scenario, models));
  TESSERA_TRY(Plan plan, PlanForCell(made, options));
  cell.prediction = Predict(made, plan, options.predict);
  if (options.replan && !StrategyOnPart(*made.index, made.cluster, plan)) {
    cell.prediction->plan_name =
        TextbookName(SearchSpace(*made.graph, made.cluster), plan);
  }
  cell.notes = std::move(made.notes);
  if (std::string parts =
          PartsOfInstancesNote(made.left ? *made.left : made.cluster);
      !parts.empty()) {
    cell.notes.push_back(std::move(parts));
  }
  if (std::string idle = IdleCollectiveNote(
          *made.graph, made.cluster, plan, options.predict.profile,
          options.predict.training, made.whole.get());
      !idle.empty()) {
    cell.notes.push_back(std::move(idle));
  }
  if (options.keep_plans) {
    cell.plan = std::move(plan);
    cell.graph = made.graph;
  }
  return {};
}

}  // namespace

Result<Plan> PlanForCell(Case& of, const GridOptions& options) {
  const DType dtype = of.graph->dtype;
  if (options.predict.training.stochastic_rounding &&
      dtype != DType::kBFloat16) {
    return Error{ErrorCode::kInfeasible,
                 "stochastic rounding is of parameters in bf16, and these are "
                 "in " +
                     std::string(NameOf(dtype)),
                 ""};
  }
  if (options.replan) {
    return BestPlan(of, options.predict, *options.replan, options.plan);
  }
  if (options.plan == nullptr) return PlanOf(of);
  const size_t used = World(*options.plan).devices.size();
  const size_t devices = of.cluster.devices.size();
  if (IsValid(*of.index, of.cluster, *options.plan)) {
    if (used == devices) return *options.plan;
    // It may leave devices of its own cluster idle, and those of a larger one
    // only where it does not say what to do with them.
    if (of.degraded || options.plan->cluster_name == of.cluster.name) {
      of.notes.push_back("the plan uses " + std::to_string(used) + " of the " +
                         std::to_string(devices) + " devices");
      return *options.plan;
    }
  }
  if (!of.strategy.empty()) return PlanOf(of);
  return Error{ErrorCode::kInfeasible,
               "the plan is for " + std::to_string(used) + " devices of " +
                   options.plan->cluster_name +
                   ", and not uniform; give a "
                   "strategy or --replan",
               ""};
}

Result<std::vector<Cell>> RunScenarios(const std::vector<Scenario>& scenarios,
                                       const GridOptions& options,
                                       ModelCache& models) {
  std::vector<Cell> cells(scenarios.size());
  std::optional<Error> error;  // of the only cell
  const Watch& watch = options.predict.watch;
  std::atomic<size_t> next = 0;
  std::atomic<size_t> done = 0;
  const auto cells_done = [&] {
    return std::to_string(done) + " of " + std::to_string(cells.size()) +
           " cells are done";
  };
  GridOptions counting = options;  // says behind the cells what one is at
  if (cells.size() > 1) {
    counting.predict.watch.hears = [&](const std::string& text) {
      watch.Tell(cells_done() + "; " + text);
    };
  }
  OnThreads(options.threads, [&] {
    for (size_t i = next++; i < cells.size(); i = next++) {
      if (watch.stopped()) return;
      Cell& cell = cells[i];
      auto run = RunCell(scenarios[i], counting, models, cell);
      if (watch.stopped() && (!run || options.replan)) {
        cell = {};  // The best of what there was time for is no answer.
        return;
      }
      if (!run) {
        // One cell of many that is wrong leaves the others as they are.
        if (cells.size() == 1 && run.error().code != ErrorCode::kInfeasible) {
          error = run.error();
        }
        cell.problem = run.error().ToString();
        if (run.error().code == ErrorCode::kInvalidInput) {
          cell.wrong_path = run.error().where;
        }
      }
      cell.done = true;
      ++done;
      watch.Tell(cells_done());
    }
  });
  if (error) return *error;
  return cells;
}

Result<std::vector<Cell>> RunGrid(const Scenario& scenario,
                                  const std::vector<Axis>& axes,
                                  const GridOptions& options,
                                  ModelCache& models) {
  const std::vector<std::vector<std::string>> products = Products(axes);
  std::vector<Scenario> scenarios;
  for (const std::vector<std::string>& values : products) {
    Scenario& own = scenarios.emplace_back(scenario);
    for (size_t a = 0; a < axes.size(); ++a) {
      own.settings.push_back({axes[a].path, values[a]});
    }
  }
  TESSERA_TRY(std::vector<Cell> cells,
              RunScenarios(scenarios, options, models));
  for (size_t i = 0; i < cells.size(); ++i) cells[i].values = products[i];
  // A value that is wrong wherever it stands is no cell's problem.
  for (const Cell& cell : cells) {
    const auto axis = std::ranges::find(axes, cell.wrong_path, &Axis::path);
    if (axis == axes.end()) continue;
    const auto a = static_cast<size_t>(axis - axes.begin());
    const bool everywhere = std::ranges::all_of(cells, [&](const Cell& other) {
      return other.values[a] != cell.values[a] ||
             other.wrong_path == cell.wrong_path;
    });
    if (everywhere) return InvalidInput(cell.problem);
  }
  return cells;
}

}  // namespace tessera
