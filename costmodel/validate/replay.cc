#include "costmodel/validate/replay.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "costmodel/validate/words.h"
#include "planner/io/huggingface.h"
#include "planner/io/model_config.h"
#include "planner/topology/stacks.h"

namespace tessera {
namespace {

using Words = std::vector<std::string>;

// reduce_bucket_size and allgather_bucket_size are 5e8 values by default
// (deepspeed.ai/docs/config-json), of 16 bits.
constexpr Bytes kDeepSpeedBucket{1'000'000'000};

// The number that a text is; nothing for words.
std::optional<int64_t> NumberIn(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

// The digits of `text` that end before `word`, or begin behind it; 0 where
// there are none.
int64_t NumberBefore(std::string_view text, std::string_view word) {
  const size_t end = std::min(text.find(word), text.size());
  size_t begin = end;
  while (begin > 0 && text[begin - 1] >= '0' && text[begin - 1] <= '9') --begin;
  return end == text.size()
             ? 0
             : NumberIn(text.substr(begin, end - begin)).value_or(0);
}
int64_t NumberBehind(std::string_view text, std::string_view word) {
  const size_t at = text.find(word);
  if (at == std::string_view::npos) return 0;
  text.remove_prefix(at + word.size());
  return NumberIn(text.substr(0, text.find_first_not_of("0123456789")))
      .value_or(0);
}

void Set(JsonValue& config, std::string_view key, double number) {
  JsonValue value;
  value.kind = JsonValue::Kind::kNumber;
  value.number = number;
  config.fields[std::string(key)] = value;
}

// The stack by the words of the row: a name of a framework in the source; who
// trains by fully sharded data parallelism does it in PyTorch; else attention
// decides: on Hopper and later, or where the row has flash attention, it is
// Megatron-Core's time.
struct StackName {
  std::string_view word;  // of the source
  std::string_view stack;
};
constexpr StackName kStackNames[] = {
    {"alpa docs", "xla-2022"},
    {"intra_ablation", "xla-2022"},
    {"benchmark/alpa", "xla-2022"},
    {"transformers", "pytorch-eager-2022"},
    {"neusight", "pytorch-eager-2022"},
    {"llm-foundry", "pytorch-fsdp-2023"},
    {"fsdp", "torchtitan-2024"},
    {"torchtitan", "torchtitan-2024"},
    {"ml-engineering", "torchtitan-2024"},
    {"vtrain", "megatron-2021"},
    {"megatron-deepspeed", "megatron-2021"},
    {"bigscience", "megatron-2021"},
    {"sc21", "megatron-2021"},
    {"2205.05198", "megatron-2021"},
    {"zero bubble", "megatron-2021"},
    {"pythia", "megatron-2021"},
    {"superscaler", "megatron-2021"},
    {"nemo", "megatron-core-2024"},
    {"megatron-bridge", "megatron-core-2024"},
    {"megatron-lm", "megatron-core-2024"},
    {"internevo", "megatron-core-2024"},
};

std::string_view StackNameOf(const PublishedRun& run) {
  const std::string source = Lower(run.source);
  for (const StackName& row : kStackNames) {
    if (Has(source, row.word)) return row.stack;
  }
  if (Has(Lower(run.zero_stage), "fsdp")) return "torchtitan-2024";
  const std::string flash = Lower(run.flash_attn);
  const std::string gpu = Lower(run.gpu);
  bool recent = !flash.empty() && flash != "no";
  for (const std::string_view name : {"h100", "h200", "h800", "b200", "b300"}) {
    recent |= Has(gpu, name);
  }
  return recent ? "megatron-core-2024" : "megatron-2021";
}

}  // namespace

Stack StackOf(const PublishedRun& run, std::span<const Stack> stacks,
              Words& assumptions) {
  const auto row = std::ranges::find(stacks, StackNameOf(run), &Stack::name);
  TESSERA_CHECK(row != stacks.end()) << StackNameOf(run);
  Stack stack = *row;
  assumptions.push_back("stack " + stack.name);
  const std::string flash = Lower(run.flash_attn);
  if (flash == "no") {
    stack.attention = StackAttention::kUnfused;
  } else if (!flash.empty() && stack.attention == StackAttention::kUnfused) {
    // Before FlashAttention-2 (July 2023).
    stack.attention = StackAttention::kFlash1;
  }
  const std::string notes = Lower(run.overlap_notes);
  if (Has(notes, "no tp overlap")) stack.tensor_exposed = 1;
  if (Has(notes, "cuda graph") && Has(notes, "full_iteration")) {
    stack.host_per_operator = Duration{};
  }
  // Models with gates, and their norms, came without dropout.
  const std::string kind = Lower(run.ffn_kind);
  if (kind.starts_with("swiglu") || kind.starts_with("geglu")) {
    stack.memory.dropout_masks = false;
  }
  if (Has(Lower(run.source), "bigscience") ||
      Has(Lower(run.zero_stage), "deepspeed")) {
    stack.memory.zero_bucket = kDeepSpeedBucket;
  }
  if (Has(Lower(run.notes), "liger kernel")) {
    stack.memory.logits = StackLogits::kNever;
  }
  const std::string precision = Lower(run.precision);
  if (Has(precision, "fp4")) {
    stack.products = ProductType::kFp4;
  } else if (Has(precision, "fp8")) {
    stack.products = ProductType::kFp8;
  }
  return stack;
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

Result<Strategy> StrategyOf(const PublishedRun& run, Words& assumptions) {
  Strategy strategy;
  const auto degree = [&](int64_t value) {
    return static_cast<int>(std::max<int64_t>(1, value));
  };
  strategy.tp = degree(run.tp);
  strategy.pp = degree(run.pp);
  strategy.vp = degree(run.vp);
  strategy.cp = degree(run.cp);
  strategy.ep = degree(run.ep);
  strategy.mbs = degree(run.micro_batch);
  const int model = strategy.tp * strategy.pp * strategy.cp * strategy.ep;
  if (run.gpus % model != 0) {
    return CannotMap(std::to_string(run.gpus) + " GPUs are not a multiple of " +
                         std::to_string(model) + " = tp pp cp ep",
                     "gpus");
  }
  strategy.dp = static_cast<int>(run.gpus) / model;
  strategy.sp = run.seq_parallel == "yes" && strategy.tp > 1;
  const std::string notes = Lower(run.notes);
  if (run.vp == 0 && strategy.pp > 1 &&
      StackNameOf(run) == "megatron-core-2024") {
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

  const std::string zero = Lower(run.zero_stage);
  if (const auto row = std::ranges::find_if(
          kZeroDefaults,
          [&](const ZeroDefault& r) { return Has(Lower(run.source), r.word); });
      zero.empty() && row != std::end(kZeroDefaults)) {
    strategy.zero = row->stage;
    assumptions.push_back("ZeRO stage " + std::to_string(row->stage));
  } else if (zero.empty()) {
    assumptions.push_back("ZeRO stage 0");
  } else if (zero.starts_with("fsdp")) {
    strategy.zero = 3;
  } else if (zero[0] >= '0' && zero[0] <= '3') {
    strategy.zero = zero[0] - '0';
  } else if (Has(zero, "zero-2")) {
    strategy.zero = 2;
  } else {
    return CannotMap("'" + run.zero_stage + "'", "zero_stage");
  }
  if (Has(zero, "offload")) strategy.optimizer_tier = MemoryTier::kHost;
  if (Has(zero, "hsdp")) strategy.zero_group = Strategy::kWithinNode;
  // "optimizer sharded over 8 GPUs, replicated beyond"
  constexpr std::string_view kOver = "sharded over ";
  if (const size_t at = zero.find(kOver); at != std::string::npos) {
    const int ranks = std::atoi(zero.c_str() + at + kOver.size());
    const int replicas = strategy.dp * strategy.cp;
    if (ranks > 1 && ranks < replicas && replicas % ranks == 0) {
      strategy.zero_group = ranks;
    }
  }
  // What replicas there are not cannot be cut.
  if (strategy.dp * strategy.cp * strategy.ep == 1) {
    strategy.zero = 0;
    strategy.zero_group = 0;
  }

  const std::string recompute = Lower(run.recompute);
  if (recompute == "full") {
    strategy.recompute = RecomputeLevel::kFull;
  } else if (recompute.starts_with("selective")) {
    strategy.recompute = RecomputeLevel::kSelective;
  } else if (recompute.empty()) {
    assumptions.push_back("no recompute");
  } else if (recompute != "none") {
    return CannotMap("'" + run.recompute + "'", "recompute");
  }
  return strategy;
}

namespace {

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
  TESSERA_TRY(const Graph graph, BuildDeepseekV3(config, options));
  return Differentiate(graph);
}

}  // namespace

Result<Graph> GraphOf(const PublishedRun& run, Words& assumptions) {
  if (Has(Lower(run.model), "lora")) {
    return CannotMap("'" + run.model + "' trains adapters only", "model");
  }
  const std::string precision = Lower(run.precision);
  ImportOptions options;
  options.global_batch = run.global_batch;
  options.seq_len = run.seq;
  if (precision.empty() && StackNameOf(run) == "megatron-2021") {
    options.dtype = DType::kFloat16;
    assumptions.push_back("fp16");
  } else if (precision.empty()) {
    options.dtype = DType::kBFloat16;
    assumptions.push_back("bf16");
  } else if (Has(precision, "bf16") || Has(precision, "fp8") ||
             Has(precision, "fp4")) {
    options.dtype = DType::kBFloat16;
  } else if (Has(precision, "fp16")) {
    options.dtype = DType::kFloat16;
    if (precision.starts_with("fp32")) options.dtype = DType::kFloat32;
  } else {
    options.dtype = DType::kFloat32;
  }

  if (run.kv_heads == "MLA" && run.experts > 0) {
    return LatentGraphOf(run, options, assumptions);
  }
  const auto kv_heads =
      run.kv_heads.empty() ? std::optional(run.heads) : NumberIn(run.kv_heads);
  if (!kv_heads) return CannotMap("'" + run.kv_heads + "'", "kv_heads");
  const std::string kind = Lower(run.ffn_kind);
  bool gated = kind.starts_with("swiglu") || kind.starts_with("geglu");
  // "2880(expert)" is a number, too.
  std::optional<int64_t> ffn =
      NumberIn(std::string_view(run.ffn).substr(0, run.ffn.find('(')));
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
    // GPT-2's, padded to a multiple of 128 as Megatron does.
    vocab = 50304;
    assumptions.push_back("vocabulary of 50304");
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
    if (run.hidden % std::max<int64_t>(1, run.heads) != 0 ||
        run.hidden / run.heads % 2 != 0) {
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
  TESSERA_TRY(const Graph graph, run.experts > 0 ? BuildMixtral(config, options)
                                 : gated         ? BuildLlama(config, options)
                                                 : BuildGpt2(config, options));
  return Differentiate(graph);
}

}  // namespace tessera
