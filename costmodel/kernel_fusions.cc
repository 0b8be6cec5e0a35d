#include "costmodel/kernel_fusions.h"

#include <algorithm>

#include "planner/base/element_count.h"

namespace tessera {

PricerOptions PricerOptionsOf(const TrainingOptions& options) {
  PricerOptions pricing;
  pricing.update = options.stochastic_rounding ? "" : options.optimizer;
  return pricing;
}

KernelFusions::KernelFusions(const Graph& graph, const Cluster& cluster,
                             const ProfileDb* profile,
                             const PricerOptions& options)
    : graph_(graph),
      cluster_(cluster),
      profile_(profile),
      options_(options),
      stack_(FusionOf(graph, cluster.stack)),
      fused_(FuseNodes(
          graph, [&](std::string_view kernel) { return HasRows(kernel); })) {
  for (const Node& node : graph.nodes) {
    const std::string kernel(node.op->name);
    if (node.op->op_class == OpClass::kMatmul && kernel.ends_with("_dw") &&
        HasRows(kernel + std::string(kAdds))) {
      adding_.insert(kernel);
    }
  }
  for (const FusedKernel& fused : FusedKernels()) {
    if (fused.first == options_.update && fused.second == "cast") {
      update_with_cast_ = fused.name;
    }
  }
  casts_fused_ = !update_with_cast_.empty() && HasRows(update_with_cast_);
}

const Fusion& KernelFusions::StackFusionOf(const Task& task) const {
  static const Fusion kAlone;
  return task.node.valid() ? stack_[task.node.index()] : kAlone;
}

std::string_view KernelFusions::KernelOf(const Task& task) const {
  if (const FusedNode* const fused = FusedAt(task);
      fused != nullptr && fused->kernel() != nullptr) {
    return fused->kernel()->name;
  }
  if (task.optimizer && casts_fused_ && task.kernel == options_.update) {
    return update_with_cast_;
  }
  return task.kernel;
}

double KernelFusions::PartsSeconds(const Task& task,
                                   const CostQuery& query) const {
  const FusedNode* const fused = FusedAt(task);
  if (fused == nullptr) return 0;
  std::set<TensorId> seen;
  const auto bytes_of = [&](const Node& node) {
    double bytes = 0;
    for (const auto* tensors : {&node.operands, &node.results}) {
      for (TensorId id : *tensors) {
        if (!seen.insert(id).second) continue;
        const Tensor& tensor = graph_.tensor(id);
        bytes += SizeOf(tensor.dtype) * LargeElementCount(tensor.shape);
      }
    }
    return bytes;
  };
  const double own = bytes_of(graph_.node(task.node));
  double others = 0;
  for (const FusedNode::Part& part : fused->parts) {
    others += bytes_of(graph_.node(part.node));
  }
  // A rank's share of them is that of the first node's.
  const double share = static_cast<double>(query.bytes.value) / own;
  return others * share /
         (query.device->memory_bandwidth.value *
          query.device->memory_efficiency);
}

std::span<const FusedNode::Part> KernelFusions::PartsOf(
    const Task& task) const {
  const FusedNode* const fused = FusedAt(task);
  if (fused == nullptr) return {};
  return fused->parts;
}

bool KernelFusions::IsElsewhere(const Task& task) const {
  if (task.optimizer && task.kernel == "cast") return casts_fused_;
  const FusedNode* const fused = FusedAt(task);
  return fused != nullptr && fused->elsewhere;
}

bool KernelFusions::HasAddingRow(const Task& task,
                                 const ProfileKey& key) const {
  if (!task.adds_microbatches || !adding_.contains(key.name)) return false;
  if (profile_ == nullptr || profile_->Find(key) == nullptr) return true;
  ProfileKey adding = key;
  adding.name += kAdds;
  return profile_->Find(adding) != nullptr;
}

// Measured for the devices of this cluster, at the type that is computed in;
// masters of updates are fp32.
bool KernelFusions::HasRows(std::string_view kernel) const {
  const bool update = kernel.ends_with("+cast");
  if (update && SizeOf(graph_.dtype) != 2) return false;
  if (options_.all_fused) return true;
  if (profile_ == nullptr) return false;
  ProfileKey key;
  key.name = kernel;
  key.dtype = update ? DType::kFloat32 : graph_.dtype;
  return std::ranges::all_of(cluster_.device_types,
                             [&](const DeviceType& type) {
                               key.device = type.name;
                               const auto [begin, end] = profile_->Family(key);
                               return begin != end;
                             });
}

bool KernelFusions::FusesAll() const {
  const auto all = FuseNodes(graph_, [](std::string_view) { return true; });
  // Of updated masters.
  const bool casts = SizeOf(graph_.dtype) == 2 && !update_with_cast_.empty();
  return (!casts || casts_fused_) &&
         std::ranges::all_of(all, [&](const FusedNode& node) {
           return node.kernel() == nullptr || HasRows(node.kernel()->name);
         });
}

void KernelFusions::AppendSignature(size_t node,
                                    std::vector<double>& signature) const {
  const Fusion& fusion = stack_[node];
  signature.push_back(fusion.outputs);
  signature.push_back(fusion.traffic);
  signature.push_back(fusion.operand_rounded);
  signature.push_back(fusion.of_head);
  if (fused_.empty()) return;
  const FusedNode& fused = fused_[node];
  signature.push_back(fused.elsewhere);
  signature.push_back(
      fused.kernel() != nullptr
          ? static_cast<double>(fused.kernel() - FusedKernels().data())
          : -1);
}

}  // namespace tessera
