#include "costmodel/whatif/questions.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>

#include "costmodel/evaluate/evaluator.h"
#include "planner/base/append.h"
#include "planner/base/check.h"
#include "planner/search/search_space.h"
#include "planner/search/sweep.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

constexpr int kParts = 8;        // of a gap, whose ends are looked at
constexpr size_t kShown = 6;     // changes of one key
constexpr size_t kOffloads = 2;  // of these, of what is offloaded
constexpr size_t kPairs = 2;     // changes of two

Scenario AtNodes(const Scenario& scenario, const Case& base, int first,
                 int nodes, bool weak) {
  Scenario own = scenario;
  own.settings.push_back({"nodes", std::to_string(nodes)});
  if (weak) {
    const int64_t batch = base.graph->global_batch * nodes / first;
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

struct Change {
  std::string key;
  std::string value;
};

// Values of "offload" other than the strategy's: state step by step, what takes
// most for least time first, each with and without activations. Pairs of
// changes are to be few enough to simulate.
std::vector<std::string> OtherOffloads(const Strategy& strategy) {
  constexpr std::string_view kState[] = {
      "",
      "optimizer:host",
      "optimizer:host,gradients:host",
      "optimizer:host,parameters:host,gradients:host",
      "optimizer:file,parameters:file,gradients:host",
  };
  constexpr MemoryTier Strategy::*kTiers[] = {
      &Strategy::optimizer_tier, &Strategy::parameter_tier,
      &Strategy::gradient_tier, &Strategy::activation_tier};
  std::vector<std::string> values;
  for (const std::string_view state : kState) {
    for (const std::string_view activations : {"", "activations:host"}) {
      std::string value(state);
      if (!activations.empty()) AppendTo(value, ",", activations);
      if (value.empty()) value = "none";
      const Strategy then = ParseStrategy("offload=" + value).value();
      const auto same = [&](auto tier) { return then.*tier == strategy.*tier; };
      if (!std::ranges::all_of(kTiers, same)) {
        values.push_back(std::move(value));
      }
    }
  }
  return values;
}

std::vector<Change> ChangesOf(const Strategy& strategy, const Case& of) {
  std::vector<Change> changes;
  const auto add = [&](std::string_view key, const std::string& value) {
    changes.push_back({std::string(key), value});
  };
  const auto complete = Complete(*of.index, of.cluster, strategy);
  const int samples = complete ? complete->mbs : strategy.mbs;
  for (int mbs = samples / 2; mbs >= 1; mbs /= 2) {
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
  if (of.cluster.hosts.empty()) return changes;
  for (const std::string& offload : OtherOffloads(strategy)) {
    add("offload", offload);
  }
  return changes;
}

// A strategy with some of its keys changed.
struct Trial {
  std::string text;  // as --strategy takes it
  Strategy strategy;
  std::string change;
  std::string last_key;
  int keys = 0;
};

// With one more key changed, each strategy once.
std::vector<Trial> Changed(const std::vector<Trial>& trials, const Case& of) {
  std::vector<Trial> changed;
  for (const Trial& trial : trials) {
    for (const Change& change : ChangesOf(trial.strategy, of)) {
      if (change.key == trial.last_key) continue;
      Trial next = trial;
      next.text = WithStrategyKey(trial.text, change.key, change.value);
      const auto strategy = ParseStrategy(next.text);
      if (!strategy) continue;
      next.strategy = *strategy;
      const auto known =
          std::ranges::find(changed, next.strategy, &Trial::strategy);
      if (known != changed.end()) continue;
      next.change +=
          (trial.change.empty() ? "" : ", ") + change.key + "=" + change.value;
      next.last_key = change.key;
      ++next.keys;
      changed.push_back(std::move(next));
    }
  }
  return changed;
}

// The best `count` of those that fit, fastest first, and faster than `than`.
std::vector<std::pair<Trial, Score>> BestOf(
    const std::vector<Trial>& trials, size_t count, const SearchSpace& space,
    const Evaluator& evaluator, const GridOptions& options,
    const std::optional<Score>& than = std::nullopt) {
  const Watch& watch = options.predict.watch;
  std::vector<Strategy> strategies;
  for (const Trial& trial : trials) strategies.push_back(trial.strategy);
  const auto stop = [&] {
    watch.Tell("comparing " + std::to_string(trials.size()) + " changes");
    return watch.stopped();
  };
  std::vector<std::pair<Trial, Score>> best;
  for (const Candidate& candidate : Sweep(space, evaluator, strategies, count,
                                          options.threads, stop, nullptr, than)
                                        .best) {
    if (!candidate.score.feasible) break;
    const auto found =
        std::ranges::find(trials, candidate.strategy, &Trial::strategy);
    best.emplace_back(*found, candidate.score);
  }
  return best;
}

// The best changes of one key that fit, and of two that are faster than these.
std::vector<std::pair<Trial, Score>> FittingChanges(
    const Trial& as_it_is, const Case& of, const SearchSpace& space,
    const Evaluator& evaluator, const GridOptions& options) {
  const std::vector<Trial> singles = Changed({as_it_is}, of);
  // Of many ways to offload two, so that there is room for others.
  std::vector<Trial> offloads;
  std::vector<Trial> others;
  for (const Trial& trial : singles) {
    (trial.last_key == "offload" ? offloads : others).push_back(trial);
  }
  auto best = BestOf(offloads, kOffloads, space, evaluator, options);
  std::ranges::move(
      BestOf(others, kShown - best.size(), space, evaluator, options),
      std::back_inserter(best));
  std::optional<Score> fastest;
  for (const auto& [trial, score] : best) {
    if (!fastest || Better(score, *fastest)) fastest = score;
  }
  std::ranges::move(
      BestOf(Changed(singles, of), kPairs, space, evaluator, options, fastest),
      std::back_inserter(best));
  return best;
}

// The counts of a machine, in the numbers that "nodes" sets: nodes, or ranks
// where a preset has only one node.
int CountOf(const Cluster& cluster) {
  const std::string name = cluster.name.substr(0, cluster.name.find(':'));
  const auto row = std::ranges::find(Topologies(), name, &Topology::name);
  const bool ranks = row != Topologies().end() && row->gpus_per_node == 0;
  return ranks ? static_cast<int>(cluster.devices.size()) : cluster.num_nodes();
}

}  // namespace

Result<Scaling> ScalingOf(const Scenario& scenario,
                          const ScalingQuestion& question,
                          const GridOptions& options, ModelCache& models) {
  TESSERA_TRY(const Case base, MakeCase(scenario, models));
  const int first = CountOf(base.cluster);
  const int per_node = static_cast<int>(base.cluster.devices.size()) / first;
  const int most =
      std::max(first, std::min(kMostNodes, question.most_devices / per_node));
  Scaling scaling;
  int enough = 0;
  int beyond = 0;  // where it is not efficient, or does not run
  // Whether it ran; then it is a point.
  const auto run = [&](int nodes) -> Result<bool> {
    GridOptions one = options;
    one.threads = 1;
    one.predict.watch.Tell("scaling to " + std::to_string(nodes * per_node) +
                           " devices");
    const Scenario at = AtNodes(scenario, base, first, nodes, question.weak);
    auto cells = RunScenarios({at}, one, models);
    if (!cells) return cells.error().At("scaling");
    ScalingPoint point = {nodes, nodes * per_node, std::move(cells->front())};
    const bool runs = Runs(point.cell);
    if (runs) {
      const ScalingPoint& start =
          scaling.points.empty() ? point : scaling.points.front();
      point.efficiency =
          PerDevice(*point.cell.prediction) / PerDevice(*start.cell.prediction);
    }
    // Between others what does not run is no answer.
    if (runs || (beyond == 0 && point.cell.done)) {
      scaling.points.push_back(std::move(point));
    }
    return runs;
  };
  const auto stopped = [&] { return options.predict.watch.stopped(); };
  const auto good = [&] {
    return scaling.points.back().efficiency >= question.efficiency;
  };
  for (int nodes = first; nodes <= most && !stopped(); nodes *= 2) {
    TESSERA_TRY(const bool runs, run(nodes));
    if (stopped()) break;
    if (runs && good()) {
      enough = nodes;
      continue;
    }
    beyond = nodes;
    if (runs) scaling.too_many = nodes * per_node;
    break;
  }
  scaling.most = beyond == 0 && !stopped();
  std::vector<int> between;
  for (int i = 1; i < kParts && enough > 0 && beyond > 0; ++i) {
    const int nodes = enough + (beyond - enough) * i / kParts;
    if (nodes > (between.empty() ? enough : between.back())) {
      between.push_back(nodes);
    }
  }
  while (!between.empty() && !stopped()) {
    const auto middle = between.begin() + std::ssize(between) / 2;
    const int nodes = *middle;
    TESSERA_TRY(const bool runs, run(nodes));
    if (!runs) {
      between.erase(middle);
    } else if (good()) {
      enough = nodes;
      between.erase(between.begin(), middle + 1);
    } else {
      scaling.too_many = nodes * per_node;
      between.erase(middle, between.end());
    }
  }
  std::ranges::sort(scaling.points, {}, &ScalingPoint::nodes);
  scaling.devices = enough * per_node;
  return scaling;
}

Result<Cheapest> CheapestOf(const Scenario& scenario,
                            const std::vector<std::string>& clusters,
                            double days, const GridOptions& options,
                            ModelCache& models) {
  TESSERA_CHECK(options.predict.run.tokens > 0) << "nothing to pay for";
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
    } else if (const std::string_view why = EndlessText(*cell.prediction);
               !why.empty()) {
      offer.refused = why;
    } else if (!cell.prediction->run->usd) {
      offer.refused = "no price: --set device.price=…USD/h";
      if (clusters.size() > 1) {
        offer.refused +=
            " gives all clusters one; for unlike ones write each by 'tessera "
            "discover --cluster NAME -o FILE' and set price_usd_per_hour of "
            "its upkeep";
      }
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

Result<Fit> FitOf(Case of, const GridOptions& options) {
  TESSERA_TRY(const Plan plan, PlanForCell(of, options));
  const PredictOptions& predict = options.predict;
  const Evaluator evaluator(*of.graph, of.cluster, predict.profile,
                            predict.training, Evaluator::kUnlimited,
                            of.whole.get());
  const auto evaluate = [&](const Evaluator& by, const Plan& any) {
    return predict.fast ? by.Evaluate(any) : evaluator.Explain(any);
  };
  const Evaluation evaluation = evaluate(evaluator, plan);
  const FullestDevice fullest = FullestOf(of.cluster, plan, evaluation);
  Fit fit;
  fit.fits = evaluation.feasible();
  fit.plan = StrategyText(*of.index, of.cluster, plan);
  fit.step_time = evaluation.step_time;
  fit.sources = evaluation.sources;
  fit.band = StepTimeBand(of.cluster, evaluation.sources);
  fit.memory = fullest.use.total;
  fit.capacity = fullest.capacity;
  for (const MemoryUse& use : evaluation.memory) {
    fit.memory_needed = std::max(fit.memory_needed, use.total);
  }
  const auto strategy = UniformStrategy(*of.index, of.cluster, plan);
  if (strategy) fit.strategy = FlagTextOf(*strategy);
  if (fit.fits) return fit;
  fit.problem = evaluation.violations.front();
  if (!fit.strategy) return fit;

  const SearchSpace space(*of.graph, of.cluster);
  Trial as_it_is = {*fit.strategy, *strategy, "", "", 0};
  as_it_is.strategy.dp = 0;
  // What takes long to simulate is looked at where nothing else fits.
  const Evaluator quick(*of.graph, of.cluster, predict.profile,
                        predict.training, Evaluator::kMostInSearch,
                        of.whole.get());
  // With one sample in each microbatch a plan is largest.
  const bool may_lack = std::ssize(of.graph->nodes) * of.graph->global_batch >
                        Evaluator::kMostInSearch;
  const Evaluator* asked = &quick;
  auto best = FittingChanges(as_it_is, of, space, *asked, options);
  if (best.empty() && may_lack && !predict.watch.stopped()) {
    asked = &evaluator;
    best = FittingChanges(as_it_is, of, space, *asked, options);
  }
  for (const auto& [trial, score] : best) {
    if (predict.watch.stopped()) break;
    predict.watch.Tell("pricing the changes with which it fits");
    const auto changed =
        PlanFromStrategy(*of.index, of.cluster, trial.strategy);
    TESSERA_CHECK(changed) << trial.text;
    const Evaluation result = evaluate(*asked, *changed);
    fit.changes.push_back({trial.change, trial.keys, trial.text,
                           result.step_time,
                           FullestOf(of.cluster, *changed, result).use.total});
  }
  fit.interrupted = predict.watch.stopped();
  std::ranges::stable_sort(fit.changes, {}, &FitChange::step_time);
  return fit;
}

}  // namespace tessera
