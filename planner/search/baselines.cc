#include "planner/search/baselines.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "planner/search/sweep.h"
#include "planner/search/uniform_strategies.h"

namespace tessera {
namespace {

std::vector<std::vector<Strategy>> Ddp(const SearchSpace& space) {
  Strategy strategy;
  strategy.dp = space.devices();
  return {WithSamples(space, strategy)};
}

// The whole batch at once, as its users have it.
std::vector<std::vector<Strategy>> Rooted(const SearchSpace& space) {
  Strategy strategy;
  strategy.dp = space.devices();
  strategy.dp_kind = DataParallelKind::kRooted;
  const int64_t batch = space.index.graph->global_batch;
  if (strategy.dp == 1 || batch % strategy.dp != 0) return {};
  strategy.mbs = static_cast<int>(batch / strategy.dp);
  return {{strategy}};
}

// Zhao et al. 2023: ZeRO-3 within nodes, replicas across.
std::vector<std::vector<Strategy>> Hybrid(const SearchSpace& space) {
  if (space.cluster->num_nodes() == 1 || space.least_devices_of_node == 1) {
    return {};
  }
  Strategy strategy;
  strategy.dp = space.devices();
  strategy.zero = 3;
  strategy.zero_group = Strategy::kWithinNode;
  return {WithSamples(space, strategy)};
}

template <int kStage>
std::vector<std::vector<Strategy>> ZeroDataParallel(const SearchSpace& space) {
  Strategy strategy;
  strategy.dp = space.devices();
  strategy.zero = kStage;
  return {WithSamples(space, strategy)};
}

// Narayanan et al. (SC'21), takeaways 1 and 2: tensor parallelism up to the
// size of a node, then pipeline stages until the model fits, then data
// parallelism; the microbatch size is tuned (takeaway 3).
std::vector<std::vector<Strategy>> Megatron(const SearchSpace& space) {
  std::vector<std::vector<Strategy>> lists;
  const int devices = space.devices();
  std::vector<int> degrees = Divisors(devices, space.least_devices_of_node);
  std::reverse(degrees.begin(), degrees.end());
  for (int tp : degrees) {
    Strategy strategy;
    strategy.tp = tp;
    // The largest degree that the model's heads and columns allow.
    bool possible = false;
    for (int pp :
         Divisors(devices / tp,
                  static_cast<int64_t>(space.index.graph->blocks.size()))) {
      strategy.pp = pp;
      strategy.dp = devices / tp / pp;
      const auto list = WithSamples(space, strategy);
      possible =
          possible ||
          std::any_of(list.begin(), list.end(), [&](const Strategy& s) {
            return PlanFromStrategy(space.index, *space.cluster, s).has_value();
          });
      if (!list.empty()) lists.push_back(list);
    }
    if (possible) return lists;
    lists.clear();
  }
  return lists;
}

}  // namespace

std::span<const BaselineRow> BaselineRows() {
  static constexpr std::array kRows = {
      BaselineRow{
          "DataParallel",
          "one device scatters the batch, computes the loss and steps for "
          "all",
          Rooted},
      BaselineRow{"DDP", "data parallelism over all devices", Ddp,
                  /*always=*/true},
      BaselineRow{"ZeRO-1",
                  "data parallelism over all devices, optimizer state cut",
                  ZeroDataParallel<1>},
      BaselineRow{
          "ZeRO-2",
          "data parallelism over all devices, optimizer state and gradients "
          "cut",
          ZeroDataParallel<2>},
      BaselineRow{
          "ZeRO-3",
          "data parallelism over all devices, optimizer state, gradients "
          "and parameters cut",
          ZeroDataParallel<3>, /*always=*/false, /*frugal=*/true},
      BaselineRow{"Hybrid ZeRO",
                  "ZeRO-3 within nodes, replicas across (Zhao et al. 2023)",
                  Hybrid},
      BaselineRow{
          "Megatron",
          "tensor parallelism within the node, then pipeline stages until "
          "it fits, then data parallelism (Narayanan et al. 2021)",
          Megatron},
  };
  return kRows;
}

namespace {

Baseline BaselineOf(const SearchSpace& space, const Objective& objective,
                    const BaselineRow& row, const Strategy& strategy) {
  Plan plan = PlanFromStrategy(space.index, *space.cluster, strategy).value();
  Evaluation evaluation = objective.Evaluate(plan);
  return {std::string(row.name), std::string(row.summary), strategy,
          std::move(plan), std::move(evaluation)};
}

// The best of a row, of those that are priced before `stop`.
std::optional<Candidate> BestOf(const BaselineRow& row,
                                const SearchSpace& space,
                                const Objective& objective, int threads,
                                const std::function<bool()>& stop) {
  const auto may_fit = [&](const Strategy& strategy) {
    return objective
        .GuessUniform(space.index, strategy, Objective::Bound::kQuick)
        .feasible;
  };
  std::optional<Candidate> best;
  for (const std::vector<Strategy>& list : row.choices(space)) {
    const bool always = row.always && std::ranges::any_of(list, may_fit);
    const SweepResult swept =
        Sweep(space, objective, list, 1, threads, always ? nullptr : stop);
    if (!swept.best.empty() &&
        (!best.has_value() || Better(swept.best[0].score, best->score))) {
      best = swept.best[0];
    }
    if (best.has_value() && best->score.feasible) break;
  }
  return best;
}

// The first choice of a row that fits, else the last that is valid: of each
// list all samples at once, where they are no sequences, then the smallest
// microbatch.
std::optional<Strategy> UnboundedChoice(const BaselineRow& row,
                                        const SearchSpace& space,
                                        const Objective& objective) {
  std::optional<Strategy> valid;
  for (const std::vector<Strategy>& list : row.choices(space)) {
    if (list.empty()) continue;
    std::vector<Strategy> tried = {list.front()};
    if (space.index.graph->seq_len <= 1) {
      tried.insert(tried.begin(), list.back());
    }
    for (const Strategy& strategy : tried) {
      const auto score =
          objective.EvaluateUniform(space.index, *space.cluster, strategy);
      if (!score) continue;
      valid = strategy;
      if (score->feasible) return valid;
    }
  }
  return valid;
}

}  // namespace

std::vector<Baseline> Baselines(const SearchSpace& space,
                                const Objective& objective, int threads,
                                const std::function<bool()>& stop,
                                const std::function<bool()>& interrupted) {
  std::vector<std::optional<Baseline>> of_row(BaselineRows().size());
  const auto any_fits = [&] {
    return std::ranges::any_of(of_row, [](const auto& baseline) {
      return baseline && baseline->evaluation.feasible();
    });
  };
  // The last first: they are what people choose for large models, where time
  // may not do for all.
  for (size_t r = of_row.size(); r-- > 0;) {
    const BaselineRow& row = BaselineRows()[r];
    const auto best = BestOf(row, space, objective, threads, stop);
    if (best) of_row[r] = BaselineOf(space, objective, row, best->strategy);
  }
  // The bounds by which a row is swept take as long as prices in a graph of
  // thousands of unlike operators. Where they left no time, rows are priced
  // without until one fits.
  for (const bool frugal : {true, false}) {
    for (size_t r = of_row.size(); r-- > 0 && !any_fits() && !interrupted();) {
      const BaselineRow& row = BaselineRows()[r];
      if (of_row[r] || row.frugal != frugal) continue;
      const auto choice = UnboundedChoice(row, space, objective);
      if (choice) of_row[r] = BaselineOf(space, objective, row, *choice);
    }
  }
  std::vector<Baseline> baselines;
  for (std::optional<Baseline>& baseline : of_row) {
    if (baseline) baselines.push_back(*std::move(baseline));
  }
  return baselines;
}

}  // namespace tessera
