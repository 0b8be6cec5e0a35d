#include "costmodel/price.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "planner/base/rng.h"
#include "planner/ir/host_size.h"
#include "planner/lower/factored_update.h"
#include "planner/lower/staging.h"
#include "planner/plan/sequence_order.h"

namespace tessera {
namespace {

// The rule of a kernel that walks over flat lists: "n+n->n".
std::string FlatRule(size_t operands) {
  std::string rule;
  for (size_t i = 0; i < operands; ++i) rule += i == 0 ? "n" : "+n";
  return rule + "->n";
}

// What a kSlice copies: all of the one value is a part of the other.
int64_t SlicedElements(const TaskView& view) {
  int64_t total = 0;
  for (size_t i = 0; i < view.task->reads.size(); ++i) {
    total +=
        std::min(ElementsOf(view.value(view.task->reads[i]), *view.group),
                 ElementsOf(view.value(view.task->writes[i]), *view.group));
  }
  return total;
}

// The copy that a kLoad, kSlice or kRecv is.
ProfileKey CopyKey(const TaskView& view) {
  ProfileKey key;
  key.name = "copy";
  key.dtype = ComputeType(view);
  key.rule = FlatRule(1);
  key.extents = {view.task->kind == TaskKind::kSlice
                     ? SlicedElements(view)
                     : ElementsOf(view, view.task->writes)};
  return key;
}

// A factor of a node as the task's values have it: the first operand with it,
// and where in that. Nothing where there is none.
struct FactorAt {
  const Value* value = nullptr;
  size_t dim = 0;
};
FactorAt FindFactor(const TaskView& view, const Node& node, int factor) {
  for (size_t k = 0; k < node.rule.operands.size(); ++k) {
    const Indices& indices = node.rule.operands[k];
    for (size_t d = 0; d < indices.size(); ++d) {
      if (indices[d] != factor) continue;
      return {&view.value(view.task->reads[k]), d};
    }
  }
  return {};
}

// Queries and keys of an attention, where they are split.
struct SplitSequence {
  FactorAt queries;
  FactorAt keys;
};
std::optional<SplitSequence> SplitOf(const Graph& graph, const TaskView& view) {
  const Task& task = *view.task;
  if (task.kind != TaskKind::kCompute || !task.node.valid()) return {};
  const Node& node = graph.node(task.node);
  if (node.op->op_class != OpClass::kAttention) return {};
  const SplitSequence split = {
      FindFactor(view, node, node.rule.FactorOf(kSequenceFactor)),
      FindFactor(view, node, node.rule.FactorOf(kKeyFactor))};
  const auto axes = [](const FactorAt& f) {
    return f.value == nullptr ? 0 : f.value->layout.dims[f.dim];
  };
  if ((axes(split.queries) | axes(split.keys)) == 0) return {};
  return split;
}

// The task as the group's devices of one type see it.
TaskView CountedView(const TaskView& view, const GroupClass& where,
                     size_t type) {
  TaskView counted = view;
  if (!where.counted.empty()) counted.group = &where.counted[type];
  return counted;
}

// What a kernel works on.
struct KernelShape {
  std::optional<IndexRule> rule;  // where that is not the node's
  std::vector<int64_t> extents;   // of its factors
  std::vector<DType> operand_dtypes;
  std::vector<DType> result_dtypes;
};

// `state`: the kernel writes only what stands behind a coupled operator's
// operands.
KernelShape ShapeOfNode(const TaskView& view, const Node& node, bool state) {
  KernelShape shape;
  shape.extents.assign(node.rule.factors.size(), 1);
  const auto read = [&](const std::vector<ValueId>& ids,
                        const std::vector<Indices>& sides,
                        std::vector<DType>& dtypes) {
    TESSERA_CHECK(ids.size() >= sides.size()) << node.name;
    for (size_t i = 0; i < sides.size(); ++i) {
      const Value& value = view.value(ids[i]);
      dtypes.push_back(value.dtype);
      for (size_t d = 0; d < sides[i].size(); ++d) {
        shape.extents[sides[i][d]] = LargestExtent(value, *view.group, d);
      }
    }
  };
  read(view.task->reads, node.rule.operands, shape.operand_dtypes);
  if (!state) {
    read(view.task->writes, node.rule.results, shape.result_dtypes);
  }
  return shape;
}

// Of the optimizer's lists: as many tensors as the rule has updated results for
// each, or for sums the gradients that are read. (Of a factored optimizer's
// vectors only what is read with these counts, which is little.)
KernelShape ShapeOfLists(const TaskView& view, const OpDef& op) {
  const Task& task = *view.task;
  auto parsed = IndexRule::Parse(op.rule);
  TESSERA_CHECK(parsed.has_value()) << op.name;
  KernelShape shape = {*std::move(parsed), {}, {}, {}};
  const IndexRule& rule = *shape.rule;
  const size_t updated = rule.results.size();
  const FactoredKernel* factored = FindFactoredKernel(op.name);
  const bool reads = op.name == "square_sum" ||
                     (factored != nullptr && factored->weight_writes > 0);
  int64_t elements = ElementsOf(view, reads ? task.reads : task.writes);
  if (MomentsOf(op.name)) elements /= static_cast<int64_t>(updated);
  if (factored != nullptr) {
    // One long matrix; where only its sums are read, long along its rows.
    shape.extents.assign(rule.factors.size(), 1);
    shape.extents[factored->piece_reads > 0 ? 0 : 1] = elements;
  } else {
    shape.extents.assign(rule.factors.size(), elements);
  }
  shape.operand_dtypes.assign(rule.operands.size(), DType::kFloat32);
  if (!task.reads.empty()) {
    shape.operand_dtypes[0] = view.value(task.reads[0]).dtype;
  }
  for (size_t i = 0; i < updated; ++i) {
    shape.result_dtypes.push_back(i < task.writes.size()
                                      ? view.value(task.writes[i]).dtype
                                      : DType::kFloat32);
  }
  return shape;
}

}  // namespace

Pricer::Pricer(const Graph& graph, const Cluster& cluster,
               const ProfileDb* profile, const PricerOptions& options,
               const Cluster* whole)
    : graph_(graph),
      cluster_(cluster),
      profile_(profile),
      options_(options),
      products_(profile, cluster.device_types),
      exchanges_(graph, cluster, profile, whole),
      classes_(cluster, exchanges_.router()),
      fusions_(graph, cluster, profile, options),
      devices_per_host_(MostDevicesByHost(cluster)),
      shards_(kShards) {
  NumberNodes();
  NumberKernels();
}

void Pricer::NumberNodes() {
  std::map<std::pair<std::string, std::vector<double>>, int> signatures;
  for (const Node& n : graph_.nodes) {
    std::vector<double> attributes;
    for (const Attribute& a : n.attributes) {
      // Salts only tell dropouts apart.
      if (a.name != "salt") attributes.push_back(a.value);
    }
    fusions_.AppendSignature(signature_.size(), attributes);
    const auto [it, is_new] = signatures.try_emplace(
        {std::string(n.op->name) + " " + n.rule.ToString(), attributes},
        static_cast<int>(signatures.size()));
    signature_.push_back(it->second);
  }
}

void Pricer::NumberKernels() {
  static const std::vector<std::string>* const kStates = [] {
    auto* names = new std::vector<std::string>();
    for (const OpDef& op : Ops()) {
      names->push_back(std::string(op.name) + ".state");
    }
    return names;
  }();
  int number = 0;
  for (const OpDef& op : Ops()) kernels_[op.name] = ++number;
  for (const std::string& name : *kStates) kernels_[name] = ++number;
  // Those of the graph's file.
  for (const Node& node : graph_.nodes) {
    if (kernels_.try_emplace(node.op->name, number + 1).second) ++number;
  }
}

const DeviceType& Pricer::TypeOf(const GroupClass& where, size_t type) const {
  return cluster_.device_types[static_cast<size_t>(where.device_types[type])];
}

void Pricer::AppendKey(const TaskView& view, IntKey& key) const {
  const Task& task = *view.task;
  key.push_back(static_cast<int64_t>(task.kind));
  key.push_back(view.group_class);
  if (task.kind == TaskKind::kComm || task.kind == TaskKind::kSend) {
    if (task.kind == TaskKind::kSend) key.push_back(view.pair_class);
    exchanges_.AppendKey(view, key);
    return;
  }
  if (task.kind == TaskKind::kCompute) {
    const auto kernel = kernels_.find(task.kernel);
    TESSERA_CHECK(kernel != kernels_.end()) << "unknown kernel " << task.kernel;
    key.push_back(kernel->second);
    key.push_back(static_cast<int64_t>(task.optimizer));
    key.push_back(task.node.valid() ? signature_[task.node.index()] : -1);
    key.push_back(fusions_.FusedAt(task) != nullptr);
    key.push_back(static_cast<int64_t>(task.adds_microbatches));
  }
  for (const auto* ids : {&task.reads, &task.writes}) {
    key.push_back(static_cast<int64_t>(ids->size()));
    for (ValueId id : *ids) {
      const Value& value = view.value(id);
      key.push_back(static_cast<int64_t>(value.dtype) |
                    static_cast<int64_t>(value.shape.size()) << 8 |
                    static_cast<int64_t>(value.tier) << 16);
      if (value.layout.flat != 0) {
        key.push_back(-ElementsOf(value, *view.group));
        continue;
      }
      for (size_t d = 0; d < value.shape.size(); ++d) {
        key.push_back(LargestExtent(value, *view.group, d));
        if (!view.group->IsUneven(value.layout.dims[d] & ~value.layout.even)) {
          continue;
        }
        for (const DeviceGroup& counted : classes_[view.group_class].counted) {
          key.push_back(LargestExtent(value, counted, d));
        }
      }
    }
  }
  if (const auto split = SplitOf(graph_, view)) {
    key.push_back(view.zigzag);
    for (const FactorAt& f : {split->queries, split->keys}) {
      key.push_back(f.value->shape[f.dim]);
      key.push_back(f.value->layout.dims[f.dim]);
      key.push_back(f.value->layout.ring);
      key.push_back(f.value->layout.turn);
    }
  }
}

// Any will do.
Pricer::Shard& Pricer::ShardOf(const IntKey& key) const {
  const auto number = static_cast<uint64_t>(key[0] + key[1] + key.back());
  return shards_[Mix64(number) % kShards];
}

TaskCost Pricer::Price(const TaskView& view) const {
  thread_local IntKey key;  // most keys are known, and copied nowhere
  key.clear();
  AppendKey(view, key);
  Shard& shard = ShardOf(key);
  {
    std::shared_lock lock(shard.mutex);
    if (auto it = shard.costs.find(key); it != shard.costs.end()) {
      return it->second;
    }
  }
  const Cost found = CostOf(view);
  const TaskCost cost = {Duration::FromSeconds(found.seconds), found.source};
  std::unique_lock lock(shard.mutex);
  shard.costs.emplace(key, cost);
  return cost;
}

Bytes Pricer::Staging(const TaskView& view, std::optional<int> position) const {
  const Task& task = *view.task;
  if (task.kind != TaskKind::kComm && task.kind != TaskKind::kSend &&
      task.kind != TaskKind::kRecv) {
    return {};
  }
  // A tensor that is summed alone is summed where it lies.
  if (task.kind == TaskKind::kComm && task.comm == CommKind::kAllReduce &&
      task.reads.size() == 1) {
    return {};
  }
  thread_local IntKey key;  // as in Price
  key.clear();
  key.push_back(task.kind == TaskKind::kComm ? view.group_class
                                             : view.pair_class);
  key.push_back(position.value_or(-1));
  AppendStagingKey(task, view.values, view.peer, key);
  Shard& shard = ShardOf(key);
  {
    std::shared_lock lock(shard.mutex);
    if (auto it = shard.staging.find(key); it != shard.staging.end()) {
      return it->second;
    }
  }
  const Bytes staging = StagingBytes(task, view.values, *view.group, view.peer,
                                     view.peer_group, position);
  std::unique_lock lock(shard.mutex);
  shard.staging.emplace(key, staging);
  return staging;
}

// A copy by the slowest device of the group.
template <typename Traffic>
Cost Pricer::CopyCost(const TaskView& view, Traffic traffic) const {
  Cost slowest = {0, CostSource::kMeasured};
  const GroupClass& where = classes_[view.group_class];
  for (size_t i = 0; i < where.device_types.size(); ++i) {
    const TaskView counted = CountedView(view, where, i);
    CostQuery query;
    query.key = CopyKey(counted);
    query.bytes = traffic(counted);
    query.device = &TypeOf(where, i);
    query.key.device = query.device->name;
    const Cost cost = PriceOf(query, profile_);
    slowest.seconds =
        std::max(slowest.seconds, cost.seconds * query.device->slowness);
    slowest.source = std::max(slowest.source, cost.source);
  }
  return slowest;
}

// A copy between tiers, or a kernel on the host, where these are no memory of
// the devices', by the slowest of the group's hosts. REQUIRES: there are hosts.
Cost Pricer::TierCost(const TaskView& view) const {
  const GroupClass& where = classes_[view.group_class];
  Cost slowest = {0, CostSource::kAnalytical};
  for (size_t i = 0; i < where.device_types.size(); ++i) {
    slowest.seconds =
        std::max(slowest.seconds,
                 TierSeconds(CountedView(view, where, i),
                             static_cast<size_t>(TypeOf(where, i).host)));
  }
  return slowest;
}

double Pricer::TierSeconds(const TaskView& view, size_t number) const {
  const Task& task = *view.task;
  const Host& host = cluster_.hosts[number];
  const double sharing = devices_per_host_[number];
  const Bytes read = BytesOf(view, task.reads);
  const Bytes written = BytesOf(view, task.writes);
  const auto moving = [](Bytes bytes, double bandwidth) {
    return static_cast<double>(bytes.value) / bandwidth;
  };
  if (task.kind == TaskKind::kCompute) {
    // The optimizer's results and what is added to are read, too. (The first
    // of a step's microbatches has nothing to add to, and counts as the others:
    // Task::like.)
    const bool casts =
        task.kernel == "cast" || task.kernel == "stochastic_cast";
    const Bytes again = casts ? Bytes{} : written;
    return moving(read + written + again,
                  host.memory_bandwidth.value / sharing);
  }
  if (view.value(task.reads[0]).tier == MemoryTier::kFile) {
    return moving(written, host.storage_read.value / sharing);
  }
  if (view.value(task.writes[0]).tier == MemoryTier::kFile) {
    return moving(read, host.storage_write.value / sharing);
  }
  return moving(read, host.device_link.value);
}

CostQuery Pricer::KernelQuery(const TaskView& view) const {
  const Task& task = *view.task;
  const OpDef* op = OperatorOf(task.kernel);
  TESSERA_CHECK(op != nullptr) << "unknown kernel " << task.kernel;
  const bool state = task.kernel.ends_with(".state");
  CostQuery query;
  query.key.name = std::string(task.kernel);
  query.key.dtype = ComputeType(view);
  query.bytes = BytesOf(view, task.reads) + BytesOf(view, task.writes);

  const Node* node = task.node.valid() ? &graph_.node(task.node) : nullptr;
  if (op->name == "sum") {
    query.key.rule = FlatRule(std::max<size_t>(1, task.reads.size()));
    query.key.extents = {ElementsOf(view, task.writes)};
    return query;
  }

  const KernelShape shape = node != nullptr ? ShapeOfNode(view, *node, state)
                                            : ShapeOfLists(view, *op);
  const IndexRule& rule = shape.rule ? *shape.rule : node->rule;
  query.key.name = std::string(fusions_.KernelOf(task));
  query.key.rule = rule.ToString();
  query.key.extents = shape.extents;
  query.op_class = state ? OpClass::kMemory : op->op_class;
  const OpCall call = {
      .rule = &rule,
      .extents = shape.extents,
      .operand_dtypes = shape.operand_dtypes,
      .result_dtypes = shape.result_dtypes,
      .attributes = node != nullptr
                        ? std::span<const Attribute>(node->attributes)
                        : std::span<const Attribute>()};
  if (op->bytes != nullptr && !state) query.bytes = op->bytes(call);
  SetWork(*op, node, call, cluster_.stack, query);
  AddStack(view, call, query);
  return query;
}

// What the stack's kernels do otherwise than fused ones at their operands'
// types.
void Pricer::AddStack(const TaskView& view, const OpCall& call,
                      CostQuery& query) const {
  const Stack& stack = cluster_.stack;
  const std::string_view kernel = view.task->kernel;
  const Fusion& fusion = fusions_.StackFusionOf(*view.task);
  if (query.matmul && view.task->node.valid()) {
    const double fused = fusion.outputs;
    (kernel == "linear_dx"   ? query.matmul->k
     : kernel == "linear_dw" ? query.matmul->m
                             : query.matmul->n) *= fused;
    query.matmul_share = 1 / (fused * stack.sustained);
  }
  // No convolution of fp8 is in use, nor a head.
  if (query.matmul && !query.matmul->traffic && !fusion.of_head &&
      stack.products != ProductType::kAsValues &&
      SizeOf(query.key.dtype) == 2) {
    query.products = stack.products;
    query.matmul->operand_bytes =
        stack.products == ProductType::kFp8 ? 1.0 : 0.5;
    // The activation or its gradient is read, rounded and written in both
    // orders; weights' products use what the others have rounded. Four bits
    // need the largest of all values first: a pass of its own
    // (Transformer Engine's NVFP4 recipe, scales of two levels).
    const bool fp4 = stack.products == ProductType::kFp4;
    if (kernel != "linear_dw" && (fp4 || !fusion.operand_rounded)) {
      query.rounding = {static_cast<int64_t>(
          ((fp4 ? 4 : 2) + 2 * query.matmul->operand_bytes) *
          query.matmul->batch * query.matmul->m * query.matmul->k)};
    }
  }
  if (!view.task->optimizer && query.op_class == OpClass::kMemory) {
    query.bytes =
        Bytes{static_cast<int64_t>(stack.kernel_traffic * fusion.traffic *
                                   static_cast<double>(query.bytes.value))};
  }
  // Half of the passes in each direction. Where ranks share the logits, their
  // states are made from them and the rest from the states.
  const OpDef* const op = OperatorOf(kernel);
  if (op->name.starts_with("cross_entropy")) {
    const bool merges = !kernel.ends_with(".state") &&
                        op->name == "cross_entropy" &&
                        view.task->reads.size() > call.rule->operands.size();
    if (!merges) {
      const Value& logits = view.value(view.task->reads[0]);
      query.bytes += Bytes{static_cast<int64_t>(
          stack.logits_passes / 2 * SizeOf(DType::kFloat32) *
          static_cast<double>(ElementsOf(logits, *view.group)))};
    }
  }
  if (view.task->optimizer && MomentsOf(kernel) == 2) {
    query.bytes = Bytes{static_cast<int64_t>(
        stack.optimizer_traffic * static_cast<double>(query.bytes.value))};
  }
}

// What the busiest rank of a group does of an attention's pairs.
void Pricer::SetAttentionShare(const TaskView& view, CostQuery& query) const {
  const auto split = SplitOf(graph_, view);
  if (!split) return;
  const AttentionMask mask = MaskOf(graph_.node(view.task->node));
  const int64_t queries = split->queries.value->shape[split->queries.dim];
  const int64_t keys = split->keys.value->shape[split->keys.dim];
  const auto block = [&](const FactorAt& f, int rank) {
    return BlockAt(f.value->layout, *view.group, f.value->shape, rank)[f.dim];
  };
  // Along other axes ranks have the same.
  const AxisSet others =
      view.group->all_axes() &
      ~(split->queries.value->layout.dims[split->queries.dim] |
        split->keys.value->layout.dims[split->keys.dim]);
  int64_t most = 0;
  for (int rank = 0; rank < std::ssize(view.group->devices); ++rank) {
    if (view.group->Coordinate(rank, others) != 0) continue;
    const Range q = block(split->queries, rank);
    const Range k = block(split->keys, rank);
    most = std::max(most, SeenPairs(PositionsOf(queries, view.zigzag, q),
                                    PositionsOf(keys, view.zigzag, k), mask));
  }
  const int64_t s =
      LargestExtent(*split->queries.value, *view.group, split->queries.dim);
  const int64_t t =
      LargestExtent(*split->keys.value, *view.group, split->keys.dim);
  const auto all =
      static_cast<double>(SeenPairs({0, queries}, {0, keys}, mask));
  const double local = static_cast<double>(s) * static_cast<double>(t);
  query.share =
      static_cast<double>(most) / all *
      (static_cast<double>(queries) * static_cast<double>(keys) / local);
  // Kernels are timed on the first positions of a sequence.
  query.share_of_measured =
      static_cast<double>(most) /
      static_cast<double>(SeenPairs({0, s}, {0, t}, mask));
  query.attention->pairs = static_cast<double>(most);
}

// Of the host, to start a kernel: one for each expert of a rank.
double Pricer::HostSeconds(const TaskView& view, const CostQuery& query) const {
  const double one = cluster_.stack.host_per_operator.seconds();
  return view.task->kernel.starts_with("expert_linear") && query.matmul
             ? one * query.matmul->batch
             : one;
}

// By the slowest device of the group.
Cost Pricer::KernelCost(const TaskView& view) const {
  const Task& task = *view.task;
  const GroupClass& where = classes_[view.group_class];
  if (OnHost(task, view.values) && !TypeOf(where, 0).shared_memory) {
    return TierCost(view);
  }
  if (fusions_.StackFusionOf(task).traffic == 0 || fusions_.IsElsewhere(task)) {
    return {0, CostSource::kAnalytical};
  }
  Cost slowest = {0, CostSource::kMeasured};
  CostQuery query;
  std::string kernel;
  for (size_t i = 0; i < where.device_types.size(); ++i) {
    const TaskView counted = CountedView(view, where, i);
    if (i == 0 || !where.counted.empty()) {
      query = KernelQuery(counted);
      kernel = query.key.name;
      SetAttentionShare(counted, query);
      slowest.seconds = std::max(slowest.seconds, HostSeconds(counted, query));
    }
    query.device = &TypeOf(where, i);
    query.key.device = query.device->name;
    query.key.name = kernel;
    if (fusions_.HasAddingRow(task, query.key)) query.key.name += kAdds;
    if (query.matmul && query.products == ProductType::kAsValues) {
      const auto factor_of = [&](std::string_view name) {
        return products_.Factor(name, query.device->name, query.key.dtype,
                                *query.matmul);
      };
      query.matmul_factor = factor_of(query.key.name);
      query.factor_of_kernel = query.matmul_factor.has_value();
      if (!query.matmul_factor) query.matmul_factor = factor_of(kProductName);
    }
    const Cost cost = PriceOf(query, profile_);
    const double parts = cost.source == CostSource::kAnalytical
                             ? fusions_.PartsSeconds(task, query)
                             : 0;
    slowest.seconds = std::max(slowest.seconds,
                               (cost.seconds + parts) * query.device->slowness);
    slowest.source = std::max(slowest.source, cost.source);
  }
  return slowest;
}

Cost Pricer::CostOf(const TaskView& view) const {
  const Task& task = *view.task;
  const bool one_memory = TypeOf(classes_[view.group_class], 0).shared_memory;
  const auto in_file = [&](ValueId id) {
    return view.value(id).tier == MemoryTier::kFile;
  };
  switch (task.kind) {
    case TaskKind::kCompute:
      return KernelCost(view);
    case TaskKind::kLoad:
      return CopyCost(view, [&](const TaskView& seen) {
        return BytesOf(seen, task.writes);
      });
    case TaskKind::kSlice:
      return CopyCost(view, [](const TaskView& seen) {
        return Bytes{2 * SlicedElements(seen) * SizeOf(ComputeType(seen))};
      });
    case TaskKind::kCopy:
      if (!one_memory || in_file(task.reads[0]) || in_file(task.writes[0])) {
        return TierCost(view);
      }
      return CopyCost(view, [&](const TaskView& seen) {
        return BytesOf(seen, task.reads) * 2;
      });
    case TaskKind::kRecv:
      if (!one_memory) return {0, CostSource::kMeasured};
      return CopyCost(view, [&](const TaskView& seen) {
        return BytesOf(seen, task.writes) * 2;
      });
    case TaskKind::kComm:
      return exchanges_.Price(view, classes_[view.group_class]);
    case TaskKind::kSend:
      break;
  }
  return exchanges_.Price(view, classes_[view.pair_class]);
}

ProfileKey Pricer::ProfileKeyOf(const TaskView& view) const {
  const TaskKind kind = view.task->kind;
  if (kind == TaskKind::kComm) {
    return exchanges_.KeyOf(view, classes_[view.group_class]);
  }
  if (kind == TaskKind::kSend) {
    return exchanges_.KeyOf(view, classes_[view.pair_class]);
  }
  ProfileKey key =
      kind == TaskKind::kCompute ? KernelQuery(view).key : CopyKey(view);
  key.device = cluster_.TypeOf(view.group->devices[0]).name;
  if (fusions_.HasAddingRow(*view.task, key)) key.name += kAdds;
  return key;
}

std::vector<LinkUse> Pricer::LinkUses(const TaskView& view,
                                      Duration duration) const {
  const TaskKind kind = view.task->kind;
  if ((kind != TaskKind::kComm && kind != TaskKind::kSend) ||
      duration <= Duration{}) {
    return {};
  }
  return exchanges_.LinkUses(view, duration);
}

}  // namespace tessera
