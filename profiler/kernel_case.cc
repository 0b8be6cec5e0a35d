#include "profiler/kernel_case.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "planner/base/divide.h"
#include "planner/base/element_count.h"
#include "planner/base/rng.h"
#include "planner/lower/factored_update.h"
#include "runtime/float16.h"

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
        value.tensor.valid() &&
        graph.tensor(value.tensor).name.ends_with("positions");
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

// The rows that a node, or the one that it is an adjoint of, looks up in a
// table of its own, or 0.
int64_t RowsOf(const Graph& graph, const Node& node) {
  const Node& forward = node.forward.valid() ? graph.node(node.forward) : node;
  const bool bag = forward.op->name == "embedding_bag";
  if (!bag && forward.op->name != "gather") return 0;
  const size_t table = bag ? 1 : 0;
  const Indices& indices = forward.rule.operands[table];
  const auto v = std::ranges::find(
      indices, static_cast<uint8_t>(forward.rule.FactorOf('v')));
  return graph.tensor(forward.operands[table])
      .shape[static_cast<size_t>(v - indices.begin())];
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
                    const Graph& graph, const ProfileKey& key,
                    const TrainingOptions& options) {
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
  if (task.kernel == "cast" || task.kernel == "stochastic_cast") {
    if (task.kernel == "stochastic_cast") result.attributes = {{"salt", 1}};
    result.results = {Flat(n, dtype_of(task.writes[0]))};
    return result;
  }
  if (task.kernel == "running_average") {
    result.attributes = {{"rate", 0.1}};
    result.results = {Flat(n, dtype_of(task.writes[0]))};
    return result;
  }
  result.operands.push_back(scalar);
  const auto per_weight =
      1 + static_cast<size_t>(MomentsOf(task.kernel).value_or(0));
  for (size_t i = 0; i < per_weight; ++i) {
    result.results.push_back(Flat(n, dtype_of(task.writes[i])));
  }
  if (key.name.ends_with("+cast")) {  // the parameter, beside its master
    const TensorId weight = tasks.value(task.writes[0]).tensor;
    result.results.push_back(Flat(n, graph.tensor(weight).dtype));
  }
  return result;
}

// One call of a factored optimizer's kernel, on a matrix of as many elements as
// the key counts.
KernelCase FactoredCase(const Task& task, const TaskGraph& tasks,
                        const ProfileKey& key, const TrainingOptions& options) {
  KernelCase result;
  result.attributes = {{"beta2_decay", options.beta2_decay},
                       {"d", options.d},
                       {"epsilon1", options.epsilon1.value_or(1e-7)},
                       {"epsilon2", options.epsilon2},
                       {"lr", options.learning_rate},
                       {"weight_decay", options.weight_decay}};
  constexpr int64_t kColumns = 1024;
  const int64_t n = ElementCount(key.extents);
  const bool sums_alone = FindFactoredKernel(task.kernel)->piece_reads == 0;
  const int64_t columns =
      std::clamp<int64_t>(sums_alone ? n / 2 : n, 1, kColumns);
  const int64_t rows =
      std::max<int64_t>(1, sums_alone ? n - columns : n / columns);
  const auto op = FindOp(task.kernel);
  TESSERA_CHECK(op.has_value()) << task.kernel;
  auto rule = IndexRule::Parse((*op)->rule);
  TESSERA_CHECK(rule.has_value()) << (*op)->rule;
  const DType dtype = tasks.value(task.reads[0]).dtype;
  const auto add = [&](const std::vector<Indices>& sides,
                       std::vector<KernelCase::Buffer>& buffers) {
    for (const Indices& indices : sides) {
      KernelCase::Buffer& buffer =
          buffers.emplace_back(KernelCase::Buffer{dtype, {}, {}});
      for (const uint8_t f : indices) {
        const char letter = rule->factors[f].letter;
        buffer.shape.push_back(letter == 'r'   ? rows
                               : letter == 'c' ? columns
                               : letter == 'n' ? n
                                               : 1);
      }
      buffer.global_shape = buffer.shape;
    }
  };
  add(rule->operands, result.operands);
  add(rule->results, result.results);
  return result;
}

bool IsList(std::string_view kernel) {
  return MomentsOf(kernel) || kernel == "square_sum" ||
         kernel == "clip_coefficient" || kernel == "cast" ||
         kernel == "stochastic_cast" || kernel == "running_average";
}

// ---- Contents

// Contents repeat after so many elements, or as few more as whole rows need.
constexpr int64_t kPatternElements = int64_t{1} << 16;

int64_t BytesOf(const KernelCase::Buffer& buffer) {
  return ElementCount(buffer.shape) * SizeOf(buffer.dtype);
}

template <typename T>
void Append(std::vector<std::byte>& bytes, T value) {
  const auto raw = std::bit_cast<std::array<std::byte, sizeof(T)>>(value);
  bytes.insert(bytes.end(), raw.begin(), raw.end());
}

// The first elements of a buffer, or all.
std::vector<std::byte> PatternOf(const KernelCase::Buffer& buffer, int64_t ids,
                                 uint64_t seed) {
  const int64_t all = BytesOf(buffer) / SizeOf(buffer.dtype);
  int64_t row = 1;
  if (buffer.fill == KernelCase::Fill::kPositions && !buffer.shape.empty()) {
    row = buffer.shape.back();
  }
  const int64_t n = std::min(all, RoundUp(kPatternElements, row));
  std::vector<std::byte> bytes;
  bytes.reserve(static_cast<size_t>(n * SizeOf(buffer.dtype)));
  for (int64_t i = 0; i < n; ++i) {
    // In (0, 1]: also good as a variance, a norm or a log-sum-exp.
    const double random =
        1.0 - CounterUniform01(seed, static_cast<uint64_t>(i));
    switch (buffer.dtype) {
      case DType::kFloat64:
        Append(bytes, random);
        break;
      case DType::kFloat32:
        Append(bytes, static_cast<float>(random));
        break;
      case DType::kBFloat16:
        Append(bytes, ToBFloat16(static_cast<float>(random)));
        break;
      case DType::kFloat16:
        Append(bytes, ToFloat16(static_cast<float>(random)));
        break;
      case DType::kInt32:
        Append(bytes, static_cast<int32_t>(
                          buffer.fill == KernelCase::Fill::kPositions
                              ? static_cast<double>(i % row)
                              : (1.0 - random) * static_cast<double>(ids)));
        break;
    }
  }
  return bytes;
}

void CopyBytes(RankDevice& device, std::byte* to, const std::byte* from,
               int64_t bytes) {
  StridedCopy copy;
  copy.run_bytes = bytes;
  device.Copy(to, from, copy);
}

// What is written once is copied behind itself until `bytes` are full.
void Fill(RankDevice& device, std::byte* data, int64_t bytes,
          const std::vector<std::byte>& pattern) {
  if (bytes == 0) return;
  auto done = static_cast<int64_t>(pattern.size());
  device.Write(data, pattern.data(), {done});
  while (done < bytes) {
    const int64_t more = std::min(done, bytes - done);
    CopyBytes(device, data + done, data, more);
    done += more;
  }
}

}  // namespace

KernelCase CaseOf(const Task& task, const TaskGraph& tasks, const Graph& graph,
                  const ProfileKey& key, const TrainingOptions& options) {
  KernelCase result;
  if (key.name == "copy") {
    const KernelCase::Buffer buffer = Flat(key.extents[0], key.dtype);
    result.operands = {buffer};
    result.results = {buffer};
    return result;
  }
  if (FindFactoredKernel(task.kernel) != nullptr) {
    result = FactoredCase(task, tasks, key, options);
  } else if (IsList(task.kernel)) {
    result = ListCase(task, tasks, graph, key, options);
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
  result.kernel = key.name.ends_with("+cast") ? key.name : task.kernel;
  result.accumulate = key.name.ends_with(kAdds);
  result.ids = IdsOf(graph);
  if (task.node.valid()) {
    if (const int64_t rows = RowsOf(graph, graph.node(task.node)); rows > 0) {
      result.ids = rows;
    }
  }
  for (const ValueId id : task.reads) {
    const Value& value = tasks.value(id);
    if (value.dtype != DType::kInt32 || !value.tensor.valid()) continue;
    if (const int64_t slots = SlotsOf(graph, value.tensor); slots > 0) {
      result.ids = slots;
    }
  }
  return result;
}

KernelCase FusedCaseOf(const KernelCase& first,
                       std::span<const KernelCase> others,
                       std::span<const FusedKernel* const> kernels) {
  KernelCase result = first;
  for (size_t i = 0; i < others.size(); ++i) {
    const FusedKernel& kernel = *kernels[i];
    result.kernel = kernel.name;
    std::vector<KernelCase::Buffer> more = others[i].operands;
    if (kernel.kind == FusedKernel::Kind::kChain) {
      // Operands of a sum are alike.
      const size_t place =
          kernel.operand == FusedKernel::kAnyOperand ? 0 : kernel.operand;
      more.erase(more.begin() + static_cast<int64_t>(place));
    } else if (kernel.kind == FusedKernel::Kind::kBranches) {
      more.erase(more.begin());
    }
    if (kernel.kind != FusedKernel::Kind::kSiblings) {
      result.operands.insert(result.operands.end(), more.begin(), more.end());
    }
    if (!kernel.keeps_first) result.results.erase(result.results.begin());
    result.results.insert(result.results.end(), others[i].results.begin(),
                          others[i].results.end());
    result.attributes.insert(result.attributes.end(),
                             others[i].attributes.begin(),
                             others[i].attributes.end());
  }
  return result;
}

namespace {

Result<const Kernel*> FindKernel(const RankDevice& device,
                                 const std::string& name) {
  if (const Kernel* const fused = device.FindFusedKernel(name)) return fused;
  return device.FindKernel(name);
}

}  // namespace

bool HasKernel(const RankDevice& device, const KernelCase& kernel_case) {
  return kernel_case.kernel.empty() ||
         FindKernel(device, kernel_case.kernel).has_value();
}

// ---- PreparedKernel

int64_t AlignedBytes(int64_t bytes) {
  constexpr int64_t kAlignment = 256;
  return RoundUp(std::max<int64_t>(bytes, 1), kAlignment);
}

int64_t SetsInTurn(Bytes rotated, int64_t set_bytes) {
  constexpr int64_t kAlone = 4;
  if (set_bytes >= kAlone * rotated.value) return 1;
  return std::min(DivideUp(rotated.value, set_bytes) + 1, kMostSets);
}

Result<std::unique_ptr<PreparedKernel>> PreparedKernel::Make(
    const KernelCase& kernel_case, RankDevice& device, Bytes rotated) {
  std::unique_ptr<PreparedKernel> prepared(
      new PreparedKernel(kernel_case, device));
  if (!kernel_case.kernel.empty()) {
    TESSERA_TRY(prepared->kernel_, FindKernel(device, kernel_case.kernel));
  }
  int64_t set_bytes = 0;
  for (const auto* buffers : {&kernel_case.operands, &kernel_case.results}) {
    for (const auto& buffer : *buffers)
      set_bytes += AlignedBytes(BytesOf(buffer));
  }
  const int64_t sets = SetsInTurn(rotated, set_bytes);
  TESSERA_TRY(prepared->memory_,
              device.Allocate({sets * set_bytes}, MemoryCategory::kActivation));
  auto* const first = static_cast<std::byte*>(prepared->memory_);
  std::byte* data = first;
  uint64_t seed = 0;
  for (const auto* buffers : {&kernel_case.operands, &kernel_case.results}) {
    for (const KernelCase::Buffer& buffer : *buffers) {
      Fill(device, data, BytesOf(buffer),
           PatternOf(buffer, kernel_case.ids, ++seed));
      data += AlignedBytes(BytesOf(buffer));
    }
  }
  for (int64_t set = 0; set < sets; ++set) {
    std::byte* const here = first + set * set_bytes;
    if (set > 0) CopyBytes(device, here, first, set_bytes);
    prepared->sets_.push_back(prepared->At(here));
  }
  return prepared;
}

PreparedKernel::~PreparedKernel() {
  if (memory_ != nullptr) device_.Free(memory_);
}

PreparedKernel::Buffers PreparedKernel::At(std::byte* data) const {
  Buffers set;
  const auto place = [&](const std::vector<KernelCase::Buffer>& of,
                         std::vector<LocalTensor>& tensors) {
    for (const KernelCase::Buffer& buffer : of) {
      LocalTensor tensor;
      tensor.data = data;
      tensor.dtype = buffer.dtype;
      tensor.shape = buffer.shape;
      tensor.offset.assign(buffer.shape.size(), 0);
      tensor.global_shape = buffer.global_shape;
      tensors.push_back(std::move(tensor));
      data += AlignedBytes(BytesOf(buffer));
    }
  };
  place(case_.operands, set.operands);
  place(case_.results, set.results);
  return set;
}

void PreparedKernel::Run() {
  const Buffers& set = sets_[next_];
  next_ = (next_ + 1) % sets_.size();
  if (kernel_ == nullptr) {
    CopyBytes(device_, static_cast<std::byte*>(set.results[0].data),
              static_cast<const std::byte*>(set.operands[0].data),
              BytesOf(case_.operands[0]));
    return;
  }
  KernelCall call;
  call.rule = case_.rule.factors.empty() ? nullptr : &case_.rule;
  call.attributes = case_.attributes;
  call.operands = set.operands;
  call.results = set.results;
  call.accumulate = case_.accumulate;
  // As the executor says it of a sequence without documents.
  bool positions = false;
  bool others = false;
  for (const KernelCase::Buffer& buffer : case_.operands) {
    if (buffer.dtype != DType::kInt32) continue;
    (buffer.fill == KernelCase::Fill::kPositions ? positions : others) = true;
  }
  call.places_are_positions = positions && !others;
  call.threads = device_.threads();
  call.any_order = true;  // as in runs without --deterministic
  device_.Launch(*kernel_, call);
}

}  // namespace tessera
