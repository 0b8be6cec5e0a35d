#include "costmodel/evaluate/surroundings.h"

#include <algorithm>
#include <map>
#include <utility>

namespace tessera {
namespace {

int64_t Pair(int64_t a, int64_t b) {
  return a << 32 | b;
}

void Append(const Layout& layout, IntKey& key) {
  static_assert(kMaxDims % 2 == 0);
  for (size_t d = 0; d < kMaxDims; d += 2) {
    key.push_back(Pair(layout.dims[d], layout.dims[d + 1]));
  }
  const bool plain =
      layout.tile.count == 1 && layout.turn == 0 && !layout.has_halo();
  key.insert(key.end(), {Pair(layout.partial, layout.flat),
                         Pair(layout.rooted, layout.ring), plain});
  if (plain) return;
  key.insert(key.end(), {layout.turn, layout.tile.dim,
                         Pair(layout.tile.index, layout.tile.count)});
  for (const Halo& halo : layout.halos) {
    key.insert(key.end(), {halo.dim, halo.before, halo.after});
  }
}

// Whether only nodes of `block` touch the tensor.
bool IsInner(const LoweringFacts& facts, TensorId id, int block) {
  const Graph& graph = facts.graph;
  const NodeId producer = facts.producers[id.index()];
  return (!producer.valid() || graph.node(producer).block == block) &&
         std::ranges::all_of(facts.reads[id.index()], [&](const auto& read) {
           return graph.node(read.node).block == block;
         });
}

// All of a block but names. `added` says of each tensor whether it is a weight
// whose gradient has several terms.
IntKey FormKey(const LoweringFacts& facts, const Pricer& pricer,
               const std::vector<bool>& added, int block) {
  const Graph& graph = facts.graph;
  const auto b = static_cast<size_t>(block);
  std::vector<NodeId> nodes = facts.forward_nodes[b];
  nodes.insert(nodes.end(), facts.backward_nodes[b].begin(),
               facts.backward_nodes[b].end());
  std::map<TensorId, int64_t> numbers;  // by first appearance
  std::vector<TensorId> tensors;
  const auto touch = [&](TensorId id) {
    if (numbers.emplace(id, std::ssize(tensors)).second) tensors.push_back(id);
  };
  for (NodeId id : nodes) {
    const Node& node = graph.node(id);
    for (TensorId operand : node.operands) touch(operand);
    for (TensorId result : node.results) touch(result);
    if (node.op->name == "sum" && node.pass == Pass::kBackward) {
      touch(graph.tensor(node.results[0]).gradient_of);
    }
  }
  const auto number_of = [&](TensorId id) -> int64_t {
    const auto it = numbers.find(id);
    return it == numbers.end() ? -1 : it->second;
  };
  IntKey key;
  for (NodeId id : nodes) {
    const Node& node = graph.node(id);
    key.push_back(pricer.NumberOf(id));  // operator, rule and attributes
    key.push_back(static_cast<int64_t>(node.pass));
    key.push_back(node.forward.valid()
                      ? number_of(graph.node(node.forward).results[0])
                      : -1);
    for (TensorId operand : node.operands) key.push_back(number_of(operand));
    for (TensorId result : node.results) key.push_back(number_of(result));
    if (facts.kernels.scratch.empty()) continue;
    const KernelScratch& scratch = facts.kernels.scratch[id.index()];
    key.insert(key.end(), {scratch.bytes, number_of(scratch.of)});
  }
  for (TensorId id : tensors) {
    const Tensor& tensor = graph.tensor(id);
    key.push_back(std::ssize(tensor.shape));
    key.insert(key.end(), tensor.shape.begin(), tensor.shape.end());
    key.insert(
        key.end(),
        {static_cast<int64_t>(tensor.dtype), static_cast<int64_t>(tensor.kind),
         tensor.sample_dim, number_of(tensor.gradient_of),
         IsInner(facts, id, block), id == graph.loss,
         facts.once_per_step[id.index()], pricer.NumberOf(id)});
    if (!facts.kernels.kept.empty()) {
      key.push_back(facts.kernels.kept[id.index()].value_or(-1));
    }
    if (tensor.kind != TensorKind::kWeight) continue;
    const std::vector<TensorId>& home = facts.home_weights[b];
    key.push_back(std::ranges::find(home, id) != home.end());
    key.push_back(facts.running_momenta[id.index()] >= 0);
    key.push_back(added[id.index()]);
    // Tied weights are sent in the graph's order.
    key.push_back(std::ranges::count_if(tensors, [&](TensorId other) {
      return graph.tensor(other).kind == TensorKind::kWeight && other < id;
    }));
  }
  return key;
}

}  // namespace

std::vector<int> FormsOf(const LoweringFacts& facts, const Pricer& pricer) {
  std::map<IntKey, int> numbers;
  std::vector<int> forms;
  std::vector<bool> seen(facts.graph.tensors.size());
  std::vector<bool> added(seen.size());
  for (const GradientTerm& term : facts.graph.gradients) {
    if (seen[term.weight.index()]) added[term.weight.index()] = true;
    seen[term.weight.index()] = true;
  }
  const auto blocks = static_cast<int>(facts.graph.blocks.size());
  for (int block = 0; block < blocks; ++block) {
    IntKey key = FormKey(facts, pricer, added, block);
    const auto next = static_cast<int>(numbers.size());
    forms.push_back(numbers.try_emplace(std::move(key), next).first->second);
  }
  return forms;
}

void Surroundings::AppendForward(IntKey& key) const {
  for (TensorId id : shape_.shared) {
    const TensorKind kind = graph_.tensor(id).kind;
    if (kind == TensorKind::kWeight || kind == TensorKind::kActivation) {
      AppendShared(id, ActionKind::kForward, key);
    }
  }
  for (TensorId id : shape_.inner) AppendInner(id, key);
  AppendPartial(Pass::kForward, key);
  AppendFetched(ActionKind::kForward, key);
}

void Surroundings::AppendBackward(ActionKind action, IntKey& key) const {
  for (TensorId id : shape_.shared) AppendShared(id, action, key);
  AppendPartial(Pass::kForward, key);  // of what runs again
  AppendPartial(Pass::kBackward, key);
  for (NodeId node : NodesOf(Pass::kBackward)) {
    if (Includes(action, context_.part(node))) AppendAccumulators(node, key);
  }
  AppendFetched(action, key);
}

void Surroundings::AppendBackwardWeight(IntKey& key) const {
  constexpr ActionKind kAction = ActionKind::kBackwardWeight;
  for (TensorId id : shape_.shared) {
    if (graph_.tensor(id).kind == TensorKind::kWeight) {
      AppendShared(id, kAction, key);
    }
  }
  for (NodeId id : NodesOf(Pass::kBackward)) {
    if (context_.part(id) != kAction) continue;
    const Node& node = graph_.node(id);
    const OpPlacement& placement = context_.placement(id);
    key.push_back(Pair(placement.tiles, placement.streamed));
    key.insert(key.end(), placement.axes.begin(),
               placement.axes.begin() + std::ssize(node.rule.factors));
    key.push_back(context_.passes_partial(id));
    for (TensorId operand : node.operands) {
      const TensorKind kind = graph_.tensor(operand).kind;
      if (kind != TensorKind::kInput && kind != TensorKind::kWeight) {
        AppendTensor(operand, kAction, key);
      }
    }
    AppendAccumulators(id, key);
  }
  AppendFetched(kAction, key);
}

void Surroundings::AppendUpdate(IntKey& key) const {
  const std::vector<TensorId>& home = context_.home_weights(block_);
  for (TensorId id : shape_.shared) {
    if (graph_.tensor(id).kind != TensorKind::kWeight) continue;
    // Others are updated elsewhere, and stored here by no group of theirs.
    const bool own =
        std::ranges::find(home, id) != home.end() ||
        std::ranges::any_of(context_.replicas(id), [&](const auto& replica) {
          return replica.block == block_;
        });
    key.push_back(own);
    if (!own) continue;
    AppendWeight(id, key);
    AppendGradients(id, key);
  }
}

const std::vector<NodeId>& Surroundings::NodesOf(Pass pass) const {
  return context_.nodes_of_block(pass)[static_cast<size_t>(block_)];
}

// Of what other blocks touch, too.
void Surroundings::AppendShared(TensorId id, ActionKind action,
                                IntKey& key) const {
  if (graph_.tensor(id).kind == TensorKind::kWeight) {
    AppendReadWeight(
        id,
        action == ActionKind::kForward ? kParametersAreCut : kGradientsAreCut,
        key);
  } else {
    AppendTensor(id, action, key);
  }
}

// Who makes a tensor sees how it is laid out everywhere, who receives it how it
// is sent, and who finds it how it is here.
void Surroundings::AppendTensor(TensorId id, ActionKind action,
                                IntKey& key) const {
  const auto& presences = context_.presences(id);
  const auto* here = context_.presence(id, own_);
  const bool made = presences[0].first_block == block_;
  const bool makes = action != ActionKind::kBackwardWeight;
  key.push_back(made);
  if (made || here == nullptr) {
    const bool again = context_.recomputed(id).valid();
    // What the forward pass made and sent is only read.
    const bool leaves =
        makes && (action == ActionKind::kForward || again ||
                  graph_.tensor(id).kind != TensorKind::kActivation);
    Append(context_.produced(id), key);
    key.push_back(context_.kept_as_produced(id));
    key.push_back(again);
    if (leaves) key.push_back(std::ssize(presences));
    for (const LoweringContext::Presence& presence : presences) {
      if (!leaves && &presence != here) continue;
      if (leaves) AppendReaders(presence, action, key);
      key.push_back(class_of_(presence.group));
      key.push_back(shape_.IndexOf(presence.first_block));
      key.push_back(static_cast<int64_t>(presence.first_part));
      Append(presence.layout, key);
    }
    return;
  }
  Append(here->layout, key);
  const bool arrives = makes && presences[0].group != own_ &&
                       here->first_block == block_ &&
                       Includes(action, here->first_part);
  key.push_back(arrives);
  if (!arrives) return;
  key.push_back(static_cast<int64_t>(here->first_part));
  AppendReaders(*here, action, key);
  key.push_back(class_of_(presences[0].group));
  key.push_back(shape_.IndexOf(presences[0].first_block));
  Append(presences[0].layout, key);
}

// Programs ask whether there are such readers, in their block and in others;
// forward, whether there are any in backward, which leaves nothing to forward.
// REQUIRES: not the gradients of weights, which leave nothing to any.
void Surroundings::AppendReaders(const LoweringContext::Presence& presence,
                                 ActionKind action, IntKey& key) const {
  int64_t readers = 0;
  for (const auto& reader : presence.readers) {
    const bool backward = reader.part != ActionKind::kForward;
    if (action != ActionKind::kForward && !backward) continue;
    const int bit =
        action == ActionKind::kForward && backward
            ? 8
            : 2 * static_cast<int>(reader.part) + (reader.block == block_);
    readers |= int64_t{1} << bit;
  }
  key.push_back(readers);
}

// Of an activation that only the block touches, what its forward pass does not
// know from how its operators are split: how it is left to backward.
void Surroundings::AppendInner(TensorId id, IntKey& key) const {
  const auto& readers = context_.presences(id)[0].readers;
  const bool left = std::ranges::any_of(readers, [](const auto& reader) {
    return reader.part != ActionKind::kForward;
  });
  key.push_back(left + 2 * context_.recomputed(id).valid() +
                4 * context_.kept_as_produced(id));
}

// `seen_from`: the ZeRO stage from which on it is seen how the weight is cut.
void Surroundings::AppendReadWeight(TensorId id, int seen_from,
                                    IntKey& key) const {
  const auto& replicas = context_.replicas(id);
  const auto here =
      std::ranges::find(replicas, own_, &LoweringContext::Replica::group);
  const bool seen =
      context_.ZeroStage(id) >= seen_from || here == replicas.end();
  key.push_back(seen);
  if (seen) {
    AppendWeight(id, key);
  } else {
    key.push_back(context_.tiles(id));
    Append(here->layout, key);
  }
}

void Surroundings::AppendWeight(TensorId id, IntKey& key) const {
  const WeightPlacement& placement = context_.weight_placement(id);
  key.push_back(placement.zero_stage);
  key.push_back(placement.zero_axes);
  key.push_back(context_.tiles(id));
  key.push_back(std::ssize(context_.replicas(id)));
  for (const LoweringContext::Replica& replica : context_.replicas(id)) {
    key.push_back(number_of_(replica.group));
    key.push_back(class_of_(replica.group));
    key.push_back(shape_.IndexOf(replica.block));
    Append(replica.layout, key);
  }
}

// What of a weight's gradients is added up.
void Surroundings::AppendGradients(TensorId id, IntKey& key) const {
  for (const LoweringContext::Replica& replica : context_.replicas(id)) {
    key.push_back(replica.one_chunk);
    key.push_back(std::ssize(replica.gradients));
    for (const Layout& layout : replica.gradients) Append(layout, key);
  }
}

// To which of these sums of each weight a node adds.
void Surroundings::AppendAccumulators(NodeId node, IntKey& key) const {
  for (TensorId result : graph_.node(node).results) {
    const Tensor& tensor = graph_.tensor(result);
    if (tensor.kind != TensorKind::kWeightGradient) continue;
    const auto& replicas = context_.replicas(tensor.gradient_of);
    const auto here =
        std::ranges::find(replicas, context_.placement(node).group,
                          &LoweringContext::Replica::group);
    if (here == replicas.end()) continue;
    key.push_back(
        std::ranges::find(here->gradients, context_.produced(result)) -
        here->gradients.begin());
  }
}

void Surroundings::AppendPartial(Pass pass, IntKey& key) const {
  for (NodeId node : NodesOf(pass)) {
    key.push_back(context_.passes_partial(node));
  }
}

// The weights that the block fetches, for itself and ahead of others, block by
// block, and whether tiles are fetched ahead.
void Surroundings::AppendFetched(ActionKind action, IntKey& key) const {
  const Pass pass =
      action == ActionKind::kForward ? Pass::kForward : Pass::kBackward;
  key.push_back(prefetch_ > 0);
  // The first of a pass fetches all that comes before, too.
  const bool first = context_.BlockAhead(block_, pass, -1) < 0;
  for (int ahead = first ? 0 : prefetch_; ahead <= prefetch_; ++ahead) {
    const int other = context_.BlockAhead(block_, pass, ahead);
    if (other < 0) break;
    const std::vector<TensorId> fetched =
        context_.FetchedWeights(other, action);
    if (fetched.empty()) continue;
    key.push_back(other == block_ ? -1 : -2);
    for (TensorId id : fetched) {
      key.push_back(shape_.NumberOf(id));
      if (other == block_) continue;
      const Tensor& weight = graph_.tensor(id);
      key.push_back(static_cast<int64_t>(weight.dtype));
      key.push_back(std::ssize(weight.shape));
      key.insert(key.end(), weight.shape.begin(), weight.shape.end());
      AppendWeight(id, key);
    }
  }
}

}  // namespace tessera
