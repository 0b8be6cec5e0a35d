#include "planner/plan/plan.h"

#include <algorithm>
#include <array>

#include "planner/plan/windows.h"

namespace tessera {

std::span<const OptimizerRow> Optimizers() {
  static constexpr std::array kRows = {
      OptimizerRow{.name = "adamw",
                   .summary = "AdamW (Loshchilov and Hutter 2019)",
                   .moments = 2,
                   .decays_by_default = true},
      OptimizerRow{.name = "adam",
                   .summary = "Adam (Kingma and Ba 2015): AdamW without weight "
                              "decay",
                   .moments = 2,
                   .decays = false},
      OptimizerRow{.name = "momentum",
                   .summary = "gradient descent with momentum 0.9, as "
                              "torch.optim.SGD",
                   .moments = 1},
      OptimizerRow{.name = "sgd", .summary = "plain gradient descent"},
      OptimizerRow{.name = "adafactor",
                   .summary = "rows and columns of second moments, steps "
                              "relative to a weight's size (Shazeer and Stern "
                              "2018), as torch.optim.Adafactor",
                   .factored = true,
                   .decays_by_default = true},
  };
  return kRows;
}

std::optional<int> MomentsOf(std::string_view optimizer) {
  const auto row =
      std::ranges::find(Optimizers(), optimizer, &OptimizerRow::name);
  if (row == Optimizers().end()) return std::nullopt;
  return row->moments;
}

const OptimizerRow& OptimizerNamed(std::string_view name) {
  const auto row = std::ranges::find(Optimizers(), name, &OptimizerRow::name);
  TESSERA_CHECK(row != Optimizers().end()) << name;
  return *row;
}

bool Uses(const Plan& plan, MemoryTier tier) {
  return std::ranges::any_of(plan.ops,
                             [&](const OpPlacement& op) {
                               return op.activation_tier == tier;
                             }) ||
         std::ranges::any_of(plan.weights, [&](const WeightPlacement& weight) {
           return weight.parameter_tier == tier ||
                  weight.optimizer_tier == tier || weight.gradient_tier == tier;
         });
}

bool Offloads(const Plan& plan) {
  return Uses(plan, MemoryTier::kHost) || Uses(plan, MemoryTier::kFile);
}

bool CanRecompute(const Graph& graph, NodeId id) {
  const Node& node = graph.node(id);
  return !node.op->once_per_step &&
         std::find(node.results.begin(), node.results.end(), graph.loss) ==
             node.results.end();
}

OpPlacement PlacementOf(const Graph& graph, const Plan& plan, NodeId id) {
  const Node& node = graph.node(id);
  if (node.pass == Pass::kForward) return plan.ops[id.index()];
  const Node& forward = graph.node(node.forward);
  const OpPlacement& placement = plan.ops[node.forward.index()];
  OpPlacement result;
  result.group = placement.group;
  result.chunk = placement.chunk;
  if (node.op->name == "sum") return result;
  result.rooted = placement.rooted;
  result.tiles = placement.tiles;
  if (node.op->streamed != 0) result.streamed = placement.streamed;
  for (size_t f = 0; f < node.rule.factors.size(); ++f) {
    const int from = forward.rule.FactorOf(node.rule.factors[f].letter);
    if (from >= 0) result.axes[f] = placement.axes[static_cast<size_t>(from)];
  }
  return result;
}

std::vector<TensorId> Weights(const Graph& graph) {
  std::vector<TensorId> weights;
  for (size_t t = 0; t < graph.tensors.size(); ++t) {
    if (graph.tensors[t].kind == TensorKind::kWeight) {
      weights.push_back(TensorId(t));
    }
  }
  return weights;
}

namespace {

// The axes that shard a dimension of factor `f`.
AxisSet AxesOf(const Node& node, const OpPlacement& placement, uint8_t f) {
  const bool streamed = node.rule.factors[f].letter == node.op->streamed;
  return placement.axes[f] | (streamed ? placement.streamed : 0);
}

// A node's windows in one direction, the axes that split their places, and how
// many shards these make.
struct WindowSplit {
  Windows windows;
  AxisSet axes = 0;
  int64_t parts = 1;
  bool makes_image = false;  // an image's gradient
};

// Those directions in which the image is split.
std::vector<WindowSplit> WindowSplits(const Graph& graph, const Node& node,
                                      const OpPlacement& placement,
                                      const DeviceGroup& group) {
  std::vector<WindowSplit> splits;
  if (!node.op->windows) return splits;
  for (const Direction direction : {Direction::kHeight, Direction::kWidth}) {
    const int place =
        node.rule.FactorOf(direction == Direction::kHeight ? 'y' : 'x');
    const AxisSet axes =
        place < 0 ? 0 : placement.axes[static_cast<size_t>(place)];
    if (axes == 0) continue;  // most nodes of most plans
    const auto windows = WindowsOf(graph, node, direction);
    if (!windows) continue;
    WindowSplit split = {.windows = *windows, .axes = axes};
    split.parts = group.Size(axes);
    split.makes_image =
        Holds(node.rule.results[0], node.rule.FactorOf(windows->image));
    if (split.parts > 1 && windows->in >= split.parts &&
        windows->out >= split.parts) {
      splits.push_back(split);
    }
  }
  return splits;
}

}  // namespace

Layout OperandLayout(const Graph& graph, const Node& node,
                     const OpPlacement& placement, const DeviceGroup& group,
                     size_t operand) {
  Layout layout;
  const Indices& indices = node.rule.operands[operand];
  for (size_t d = 0; d < indices.size(); ++d) {
    layout.dims[d] = AxesOf(node, placement, indices[d]);
  }
  layout.rooted = placement.rooted;
  size_t halos = 0;
  for (const WindowSplit& split : WindowSplits(graph, node, placement, group)) {
    for (size_t d = 0; d < indices.size(); ++d) {
      const char letter = node.rule.factors[indices[d]].letter;
      const bool is_image = letter == split.windows.image;
      if (!is_image && letter != split.windows.place) continue;
      if (is_image) layout.dims[d] = split.axes;
      if (!is_image && !split.makes_image) continue;
      const Reach reach = !split.makes_image
                              ? ImageReach(split.windows, split.parts)
                          : is_image ? TouchedReach(split.windows, split.parts)
                                     : PlaceReach(split.windows, split.parts);
      if (reach.before == 0 && reach.after == 0) continue;
      layout.halos[halos++] = {static_cast<int8_t>(d),
                               static_cast<int32_t>(reach.before),
                               static_cast<int32_t>(reach.after)};
    }
  }
  return layout;
}

AxisSet MergedAxes(const Node& node, const OpPlacement& placement,
                   const DeviceGroup& group) {
  const Coupling& coupling = node.op->coupling;
  AxisSet merged = 0;
  for (size_t f = 0; f < node.rule.factors.size(); ++f) {
    const Factor& factor = node.rule.factors[f];
    if (node.op->exchanged.find(factor.letter) != std::string_view::npos) {
      merged |= placement.axes[f];
    }
    if (!coupling.Merges(factor.letter)) continue;
    const bool whole_groups =
        factor.role == Role::kSample && !coupling.groups.empty() &&
        static_cast<int64_t>(node.attribute(coupling.groups)) %
                group.Size(placement.axes[f]) ==
            0;
    if (!whole_groups) merged |= placement.axes[f];
  }
  return merged;
}

Layout ResultLayout(const Graph& graph, const Node& node,
                    const OpPlacement& placement, const DeviceGroup& group,
                    size_t result) {
  Layout layout;
  const Indices& indices = node.rule.results[result];
  for (size_t d = 0; d < indices.size(); ++d) {
    layout.dims[d] = AxesOf(node, placement, indices[d]);
  }
  const AxisSet merged = MergedAxes(node, placement, group);
  for (size_t f = 0; f < node.rule.factors.size(); ++f) {
    if (!Holds(indices, static_cast<int>(f))) {
      layout.partial |= placement.axes[f] & ~merged;
    }
  }
  for (const WindowSplit& split : WindowSplits(graph, node, placement, group)) {
    if (!split.makes_image) continue;
    for (size_t d = 0; d < indices.size(); ++d) {
      if (node.rule.factors[indices[d]].letter == split.windows.image) {
        layout.dims[d] = split.axes;
      }
    }
  }
  // The sums of a streamed result go round with their blocks, and an image's
  // gradient is split as its places are.
  layout.partial &= ~layout.sharded();
  layout.rooted = placement.rooted;
  return layout;
}

}  // namespace tessera
