// Gives one axis to other factors, or to none, in two nodes at once of which
// one reads a result of the other, and perhaps in all their like: where either
// change alone costs an exchange that both together do not. Half of the draws
// split the tensor between them alike on both sides, the others split each
// anyhow: new targets q are drawn whatever the old are, so that the ratio is
// q(old) / q(new).

#include <algorithm>
#include <cmath>
#include <vector>

#include "planner/search/moves/retarget.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

// Targets of a node: its splittable factors, and -1 for none.
std::vector<int> TargetsOf(const Node& node) {
  std::vector<int> targets = {-1};
  for (int f = 0; f < static_cast<int>(node.rule.factors.size()); ++f) {
    if (node.rule.factors[static_cast<size_t>(f)].splittable) {
      targets.push_back(f);
    }
  }
  return targets;
}

// The factor with which `reader` indexes in operand `k` what factor `made` of
// `maker` indexes in the tensor; -1 where there is none, or it is not split.
int Alike(const Node& maker, int made, const Node& reader, size_t k) {
  const TensorId tensor = reader.operands[k];
  const auto r = std::ranges::find(maker.results, tensor);
  const Indices& written =
      maker.rule.results[static_cast<size_t>(r - maker.results.begin())];
  const auto d = std::ranges::find(written, made);
  if (made < 0 || d == written.end()) return -1;
  const int read =
      reader.rule.operands[k][static_cast<size_t>(d - written.begin())];
  if (read < 0) return -1;
  return reader.rule.factors[static_cast<size_t>(read)].splittable ? read : -1;
}

// Gives `axis` to `to` in a node and its like in `blocks`, which must all give
// it to one factor before: that, or nothing.
std::optional<int> Apply(NodeId node, const std::vector<int>& blocks,
                         AxisSet axis, int to, Draft& draft) {
  const SearchSpace& space = draft.space();
  Plan& plan = draft.edited();
  const int from = FactorServedBy(plan.ops[node.index()], axis);
  for (int block : blocks) {
    const NodeId like =
        space.index.nodes_of_block[static_cast<size_t>(block)]
                                  [space.index.position[node.index()]];
    draft.Touch(like);
    OpPlacement& placement = plan.ops[like.index()];
    if (FactorServedBy(placement, axis) != from) return std::nullopt;
    Apply(Retarget{axis, from, to}, placement);
  }
  return from;
}

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const GraphIndex& index = space.index;
  const NodeId reader(rng.Below(static_cast<uint32_t>(index.forward_nodes)));
  const Node& reads = index.graph->node(reader);
  const size_t k = rng.Below(static_cast<uint32_t>(reads.operands.size()));
  const NodeId maker = index.producer[reads.operands[k].index()];
  const Scope scope = DrawScope(draft, 3, rng);  // up to kClass
  const GroupId group = plan.ops[reader.index()].group;
  const size_t axes = plan.groups[group.index()].axes.size();
  if (!maker.valid() || plan.ops[maker.index()].group != group || axes == 0) {
    return std::nullopt;
  }
  const Node& makes = index.graph->node(maker);
  // Not two that are like each other.
  if (scope != Scope::kBlock &&
      index.position[maker.index()] == index.position[reader.index()] &&
      index.block_class[static_cast<size_t>(makes.block)] ==
          index.block_class[static_cast<size_t>(reads.block)]) {
    return std::nullopt;
  }
  const AxisSet axis = AxisSet{1} << rng.Below(static_cast<uint32_t>(axes));
  const std::vector<int> of_maker = TargetsOf(makes);
  const std::vector<int> of_reader = TargetsOf(reads);
  const int made = of_maker[rng.Below(static_cast<uint32_t>(of_maker.size()))];
  const int anyhow =
      of_reader[rng.Below(static_cast<uint32_t>(of_reader.size()))];
  const int read = rng.Below(2) == 0 ? Alike(makes, made, reads, k) : anyhow;
  const auto probability = [&](int m, int r) {
    return 0.5 * (Alike(makes, m, reads, k) == r ? 1 : 0) +
           0.5 / static_cast<double>(of_reader.size());
  };

  const auto makers = BlocksIn(space, plan, makes.block, scope);
  const auto readers = BlocksIn(space, plan, reads.block, scope);
  if (!makers || !readers) return std::nullopt;
  const auto made_before = Apply(maker, *makers, axis, made, draft);
  if (!made_before) return std::nullopt;
  const auto read_before = Apply(reader, *readers, axis, read, draft);
  if (!read_before) return std::nullopt;
  return std::log(probability(*made_before, *read_before) /
                  probability(made, read));
}

}  // namespace

extern const Move kSplitPair;
const Move kSplitPair = {
    "split-pair", "one axis of an operator and of one that reads it", 3, Edit};

}  // namespace tessera
