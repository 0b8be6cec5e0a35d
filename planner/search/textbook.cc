#include "planner/search/textbook.h"

#include <algorithm>
#include <array>
#include <functional>

#include "planner/base/append.h"
#include "planner/base/table.h"
#include "planner/plan/recompute.h"
#include "planner/plan/validate.h"
#include "planner/search/idle_in_plan.h"
#include "planner/search/ragged.h"
#include "planner/search/uniform_strategies.h"

namespace tessera {
namespace {

// The split of a replica: tensor parallelism, pipelines.
bool IsPipeline(const Strategy& s) {
  return s.tp == 1 && s.pp > 1;
}
bool IsTensor(const Strategy& s) {
  return s.tp > 1 && s.pp == 1;
}
bool IsBoth(const Strategy& s) {
  return s.tp > 1 && s.pp > 1;
}
bool IsEither(const Strategy& s) {
  return s.tp > 1 || s.pp > 1;
}

// Those of the grid that `is` keeps, with tensor parallelism within nodes, but
// where constraints ask for more.
template <typename Is>
std::vector<Strategy> Grid(const SearchSpace& space, Is is) {
  const int most_tensor =
      std::max(space.least_devices_of_node, space.constraints.MostFixed("tp"));
  std::vector<Strategy> all = UniformStrategies(space);
  std::erase_if(
      all, [&](const Strategy& s) { return s.tp > most_tensor || !is(s); });
  return all;
}

std::vector<Strategy> Unsplit(const SearchSpace& space) {
  if (space.devices() > 1) return {};
  Strategy strategy;
  strategy.dp = 1;
  return WithSamples(space, strategy);
}

std::vector<Strategy> Ddp(const SearchSpace& space) {
  Strategy strategy;
  strategy.dp = space.devices();
  return strategy.dp == 1 ? std::vector<Strategy>()
                          : WithSamples(space, strategy);
}

std::vector<Strategy> Zero(const SearchSpace& space) {
  auto all = Grid(space, [](const Strategy& s) {
    return s.tp == 1 && s.pp == 1 && s.ep == 1 && s.zero > 0;
  });
  if (space.cluster->num_nodes() == 1 || space.least_devices_of_node == 1) {
    return all;
  }
  const size_t count = all.size();
  for (size_t i = 0; i < count; ++i) {
    Strategy hybrid = all[i];
    hybrid.zero_group = Strategy::kWithinNode;
    all.push_back(std::move(hybrid));
  }
  return all;
}

std::vector<Strategy> PipelineParallel(const SearchSpace& space) {
  return Grid(space, [](const Strategy& s) {
    return IsPipeline(s) && s.ep == 1 && s.zero == 0;
  });
}

std::vector<Strategy> TensorParallel(const SearchSpace& space) {
  return Grid(space, [](const Strategy& s) {
    return IsTensor(s) && s.ep == 1 && s.zero == 0;
  });
}

std::vector<Strategy> ThreeD(const SearchSpace& space) {
  return Grid(space,
              [](const Strategy& s) { return IsBoth(s) && s.zero == 0; });
}

std::vector<Strategy> ThreeDZero(const SearchSpace& space) {
  return Grid(space,
              [](const Strategy& s) { return IsBoth(s) && s.zero == 1; });
}

// The plainest strategies of some approaches: degrees, perhaps a ZeRO stage,
// and nothing else.

template <int kZero>
std::vector<Strategy> PlainReplicas(const SearchSpace& space) {
  Strategy strategy;
  strategy.dp = space.devices();
  strategy.zero = kZero;
  return {strategy};
}

template <bool (*kIs)(const Strategy&), int kZero>
std::vector<Strategy> PlainSplits(const SearchSpace& space) {
  std::vector<Strategy> all;
  const int devices = space.devices();
  const auto blocks = static_cast<int64_t>(space.index.graph->blocks.size());
  for (int tp : Divisors(devices, space.least_devices_of_node)) {
    for (int pp : Divisors(devices / tp, blocks)) {
      Strategy strategy;
      strategy.tp = tp;
      strategy.pp = pp;
      strategy.dp = devices / tp / pp;
      strategy.zero = kZero;
      if (kIs(strategy)) all.push_back(strategy);
    }
  }
  return all;
}

// The one with the least memory.
DeviceId SmallestDevice(const Cluster& cluster) {
  DeviceId smallest(0);
  for (size_t d = 1; d < cluster.devices.size(); ++d) {
    const DeviceId device(static_cast<int64_t>(d));
    if (cluster.TypeOf(device).memory < cluster.TypeOf(smallest).memory) {
      smallest = device;
    }
  }
  return smallest;
}

// Whether a replica fits on the smallest device, all others idle: for batches
// that the devices do not divide.
bool FitsAlone(const SearchSpace& space, const Objective& objective) {
  Cluster alone = *space.cluster;
  alone.devices.resize(1);
  const DeviceId smallest = SmallestDevice(*space.cluster);
  Strategy strategy;
  strategy.dp = 1;
  for (const Strategy& sized : WithSamples(space, strategy)) {
    auto plan = PlanFromStrategy(space.index, alone, sized);
    if (!plan) continue;
    for (DeviceGroup& group : plan->groups) group.devices = {smallest};
    plan->cluster_name = space.cluster->name;
    if (IsValid(space.index, *space.cluster, *plan) &&
        objective.Evaluate(*plan).feasible()) {
      return true;
    }
  }
  return false;
}

// Those of the grid that `is` keeps, of the plainest schedule and without cuts
// of the sequence, with the optimizer on a tier, parameters there or nearer to
// the device, and gradients on the host or the device.
template <typename Is>
std::vector<Strategy> Offloaded(const SearchSpace& space, MemoryTier tier,
                                int tiles, Is is) {
  std::vector<Strategy> all;
  if (space.cluster->hosts.empty()) return all;
  const auto whole = Grid(space, [&](const Strategy& s) {
    return is(s) && s.cp == 1 && s.vp == 1 &&
           s.schedule == Strategy().schedule &&
           s.recompute != RecomputeLevel::kSelective;
  });
  for (Strategy strategy : whole) {
    strategy.tiles = tiles;
    strategy.optimizer_tier = tier;
    for (const MemoryTier parameters :
         {MemoryTier::kDevice, MemoryTier::kHost, MemoryTier::kFile}) {
      if (parameters > tier) continue;
      for (const MemoryTier gradients :
           {MemoryTier::kDevice, MemoryTier::kHost}) {
        strategy.parameter_tier = parameters;
        strategy.gradient_tier = gradients;
        all.push_back(strategy);
      }
    }
  }
  return all;
}

// Data parallelism of every stage of ZeRO, experts perhaps split besides; on
// one device there is none.
template <MemoryTier kTier, int kTiles>
std::vector<Strategy> ZeroOffloaded(const SearchSpace& space) {
  return Offloaded(space, kTier, kTiles, [&](const Strategy& s) {
    return !IsEither(s) && (s.zero > 0 || space.devices() == 1);
  });
}

// Pipelines and tensor parallelism, each stage's state beside its devices, and
// each state once.
template <MemoryTier kTier>
std::vector<Strategy> SplitOffloaded(const SearchSpace& space) {
  return Offloaded(space, kTier, 1, [](const Strategy& s) {
    return IsEither(s) && (s.zero > 0 || s.dp * s.ep == 1);
  });
}

std::vector<Strategy> Tiled(const SearchSpace& space) {
  constexpr int kTiles = 4;
  auto all = ZeroOffloaded<MemoryTier::kHost, kTiles>(space);
  const auto files = ZeroOffloaded<MemoryTier::kFile, kTiles>(space);
  all.insert(all.end(), files.begin(), files.end());
  return all;
}

// Of all its strategies; of equal bounds the first in the list is priced first:
// where each takes a simulation, with few microbatches it takes less.
std::vector<Strategy> StrategiesOf(const Approach& approach,
                                   const SearchSpace& space) {
  std::vector<Strategy> strategies = approach.strategies(space);
  if (approach.offloads) {
    std::ranges::stable_sort(strategies, std::greater(), &Strategy::mbs);
  }
  return strategies;
}

// Strategies with all layers run again for which it is asked whether fewer do:
// the fastest of them need not be so with fewer.
constexpr size_t kMostFull = 8;

// Puts in the place of `best` what `full`, which fits, is with as few layers
// run again as fit, if that is better: of more layers memory falls and time
// grows.
void TryFewer(const SearchSpace& space, const Objective& objective,
              const Candidate& full, const std::function<bool()>& stop,
              Candidate& best) {
  Strategy strategy = full.strategy;
  const auto score = [&] {
    return objective.EvaluateUniform(space.index, *space.cluster, strategy);
  };
  strategy.recompute = RecomputeLevel::kNone;
  const auto none = score();
  if (!none || none->feasible || none->step_time >= best.score.step_time) {
    return;
  }
  strategy.recompute = RecomputeLevel::kFull;
  const auto [first, last] = Layers(space.index);
  int lacking = 0;
  for (int fitting = last - first; fitting - lacking > 1;) {
    if (stop && stop()) return;
    strategy.recompute_layers = (lacking + fitting) / 2;
    const auto some = score();
    if (!some) return;
    (some->feasible ? fitting : lacking) = strategy.recompute_layers;
    if (Better(*some, best.score)) best = {strategy, *some};
  }
}

}  // namespace

std::span<const Approach> Approaches() {
  static constexpr std::array kTable = {
      Approach{"no split", "the whole model on one device", false, Unsplit,
               PlainReplicas<0>},
      Approach{"DDP", "a replica on every device", false, Ddp,
               PlainReplicas<0>},
      Approach{"ZeRO", "data parallelism, state cut over all or within nodes",
               false, Zero, PlainReplicas<1>},
      Approach{"PP", "a pipeline, perhaps of several replicas", false,
               PipelineParallel, PlainSplits<IsPipeline, 0>},
      Approach{"TP", "tensor parallelism within nodes, perhaps replicated",
               false, TensorParallel, PlainSplits<IsTensor, 0>},
      Approach{"PP+TP+DP", "all three", false, ThreeD, PlainSplits<IsBoth, 0>},
      Approach{"PP+TP+DP+ZeRO-1", "all three, optimizer state cut", false,
               ThreeDZero, PlainSplits<IsBoth, 1>},
      Approach{"ZeRO with CPU offload",
               "optimizer state, perhaps parameters, in the host's memory",
               true, ZeroOffloaded<MemoryTier::kHost, 1>, PlainReplicas<0>},
      Approach{"PP+TP with CPU offload",
               "stages or tensor ranks, state in the host's memory", true,
               SplitOffloaded<MemoryTier::kHost>, PlainSplits<IsEither, 0>},
      Approach{"ZeRO with NVMe offload",
               "data parallelism, state in files, perhaps parameters, too",
               true, ZeroOffloaded<MemoryTier::kFile, 1>, PlainReplicas<0>},
      Approach{"PP+TP with NVMe offload",
               "stages or tensor ranks, state in files", true,
               SplitOffloaded<MemoryTier::kFile>, PlainSplits<IsEither, 0>},
      Approach{"ZeRO with offload and tiling",
               "the same, linears in tiles one after another", true, Tiled,
               PlainReplicas<0>},
  };
  return kTable;
}

Result<const Approach*> FindApproach(std::string_view name) {
  return Find("approach", Approaches(), name);
}

std::optional<Candidate> BestOf(const Approach& approach,
                                const SearchSpace& space,
                                const Objective& objective, int threads,
                                const std::function<bool()>& stop) {
  std::vector<Strategy> strategies = StrategiesOf(approach, space);
  const SweepResult swept =
      Sweep(space, objective, strategies, 1, threads, stop);
  if (swept.best.empty()) return std::nullopt;
  Candidate best = swept.best[0];
  std::erase_if(strategies, [](const Strategy& s) {
    return s.recompute != RecomputeLevel::kFull;
  });
  const size_t count = approach.offloads ? 1 : kMostFull;
  for (const Candidate& full :
       Sweep(space, objective, strategies, count, threads, stop).best) {
    if (full.score.feasible) TryFewer(space, objective, full, stop, best);
  }
  best.strategy = WithoutIdle(space, best.strategy);
  return best;
}

std::optional<FoundPlan> RaggedOf(const Approach& approach,
                                  const SearchSpace& space,
                                  const Objective& objective,
                                  const std::function<bool()>& stop) {
  const bool is_cut = approach.strategies == Zero;
  if (!is_cut && approach.strategies != Ddp) return std::nullopt;
  std::optional<FoundPlan> best;
  for (FoundPlan& found :
       RaggedPlans(space, objective, [&] { return stop && stop(); })) {
    const bool cuts = std::ranges::any_of(
        found.plan.weights,
        [](const WeightPlacement& weight) { return weight.zero_stage > 0; });
    if (cuts != is_cut) continue;
    if (best && !Better(found.evaluation, best->evaluation)) continue;
    best = std::move(found);
  }
  return best;
}

std::string NameOf(const Approach& approach, const Strategy& strategy) {
  if (approach.offloads || !IsEither(strategy)) {
    return std::string(approach.name);
  }
  std::string name;
  const auto add = [&](bool has, std::string_view degree) {
    if (has) AppendTo(name, "+", degree);
  };
  add(strategy.pp > 1, "PP");
  add(strategy.tp > 1, "TP");
  add(strategy.cp > 1, "CP");
  add(strategy.dp * strategy.ep > 1, "DP");
  add(strategy.zero > 0, "ZeRO-" + std::to_string(strategy.zero));
  return name;
}

std::string WhyNone(const Approach& approach, const SearchSpace& space) {
  const int devices = space.devices();
  const bool whole = approach.strategies == Unsplit;
  if (whole && devices > 1) {
    return "the cluster has " + std::to_string(devices) + " devices";
  }
  if (approach.offloads && space.cluster->hosts.empty()) {
    return "the cluster does not say what its hosts have";
  }
  const bool offloads_alone =
      approach.offloads && approach.plainest == PlainReplicas<0>;
  if (devices == 1 && !whole && !offloads_alone) {
    return "the cluster has one device";
  }
  const std::vector<Strategy> splits = approach.plainest(space);
  if (splits.empty()) {
    return std::to_string(devices) +
           " devices have no such degrees, with tensor parallelism inside a "
           "node";
  }
  std::string reason;
  for (const Strategy& split : splits) {
    const auto plan = PlanFromStrategy(space.index, *space.cluster, split);
    if (plan) return "none of its strategies gives a valid plan";
    if (!reason.empty()) continue;
    if (split.tp * split.pp > 1) {
      reason = "with tp=" + std::to_string(split.tp) +
               ", pp=" + std::to_string(split.pp) + ": ";
    }
    reason += plan.error().message;
  }
  if (splits.size() == 1) return reason;
  return "none of " + std::to_string(splits.size()) + " splits is; " + reason;
}

Situation SituationOf(const SearchSpace& space, const Objective& objective,
                      bool fast_within, bool fast_between, int threads,
                      const std::function<bool()>& stop) {
  const Graph& graph = *space.index.graph;
  Situation situation;
  situation.devices = space.devices();
  situation.nodes = space.cluster->num_nodes();
  situation.fast_within = fast_within;
  situation.fast_between = fast_between;
  // Nothing where none of its strategies is valid.
  const auto fits = [&](std::string_view name) -> std::optional<bool> {
    const auto strategies = StrategiesOf(**FindApproach(name), space);
    const auto best =
        Sweep(space, objective, strategies, 1, threads, stop).best;
    if (best.empty()) return std::nullopt;
    return best[0].score.feasible;
  };
  const auto whole = fits(situation.devices == 1 ? "no split" : "DDP");
  situation.fits = whole ? *whole : FitsAlone(space, objective);
  std::vector<int64_t> elements(graph.blocks.size());
  for (const GraphIndex::WeightUse& weight : space.index.weights) {
    elements[static_cast<size_t>(graph.node(weight.home.node).block)] +=
        weight.elements;
  }
  const int64_t largest = *std::ranges::max_element(elements);
  const int64_t memory =
      space.cluster->TypeOf(SmallestDevice(*space.cluster)).memory.value;
  situation.layer_fits = 2 * largest * SizeOf(graph.dtype) <= memory;
  situation.host_fits = situation.fits || situation.devices > 1;
  if (situation.host_fits) return situation;
  situation.host_fits = fits("ZeRO with CPU offload").value_or(false);
  return situation;
}

std::span<const Advice> Advices() {
  static const std::vector<Advice> kTable = {
      {"one device: the model fits",
       {"no split"},
       [](const Situation& s) { return s.devices == 1 && s.fits; }},
      {"one device: the largest layer does not fit",
       {"ZeRO with offload and tiling"},
       [](const Situation& s) { return s.devices == 1 && !s.layer_fits; }},
      {"one device: does not fit",
       {"ZeRO with CPU offload"},
       [](const Situation& s) { return s.devices == 1 && s.host_fits; }},
      {"one device: does not fit, nor does the host have room",
       {"ZeRO with NVMe offload"},
       [](const Situation& s) { return s.devices == 1; }},
      {"one node: the model fits on a device",
       {"DDP", "ZeRO"},
       [](const Situation& s) { return s.nodes == 1 && s.fits; }},
      {"one node: the largest layer does not fit",
       {"TP", "ZeRO"},
       [](const Situation& s) { return s.nodes == 1 && !s.layer_fits; }},
      {"one node: does not fit, with NVLink",
       {"PP", "ZeRO", "TP"},
       [](const Situation& s) { return s.nodes == 1 && s.fast_within; }},
      {"one node: does not fit, without NVLink",
       {"PP"},
       [](const Situation& s) { return s.nodes == 1; }},
      {"many nodes: fast network",
       {"ZeRO", "PP+TP+DP"},
       [](const Situation& s) { return s.fast_between; }},
      {"many nodes: slow network, the model fits on a device",
       {"DDP", "ZeRO"},
       [](const Situation& s) { return s.fits; }},
      {"many nodes: slow network, little memory",
       {"PP+TP+DP+ZeRO-1"},
       [](const Situation&) { return true; }},
  };
  return kTable;
}

const Advice& AdviceFor(const Situation& situation) {
  return *std::ranges::find_if(Advices(), [&](const Advice& advice) {
    return advice.applies(situation);
  });
}

}  // namespace tessera
