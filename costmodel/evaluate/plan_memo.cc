#include "costmodel/evaluate/plan_memo.h"

#include <mutex>
#include <string>

#include "planner/base/rng.h"

namespace tessera {
namespace {

uint64_t HashOf(const Plan& plan) {
  uint64_t hash = std::hash<std::string>()(plan.schedule);
  const auto add = [&](auto... values) {
    uint64_t mixed = 0;
    ((mixed = mixed * 31 + static_cast<uint64_t>(values)), ...);
    hash = Mix64(hash ^ mixed);
  };
  add(plan.microbatches, plan.bucket_bytes.value, plan.prefetch, plan.zigzag);
  for (const DeviceGroup& group : plan.groups) {
    for (DeviceId device : group.devices) add(device.value);
  }
  for (const OpPlacement& op : plan.ops) {
    uint64_t splits = 0;
    for (AxisSet set : op.axes) splits = splits * 31 + set;
    add(splits, op.group.value, op.chunk, op.recompute, op.rooted, op.tiles,
        op.streamed, op.activation_tier);
  }
  for (const WeightPlacement& weight : plan.weights) {
    add(weight.zero_stage, weight.zero_axes, weight.rooted,
        weight.parameter_tier, weight.optimizer_tier, weight.gradient_tier);
  }
  for (const std::vector<Action>& actions : plan.actions) {
    for (const Action& action : actions) {
      add(action.kind, action.chunk, action.microbatch);
    }
  }
  return hash;
}

// What of a plan takes memory, of some 70 bytes each.
size_t SizeOf(const Plan& plan) {
  size_t size = plan.ops.size() + plan.weights.size();
  for (const DeviceGroup& group : plan.groups) size += group.devices.size();
  for (const std::vector<Action>& actions : plan.actions) {
    size += actions.size();
  }
  return size;
}

}  // namespace

Evaluation PlanMemo::Get(const Plan& plan,
                         const std::function<Evaluation()>& make) {
  const uint64_t hash = HashOf(plan);
  {
    std::shared_lock lock(mutex_);
    const auto [begin, end] = known_.equal_range(hash);
    for (auto it = begin; it != end; ++it) {
      if (it->second.first == plan) return it->second.second;
    }
  }
  Evaluation result = make();
  std::unique_lock lock(mutex_);
  size_ += SizeOf(plan);
  if (size_ > most_) {
    known_.clear();
    size_ = SizeOf(plan);
  }
  known_.emplace(hash, std::pair(plan, result));
  return result;
}

}  // namespace tessera
