#include "costmodel/evaluate/surroundings.h"

#include <algorithm>

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

}  // namespace

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
  // Whether reductions wait for all backwards of the pipeline.
  key.push_back(!context_.concurrent_streams() &&
                context_.stages().count() > 1);
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
    Append(context_.produced(id), key);
    key.push_back(context_.kept_as_produced(id));
    if (makes) key.push_back(context_.recomputed(id).valid());
    if (makes) key.push_back(std::ssize(presences));
    for (const LoweringContext::Presence& presence : presences) {
      if (!makes && &presence != here) continue;
      AppendReaders(presence, action, key);
      key.push_back(class_of_(presence.group));
      key.push_back(shape_.IndexOf(presence.first_block));
      key.push_back(static_cast<int64_t>(presence.first_part));
      Append(presence.layout, key);
    }
    return;
  }
  Append(here->layout, key);
  const bool arrives =
      makes && presences[0].group != own_ && here->first_block == block_;
  key.push_back(arrives);
  if (!arrives) return;
  key.push_back(static_cast<int64_t>(here->first_part));
  AppendReaders(*here, action, key);
  key.push_back(class_of_(presences[0].group));
  key.push_back(shape_.IndexOf(presences[0].first_block));
  Append(presences[0].layout, key);
}

// Programs ask whether there are such readers, in their block and in others;
// forward, whether there are any in backward. Gradients of weights leave
// nothing to any.
void Surroundings::AppendReaders(const LoweringContext::Presence& presence,
                                 ActionKind action, IntKey& key) const {
  if (action == ActionKind::kBackwardWeight) return;
  int64_t readers = 0;
  for (const auto& reader : presence.readers) {
    const bool backward = reader.part != ActionKind::kForward;
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

// The weights that the block fetches, for itself and ahead of others.
void Surroundings::AppendFetched(ActionKind action, IntKey& key) const {
  const Pass pass =
      action == ActionKind::kForward ? Pass::kForward : Pass::kBackward;
  // The first of a pass fetches all that comes before, too.
  if (prefetch_ > 0) key.push_back(context_.BlockAhead(block_, pass, -1) < 0);
  for (int ahead = 0; ahead <= prefetch_; ++ahead) {
    const int other = context_.BlockAhead(block_, pass, ahead);
    if (other < 0) break;
    for (TensorId id : context_.FetchedWeights(other, action)) {
      key.push_back(shape_.NumberOf(id));
      if (other != block_) AppendWeight(id, key);
    }
    key.push_back(-1);
  }
}

}  // namespace tessera
