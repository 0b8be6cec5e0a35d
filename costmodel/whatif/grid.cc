#include "costmodel/whatif/grid.h"

#include <thread>

#include "planner/plan/stages.h"
#include "planner/plan/validate.h"

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

bool UsesAll(const Plan& plan, const Cluster& cluster) {
  size_t used = 0;
  for (const DeviceSet& set : DeviceSets(plan.groups)) {
    used += set.devices.size();
  }
  return used == cluster.devices.size();
}

Result<void> RunCell(const Scenario& scenario, const GridOptions& options,
                     ModelCache& models, Cell& cell) {
  TESSERA_TRY(Case made, MakeCase(scenario, models));
  TESSERA_TRY(const Plan plan, PlanForCell(made, options));
  cell.prediction = Predict(made, plan, options.predict);
  cell.notes = std::move(made.notes);
  return {};
}

}  // namespace

Result<Plan> PlanForCell(Case& of, const GridOptions& options) {
  if (options.replan) {
    return BestPlan(of, options.predict.training, options.predict.profile,
                    *options.replan);
  }
  // On more devices than it uses its strategy says more.
  if (options.plan != nullptr &&
      IsValid(*of.index, of.cluster, *options.plan) &&
      (of.strategy.empty() || UsesAll(*options.plan, of.cluster))) {
    return *options.plan;
  }
  if (options.plan != nullptr && of.strategy.empty()) {
    return Error{ErrorCode::kInfeasible,
                 "the plan is not for this model and cluster, and not uniform; "
                 "give a strategy or --replan",
                 ""};
  }
  return PlanOf(of);
}

Result<std::vector<Cell>> RunScenarios(const std::vector<Scenario>& scenarios,
                                       const GridOptions& options,
                                       ModelCache& models) {
  std::vector<Cell> cells(scenarios.size());
  std::vector<std::optional<Error>> errors(cells.size());
  std::atomic<size_t> next = 0;
  std::atomic<size_t> done = 0;
  const auto work = [&] {
    for (size_t i = next++; i < cells.size(); i = next++) {
      if (options.stop != nullptr && options.stop->load()) return;
      Cell& cell = cells[i];
      if (auto run = RunCell(scenarios[i], options, models, cell); !run) {
        if (run.error().code != ErrorCode::kInfeasible) {
          errors[i] = run.error();
        }
        cell.problem = run.error().ToString();
      }
      cell.done = true;
      if (options.progress) options.progress(++done);
    }
  };
  std::vector<std::jthread> workers;
  for (int t = 1; t < options.threads; ++t) workers.emplace_back(work);
  work();
  workers.clear();  // Joins them.
  for (const auto& error : errors) {
    if (error) return *error;
  }
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
  return cells;
}

}  // namespace tessera
