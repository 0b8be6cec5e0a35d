#include "costmodel/memory/overhead.h"

#include <algorithm>
#include <set>
#include <string>

namespace tessera {
namespace {

// "tp" of "tp0".
std::string DimensionOf(std::string_view axis) {
  return std::string(axis.substr(0, axis.find_last_not_of("0123456789") + 1));
}

}  // namespace

int CommunicatorsOf(const Plan& plan, const DeviceSet& set) {
  std::set<std::string> dimensions;
  for (GroupId id : set.groups) {
    for (const MeshAxis& axis : plan.groups[id.index()].axes) {
      if (axis.size > 1) dimensions.insert(DimensionOf(axis.name));
    }
  }
  const bool pipeline = plan.groups.size() > 1;
  const int inner = static_cast<int>(dimensions.size()) + (pipeline ? 1 : 0);
  return inner == 0 ? 0 : inner + 1;
}

void AddOverhead(const Stack& stack, const TrainingOptions& options,
                 DType dtype, const Plan& plan, const DeviceSet& set,
                 MemoryUse& use) {
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
  if (memory.communicator > Bytes{}) {
    const int64_t communicators = CommunicatorsOf(plan, set);
    add(MemoryCategory::kFramework,
        {communicators * memory.communicator.value});
  }
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
