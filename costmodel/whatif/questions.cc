#include "costmodel/whatif/questions.h"

#include <algorithm>

#include "costmodel/evaluate/evaluator.h"
#include "planner/plan/stages.h"

namespace tessera {
namespace {

constexpr int kHalvings = 3;

Scenario AtNodes(const Scenario& scenario, const Case& base, int nodes,
                 bool weak) {
  Scenario own = scenario;
  own.settings.push_back({"nodes", std::to_string(nodes)});
  if (weak) {
    const int64_t batch = base.graph->global_batch * nodes /
                          std::max(1, base.cluster.num_nodes());
    own.settings.push_back({"batch", std::to_string(batch)});
  }
  return own;
}

bool Runs(const Cell& cell) {
  return cell.prediction && cell.prediction->evaluation.feasible();
}

double PerDevice(const Prediction& prediction) {
  return prediction.tokens_per_s / prediction.devices;
}

// The strategy with one more change, or nothing where it does not apply.
struct Change {
  std::string text;
  std::string key;
  std::string value;
};

std::vector<Change> ChangesOf(const Strategy& strategy, const Case& of) {
  std::vector<Change> changes;
  const auto add = [&](std::string_view key, const std::string& value) {
    changes.push_back(
        {std::string(key) + "=" + value, std::string(key), value});
  };
  for (int mbs = strategy.mbs / 2; mbs >= 1; mbs /= 2) {
    add("mbs", std::to_string(mbs));
  }
  if (strategy.tp > 1 && !strategy.sp) add("sp", "1");
  for (int zero = strategy.zero + 1; zero <= 3; ++zero) {
    add("zero", std::to_string(zero));
  }
  if (strategy.recompute == RecomputeLevel::kNone) {
    add("recompute", "selective");
  }
  if (strategy.recompute != RecomputeLevel::kFull) add("recompute", "full");
  const auto devices = static_cast<int64_t>(of.cluster.devices.size());
  const int64_t replica = int64_t{strategy.tp} * strategy.pp * strategy.cp;
  for (int64_t times = 2; replica * times <= devices; times *= 2) {
    add("tp", std::to_string(strategy.tp * times));
    add("pp", std::to_string(strategy.pp * times));
  }
  if (of.cluster.host) {
    add("offload", "optimizer:host");
    add("offload", "optimizer:host,activations:host");
  }
  return changes;
}

struct Trial {
  std::string change;
  std::string strategy;
  std::string first_key;  // a second change is of another key
};

// What the fullest device needs, and has.
void FullestOf(const Cluster& cluster, const Plan& plan,
               const Evaluation& evaluation, Bytes& memory, Bytes& capacity) {
  const std::vector<DeviceSet> sets = DeviceSets(plan.groups);
  for (size_t s = 0; s < sets.size(); ++s) {
    if (evaluation.memory[s].total <= memory) continue;
    memory = evaluation.memory[s].total;
    capacity = cluster.TypeOf(sets[s].devices.front()).memory;
  }
}

}  // namespace

Result<Scaling> ScalingOf(const Scenario& scenario,
                          const ScalingQuestion& question,
                          const GridOptions& options, ModelCache& models) {
  TESSERA_TRY(const Case base, MakeCase(scenario, models));
  const int first = base.cluster.num_nodes();
  const auto per_node =
      static_cast<int>(base.cluster.devices.size()) / std::max(1, first);
  Scaling scaling;
  const auto point = [&](int nodes) -> Result<ScalingPoint> {
    GridOptions one = options;
    one.threads = 1;
    TESSERA_TRY(std::vector<Cell> cells,
                RunScenarios({AtNodes(scenario, base, nodes, question.weak)},
                             one, models));
    ScalingPoint made;
    made.nodes = nodes;
    made.devices = nodes * per_node;
    made.cell = std::move(cells.front());
    if (Runs(made.cell) && !scaling.points.empty()) {
      made.efficiency = PerDevice(*made.cell.prediction) /
                        PerDevice(*scaling.points.front().cell.prediction);
    } else if (Runs(made.cell)) {
      made.efficiency = 1;
    }
    return made;
  };
  const auto stopped = [&] {
    return options.stop != nullptr && options.stop->load();
  };
  int good = 0;
  int bad = 0;
  for (int nodes = first; nodes * per_node <= question.most_devices;
       nodes *= 2) {
    TESSERA_TRY(ScalingPoint made, point(nodes));
    if (!made.cell.done) break;
    const bool enough = made.efficiency >= question.efficiency;
    if (scaling.points.empty() && !Runs(made.cell)) {
      scaling.points.push_back(std::move(made));
      return scaling;
    }
    scaling.points.push_back(std::move(made));
    if (!enough) {
      bad = nodes;
      break;
    }
    good = nodes;
  }
  for (int i = 0; i < kHalvings && bad - good > 1 && good > 0; ++i) {
    if (stopped()) break;
    const int middle = good + (bad - good) / 2;
    TESSERA_TRY(ScalingPoint made, point(middle));
    if (!made.cell.done) break;
    (made.efficiency >= question.efficiency ? good : bad) = middle;
    scaling.points.push_back(std::move(made));
  }
  std::ranges::sort(scaling.points, {}, &ScalingPoint::nodes);
  scaling.devices = good * per_node;
  scaling.too_many = bad * per_node;
  return scaling;
}

Result<Cheapest> CheapestOf(const Scenario& scenario,
                            const std::vector<std::string>& clusters,
                            double days, const GridOptions& options,
                            ModelCache& models) {
  std::vector<Scenario> scenarios;
  for (const std::string& cluster : clusters) {
    Scenario& own = scenarios.emplace_back(scenario);
    own.settings.insert(own.settings.begin(), {"cluster", cluster});
  }
  TESSERA_TRY(std::vector<Cell> cells,
              RunScenarios(scenarios, options, models));
  Cheapest result;
  for (size_t i = 0; i < cells.size(); ++i) {
    Offer offer = {clusters[i], std::move(cells[i]), ""};
    const Cell& cell = offer.cell;
    if (!cell.done) {
      offer.refused = "interrupted";
    } else if (!cell.prediction) {
      offer.refused = cell.problem;
    } else if (!Runs(cell)) {
      offer.refused = cell.prediction->evaluation.violations.front();
    } else if (!cell.prediction->run->usd) {
      offer.refused = "no price: --set device.price=…USD/h";
    } else if (days > 0 && cell.prediction->run->days > days) {
      offer.refused = "too slow";
    } else if (!result.best ||
               *cell.prediction->run->usd <
                   *result.offers[*result.best].cell.prediction->run->usd) {
      result.best = i;
    }
    result.offers.push_back(std::move(offer));
  }
  return result;
}

Result<Fit> FitOf(Case of, const PredictOptions& options) {
  TESSERA_TRY(const Plan plan, PlanOf(of));
  const Evaluator evaluator(*of.graph, of.cluster, options.profile,
                            options.training);
  const Evaluation evaluation = evaluator.Evaluate(plan);
  Fit fit;
  fit.fits = evaluation.feasible();
  fit.step_time = evaluation.step_time;
  FullestOf(of.cluster, plan, evaluation, fit.memory, fit.capacity);
  fit.memory_needed = fit.memory;
  if (fit.fits) return fit;

  std::vector<Trial> open = {{"", of.strategy, ""}};
  for (int changes = 1; changes <= 2 && fit.changes.empty(); ++changes) {
    std::vector<Trial> tried;
    for (const Trial& trial : open) {
      TESSERA_TRY(const Strategy strategy, ParseStrategy(trial.strategy));
      for (const Change& change : ChangesOf(strategy, of)) {
        // Each pair once.
        if (change.key <= trial.first_key) continue;
        Trial next;
        next.change =
            (trial.change.empty() ? "" : trial.change + ", ") + change.text;
        next.strategy =
            WithStrategyKey(trial.strategy, change.key, change.value);
        next.first_key = change.key;
        auto parsed = ParseStrategy(next.strategy);
        if (!parsed) continue;
        const auto changed = PlanFromStrategy(*of.index, of.cluster, *parsed);
        if (!changed) continue;
        tried.push_back(next);
        const Evaluation result = evaluator.Evaluate(*changed);
        if (!result.feasible()) continue;
        Bytes memory;
        Bytes capacity;
        FullestOf(of.cluster, *changed, result, memory, capacity);
        fit.changes.push_back(
            {next.change, next.strategy, result.step_time, memory});
      }
    }
    open = std::move(tried);
  }
  std::ranges::stable_sort(fit.changes, {}, &FitChange::step_time);
  return fit;
}

}  // namespace tessera
