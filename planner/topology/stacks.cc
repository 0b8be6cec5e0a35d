#include "planner/topology/stacks.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "planner/base/check.h"
#include "planner/base/table.h"

namespace tessera {
namespace {

// What is fitted, by the stack's name (tools/fit_stacks.py).
struct StackFigures {
  std::string_view name;
  double host_per_operator;  // s
  double logits_passes;
  double kernel_traffic;
  double optimizer_traffic;
  double sustained;
  double tensor_exposed;
  double sharded_bandwidth;  // bytes/s
};

constexpr StackFigures kFigures[] = {
#include "planner/topology/stack_constants.inc"
};

// What else tells them apart, and what they are.
struct StackRow {
  std::string_view name;
  StackAttention attention;
  bool overlaps;
  bool fuses_elementwise;
  double host_per_shard;  // s
  SplitSends split_sends;
  std::string_view source;
};

// What Python takes to slice a tensor and PyTorch to start a copy. DeepSpeed's
// ZeRO-3 until 0.5 gathers each parameter into a list of one tensor for each
// rank, and reduces its gradient from such a list, having waited for the device
// (runtime/zero/partition_parameters.py, v0.3.13); PyTorch copies them one by
// one from and to what NCCL moves.
constexpr double kHostPerShard = 1e-5;

constexpr StackRow kRows[] = {
    // --no-scatter-gather-tensors-in-pipeline is off (megatron/arguments.py;
    // Narayanan et al. 2021, section 4.1).
    {"megatron-2021", StackAttention::kUnfused, false, true, kHostPerShard,
     SplitSends::kAlways,
     "Megatron-LM and Megatron-DeepSpeed of 2021 and 2022: fp16, attention of "
     "separate products and a fused softmax, Apex's fused Adam, no "
     "communication beside kernels"},
    {"megatron-core-2024", StackAttention::kFused, true, true, 0,
     SplitSends::kNever,
     "Megatron-Core, NeMo and Megatron-Bridge since 2023: Transformer Engine, "
     "cuDNN attention, distributed optimizer overlapped with the passes"},
    {"torchtitan-2024", StackAttention::kFused, true, true, 0,
     SplitSends::kNever,
     "PyTorch's fully sharded data parallelism with FlashAttention-2 and "
     "later, compiled (fms-fsdp, torchtitan)"},
    {"pytorch-fsdp-2023", StackAttention::kFlash1, true, false, 0,
     SplitSends::kNever,
     "PyTorch's first fully sharded data parallelism with Triton's or the "
     "first FlashAttention (llm-foundry)"},
    {"pytorch-eager-2022", StackAttention::kUnfused, true, false, 0,
     SplitSends::kNever,
     "PyTorch with distributed data parallelism (Hugging Face transformers): "
     "attention of separate kernels"},
    {"xla-2022", StackAttention::kUnfused, false, true, 0, SplitSends::kNever,
     "JAX's XLA of 2022 as Alpa has it: compiled, attention not fused, no "
     "communication beside kernels"},
};

// What the software keeps and holds, by the stack's name.
struct StackMemoryRow {
  std::string_view name;
  StackMemory memory;
};

// A process that has one tensor: 1113 MiB, of PyTorch 1.8 on V100 with all of
// its kernels loaded (bigscience-workshop/bigscience, experiments/tr3m-1B3.md,
// "calibration"). Since CUDA 11.7 kernels are loaded when first used:
// estimated.
constexpr Bytes kWholeContext{int64_t{1113} << 20};
constexpr Bytes kLazyContext{int64_t{500} << 20};
// NCCL takes 4 MiB a channel and connection (NCCL_BUFFSIZE), of which a rank
// has two in a ring and four in a double tree, on some eight channels.
constexpr Bytes kNcclBuffers{(int64_t{4} << 20) * 8 * 6};
// An estimate: published runs have between nothing (max_memory_reserved of
// Llama-3.1-8B over sequence lengths, stas00/ml-engineering) and a tenth.
constexpr double kFragmentation = 0.05;

constexpr StackMemoryRow kMemory[] = {
    // Dropout at 0.1 unless told otherwise (megatron/arguments.py); fp16
    // gradients unless --accumulate-allreduce-grads-in-fp32, which bf16 sets;
    // logits in float() for the vocabulary-parallel loss.
    {"megatron-2021",
     {.dropout_masks = true,
      .fp16_gradients = true,
      .gradient_copies = true,
      .logits = StackLogits::kFp32,
      .context = kWholeContext,
      .communicator = kNcclBuffers,
      .fragmentation = kFragmentation}},
    {"megatron-core-2024",
     {.fp16_gradients = true,
      .logits = StackLogits::kFp32,
      .context = kLazyContext,
      .communicator = kNcclBuffers,
      .fragmentation = kFragmentation}},
    {"torchtitan-2024",
     {.logits = StackLogits::kFp32,
      .context = kLazyContext,
      .communicator = kNcclBuffers,
      .fragmentation = kFragmentation}},
    {"pytorch-fsdp-2023",
     {.logits = StackLogits::kFp32,
      .context = kLazyContext,
      .communicator = kNcclBuffers,
      .fragmentation = kFragmentation}},
    {"pytorch-eager-2022",
     {.dropout_masks = true,
      .logits = StackLogits::kFp32,
      .context = kWholeContext,
      .communicator = kNcclBuffers,
      .fragmentation = kFragmentation}},
    // One buffer planned by the compiler: no blocks between its values.
    // Gradients are values of the parameters' type (alpa/model/model_util.py),
    // whose reductions are one (all_reduce_threshold = 1 << 60,
    // alpa/shard_parallel/auto_sharding.py).
    {"xla-2022",
     {.fp16_gradients = true,
      .whole_gradients = true,
      .logits = StackLogits::kFp32,
      .context = kWholeContext,
      .communicator = kNcclBuffers}},
};

Stack Made(const StackRow& row) {
  const auto* const figures =
      std::ranges::find(kFigures, row.name, &StackFigures::name);
  TESSERA_CHECK(figures != std::end(kFigures)) << row.name;
  Stack stack;
  stack.name = row.name;
  stack.source = row.source;
  stack.attention = row.attention;
  stack.overlaps = row.overlaps;
  stack.fuses_projections = true;
  stack.fuses_elementwise = row.fuses_elementwise;
  stack.host_per_operator = Duration::FromSeconds(figures->host_per_operator);
  stack.logits_passes = figures->logits_passes;
  stack.kernel_traffic = figures->kernel_traffic;
  stack.optimizer_traffic = figures->optimizer_traffic;
  stack.sustained = figures->sustained;
  stack.host_per_shard = Duration::FromSeconds(row.host_per_shard);
  stack.split_sends = row.split_sends;
  stack.tensor_exposed = figures->tensor_exposed;
  stack.sharded_bandwidth = {figures->sharded_bandwidth};
  const auto* const memory =
      std::ranges::find(kMemory, row.name, &StackMemoryRow::name);
  TESSERA_CHECK(memory != std::end(kMemory)) << row.name;
  stack.memory = memory->memory;
  return stack;
}

std::vector<Stack> MakeStacks() {
  std::vector<Stack> stacks = {Stack()};  // Tessera's own
  for (const StackRow& row : kRows) stacks.push_back(Made(row));
  return stacks;
}

Error BadValue(std::string_view key, std::string_view value,
               std::string_view expected) {
  return InvalidInput(
      "'" + std::string(value) + "': expected " + std::string(expected),
      std::string(key));
}

Result<double> Number(std::string_view key, std::string_view text, double least,
                      double most) {
  double value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() ||
      !(value >= least && value <= most)) {
    char range[64];
    std::snprintf(range, sizeof range, "a number from %g to %g", least, most);
    return BadValue(key, text, range);
  }
  return value;
}

Result<void> SetFlag(std::string_view key, std::string_view text, bool& flag) {
  if (text != "0" && text != "1") return BadValue(key, text, "0 or 1");
  flag = text == "1";
  return {};
}

// The names of an enumeration's values, in their order.
constexpr std::string_view kAttentionNames[] = {"fused", "flash1", "unfused"};
constexpr std::string_view kProductNames[] = {"as-values", "fp8", "fp4"};
constexpr std::string_view kSplitNames[] = {"never", "forward", "always"};
constexpr std::string_view kLogitsNames[] = {"as-values", "fp32", "never"};

template <typename Enum>
Result<void> SetName(std::string_view key, std::string_view text,
                     std::span<const std::string_view> names, Enum& value) {
  const auto found = std::ranges::find(names, text);
  if (found == names.end()) return UnknownName(key, text, names);
  value = static_cast<Enum>(found - names.begin());
  return {};
}

// One row for each key of ParseStack.
struct Key {
  std::string_view name;
  Result<void> (*set)(Stack& stack, std::string_view key,
                      std::string_view value);
};

template <double Stack::*kField, int kMost>
Result<void> SetNumber(Stack& stack, std::string_view key,
                       std::string_view value) {
  TESSERA_TRY(stack.*kField, Number(key, value, 0, kMost));
  return {};
}

template <Duration Stack::*kField>
Result<void> SetSeconds(Stack& stack, std::string_view key,
                        std::string_view value) {
  TESSERA_TRY(const double seconds, Number(key, value, 0, 1));
  stack.*kField = Duration::FromSeconds(seconds);
  return {};
}

template <Bytes StackMemory::*kField>
Result<void> SetBytes(Stack& stack, std::string_view key,
                      std::string_view value) {
  TESSERA_TRY(const double bytes, Number(key, value, 0, 1e12));
  stack.memory.*kField = {static_cast<int64_t>(bytes)};
  return {};
}

constexpr Key kKeys[] = {
    {"host", SetSeconds<&Stack::host_per_operator>},
    {"host-per-shard", SetSeconds<&Stack::host_per_shard>},
    {"split-sends",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetName(key, value, kSplitNames, stack.split_sends);
     }},
    {"overlap",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetFlag(key, value, stack.overlaps);
     }},
    {"attention",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetName(key, value, kAttentionNames, stack.attention);
     }},
    {"fuse",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetFlag(key, value, stack.fuses_projections);
     }},
    {"fuse-elementwise",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetFlag(key, value, stack.fuses_elementwise);
     }},
    {"logits", SetNumber<&Stack::logits_passes, 100>},
    {"traffic", SetNumber<&Stack::kernel_traffic, 100>},
    {"optimizer", SetNumber<&Stack::optimizer_traffic, 100>},
    {"sustained",
     [](Stack& stack, std::string_view key,
        std::string_view value) -> Result<void> {
       TESSERA_TRY(stack.sustained, Number(key, value, 0.01, 1));
       return {};
     }},
    {"sharded",
     [](Stack& stack, std::string_view key,
        std::string_view value) -> Result<void> {
       TESSERA_TRY(stack.sharded_bandwidth.value, Number(key, value, 0, 1e15));
       return {};
     }},
    {"tensor-exposed", SetNumber<&Stack::tensor_exposed, 1>},
    {"experts-exposed", SetNumber<&Stack::experts_exposed, 1>},
    {"experts-once-per-host",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetFlag(key, value, stack.experts_once_per_host);
     }},
    {"products",
     [](Stack& stack, std::string_view key,
        std::string_view value) -> Result<void> {
       return SetName(key, value, kProductNames, stack.products);
     }},
    {"masks",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetFlag(key, value, stack.memory.dropout_masks);
     }},
    {"fp16-gradients",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetFlag(key, value, stack.memory.fp16_gradients);
     }},
    {"bf16-gradients",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetFlag(key, value, stack.memory.bf16_gradients);
     }},
    {"gradient-copies",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetFlag(key, value, stack.memory.gradient_copies);
     }},
    {"keep-logits",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetName(key, value, kLogitsNames, stack.memory.logits);
     }},
    {"whole-gradients",
     [](Stack& stack, std::string_view key, std::string_view value) {
       return SetFlag(key, value, stack.memory.whole_gradients);
     }},
    {"zero-bucket", SetBytes<&StackMemory::zero_bucket>},
    {"context", SetBytes<&StackMemory::context>},
    {"communicator", SetBytes<&StackMemory::communicator>},
    {"fragmentation",
     [](Stack& stack, std::string_view key,
        std::string_view value) -> Result<void> {
       TESSERA_TRY(stack.memory.fragmentation, Number(key, value, 0, 10));
       return {};
     }},
};

}  // namespace

std::span<const Stack> Stacks() {
  static const std::vector<Stack> stacks = MakeStacks();
  return stacks;
}

const Stack& StackNamed(std::string_view name) {
  const auto stacks = Stacks();
  const auto row = std::ranges::find(stacks, name, &Stack::name);
  TESSERA_CHECK(row != stacks.end()) << name;
  return *row;
}

Result<Stack> ParseStack(std::string_view text) {
  const std::string_view name = text.substr(0, text.find(','));
  std::vector<std::string_view> names;
  for (const Stack& row : Stacks()) names.push_back(row.name);
  if (std::ranges::find(names, name) == names.end()) {
    return UnknownName("stack", name, names);
  }
  Stack stack = StackNamed(name);
  for (size_t at = name.size(); at < text.size();) {
    const size_t end = std::min(text.find(',', at + 1), text.size());
    const std::string_view word = text.substr(at + 1, end - at - 1);
    at = end;
    const std::string_view key = word.substr(0, word.find('='));
    const auto* const row = std::ranges::find(kKeys, key, &Key::name);
    if (row == std::end(kKeys)) {
      std::vector<std::string_view> keys;
      for (const Key& known : kKeys) keys.push_back(known.name);
      return UnknownName("key", key, keys);
    }
    if (key.size() == word.size()) {
      return InvalidInput("needs a value", std::string(key));
    }
    TESSERA_RETURN_IF_ERROR(row->set(stack, key, word.substr(key.size() + 1)));
  }
  return stack;
}

}  // namespace tessera
