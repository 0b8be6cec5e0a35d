#include "costmodel/validate/replay.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

#include "costmodel/validate/published_cluster.h"
#include "costmodel/validate/words.h"
#include "planner/base/whole_number.h"
#include "planner/io/huggingface.h"
#include "planner/io/model_config.h"
#include "planner/plan/recompute.h"
#include "planner/topology/hardware.h"
#include "planner/topology/stacks.h"

namespace tessera {
namespace {

using Words = std::vector<std::string>;

// reduce_bucket_size and allgather_bucket_size are 5e8 values by default
// (deepspeed.ai/docs/config-json), of 16 bits.
constexpr Bytes kDeepSpeedBucket{1'000'000'000};

// No published model has heads as narrow.
constexpr int64_t kLeastWidth = 8;

// As models' configurations are read: what any size is at most.
constexpr int64_t kMostWidth = int64_t{1} << 20;
// Microbatches are counted by an int.
constexpr int64_t kMostSequences = std::numeric_limits<int32_t>::max();

Result<void> CheckWidth(std::string_view what, int64_t width) {
  if (width >= 1 && width <= kMostWidth) return {};
  return CannotMap("is " + std::to_string(width) + std::string(what) +
                       ": expected a whole number from 1 to " +
                       std::to_string(kMostWidth),
                   "ffn");
}

// The digits of `text` that end before `word`, or begin behind it; 0 where
// there are none.
int64_t NumberBefore(std::string_view text, std::string_view word) {
  const size_t end = std::min(text.find(word), text.size());
  size_t begin = end;
  while (begin > 0 && text[begin - 1] >= '0' && text[begin - 1] <= '9') --begin;
  return end == text.size()
             ? 0
             : ParseWhole<int64_t>(text.substr(begin, end - begin)).value_or(0);
}
int64_t NumberBehind(std::string_view text, std::string_view word) {
  const size_t at = text.find(word);
  if (at == std::string_view::npos) return 0;
  text.remove_prefix(at + word.size());
  return ParseWhole<int64_t>(
             text.substr(0, text.find_first_not_of("0123456789")))
      .value_or(0);
}

void Set(JsonValue& config, std::string_view key, double number) {
  JsonValue value;
  value.kind = JsonValue::Kind::kNumber;
  value.number = number;
  config.fields[std::string(key)] = value;
}

// The software by its words, first in the source, then in the notes and the
// columns that name a framework; who trains by fully sharded data parallelism
// does it in PyTorch; else attention decides: on Hopper and later, or where the
// row has flash attention, it is Megatron-Core's time.
struct StackName {
  std::string_view word;
  std::string_view stack;
};
constexpr StackName kStackNames[] = {
    {"alpa docs", "xla-2022"},
    {"intra_ablation", "xla-2022"},
    {"benchmark/alpa", "xla-2022"},
    {"transformers", "pytorch-eager-2022"},
    {"neusight", "pytorch-eager-2022"},
    {"paddle", "pytorch-eager-2022"},
    {"llm-foundry", "pytorch-fsdp-2023"},
    // JAX since 2023 compiles, fuses attention and hides its collectives, as
    // compiled PyTorch does; XLA of 2022 did none of the latter.
    {"maxtext", "torchtitan-2024"},
    {"paxml", "torchtitan-2024"},
    {"jax", "torchtitan-2024"},
    {"t5x", "torchtitan-2024"},
    {"levanter", "torchtitan-2024"},
    {"easylm", "torchtitan-2024"},
    {"fsdp", "torchtitan-2024"},
    {"torchtitan", "torchtitan-2024"},
    {"torchtune", "torchtitan-2024"},
    {"litgpt", "torchtitan-2024"},
    {"lit-gpt", "torchtitan-2024"},
    {"tinyllama", "torchtitan-2024"},
    {"nanogpt", "torchtitan-2024"},
    {"llm.c", "torchtitan-2024"},
    {"olmo", "torchtitan-2024"},
    {"lingua", "torchtitan-2024"},
    {"open_lm", "torchtitan-2024"},
    {"ml-engineering", "torchtitan-2024"},
    {"vtrain", "megatron-2021"},
    {"megatron-deepspeed", "megatron-2021"},
    {"bigscience", "megatron-2021"},
    {"sc21", "megatron-2021"},
    {"2205.05198", "megatron-2021"},
    {"zero bubble", "megatron-2021"},
    {"pythia", "megatron-2021"},
    {"gpt-neox", "megatron-2021"},
    {"superscaler", "megatron-2021"},
    {"nemo", "megatron-core-2024"},
    {"megatron-bridge", "megatron-core-2024"},
    {"megatron-lm", "megatron-core-2024"},
    {"internevo", "pytorch-fsdp-2023"},
};
// Beside the source.
constexpr StackName kFrameworks[] = {
    {"maxtext", "torchtitan-2024"},
    {"jax", "torchtitan-2024"},
    {"paxml", "torchtitan-2024"},
    {"torchtitan", "torchtitan-2024"},
    {"torchtune", "torchtitan-2024"},
    {"litgpt", "torchtitan-2024"},
    {"pytorch fsdp", "torchtitan-2024"},
    {"nemo", "megatron-core-2024"},
    {"megatron-core", "megatron-core-2024"},
    {"megatron-bridge", "megatron-core-2024"},
    {"flagscale", "megatron-core-2024"},
    {"nanotron", "megatron-core-2024"},
    {"megatron", ""},  // by its GPU and attention
    // Kernel by kernel, as frameworks without a compiler run models.
    {"deepspeed", "pytorch-eager-2022"},
    {"hugging face", "pytorch-eager-2022"},
    {"transformers", "pytorch-eager-2022"},
    {"paddle", "pytorch-eager-2022"},
    {"colossal", "pytorch-eager-2022"},
};

template <size_t kRows>
std::optional<std::string_view> StackIn(const StackName (&table)[kRows],
                                        const std::string& text) {
  for (const StackName& row : table) {
    if (HasStem(text, row.word)) return row.stack;
  }
  return {};
}

// A row of Hugging Face's layers among Megatron's of 2021, under the DeepSpeed
// that those have.
bool ComparesWithMegatron(const PublishedRun& run) {
  return Has(Lower(run.notes), "hf transformers") &&
         StackIn(kStackNames, Lower(run.source)) == "megatron-2021";
}

std::string_view StackNameOf(const PublishedRun& run) {
  if (ComparesWithMegatron(run)) return "pytorch-eager-2022";
  if (const auto stack = StackIn(kStackNames, Lower(run.source))) {
    return *stack;
  }
  const std::string zero = Lower(run.zero_stage);
  const std::string notes = Lower(run.notes);
  const auto framework = StackIn(kFrameworks, notes + " " + zero);
  if (framework && !framework->empty()) return *framework;
  if (Has(zero, "fsdp") || Has(zero, "_shard")) return "torchtitan-2024";
  const std::string flash = Lower(run.flash_attn);
  const std::string gpu = Lower(run.gpu);
  bool recent =
      !flash.empty() && ReadAttention(flash) != StackAttention::kUnfused;
  for (const std::string_view name :
       {"h100", "h200", "h800", "h20", "b200", "b300", "gh200", "gb200",
        "gb300", "p5", "a3-mega", "a3-ultra"}) {
    recent |= HasWord(gpu, name);
  }
  return recent ? "megatron-core-2024" : "megatron-2021";
}

// NVIDIA's recipes overlap tensor-parallel collectives with products
// (ub_tp_comm_overlap) and interleave stages; Megatron-LM does so only where it
// is asked to (--tp-comm-overlap, --num-layers-per-virtual-pipeline-stage).
bool IsNvidiaRecipe(const PublishedRun& run) {
  const std::string source = Lower(run.source);
  return Has(source, "nemo") || Has(source, "megatron-bridge") ||
         Has(source, "dgxc");
}

// What the row says of it; nothing where it says nothing.
std::optional<bool> OverlapsTensorCollectives(const std::string& notes) {
  const auto names_it = [](const std::string& text) {
    return std::ranges::any_of(
        std::to_array<std::string_view>({"tp comm overlap", "tp overlap",
                                         "tp_comm_overlap", "asynctp",
                                         "async tp", "async-tp", "userbuffer"}),
        [&](std::string_view word) { return Has(text, word); });
  };
  if (names_it(Asserted(notes))) return true;
  if (names_it(notes) || Has(notes, "vanilla tp") || Has(notes, "without tp")) {
    return false;
  }
  return {};
}

// Where the table has no ZeRO stage, by the scripts that the source ran.
struct ZeroDefault {
  std::string_view word;  // of the source
  int stage;
};
constexpr ZeroDefault kZeroDefaults[] = {
    // train/tr3-1B3-baseline/tr3m-1B3-emb-norm-pile.slurm: ZERO_STAGE=1
    {"bigscience", 1},
    // benchmark/alpa: prefer_reduce_scatter=True, "ZeRO-2-like"
    {"alpa", 2},
};

// The row's stage; nothing for words that name none.
std::optional<int> ZeroStageOf(const PublishedRun& run) {
  if (const auto zero = ReadZero(Lower(run.zero_stage))) return zero->stage;
  if (!run.zero_stage.empty()) return {};
  const auto* const row = std::ranges::find_if(
      kZeroDefaults,
      [&](const ZeroDefault& r) { return Has(Lower(run.source), r.word); });
  return row == std::end(kZeroDefaults) ? 0 : row->stage;
}

// The row's words of recomputation. Where torchtitan says no more than
// "selective" it is the way that its configurations have by default
// (selective_ac_option = "op"), not Megatron's.
std::string RecomputeTextOf(const PublishedRun& run) {
  std::string text = Lower(run.recompute);
  if (text == "selective" && Has(Lower(run.source), "torchtitan")) {
    text = "selective (op)";
  }
  return text;
}

// What the row says twice, or of parts that its model has not, agrees; and its
// words are known.
Result<void> CheckColumns(const PublishedRun& run, int64_t replicas) {
  if (run.dp > 0 && run.dp != replicas) {
    return CannotMap("is " + std::to_string(run.dp) + ", but " +
                         std::to_string(run.gpus) + " GPUs are " +
                         std::to_string(replicas) + " times tp pp cp",
                     "dp");
  }
  for (const auto& [column, value, least] :
       {std::tuple<std::string_view, int64_t, int64_t>{"ep", run.ep, 2},
        {"topk", run.topk, 1}}) {
    if (run.experts > 0 || value < least) continue;
    return CannotMap(
        "is " + std::to_string(value) + ", but the model has no experts",
        column);
  }
  const std::string parallel = Lower(run.seq_parallel);
  if (!parallel.empty() && !ReadYes(parallel)) {
    return CannotMap("'" + run.seq_parallel + "'", "seq_parallel");
  }
  // A plain yes says that there is some flash attention.
  const std::string flash = Lower(run.flash_attn);
  if (!flash.empty() && !ReadYes(flash) && !ReadAttention(flash) &&
      !Has(flash, "flash")) {
    return CannotMap("'" + run.flash_attn + "'", "flash_attn");
  }
  return {};
}

// Megatron or Hugging Face's layers under DeepSpeed's engine.
bool IsDeepSpeed(const PublishedRun& run) {
  const std::string source = Lower(run.source);
  if (Has(source, "bigscience")) {
    return !Has(Lower(run.notes), "megatron alone");
  }
  return Has(source, "vtrain") || Has(source, "pythia") ||
         Has(source, "gpt-neox") || Has(source, "deepspeed") ||
         Has(Lower(run.zero_stage), "deepspeed") ||
         Has(Lower(run.notes), "megatron-deepspeed");
}

}  // namespace

Stack StackOf(const PublishedRun& run, std::span<const Stack> stacks,
              Words& assumptions) {
  const auto named = [&](std::string_view name) -> const Stack& {
    const auto row = std::ranges::find(stacks, name, &Stack::name);
    TESSERA_CHECK(row != stacks.end()) << name;
    return *row;
  };
  Stack stack = named(StackNameOf(run));
  assumptions.push_back("stack " + stack.name);
  const std::string flash = Lower(run.flash_attn);
  if (const auto attention = ReadAttention(flash)) {
    stack.attention = *attention;
  } else if (!flash.empty() && stack.attention == StackAttention::kUnfused) {
    // Before FlashAttention-2 (July 2023).
    stack.attention = StackAttention::kFlash1;
  }
  const std::string notes = Lower(run.overlap_notes);
  if (const auto overlaps = OverlapsTensorCollectives(notes)) {
    stack.tensor_exposed =
        *overlaps ? named("megatron-core-2024").tensor_exposed : 1;
  } else if (run.tp > 1 && stack.tensor_exposed < 1 && !IsNvidiaRecipe(run)) {
    stack.tensor_exposed = 1;
    assumptions.push_back("tensor-parallel collectives not overlapped");
  }
  const std::string asserted = Asserted(notes);
  if (Has(asserted, "moe a2a overlap")) {
    stack.experts_exposed = named("megatron-core-2024").tensor_exposed;
  }
  stack.experts_once_per_host =
      Has(asserted, "deepep") || Has(asserted, "hybridep");
  if (Has(asserted, "cuda graph") && Has(asserted, "full_iteration")) {
    stack.host_per_operator = Duration{};
  }
  // Models with gates, and their norms, came without dropout.
  const std::string kind = Lower(run.ffn_kind);
  if (kind.starts_with("swiglu") || kind.starts_with("geglu")) {
    stack.memory.dropout_masks = false;
  }
  // Its optimizer reduces gradients in their own type (InternEvo,
  // hybrid_zero_optim.py), which is the parameters'.
  stack.memory.bf16_gradients |= Has(Lower(run.source), "internevo");
  if (IsDeepSpeed(run)) {
    // Its optimizer has them with one replica, too.
    if (ZeroStageOf(run).value_or(0) > 0) {
      stack.memory.zero_bucket = kDeepSpeedBucket;
    }
    // Activations cross in parts, their gradients whole (is_pipe_partitioned
    // and is_grad_partitioned of runtime/pipe/engine.py, v0.3.13 to v0.5).
    if (stack.split_sends == SplitSends::kAlways) {
      stack.split_sends = SplitSends::kForward;
    }
  }
  if (ComparesWithMegatron(run)) {
    const Stack& megatron = named("megatron-2021");
    stack.overlaps = megatron.overlaps;
    stack.sharded_bandwidth = megatron.sharded_bandwidth;
    stack.memory.fp16_gradients = megatron.memory.fp16_gradients;
    assumptions.push_back("ZeRO as of megatron-2021");
  }
  if (Has(Lower(run.notes), "liger kernel")) {
    stack.memory.logits = StackLogits::kNever;
  }
  if (const auto precision = ReadPrecision(Lower(run.precision))) {
    stack.products = precision->products;
    if (precision->tf32) {
      // Half of the rate of 16 bits (NVIDIA's datasheets of A100 to B200).
      stack.sustained *= 0.5;
      assumptions.push_back("TF32 as bf16 at half its rate");
    }
  }
  return stack;
}

Result<Strategy> StrategyOf(const PublishedRun& run, Words& assumptions) {
  Strategy strategy;
  const auto degree = [&](int64_t value) {
    return static_cast<int>(std::clamp<int64_t>(value, 1, 1 << 20));
  };
  strategy.tp = degree(run.tp);
  strategy.pp = degree(run.pp);
  strategy.vp = degree(run.vp);
  strategy.cp = degree(run.cp);
  strategy.ep = run.experts > 0 ? degree(run.ep) : 1;
  strategy.mbs = degree(run.micro_batch);
  const int64_t dense = int64_t{strategy.tp} * strategy.pp * strategy.cp;
  if (run.gpus % dense != 0) {
    return CannotMap(std::to_string(run.gpus) + " GPUs are not a multiple of " +
                         std::to_string(dense) + " = tp pp cp",
                     "gpus");
  }
  const int64_t replicas = run.gpus / dense;
  TESSERA_RETURN_IF_ERROR(CheckColumns(run, replicas));
  if (strategy.tp > 1 && strategy.ep % strategy.tp == 0 &&
      IsNvidiaRecipe(run)) {
    // Its recipes have whole experts on a tensor rank, and count those ranks in
    // ep (Megatron-Core's expert-tensor-parallel-size of 1).
    strategy.ep /= strategy.tp;
    strategy.etp = 1;
    assumptions.push_back("whole experts on tensor ranks");
  }
  if (replicas % strategy.ep != 0) {
    // Megatron-Core lets experts share ranks with cp; here only with dp.
    strategy.ep = static_cast<int>(std::gcd<int64_t>(replicas, strategy.ep));
    assumptions.push_back("experts over " + std::to_string(strategy.ep) +
                          " ranks, not " + std::to_string(run.ep));
  }
  strategy.dp = static_cast<int>(replicas / strategy.ep);
  strategy.sp =
      ReadYes(Lower(run.seq_parallel)).value_or(false) && strategy.tp > 1;
  const std::string notes = Lower(run.notes);
  if (run.vp == 0 && strategy.pp > 1 && IsNvidiaRecipe(run)) {
    // As its recipes do wherever the table has them.
    strategy.vp =
        static_cast<int>(std::max<int64_t>(1, run.layers / strategy.pp));
    assumptions.push_back("interleaved by single layers");
  }
  if (strategy.vp > 1) strategy.schedule = "interleaved";
  if (strategy.pp > 1 && Has(notes, "schedule zb-2p")) {
    strategy.schedule = "zb-h2";
    assumptions.push_back("ZB-2p as ZB-H2");
  } else if (strategy.pp > 1 &&
             (Has(notes, "schedule zb-1p") || Has(notes, "schedule zb-h1"))) {
    strategy.schedule = "zb-h1";
  }

  if (run.zero_stage.empty()) {
    strategy.zero = *ZeroStageOf(run);
    assumptions.push_back("ZeRO stage " + std::to_string(strategy.zero));
  } else if (const auto zero = ReadZero(Lower(run.zero_stage))) {
    strategy.zero = zero->stage;
    if (zero->offloads_optimizer) strategy.optimizer_tier = MemoryTier::kHost;
    const int ranks = strategy.dp * strategy.cp;
    if (zero->group > 1 && zero->group < ranks && ranks % zero->group == 0) {
      strategy.zero_group = zero->group;
    } else if (zero->within_node) {
      strategy.zero_group = Strategy::kWithinNode;
    }
    if (strategy.zero == 3 && strategy.pp > 1 &&
        Has(Lower(run.zero_stage), "fsdp2")) {
      // torchtitan keeps what it has gathered through the microbatches of a
      // pipeline (reshard_after_forward = not pp_enabled, parallelize_llama.py,
      // December 2024).
      strategy.zero = 2;
      assumptions.push_back("FSDP2 in a pipeline gathers once a step");
    }
  } else {
    return CannotMap("'" + run.zero_stage + "'", "zero_stage");
  }
  // What replicas there are not cannot be cut.
  if (strategy.dp * strategy.cp * strategy.ep == 1) {
    strategy.zero = 0;
    strategy.zero_group = 0;
  }

  const auto recompute = ReadRecompute(RecomputeTextOf(run));
  if (recompute) {
    strategy.recompute = recompute->level;
  } else if (run.recompute.empty()) {
    assumptions.push_back("no recompute");
  } else {
    return CannotMap("'" + run.recompute + "'", "recompute");
  }
  return strategy;
}

void SetRecomputeOf(const PublishedRun& run, const GraphIndex& index,
                    Plan& plan) {
  const auto words = ReadRecompute(RecomputeTextOf(run));
  if (!words) return;
  const Graph& graph = *index.graph;
  const auto has = [&](NodeId id, std::span<const std::string_view> fragments) {
    const Node& node = graph.node(id);
    return std::ranges::any_of(fragments, [&](std::string_view fragment) {
      return fragment == "attention" ? node.op->op_class == OpClass::kAttention
                                     : Has(node.name, fragment);
    });
  };
  const auto [first, last] = Layers(index);
  std::map<std::pair<GroupId, int>, int> of_chunk;  // layers so far
  for (int layer = first; layer < last; ++layer) {
    const auto& nodes = index.nodes_of_block[static_cast<size_t>(layer)];
    bool beyond = false;  // those of its chunk that run again
    if (!nodes.empty() && words->of_chunk > 0) {
      const OpPlacement& placement = plan.ops[nodes[0].index()];
      beyond =
          of_chunk[{placement.group, placement.chunk}]++ >= words->of_chunk;
    }
    for (const NodeId id : nodes) {
      bool& recompute = plan.ops[id.index()].recompute;
      if ((layer - first) % words->every != 0 || beyond) recompute = false;
      if (has(id, words->kept)) recompute = false;
      if (has(id, words->again)) recompute = CanRecompute(graph, id);
    }
  }
}

namespace {

// Where the table has no vocabulary, by the source.
struct Vocabulary {
  std::string_view word;  // of the source
  int64_t size;
};
constexpr Vocabulary kVocabularies[] = {
    // A SentencePiece model (sail-sg/zero-bubble-pipeline-parallelism, its
    // example's tokenizer.model); the sizes printed of its four models, 1.5,
    // 6.2, 14.6 and 28.3 thousand million parameters, leave 25,500 to 33,500
    // words with the embedding tied (12 h^2 + 13 h a layer, 1,024 positions).
    {"zero bubble", 32000},
};

// A model with multi-head latent attention. The table has its width, layers,
// heads and experts, "18432(dense first 3)/2048(expert)+2048(shared)"; what it
// has not are DeepSeek-V3's latents, groups of experts and vocabulary, and one
// dense layer and one shared expert, as its descendants have.
Result<Graph> LatentGraphOf(const PublishedRun& run,
                            const ImportOptions& options, Words& assumptions) {
  const int64_t dense = NumberBefore(run.ffn, "(dense");
  const int64_t expert = NumberBefore(run.ffn, "(expert)");
  if (dense == 0 || expert == 0) {
    return CannotMap("'" + run.ffn + "'", "ffn");
  }
  const int64_t first = NumberBehind(run.ffn, "(dense first ");
  const int64_t shared = NumberBefore(run.ffn, "(shared)");
  TESSERA_RETURN_IF_ERROR(CheckWidth("(dense)", dense));
  TESSERA_RETURN_IF_ERROR(CheckWidth("(expert)", expert));
  if (shared > 0) TESSERA_RETURN_IF_ERROR(CheckWidth("(shared)", shared));
  assumptions.push_back("latents of DeepSeek-V3");
  assumptions.push_back("without layers that predict further tokens");
  if (run.vocab == 0) assumptions.push_back("vocabulary of 129280");
  JsonValue json;
  json.kind = JsonValue::Kind::kObject;
  for (const auto& [key, number] :
       {std::pair<std::string_view, int64_t>{"hidden_size", run.hidden},
        {"num_hidden_layers", run.layers},
        {"num_attention_heads", run.heads},
        {"q_lora_rank", 1536},
        {"kv_lora_rank", 512},
        {"qk_rope_head_dim", 64},
        {"qk_nope_head_dim", 128},
        {"v_head_dim", 128},
        {"intermediate_size", dense},
        {"moe_intermediate_size", expert},
        {"first_k_dense_replace", std::max<int64_t>(1, first)},
        {"n_routed_experts", run.experts},
        {"n_shared_experts",
         std::max<int64_t>(1, (shared + expert - 1) / expert)},
        {"num_experts_per_tok", std::max<int64_t>(1, run.topk)},
        {"n_group", run.experts % 8 == 0 ? 8 : 1},
        {"topk_group", run.experts % 8 == 0 ? 4 : 1},
        {"vocab_size", run.vocab == 0 ? 129280 : run.vocab},
        {"max_position_embeddings", run.seq},
        // Tokens are spread evenly over the experts.
        {"expert_capacity_factor", 1}}) {
    Set(json, key, static_cast<double>(number));
  }
  ModelConfig config("line " + std::to_string(run.line), std::move(json));
  TESSERA_TRY(Graph graph, BuildDeepseekV3(config, options));
  graph.name = run.model;
  return Differentiate(std::move(graph));
}

}  // namespace

Result<Graph> GraphOf(const PublishedRun& run, Words& assumptions) {
  if (Has(Lower(run.model), "lora")) {
    return CannotMap("'" + run.model + "' trains adapters only", "model");
  }
  for (const auto& [column, value] :
       {std::pair<std::string_view, int64_t>{"layers", run.layers},
        {"hidden", run.hidden},
        {"heads", run.heads},
        {"seq", run.seq},
        {"global_batch", run.global_batch}}) {
    if (value < 1) return CannotMap("is blank or 0", column);
  }
  if (run.global_batch > kMostSequences) {
    return CannotMap("is " + std::to_string(run.global_batch) +
                         ": expected at most " + std::to_string(kMostSequences),
                     "global_batch");
  }
  ImportOptions options;
  options.global_batch = run.global_batch;
  options.seq_len = run.seq;
  const auto precision = ReadPrecision(Lower(run.precision));
  if (!precision && !run.precision.empty()) {
    return CannotMap("no figures of '" + run.precision + "'", "precision");
  }
  if (precision && precision->values) {
    options.dtype = precision->tf32 ? DType::kBFloat16 : *precision->values;
  } else if (run.precision.empty() && StackNameOf(run) == "megatron-2021") {
    options.dtype = DType::kFloat16;
    assumptions.push_back("fp16");
  } else {
    // A GPU before Ampere has no bf16.
    TESSERA_TRY(const std::string_view device, DeviceNameOf(run));
    const bool has_bf16 = DeviceTypeNamed(device).peak_bf16.value > 0;
    options.dtype = has_bf16 ? DType::kBFloat16 : DType::kFloat16;
    assumptions.push_back(has_bf16 ? "bf16" : "fp16");
  }

  if (run.kv_heads == "MLA" && run.experts > 0) {
    return LatentGraphOf(run, options, assumptions);
  }
  const auto kv_heads = run.kv_heads.empty()
                            ? std::optional(run.heads)
                            : ParseWhole<int64_t>(run.kv_heads);
  if (!kv_heads) return CannotMap("'" + run.kv_heads + "'", "kv_heads");
  if (run.hidden % run.heads != 0 || run.hidden / run.heads < kLeastWidth) {
    return CannotMap(
        "is " + std::to_string(run.heads) + ": expected a divisor of hidden, " +
            std::to_string(run.hidden) + ", that leaves each head at least " +
            std::to_string(kLeastWidth),
        "heads");
  }
  const std::string kind = Lower(run.ffn_kind);
  bool gated = kind.starts_with("swiglu") || kind.starts_with("geglu");
  // "2880(expert)" is a number, too.
  std::optional<int64_t> ffn = ParseWhole<int64_t>(
      std::string_view(run.ffn).substr(0, run.ffn.find('(')));
  if (ffn) TESSERA_RETURN_IF_ERROR(CheckWidth("", *ffn));
  if (!gated && run.experts == 0 && ffn && *kv_heads != run.heads) {
    // GPT-2's architecture has no grouped heads.
    gated = true;
    ffn = *ffn * 2 / 3;
    assumptions.push_back("gated layers of two thirds the width");
  }
  if (run.ffn.empty()) {
    ffn = 4 * run.hidden;
    assumptions.push_back("ffn of 4 hidden");
  }
  if (!ffn) return CannotMap("'" + run.ffn + "'", "ffn");
  int64_t vocab = run.vocab;
  if (vocab == 0) {
    const auto* const row = std::ranges::find_if(
        kVocabularies,
        [&](const Vocabulary& r) { return Has(Lower(run.source), r.word); });
    // GPT-2's, padded to a multiple of 128 as Megatron does.
    vocab = row == std::end(kVocabularies) ? 50304 : row->size;
    assumptions.push_back("vocabulary of " + std::to_string(vocab));
  }

  JsonValue json;
  json.kind = JsonValue::Kind::kObject;
  if (gated || run.experts > 0) {
    Set(json, "hidden_size", static_cast<double>(run.hidden));
    Set(json, "num_hidden_layers", static_cast<double>(run.layers));
    Set(json, "num_attention_heads", static_cast<double>(run.heads));
    Set(json, "num_key_value_heads", static_cast<double>(*kv_heads));
    Set(json, "intermediate_size", static_cast<double>(*ffn));
    Set(json, "vocab_size", static_cast<double>(vocab));
    if (run.hidden / run.heads % 2 != 0) {
      Set(json, "head_dim", 64);
      assumptions.push_back("heads of 64");
    }
    Set(json, "max_position_embeddings", static_cast<double>(run.seq));
    if (run.experts > 0) {
      Set(json, "num_local_experts", static_cast<double>(run.experts));
      // Tokens are spread evenly over the experts.
      Set(json, "expert_capacity_factor", 1);
      Set(json, "num_experts_per_tok",
          static_cast<double>(std::max<int64_t>(1, run.topk)));
    }
  } else {
    Set(json, "n_embd", static_cast<double>(run.hidden));
    Set(json, "n_layer", static_cast<double>(run.layers));
    Set(json, "n_head", static_cast<double>(run.heads));
    Set(json, "n_inner", static_cast<double>(*ffn));
    Set(json, "vocab_size", static_cast<double>(vocab));
    Set(json, "n_positions", static_cast<double>(run.seq));
    for (const char* key : {"embd_pdrop", "resid_pdrop", "attn_pdrop"}) {
      Set(json, key, 0);
    }
  }
  ModelConfig config("line " + std::to_string(run.line), std::move(json));
  TESSERA_TRY(Graph graph, run.experts > 0 ? BuildMixtral(config, options)
                           : gated         ? BuildLlama(config, options)
                                           : BuildGpt2(config, options));
  graph.name = run.model;
  return Differentiate(std::move(graph));
}

Result<void> CheckPrecision(const PublishedRun& run, const Cluster& cluster,
                            const Graph& graph) {
  for (const DeviceType& type : cluster.device_types) {
    const bool values = type.Peak(graph.dtype).value > 0;
    const ProductType products = cluster.stack.products;
    const bool narrow =
        (products == ProductType::kFp8 && !(type.peak_fp8.value > 0)) ||
        (products == ProductType::kFp4 && !(type.peak_fp4.value > 0));
    if (values && !narrow) continue;
    return CannotMap(type.name + " does not compute in " +
                         (narrow ? "'" + run.precision + "'"
                                 : std::string(NameOf(graph.dtype))),
                     "precision");
  }
  return {};
}

}  // namespace tessera
