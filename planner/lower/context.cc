#include <algorithm>

#include "planner/ir/running_average.h"
#include "planner/lower/concurrent_streams.h"
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
      producers(graph.tensors.size()),
      reads(graph.tensors.size()),
      weights(Weights(graph)),
      weight_index(graph.tensors.size(), -1),
      home_weights(graph.blocks.size()),
      gradient_terms(weights.size()),
      running_momenta(RunningMomenta(graph)) {
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    const auto block = static_cast<size_t>(node.block);
    for (size_t k = 0; k < node.operands.size(); ++k) {
      const TensorId operand = node.operands[k];
      if (reads[operand.index()].empty() &&
          graph.tensor(operand).kind == TensorKind::kWeight) {
        home_weights[block].push_back(operand);
      }
      reads[operand.index()].push_back({NodeId(i), k});
    }
    for (TensorId result : node.results) producers[result.index()] = NodeId(i);
    adds.push_back(node.op->name == "sum" ? Adds::kAlways
                   : AddsPartialSums(*node.op, node.operands.size())
                       ? Adds::kPerhaps
                       : Adds::kNever);
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
  for (const GradientTerm& term : graph.gradients) {
    const int weight = weight_index[term.weight.index()];
    gradient_terms[static_cast<size_t>(weight)].push_back(term.gradient);
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
      overlaps_(Overlaps(plan.groups)),
      adjoint_placements_(facts.graph.nodes.size()),
      produced_(facts.graph.tensors.size()),
      presences_(facts.graph.tensors.size()),
      recomputed_nodes_(facts.graph.blocks.size()),
      recomputed_(facts.graph.tensors.size()),
      replicas_(facts.weights.size()),
      kept_as_produced_(facts.graph.tensors.size(), Known::kNot),
      passes_partial_(facts.graph.nodes.size(), Known::kNot) {
  for (const auto& others : overlaps_) devices_are_shared_ |= !others.empty();
  concurrent_streams_ = HasConcurrentStreams(facts.cluster, plan);
  PlaceBlocks();
  FindInputRoots();
  FindTied();
  FindOffloaded();
  fetches_ = std::ranges::any_of(
      weights(), [&](TensorId weight) { return IsFetched(weight); });
}

void LoweringContext::PlaceBlocks() {
  const size_t blocks = graph_.blocks.size();
  group_of_block_.assign(blocks, GroupId(0));
  groups_begun_.resize(blocks);
  std::vector<bool> begun(plan_.groups.size(), false);
  position_of_block_.assign(blocks, 0);
  for (size_t i = 0; i < plan_.ops.size(); ++i) {
    const OpPlacement& placement = plan_.ops[i];
    const auto block = static_cast<size_t>(graph_.nodes[i].block);
    group_of_block_[block] = placement.group;
    position_of_block_[block] = placement.chunk * stages_.count() +
                                stages_.of_group[placement.group.index()];
    if (!begun[placement.group.index()]) {
      begun[placement.group.index()] = true;
      groups_begun_[block].push_back(placement.group);
    }
  }
}

const OpPlacement& LoweringContext::placement(NodeId node) const {
  if (graph_.node(node).pass == Pass::kForward) return plan_.ops[node.index()];
  const OpPlacement* known = adjoint_placements_.Find(node.index());
  return known != nullptr ? *known
                          : adjoint_placements_.Set(
                                node.index(), PlacementOf(graph_, plan_, node));
}

void LoweringContext::FindInputRoots() {
  if (std::ranges::none_of(plan_.weights, [](const WeightPlacement& weight) {
        return weight.rooted != 0;
      })) {
    return;
  }
  for (size_t i = 0; i < plan_.ops.size(); ++i) {
    AxisSet root = 0;
    for (TensorId id : graph_.nodes[i].operands) {
      if (graph_.tensor(id).kind != TensorKind::kWeight) continue;
      const NodeId home = facts_.reads[id.index()][0].node;
      if (plan_.ops[home.index()].group == plan_.ops[i].group) {
        root |= weight_placement(id).rooted;
      }
    }
    if (root == 0) continue;
    for (TensorId id : graph_.nodes[i].operands) {
      if (graph_.tensor(id).kind == TensorKind::kInput) {
        input_roots_.try_emplace({id, plan_.ops[i].group}, root);
      }
    }
  }
}

AxisSet LoweringContext::InputRoot(TensorId input, GroupId group) const {
  const auto it = input_roots_.find({input, group});
  return it == input_roots_.end() ? 0 : it->second;
}

// ---- layouts of tensors
//
// A tensor's layouts follow from how it is produced and who reads it; only its
// first reader changes how its producer's group keeps it. So each is found by
// itself. What is produced follows from the node's placement, but for nodes
// that add partial sums as they are.

// How a tensor that `home` produces is kept there once `reader` has read it as
// the first: partial sums are resolved, and a layout with the same shards is
// exchanged for the reader's.
Layout LoweringContext::Settled(const Layout& produced, GroupId home,
                                const Layout& wanted, GroupId reader) const {
  // What is first read at a root is kept there.
  if (wanted.rooted != 0 && home == reader) return wanted;
  if (produced.partial != 0) {
    const bool comparable =
        home == reader ||
        SameMesh(plan_.groups[home.index()], plan_.groups[reader.index()]);
    return Resolved(produced, comparable ? wanted : Layout());
  }
  const bool exchanges = home == reader && produced.flat == 0 &&
                         produced.rooted == 0 &&
                         produced.sharded() == wanted.sharded();
  return exchanges ? wanted : produced;
}

// A gradient sum lays out whole sums like the tensor whose gradient it is.
Layout LoweringContext::WholeSum(NodeId sum) const {
  const Tensor& result = graph_.tensor(graph_.node(sum).results[0]);
  Layout whole = LayoutOn(result.gradient_of, placement(sum).group);
  whole.partial = 0;
  return whole;
}

// What a reader wants that does not take the tensor as it is.
Layout LoweringContext::ReadLayout(const LoweringFacts::Read& read) const {
  const bool sum =
      facts_.adds[read.node.index()] == LoweringFacts::Adds::kAlways;
  return (sum ? WholeSum(read.node)
              : Wanted(graph_.node(read.node), placement(read.node),
                       read.operand))
      .WithoutHalo();
}

// How the producer's group keeps a tensor.
Layout LoweringContext::HomeLayout(TensorId tensor) const {
  const auto& reads = facts_.reads[tensor.index()];
  const GroupId home = placement(facts_.producers[tensor.index()]).group;
  const Layout& layout = produced(tensor);
  if (reads.empty()) return layout;
  const GroupId reader = placement(reads[0].node).group;
  if (reader == home && passes_partial(reads[0].node)) return layout;
  return Settled(layout, home, ReadLayout(reads[0]), reader);
}

// How a group has a tensor that it makes or reads.
Layout LoweringContext::LayoutOn(TensorId tensor, GroupId group) const {
  if (placement(facts_.producers[tensor.index()]).group == group) {
    return HomeLayout(tensor);
  }
  for (const LoweringFacts::Read& read : facts_.reads[tensor.index()]) {
    if (placement(read.node).group == group) return ReadLayout(read);
  }
  TESSERA_CHECK(false) << graph_.tensor(tensor).name;
  return {};
}

// An addition passes partial sums through when all its operands come from its
// block, are partial over the same axes, otherwise laid out as the node wants
// them, and nobody has asked for them whole before.
bool LoweringContext::PassesPartial(NodeId id) const {
  const Node& node = graph_.node(id);
  const OpPlacement& own = placement(id);
  for (TensorId operand : node.operands) {
    const NodeId producer = facts_.producers[operand.index()];
    if (!producer.valid() || facts_.reads[operand.index()][0].node != id ||
        graph_.node(producer).block != node.block ||
        placement(producer).group != own.group) {
      return false;
    }
  }
  const Layout& common = produced(node.operands[0]);
  for (size_t k = 0; k < node.operands.size(); ++k) {
    const Layout& layout = produced(node.operands[k]);
    Layout wanted = Wanted(node, own, k);
    wanted.partial = layout.partial;
    if (layout.partial == 0 || layout != wanted || layout != common) {
      return false;
    }
  }
  return true;
}

bool LoweringContext::passes_partial(NodeId node) const {
  switch (facts_.adds[node.index()]) {
    case LoweringFacts::Adds::kNever:
      return false;
    case LoweringFacts::Adds::kAlways:
      return true;
    case LoweringFacts::Adds::kPerhaps:
      break;
  }
  Known& known = passes_partial_[node.index()];
  if (known == Known::kNot) {
    known = PassesPartial(node) ? Known::kYes : Known::kNo;
  }
  return known == Known::kYes;
}

// A gradient sum's result: laid out as its operands, where all are so here.
Layout LoweringContext::SumLayout(NodeId sum) const {
  const Node& node = graph_.node(sum);
  const GroupId group = placement(sum).group;
  Layout common;
  for (size_t k = 0; k < node.operands.size(); ++k) {
    const Layout layout = LayoutOn(node.operands[k], group);
    if (k == 0) common = layout;
    if (layout != common) return WholeSum(sum);
  }
  return common;
}

const Layout& LoweringContext::produced(TensorId tensor) const {
  const Layout* known = produced_.Find(tensor.index());
  if (known != nullptr) return *known;
  const NodeId producer = facts_.producers[tensor.index()];
  // Inputs and weights come in any layout.
  return producer.valid() ? ProducedBy(producer, tensor)
                          : produced_.Set(tensor.index(), Layout());
}

const Layout& LoweringContext::ProducedBy(NodeId id, TensorId tensor) const {
  const Node& node = graph_.node(id);
  if (facts_.adds[id.index()] != LoweringFacts::Adds::kAlways) {
    if (passes_partial(id)) {
      return produced_.Set(tensor.index(), produced(node.operands[0]));
    }
    const auto result = std::ranges::find(node.results, tensor);
    const OpPlacement& own = placement(id);
    return produced_.Set(
        tensor.index(),
        ResultLayout(graph_, node, own, plan_.groups[own.group.index()],
                     static_cast<size_t>(result - node.results.begin())));
  }
  // Sums follow from one another, as long as the graph is deep: no recursion.
  std::vector<NodeId> pending = {id};
  while (!pending.empty()) {
    const NodeId sum = pending.back();
    const size_t before = pending.size();
    for (TensorId operand : graph_.node(sum).operands) {
      const NodeId other = facts_.producers[operand.index()];
      if (other.valid() && produced_.Find(operand.index()) == nullptr &&
          facts_.adds[other.index()] == LoweringFacts::Adds::kAlways) {
        pending.push_back(other);
      }
    }
    if (pending.size() > before) continue;
    pending.pop_back();
    const size_t result = graph_.node(sum).results[0].index();
    if (produced_.Find(result) == nullptr) {
      produced_.Set(result, SumLayout(sum));
    }
  }
  return *produced_.Find(tensor.index());
}

void LoweringContext::Assume(TensorId sum, const Layout& produced) {
  if (produced_.Find(sum.index()) == nullptr) {
    produced_.Set(sum.index(), produced);
  }
}

const std::vector<LoweringContext::Presence>& LoweringContext::presences(
    TensorId tensor) const {
  const std::vector<Presence>* known = presences_.Find(tensor.index());
  return known != nullptr
             ? *known
             : presences_.Set(tensor.index(), FindPresences(tensor));
}

std::vector<LoweringContext::Presence> LoweringContext::FindPresences(
    TensorId tensor) const {
  std::vector<Presence> presences;
  const TensorKind kind = graph_.tensor(tensor).kind;
  if (kind == TensorKind::kWeight) return presences;
  const auto find = [&](GroupId group) {
    return std::ranges::find(presences, group, &Presence::group);
  };
  // A reader that does not take the tensor as it is.
  const auto add_read = [&](const LoweringFacts::Read& read, GroupId group,
                            const Presence::Reader& reader) {
    const Layout wanted = ReadLayout(read);
    Presence& home = presences[0];
    if (home.readers.empty() && presences.size() == 1) {
      home.layout = Settled(home.layout, home.group, wanted, group);
    }
    if (const auto it = find(group); it != presences.end()) {
      it->readers.push_back(reader);
      return;
    }
    const ActionKind part = reader.part == ActionKind::kBackwardWeight
                                ? ActionKind::kBackwardInput
                                : reader.part;
    presences.push_back({group, wanted, reader.block, part, {reader}});
  };

  const NodeId producer = facts_.producers[tensor.index()];
  if (producer.valid()) {
    presences.push_back({placement(producer).group, produced(tensor),
                         graph_.node(producer).block, part(producer)});
  }
  for (const LoweringFacts::Read& read : facts_.reads[tensor.index()]) {
    const Node& node = graph_.node(read.node);
    const GroupId group = placement(read.node).group;
    const Presence::Reader reader = {node.block, part(read.node)};
    if (kind == TensorKind::kInput) {
      if (node.op->once_per_step || InputRoot(tensor, group) == 0) continue;
      if (find(group) == presences.end()) {
        presences.push_back({group, ReadLayout(read), node.block, reader.part});
      }
    } else if (group == presences[0].group && passes_partial(read.node)) {
      presences[0].readers.push_back(reader);
      continue;
    }
    add_read(read, group, reader);
  }
  // What runs again reads it once more.
  for (const LoweringFacts::Read& read : facts_.reads[tensor.index()]) {
    const Node& node = graph_.node(read.node);
    if (node.pass != Pass::kForward) break;
    if (!plan_.ops[read.node.index()].recompute ||
        !std::ranges::binary_search(recomputed_nodes(node.block), read.node)) {
      continue;
    }
    const auto it = find(placement(read.node).group);
    if (it != presences.end()) {
      it->readers.push_back({node.block, ActionKind::kBackwardInput});
    }
  }
  return presences;
}

bool LoweringContext::kept_as_produced(TensorId tensor) const {
  Known& known = kept_as_produced_[tensor.index()];
  if (known == Known::kNot) {
    known = FindKept(tensor) ? Known::kYes : Known::kNo;
  }
  return known == Known::kYes;
}

// An activation that was exchanged for its readers, and is wanted by an adjoint
// in its block as it was produced, is kept so, too; what runs again is not
// kept.
bool LoweringContext::FindKept(TensorId tensor) const {
  if (graph_.tensor(tensor).kind != TensorKind::kActivation) return false;
  const Layout& made = produced(tensor);
  const Layout kept = HomeLayout(tensor);
  if (kept == made || kept.sharded() != made.sharded() ||
      recomputed(tensor).valid()) {
    return false;
  }
  const NodeId producer = facts_.producers[tensor.index()];
  return std::ranges::any_of(
      facts_.reads[tensor.index()], [&](const LoweringFacts::Read& read) {
        const Node& node = graph_.node(read.node);
        return node.pass == Pass::kBackward && !passes_partial(read.node) &&
               placement(read.node).group == placement(producer).group &&
               node.block == graph_.node(producer).block &&
               Wanted(node, placement(read.node), read.operand) == made;
      });
}

NodeId LoweringContext::recomputed(TensorId tensor) const {
  const NodeId producer = facts_.producers[tensor.index()];
  if (!producer.valid() || graph_.node(producer).pass != Pass::kForward ||
      !plan_.ops[producer.index()].recompute) {
    return NodeId();
  }
  recomputed_nodes(graph_.node(producer).block);
  return recomputed_[tensor.index()];
}

const std::vector<NodeId>& LoweringContext::recomputed_nodes(int block) const {
  const auto index = static_cast<size_t>(block);
  const std::vector<NodeId>* known = recomputed_nodes_.Find(index);
  return known != nullptr ? *known
                          : recomputed_nodes_.Set(index, FindRecomputed(block));
}

// What a block's backward needs and is not kept: results of nodes that are to
// run again, where nobody outside of the block and its group reads them.
// Running again needs the node's operands, which are kept longer or made in the
// same way.
std::vector<NodeId> LoweringContext::FindRecomputed(int block) const {
  const auto index = static_cast<size_t>(block);
  std::vector<NodeId> nodes;
  if (std::ranges::none_of(facts_.forward_nodes[index], [&](NodeId id) {
        return plan_.ops[id.index()].recompute;
      })) {
    return nodes;
  }
  std::vector<TensorId> wanted;
  for (NodeId id : facts_.backward_nodes[index]) {
    const auto& operands = graph_.node(id).operands;
    wanted.insert(wanted.end(), operands.begin(), operands.end());
  }
  while (!wanted.empty()) {
    const TensorId tensor = wanted.back();
    wanted.pop_back();
    const NodeId maker = facts_.producers[tensor.index()];
    if (!maker.valid() || recomputed_[tensor.index()].valid()) continue;
    const Node& node = graph_.node(maker);
    if (node.pass != Pass::kForward || node.block != block ||
        !plan_.ops[maker.index()].recompute ||
        std::ranges::any_of(
            facts_.reads[tensor.index()], [&](const LoweringFacts::Read& read) {
              return graph_.node(read.node).block != block ||
                     placement(read.node).group != placement(maker).group;
            })) {
      continue;
    }
    recomputed_[tensor.index()] = maker;
    if (std::ranges::find(nodes, maker) != nodes.end()) continue;
    nodes.push_back(maker);
    wanted.insert(wanted.end(), node.operands.begin(), node.operands.end());
  }
  std::ranges::sort(nodes);
  return nodes;
}

// ---- weights

const std::vector<LoweringContext::Replica>& LoweringContext::replicas(
    TensorId weight) const {
  const size_t index = WeightIndex(weight);
  const std::vector<Replica>* known = replicas_.Find(index);
  return known != nullptr ? *known : replicas_.Set(index, FindReplicas(weight));
}

std::vector<LoweringContext::Replica> LoweringContext::FindReplicas(
    TensorId weight) const {
  std::vector<Replica> replicas;
  const auto find = [&](GroupId group) {
    return std::ranges::find(replicas, group, &Replica::group);
  };
  for (const LoweringFacts::Read& read : facts_.reads[weight.index()]) {
    const Node& node = graph_.node(read.node);
    if (node.pass != Pass::kForward) break;
    const OpPlacement& reader = placement(read.node);
    if (const auto known = find(reader.group); known != replicas.end()) {
      known->one_chunk = known->one_chunk && position_of_block(known->block) ==
                                                 position_of_block(node.block);
      continue;
    }
    replicas.push_back({reader.group,
                        Wanted(node, reader, read.operand),
                        node.block,
                        true,
                        {}});
  }
  for (TensorId term : facts_.gradient_terms[WeightIndex(weight)]) {
    const auto replica = find(placement(facts_.producers[term.index()]).group);
    if (replica == replicas.end()) continue;
    const Layout& layout = produced(term);
    if (std::ranges::find(replica->gradients, layout) ==
        replica->gradients.end()) {
      replica->gradients.push_back(layout);
    }
  }
  return replicas;
}

void LoweringContext::FindTied() {
  const auto is_forward = [&](const LoweringFacts::Read& read) {
    return graph_.node(read.node).pass == Pass::kForward;
  };
  for (TensorId weight : weights()) {
    const auto& reads = facts_.reads[weight.index()];
    // Most are read once there.
    if (reads.size() < 2 || !is_forward(reads[1])) continue;
    const bool tied =
        std::ranges::any_of(reads, [&](const LoweringFacts::Read& read) {
          return is_forward(read) &&
                 placement(read.node).group != placement(reads[0].node).group;
        });
    if (tied) tied_weights_.push_back(weight);
  }
}

int LoweringContext::tiles(TensorId weight) const {
  // A linear's bias is whole.
  const auto& reads = facts_.reads[weight.index()];
  return !reads.empty() && reads[0].operand == 1
             ? placement(reads[0].node).tiles
             : 1;
}

const LoweringContext::Presence* LoweringContext::presence(
    TensorId tensor, GroupId group) const {
  for (const Presence& presence : presences(tensor)) {
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
  if (!fetches_) return weights;
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
  const int64_t reach = pass == Pass::kForward ? ahead : -int64_t{ahead};
  const int64_t other = block + reach;
  if (other < 0 || other >= std::ssize(group_of_block_)) return -1;
  const auto at = static_cast<int>(other);
  return position_of_block(at) == position_of_block(block) ? at : -1;
}

Layout LoweringContext::StateLayout(const WeightPiece& piece) const {
  const TensorId weight = piece.weight;
  Layout layout = PieceOf(replicas(weight)[0].layout, piece);
  if (ZeroStage(weight) >= 1) layout.flat = weight_placement(weight).zero_axes;
  layout.rooted |= weight_placement(weight).rooted;
  return layout;
}

}  // namespace tessera
