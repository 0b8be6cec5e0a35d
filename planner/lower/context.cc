#include <algorithm>

#include "planner/ir/running_average.h"
#include "planner/lower/lower.h"
#include "planner/plan/tiles.h"

namespace tessera {
namespace {

// `produced` with its partial sums resolved as the first reader wants them:
// scattered where the reader splits, whole elsewhere. Axes that are not
// partial stay as they are.
Layout Resolved(const Layout& produced, const Layout& wanted) {
  Layout layout = produced;
  for (size_t d = 0; d < kMaxDims; ++d) {
    layout.dims[d] |= wanted.dims[d] & produced.partial;
  }
  layout.partial = 0;
  return layout;
}

}  // namespace

LoweringFacts::LoweringFacts(const Graph& graph, const Cluster& cluster,
                             const TrainingOptions& options)
    : graph(graph),
      cluster(cluster),
      options(options),
      kernels(KernelMemoryOf(graph, cluster.stack)),
      forward_nodes(graph.blocks.size()),
      backward_nodes(graph.blocks.size()),
      once_per_step(graph.tensors.size(), false),
      weights(Weights(graph)),
      weight_index(graph.tensors.size(), -1),
      running_momenta(RunningMomenta(graph)) {
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    const auto block = static_cast<size_t>(node.block);
    if (node.pass == Pass::kForward) {
      forward_nodes[block].push_back(NodeId(i));
      parts.push_back(ActionKind::kForward);
    } else {
      backward_nodes[block].push_back(NodeId(i));
      const bool weights_only = std::all_of(
          node.results.begin(), node.results.end(), [&](TensorId result) {
            return graph.tensor(result).kind == TensorKind::kWeightGradient;
          });
      parts.push_back(weights_only ? ActionKind::kBackwardWeight
                                   : ActionKind::kBackwardInput);
    }
    if (node.op->once_per_step) {
      for (TensorId result : node.results) once_per_step[result.index()] = true;
    }
  }
  for (size_t w = 0; w < weights.size(); ++w) {
    weight_index[weights[w].index()] = static_cast<int>(w);
  }
  if (OptimizerNamed(options.optimizer).factored) {
    matrix_forms = MatrixForms(graph);
  }
}

LoweringContext::LoweringContext(const LoweringFacts& facts, const Plan& plan)
    : facts_(facts),
      graph_(facts.graph),
      plan_(plan),
      stages_(StagesOf(facts.graph, plan)),
      overlaps_(Overlaps(plan.groups)) {
  for (const auto& others : overlaps_) devices_are_shared_ |= !others.empty();
  concurrent_streams_ =
      facts.cluster.stack.overlaps &&
      facts.cluster.TypeOf(plan.groups[0].devices[0]).concurrent_streams;
  PlaceNodes();
  FindInputRoots();
  FindLayouts();
  FindRecomputed();
  FindKept();
  FindReplicas();
  FindOffloaded();
}

void LoweringContext::PlaceNodes() {
  const size_t blocks = graph_.blocks.size();
  placements_.reserve(graph_.nodes.size());
  group_of_block_.assign(blocks, GroupId(0));
  groups_begun_.resize(blocks);
  std::vector<bool> begun(plan_.groups.size(), false);
  position_of_block_.assign(blocks, 0);
  for (size_t i = 0; i < graph_.nodes.size(); ++i) {
    const Node& node = graph_.nodes[i];
    placements_.push_back(PlacementOf(graph_, plan_, NodeId(i)));
    if (node.pass != Pass::kForward) continue;
    const auto block = static_cast<size_t>(node.block);
    const OpPlacement& placement = placements_.back();
    group_of_block_[block] = placement.group;
    position_of_block_[block] = placement.chunk * stages_.count() +
                                stages_.of_group[placement.group.index()];
    if (!begun[placement.group.index()]) {
      begun[placement.group.index()] = true;
      groups_begun_[block].push_back(placement.group);
    }
  }
}

void LoweringContext::FindInputRoots() {
  for (size_t i = 0; i < plan_.ops.size(); ++i) {
    AxisSet root = 0;
    for (TensorId id : graph_.nodes[i].operands) {
      if (graph_.tensor(id).kind != TensorKind::kWeight) continue;
      const AxisSet rooted = weight_placement(id).rooted;
      if (rooted != 0 &&
          HomeOf(graph_, plan_, id).group == placements_[i].group) {
        root |= rooted;
      }
    }
    if (root == 0) continue;
    for (TensorId id : graph_.nodes[i].operands) {
      if (graph_.tensor(id).kind == TensorKind::kInput) {
        input_roots_.try_emplace({id, placements_[i].group}, root);
      }
    }
  }
}

AxisSet LoweringContext::InputRoot(TensorId input, GroupId group) const {
  const auto it = input_roots_.find({input, group});
  return it == input_roots_.end() ? 0 : it->second;
}

void LoweringContext::AddRead(TensorId tensor, GroupId group,
                              const Layout& read, int block, ActionKind part) {
  const Layout wanted = read.WithoutHalo();
  std::vector<Presence>& presences = presences_[tensor.index()];
  Presence& home = presences[0];
  const bool first = home.readers.empty() && presences.size() == 1;
  // What is first read at a root is kept there.
  if (first && wanted.rooted != 0 && home.group == group) {
    home.layout = wanted;
  } else if (first) {
    const bool comparable =
        home.group == group ||
        SameMesh(plan_.groups[home.group.index()], plan_.groups[group.index()]);
    if (home.layout.partial != 0) {
      home.layout = Resolved(home.layout, comparable ? wanted : Layout());
    } else if (home.group == group && home.layout.flat == 0 &&
               home.layout.rooted == 0 &&
               home.layout.sharded() == wanted.sharded()) {
      home.layout = wanted;
    }
  }
  for (Presence& presence : presences) {
    if (presence.group != group) continue;
    presence.readers.push_back({block, part});
    return;
  }
  presences.push_back(
      {group,
       wanted,
       block,
       part == ActionKind::kBackwardWeight ? ActionKind::kBackwardInput : part,
       {{block, part}}});
}

// An addition passes partial sums through when all its operands come from its
// block, are partial over the same axes, otherwise laid out as the node wants
// them, and nobody has asked for them whole before.
bool LoweringContext::PassesPartial(const Node& node,
                                    const OpPlacement& placement) const {
  if (!AddsPartialSums(*node.op, node.operands.size())) return false;
  Layout common;
  for (size_t k = 0; k < node.operands.size(); ++k) {
    const std::vector<Presence>& presences =
        presences_[node.operands[k].index()];
    if (presences.size() != 1 || !presences[0].readers.empty() ||
        presences[0].group != placement.group ||
        presences[0].first_block != node.block) {
      return false;
    }
    const Layout& layout = presences[0].layout;
    Layout wanted = Wanted(node, placement, k);
    wanted.partial = layout.partial;
    if (layout.partial == 0 || layout != wanted) return false;
    if (k > 0 && layout != common) return false;
    common = layout;
  }
  return true;
}

void LoweringContext::FindLayouts() {
  passes_partial_.assign(graph_.nodes.size(), false);
  produced_.resize(graph_.tensors.size());
  presences_.resize(graph_.tensors.size());
  for (size_t i = 0; i < graph_.nodes.size(); ++i) {
    const NodeId id(i);
    const Node& node = graph_.nodes[i];
    const OpPlacement& placement = placements_[i];
    const bool is_sum = node.op->name == "sum";
    // A gradient sum reads what is there as it is, and lays out whole sums
    // like the tensor whose gradient it is.
    Layout whole;
    if (is_sum) {
      const Tensor& result = graph_.tensor(node.results[0]);
      const Presence* forward = presence(result.gradient_of, placement.group);
      TESSERA_CHECK(forward != nullptr) << node.name;
      whole = forward->layout;
      whole.partial = 0;
    }
    const bool passes = is_sum || PassesPartial(node, placement);
    passes_partial_[i] = passes;
    bool agree = true;
    Layout common;
    for (size_t k = 0; k < node.operands.size(); ++k) {
      const TensorId operand = node.operands[k];
      const TensorKind kind = graph_.tensor(operand).kind;
      if (kind == TensorKind::kWeight) continue;
      if (kind == TensorKind::kInput) {
        if (node.op->once_per_step ||
            InputRoot(operand, placement.group) == 0) {
          continue;
        }
        std::vector<Presence>& presences = presences_[operand.index()];
        const Layout wanted = Wanted(node, placement, k).WithoutHalo();
        if (presence(operand, placement.group) == nullptr) {
          presences.push_back({placement.group, wanted, node.block, part(id)});
        }
        AddRead(operand, placement.group, wanted, node.block, part(id));
        continue;
      }
      if (passes && presences_[operand.index()][0].group == placement.group) {
        presences_[operand.index()][0].readers.push_back(
            {node.block, part(id)});
      } else {
        AddRead(operand, placement.group,
                is_sum ? whole : Wanted(node, placement, k), node.block,
                part(id));
      }
      if (passes) {
        const Layout& layout = presence(operand, placement.group)->layout;
        if (k == 0) common = layout;
        agree = agree && layout == common;
      }
    }
    for (size_t k = 0; k < node.results.size(); ++k) {
      const TensorId result = node.results[k];
      Layout& layout = produced_[result.index()];
      if (passes) {
        layout = agree ? common : whole;
      } else {
        layout = ResultLayout(graph_, node, placement,
                              plan_.groups[placement.group.index()], k);
      }
      presences_[result.index()].push_back(
          {placement.group, layout, node.block, part(id)});
    }
  }
}

// An activation that was exchanged for its readers, and is wanted by an adjoint
// in its block as it was produced, is kept so, too; what runs again is not
// kept.
void LoweringContext::FindKept() {
  kept_as_produced_.assign(graph_.tensors.size(), false);
  for (size_t i = 0; i < graph_.nodes.size(); ++i) {
    const Node& node = graph_.nodes[i];
    if (node.pass == Pass::kForward || passes_partial_[i]) continue;
    for (size_t k = 0; k < node.operands.size(); ++k) {
      const TensorId tensor = node.operands[k];
      if (graph_.tensor(tensor).kind != TensorKind::kActivation) continue;
      const Presence& home = presences_[tensor.index()][0];
      const Layout& produced = produced_[tensor.index()];
      if (!recomputed(tensor).valid() && home.group == placements_[i].group &&
          home.first_block == node.block && home.layout != produced &&
          home.layout.sharded() == produced.sharded() &&
          Wanted(node, placements_[i], k) == produced) {
        kept_as_produced_[tensor.index()] = true;
      }
    }
  }
}

// What backward needs and is not kept: results of nodes that are to run again,
// where nobody outside of the block reads them. Running again needs the node's
// operands, which are kept longer or made in the same way.
void LoweringContext::FindRecomputed() {
  recomputed_.assign(graph_.tensors.size(), NodeId());
  recomputed_nodes_.resize(graph_.blocks.size());
  std::vector<NodeId> makers(graph_.tensors.size());
  bool any = false;
  for (size_t i = 0; i < plan_.ops.size(); ++i) {
    if (!plan_.ops[i].recompute) continue;
    any = true;
    for (TensorId result : graph_.nodes[i].results) {
      if (presences_[result.index()].size() == 1) {
        makers[result.index()] = NodeId(i);
      }
    }
  }
  if (!any) return;
  std::vector<TensorId> wanted;
  for (const Node& node : graph_.nodes) {
    for (TensorId operand : node.operands) {
      NodeId& maker = makers[operand.index()];
      if (maker.valid() && graph_.node(maker).block != node.block) {
        maker = NodeId();
      }
      if (node.pass == Pass::kBackward) wanted.push_back(operand);
    }
  }
  while (!wanted.empty()) {
    const TensorId tensor = wanted.back();
    wanted.pop_back();
    const NodeId maker = makers[tensor.index()];
    if (!maker.valid() || recomputed(tensor).valid()) continue;
    recomputed_[tensor.index()] = maker;
    const Node& node = graph_.node(maker);
    auto& nodes = recomputed_nodes_[static_cast<size_t>(node.block)];
    if (std::find(nodes.begin(), nodes.end(), maker) != nodes.end()) continue;
    nodes.push_back(maker);
    wanted.insert(wanted.end(), node.operands.begin(), node.operands.end());
  }

  for (auto& nodes : recomputed_nodes_) {
    std::sort(nodes.begin(), nodes.end());
    for (NodeId id : nodes) {
      const Node& node = graph_.node(id);
      for (TensorId operand : node.operands) {
        for (Presence& presence : presences_[operand.index()]) {
          if (presence.group == placement(id).group) {
            presence.readers.push_back(
                {node.block, ActionKind::kBackwardInput});
          }
        }
      }
    }
  }
}

void LoweringContext::FindReplicas() {
  home_weights_.resize(graph_.blocks.size());
  replicas_.resize(weights().size());
  tiles_.resize(weights().size(), 1);
  for (size_t i = 0; i < plan_.ops.size(); ++i) {
    const Node& node = graph_.nodes[i];
    for (size_t k = 0; k < node.operands.size(); ++k) {
      const TensorId weight = node.operands[k];
      if (graph_.tensor(weight).kind != TensorKind::kWeight) continue;
      std::vector<Replica>& replicas = replicas_[WeightIndex(weight)];
      const auto known = std::find_if(
          replicas.begin(), replicas.end(),
          [&](const Replica& r) { return r.group == placements_[i].group; });
      if (known != replicas.end()) {
        known->one_chunk =
            known->one_chunk &&
            position_of_block(known->block) == position_of_block(node.block);
        continue;
      }
      if (replicas.empty()) {
        // A linear's bias is whole.
        if (k == 1) tiles_[WeightIndex(weight)] = placements_[i].tiles;
        home_weights_[static_cast<size_t>(node.block)].push_back(weight);
      }
      replicas.push_back({placements_[i].group,
                          Wanted(node, placements_[i], k),
                          node.block,
                          true,
                          {}});
    }
  }
  for (const GradientTerm& term : graph_.gradients) {
    const Presence& produced = presences_[term.gradient.index()][0];
    for (Replica& replica : replicas_[WeightIndex(term.weight)]) {
      if (replica.group != produced.group) continue;
      const Layout& layout = produced_[term.gradient.index()];
      if (std::find(replica.gradients.begin(), replica.gradients.end(),
                    layout) == replica.gradients.end()) {
        replica.gradients.push_back(layout);
      }
    }
  }
  for (size_t w = 0; w < replicas_.size(); ++w) {
    if (replicas_[w].size() > 1) tied_weights_.push_back(weights()[w]);
  }
}

const LoweringContext::Presence* LoweringContext::presence(
    TensorId tensor, GroupId group) const {
  for (const Presence& presence : presences_[tensor.index()]) {
    if (presence.group == group) return &presence;
  }
  return nullptr;
}

const WeightPlacement& LoweringContext::weight_placement(
    TensorId weight) const {
  return plan_.weights[WeightIndex(weight)];
}

int LoweringContext::ZeroStage(TensorId weight) const {
  const WeightPlacement& placement = weight_placement(weight);
  return placement.zero_axes == 0 ? 0 : placement.zero_stage;
}

Layout LoweringContext::PieceOf(Layout layout, const WeightPiece& piece) const {
  const int count = tiles(piece.weight);
  if (count > 1) {
    layout.tile = {TiledDim(graph_, piece.weight), piece.tile, count};
  }
  return layout;
}

Layout LoweringContext::ParameterLayout(const WeightPiece& piece,
                                        const Replica& replica) const {
  const bool cut =
      ZeroStage(piece.weight) >= 3 && &replica == &replicas(piece.weight)[0];
  return cut ? StateLayout(piece) : PieceOf(replica.layout, piece);
}

bool LoweringContext::CompleteWithBackward(TensorId weight) const {
  // Where compute would wait for them, reductions would hold up the stages
  // before, one after another.
  if (!concurrent_streams_ && stages_.count() > 1) return false;
  return replicas(weight).size() == 1 && replicas(weight)[0].one_chunk;
}

std::vector<TensorId> LoweringContext::FetchedWeights(int block,
                                                      ActionKind action) const {
  std::vector<TensorId> weights;
  const Pass pass =
      action == ActionKind::kForward ? Pass::kForward : Pass::kBackward;
  std::vector<NodeId> nodes;
  for (NodeId id : nodes_of_block(pass)[static_cast<size_t>(block)]) {
    if (Includes(action, part(id))) nodes.push_back(id);
  }
  if (Includes(action, ActionKind::kBackwardInput)) {
    const auto& again = recomputed_nodes(block);
    nodes.insert(nodes.end(), again.begin(), again.end());
  }
  for (NodeId id : nodes) {
    for (TensorId tensor : graph_.node(id).operands) {
      if (graph_.tensor(tensor).kind == TensorKind::kWeight &&
          IsFetched(tensor) && tiles(tensor) == 1 &&
          std::find(weights.begin(), weights.end(), tensor) == weights.end()) {
        weights.push_back(tensor);
      }
    }
  }
  return weights;
}

int LoweringContext::BlockAhead(int block, Pass pass, int ahead) const {
  const int other = pass == Pass::kForward ? block + ahead : block - ahead;
  const auto blocks = static_cast<int>(group_of_block_.size());
  const bool same_position =
      other >= 0 && other < blocks &&
      position_of_block(other) == position_of_block(block);
  return same_position ? other : -1;
}

Layout LoweringContext::StateLayout(const WeightPiece& piece) const {
  const TensorId weight = piece.weight;
  Layout layout = PieceOf(replicas(weight)[0].layout, piece);
  if (ZeroStage(weight) >= 1) layout.flat = weight_placement(weight).zero_axes;
  layout.rooted |= weight_placement(weight).rooted;
  return layout;
}

}  // namespace tessera
