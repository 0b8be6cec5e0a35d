#include "profiler/kernel_case.h"

#include <algorithm>
#include <cstring>

#include "planner/base/rng.h"
#include "planner/lower/lower.h"

namespace tessera {
namespace {

KernelCase::Buffer BufferOf(const TaskGraph& tasks, const Graph& graph,
                            ValueId id) {
  const Value& value = tasks.value(id);
  const DeviceGroup& group = tasks.group(value.group);
  KernelCase::Buffer buffer;
  buffer.dtype = value.dtype;
  buffer.global_shape = value.shape;
  if (value.layout.flat != 0) {
    // Flat shards have one dimension.
    buffer.shape = {LargestElements(value.layout, group, value.shape)};
    buffer.global_shape = buffer.shape;
  } else {
    buffer.shape = LargestBlock(value.layout, group, value.shape);
  }
  if (value.dtype == DType::kInt32) {
    const bool positions =
        value.tensor.valid() && graph.tensor(value.tensor).name == "positions";
    buffer.fill =
        positions ? KernelCase::Fill::kPositions : KernelCase::Fill::kIds;
  }
  return buffer;
}

KernelCase::Buffer Flat(int64_t elements, DType dtype) {
  return {dtype, {elements}, {elements}, KernelCase::Fill::kRandom};
}

// The least number of rows or classes that ids of this graph may address.
int64_t IdsOf(const Graph& graph) {
  int64_t ids = std::numeric_limits<int32_t>::max();
  for (const Node& node : graph.nodes) {
    if (node.op->name == "embedding" &&
        graph.tensor(node.operands[0]).name == "tokens") {
      ids = std::min(ids, graph.tensor(node.operands[1]).shape[0]);
    }
  }
  return ids;
}

// The number of slots that an int32 tensor of a graph counts, or 0 where it is
// no router's result.
int64_t SlotsOf(const Graph& graph, TensorId tensor) {
  for (const Node& node : graph.nodes) {
    if (node.op->name == "moe_gate" && node.results[1] == tensor) {
      return graph.tensor(node.operands[0]).shape.back() *
             static_cast<int64_t>(node.attribute("capacity"));
    }
  }
  return 0;
}

// One call over the elements of all tensors of an optimizer task's list, which
// is how its key counts them.
KernelCase ListCase(const Task& task, const TaskGraph& tasks,
                    const ProfileKey& key, const TrainingOptions& options) {
  const auto dtype_of = [&](ValueId id) { return tasks.value(id).dtype; };
  const int64_t n = key.extents.empty() ? 1 : key.extents[0];
  KernelCase result;
  result.attributes = {
      {"beta1", options.beta1},      {"beta2", options.beta2},
      {"clip", options.clip},        {"epsilon", options.epsilon},
      {"lr", options.learning_rate}, {"weight_decay", options.weight_decay}};
  const KernelCase::Buffer scalar = {
      key.dtype, {}, {}, KernelCase::Fill::kRandom};
  if (task.kernel == "clip_coefficient") {
    result.operands = {scalar};
    result.results = {scalar};
    return result;
  }
  result.operands = {Flat(n, dtype_of(task.reads[0]))};
  if (task.kernel == "square_sum") {
    result.results = {
        {dtype_of(task.writes[0]), {}, {}, KernelCase::Fill::kRandom}};
    return result;
  }
  if (task.kernel == "cast") {
    result.results = {Flat(n, dtype_of(task.writes[0]))};
    return result;
  }
  result.operands.push_back(scalar);
  const size_t per_weight = task.kernel == "adamw" ? 3 : 1;
  for (size_t i = 0; i < per_weight; ++i) {
    result.results.push_back(Flat(n, dtype_of(task.writes[i])));
  }
  return result;
}

bool IsList(std::string_view kernel) {
  return kernel == "adamw" || kernel == "sgd" || kernel == "square_sum" ||
         kernel == "clip_coefficient" || kernel == "cast";
}

Result<KernelCase> CaseOf(const Task& task, const TaskGraph& tasks,
                          const Graph& graph, const ProfileKey& key,
                          const TrainingOptions& options) {
  KernelCase result;
  if (key.name == "copy") {
    const KernelCase::Buffer buffer = Flat(key.extents[0], key.dtype);
    result.operands = {buffer};
    result.results = {buffer};
    return result;
  }
  if (IsList(task.kernel)) {
    result = ListCase(task, tasks, key, options);
  } else {
    for (const ValueId id : task.reads) {
      result.operands.push_back(BufferOf(tasks, graph, id));
    }
    for (const ValueId id : task.writes) {
      result.results.push_back(BufferOf(tasks, graph, id));
    }
    if (task.node.valid()) {
      result.rule = graph.node(task.node).rule;
      result.attributes = graph.node(task.node).attributes;
    }
  }
  TESSERA_TRY(result.kernel, FindCpuKernel(task.kernel));
  result.ids = IdsOf(graph);
  for (const ValueId id : task.reads) {
    const Value& value = tasks.value(id);
    if (value.dtype != DType::kInt32 || !value.tensor.valid()) continue;
    if (const int64_t slots = SlotsOf(graph, value.tensor); slots > 0) {
      result.ids = slots;
    }
  }
  return result;
}

}  // namespace

namespace {

// Server CPUs of 2020 to 2025 have 1 to 4 MiB of last-level cache a core
// (AMD EPYC 7003: 4 MiB; Intel Xeon 8380: 1.5 MiB), and several ranks may share
// a core; twice the largest, and not so many sets that making them takes longer
// than timing.
constexpr size_t kRotatedBytes = size_t{8} << 20;
constexpr size_t kMostSets = 64;

}  // namespace

Result<void> AddKernelCases(const Pricer& pricer, const Plan& plan,
                            const TrainingOptions& options,
                            std::map<ProfileKey, KernelCase>& cases) {
  const Graph& graph = pricer.graph();
  const TaskGraph tasks = Lower(graph, pricer.cluster(), plan, options);
  for (const Task& task : tasks.tasks) {
    if (task.kind == TaskKind::kComm || task.kind == TaskKind::kSend) continue;
    const DeviceGroup& group = tasks.group(task.group);
    const ProfileKey key =
        pricer.ProfileKeyOf({.task = &task,
                             .values = tasks.values,
                             .group = &group,
                             .group_class = pricer.ClassOf(group)});
    if (cases.contains(key)) continue;
    TESSERA_TRY(KernelCase found, CaseOf(task, tasks, graph, key, options));
    cases.emplace(key, std::move(found));
  }
  return {};
}

PreparedKernel::PreparedKernel(const KernelCase& kernel_case,
                               ThreadPool& threads)
    : case_(kernel_case), threads_(threads) {
  Buffers first;
  Allocate(case_.operands, first, first.operands);
  Allocate(case_.results, first, first.results);
  size_t bytes = 1;
  for (const auto& memory : first.memory) bytes += memory.size();
  const size_t sets = std::clamp<size_t>(kRotatedBytes / bytes, 1, kMostSets);
  sets_.push_back(std::move(first));
  while (sets_.size() < sets) {
    Buffers& copy = sets_.emplace_back(sets_[0]);
    size_t i = 0;
    for (LocalTensor& t : copy.operands) t.data = copy.memory[i++].data();
    for (LocalTensor& t : copy.results) t.data = copy.memory[i++].data();
  }
}

void PreparedKernel::Allocate(const std::vector<KernelCase::Buffer>& of,
                              Buffers& buffers,
                              std::vector<LocalTensor>& tensors) const {
  for (const KernelCase::Buffer& buffer : of) {
    LocalTensor tensor;
    tensor.dtype = buffer.dtype;
    tensor.shape = buffer.shape;
    tensor.offset.assign(buffer.shape.size(), 0);
    tensor.global_shape = buffer.global_shape;
    const auto n = static_cast<size_t>(tensor.elements());
    auto& memory = buffers.memory.emplace_back(
        n * static_cast<size_t>(SizeOf(buffer.dtype)));
    tensor.data = memory.data();
    const auto length =
        static_cast<size_t>(buffer.shape.empty() ? 1 : buffer.shape.back());
    for (size_t i = 0; i < n; ++i) {
      // In (0, 1]: also good as a variance, a norm or a log-sum-exp.
      const double random = 1.0 - CounterUniform01(buffers.memory.size(), i);
      switch (buffer.dtype) {
        case DType::kFloat64:
          tensor.as<double>()[i] = random;
          break;
        case DType::kFloat32:
          tensor.as<float>()[i] = static_cast<float>(random);
          break;
        case DType::kInt32:
          tensor.as<int32_t>()[i] = static_cast<int32_t>(
              buffer.fill == KernelCase::Fill::kPositions
                  ? static_cast<double>(i % length)
                  : (1.0 - random) * static_cast<double>(case_.ids));
          break;
        default:
          break;  // zero, as the memory is
      }
    }
    tensors.push_back(std::move(tensor));
  }
}

void PreparedKernel::Run() {
  const Buffers& set = sets_[next_];
  next_ = (next_ + 1) % sets_.size();
  if (case_.kernel == nullptr) {
    const LocalTensor& from = set.operands[0];
    std::memcpy(set.results[0].data, from.data,
                static_cast<size_t>(from.elements() * SizeOf(from.dtype)));
    return;
  }
  KernelCall call;
  call.rule = case_.rule.factors.empty() ? nullptr : &case_.rule;
  call.attributes = case_.attributes;
  call.operands = set.operands;
  call.results = set.results;
  call.threads = &threads_;
  case_.kernel->run(call);
}

}  // namespace tessera
