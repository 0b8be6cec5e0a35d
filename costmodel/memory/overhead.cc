#include "costmodel/memory/overhead.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <set>

namespace tessera {
namespace {

// What an axis may split, as bits. Heads and keys of attention tell no axes
// apart: tensor and context parallelism both may split them.
enum Split : uint8_t {
  kNothing = 0,
  kSamples = 1,
  kExperts = 2,
  kSequence = 4,
  kWeights = 8,
};

Split SplitOf(const GraphIndex& index, NodeId id, int factor) {
  if (factor == index.SampleFactor(id)) return kSamples;
  if (factor == index.ExpertFactor(id)) return kExperts;
  if (factor == index.SequenceFactor(id)) return kSequence;
  const Graph& graph = *index.graph;
  const auto is_weight = [&](TensorId operand) {
    return graph.tensor(operand).kind == TensorKind::kWeight;
  };
  return std::ranges::any_of(graph.node(id).operands, is_weight) ? kWeights
                                                                 : kNothing;
}

}  // namespace

std::vector<int> CommunicatorsOf(const GraphIndex& index, const Plan& plan,
                                 const std::vector<DeviceSet>& sets) {
  // By group and axis.
  std::vector<std::array<uint8_t, kMaxAxes>> splits(plan.groups.size());
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const NodeId node(static_cast<int64_t>(i));
    const OpPlacement& op = plan.ops[i];
    for (int f = 0; f < kMaxFactors; ++f) {
      for (AxisSet axes = op.axes[static_cast<size_t>(f)]; axes != 0;
           axes &= axes - 1) {
        splits[op.group.index()][static_cast<size_t>(std::countr_zero(axes))] |=
            SplitOf(index, node, f);
      }
    }
  }
  const bool pipeline = plan.groups.size() > 1;
  std::vector<int> counts;
  for (const DeviceSet& set : sets) {
    std::set<uint8_t> dimensions;
    for (GroupId id : set.groups) {
      const auto& axes = plan.groups[id.index()].axes;
      for (size_t a = 0; a < axes.size(); ++a) {
        if (axes[a].size > 1) dimensions.insert(splits[id.index()][a]);
      }
    }
    const int inner = static_cast<int>(dimensions.size()) + (pipeline ? 1 : 0);
    counts.push_back(inner == 0 ? 0 : inner + 1);
  }
  return counts;
}

void AddOverhead(const Stack& stack, const TrainingOptions& options,
                 DType dtype, int communicators, MemoryUse& use) {
  const StackMemory& memory = stack.memory;
  const auto part = [&](MemoryCategory category) -> Bytes& {
    return use.parts[static_cast<size_t>(category)];
  };
  const auto add = [&](MemoryCategory category, Bytes bytes) {
    part(category) += bytes;
    use.total += bytes;
  };
  add(MemoryCategory::kCommunication, {2 * memory.zero_bucket.value});
  const int64_t passing = part(MemoryCategory::kActivation).value +
                          part(MemoryCategory::kCommunication).value +
                          part(MemoryCategory::kWorkspace).value;
  add(MemoryCategory::kFramework, {communicators * memory.communicator.value});
  add(MemoryCategory::kFramework, memory.context);
  add(MemoryCategory::kAllocator,
      {static_cast<int64_t>(memory.fragmentation *
                            static_cast<double>(passing))});
  if (memory.gradient_copies && dtype == DType::kFloat16) {
    // The vectors of a factored moment hardly count.
    const int64_t words = 1 + *MomentsOf(options.optimizer);
    add(MemoryCategory::kAllocator,
        {part(MemoryCategory::kOptimizer).value / words});
  }
}

}  // namespace tessera
