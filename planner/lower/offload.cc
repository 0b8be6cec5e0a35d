// What of a plan leaves the device, and when it is wanted again.

#include <algorithm>

#include "planner/lower/lower.h"

namespace tessera {

bool LoweringContext::HasHostMaster(TensorId weight) const {
  const WeightPlacement& placement = weight_placement(weight);
  return placement.optimizer_tier != MemoryTier::kDevice &&
         (SizeOf(graph_.tensor(weight).dtype) < 4 ||
          placement.parameter_tier == MemoryTier::kDevice ||
          ParameterLayout({weight}, replicas(weight)[0]) !=
              StateLayout({weight}));
}

bool LoweringContext::HasFileState(TensorId weight) const {
  const WeightPlacement& placement = weight_placement(weight);
  return placement.optimizer_tier == MemoryTier::kFile ||
         (placement.optimizer_tier == MemoryTier::kHost &&
          placement.parameter_tier == MemoryTier::kFile &&
          !HasHostMaster(weight));
}

int LoweringContext::NextFileBlock(int block, GroupId group,
                                   int direction) const {
  const auto blocks = static_cast<int>(graph_.blocks.size());
  for (int b = block + direction; b >= 0 && b < blocks; b += direction) {
    for (TensorId weight : home_weights(b)) {
      if (HasFileState(weight) && replicas(weight)[0].group == group) return b;
    }
  }
  return -1;
}

// Every read of a kept activation by backward, adjoint or forward node that
// runs again. Of a backward in two parts all gradients of activations come
// before those of weights; undivided, later blocks come first. What is fetched
// for the last block that reads it, in the first part, is there in time for
// both.
void LoweringContext::FindOffloaded() {
  offloaded_.resize(graph_.blocks.size());
  std::vector<MemoryTier> tiers(graph_.tensors.size(), MemoryTier::kDevice);
  bool any = false;
  for (size_t i = 0; i < plan_.ops.size(); ++i) {
    const MemoryTier tier = plan_.ops[i].activation_tier;
    if (tier == MemoryTier::kDevice) continue;
    for (TensorId result : graph_.nodes[i].results) {
      if (once_per_step(result) || result == graph_.loss) continue;
      tiers[result.index()] = tier;
      any = true;
    }
  }
  if (!any) return;

  struct Use {
    int position = -1;
    int block = -1;
    bool by_input_part = false;
  };
  std::map<std::tuple<TensorId, int, GroupId>, Use> uses;
  const auto read = [&](NodeId id, ActionKind part) {
    const Node& node = graph_.node(id);
    const OpPlacement& at = placement(id);
    for (size_t k = 0; k < node.operands.size(); ++k) {
      const TensorId tensor = node.operands[k];
      if (tiers[tensor.index()] == MemoryTier::kDevice ||
          recomputed(tensor).valid()) {
        continue;
      }
      const Presence* here = presence(tensor, at.group);
      if (here->first_part != ActionKind::kForward) continue;
      const bool as_produced =
          !passes_partial(id) && kept_as_produced(tensor) &&
          here == &presences(tensor)[0] && here->first_block == node.block &&
          Wanted(node, at, k) == produced(tensor);
      Use& use = uses[{tensor, as_produced ? 1 : 0, at.group}];
      const int position = position_of_block(node.block);
      if (std::pair(position, node.block) >
          std::pair(use.position, use.block)) {
        use.position = position;
        use.block = node.block;
      }
      use.by_input_part =
          use.by_input_part || part == ActionKind::kBackwardInput;
    }
  };
  for (size_t i = 0; i < graph_.nodes.size(); ++i) {
    if (graph_.nodes[i].pass != Pass::kBackward) continue;
    read(NodeId(static_cast<int64_t>(i)), part(NodeId(i)));
  }
  for (size_t b = 0; b < graph_.blocks.size(); ++b) {
    for (NodeId id : recomputed_nodes(static_cast<int>(b))) {
      read(id, ActionKind::kBackwardInput);
    }
  }
  for (const auto& [key, use] : uses) {
    const auto& [tensor, index, group] = key;
    const Offloaded kept = {tensor, index, group, tiers[tensor.index()],
                            use.by_input_part ? ActionKind::kBackwardInput
                                              : ActionKind::kBackwardWeight};
    offloaded_[static_cast<size_t>(use.block)].push_back(kept);
    offloaded_at_.emplace(key, kept);
  }
}

const LoweringContext::Offloaded* LoweringContext::FindOffloaded(
    TensorId tensor, int index, GroupId group) const {
  const auto found = offloaded_at_.find({tensor, index, group});
  return found == offloaded_at_.end() ? nullptr : &found->second;
}

}  // namespace tessera
