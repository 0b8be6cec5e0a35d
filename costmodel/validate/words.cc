#include "costmodel/validate/words.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <initializer_list>
#include <vector>

namespace tessera {
namespace {

bool IsLetter(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) != 0;
}
bool IsDigit(char c) {
  return std::isdigit(static_cast<unsigned char>(c)) != 0;
}

bool GoesOn(char a, char b) {
  return (IsLetter(a) && IsLetter(b)) || (IsDigit(a) && IsDigit(b));
}

bool IsNo(std::string_view text) {
  constexpr std::array<std::string_view, 11> kNo = {
      "no",  "none", "off", "false",    "0",       "-",
      "n/a", "na",   "x",   "disabled", "without",
  };
  return std::ranges::find(kNo, text) != kNo.end();
}

bool IsOneOf(std::string_view word,
             std::initializer_list<std::string_view> words) {
  return std::ranges::find(words, word) != words.end();
}

// The parts of `text` between any of `ends`, in order, without those.
std::vector<std::string_view> PartsBetween(std::string_view text,
                                           std::string_view ends) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find_first_of(ends), text.size());
    if (end > 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

constexpr std::string_view kClauseEnds = ",;()";

// What a clause says but for what it denies.
std::string AssertedOf(std::string_view clause) {
  const std::vector<std::string_view> words = PartsBetween(clause, " =:");
  if (words.empty()) return "";
  if (IsOneOf(words.back(),
              {"no", "off", "none", "false", "disabled", "unused"})) {
    return "";
  }
  for (size_t w = 0; w < words.size(); ++w) {
    if (!IsOneOf(words[w], {"no", "not", "without", "w/o", "never"})) continue;
    const bool denies_before =
        words[w] == "not" && w + 1 < words.size() &&
        IsOneOf(words[w + 1], {"used", "enabled", "active", "applied"});
    if (denies_before) return "";
    clause =
        clause.substr(0, static_cast<size_t>(words[w].data() - clause.data()));
    while (clause.ends_with(' ')) clause.remove_suffix(1);
    break;
  }
  return std::string(clause);
}

// The number behind `word` and what joins it: "group=64", "group of 64",
// "fsdp 32", "sharded over 8"; 0 where there is none.
int NumberBehind(std::string_view text, std::string_view word) {
  size_t at = text.find(word);
  if (at == std::string_view::npos) return 0;
  at += word.size();
  for (const std::string_view joint : {" of", " size"}) {
    if (text.substr(at).starts_with(joint)) at += joint.size();
  }
  const size_t joined = at;
  while (at < text.size() && (text[at] == ' ' || text[at] == '=' ||
                              text[at] == ':' || text[at] == '-')) {
    ++at;
  }
  if (at == joined) return 0;  // "fsdp2" is a name
  int value = 0;
  for (; at < text.size() && IsDigit(text[at]) && value < 1'000'000; ++at) {
    value = 10 * value + (text[at] - '0');
  }
  return value;
}

struct ZeroName {
  std::string_view word;
  int stage;
};

// The first row whose word is there.
constexpr ZeroName kZeroNames[] = {
    // PyTorch's names of its sharding strategies.
    {"shard_grad_op", 2},
    {"shard grad op", 2},
    {"zero2", 2},
    {"no_shard", 0},
    {"full_shard", 3},
    {"hybrid_shard", 3},
    {"hsdp", 3},
    {"zero-3", 3},
    {"zero3", 3},
    {"zero 3", 3},
    {"stage3", 3},
    {"stage 3", 3},
    {"stage-3", 3},
    {"zero-2", 2},
    {"zero 2", 2},
    {"stage2", 2},
    {"stage 2", 2},
    {"stage-2", 2},
    {"zero-1", 1},
    {"zero1", 1},
    {"zero 1", 1},
    {"stage1", 1},
    {"stage 1", 1},
    {"stage-1", 1},
    {"zero-0", 0},
    {"zero 0", 0},
    {"zero0", 0},
    {"stage0", 0},
    {"stage 0", 0},
    // These cut parameters.
    {"infinity", 3},
    {"zero++", 3},
    {"gemini", 3},
    {"mics", 3},
    {"fsdp", 3},
    {"fully sharded", 3},
    {"fully-sharded", 3},
    // Gradients are reduced whole, or to whom they belong.
    {"zero-offload", 2},
    {"distributed optimizer", 1},
    {"distributed_optimizer", 1},
    {"distributed_fused_adam", 1},
    {"sharded optimizer", 1},
    {"optimizer state", 1},
    {"zero", 1},
    {"ddp", 0},
    {"data parallel", 0},
};

// Of the names of nodes in a layer, of Llama's and of GPT-2's kind.
constexpr std::array<std::string_view, 6> kQkv = {
    "q_proj", "k_proj", "v_proj", "c_attn.q", "c_attn.k", "c_attn.v"};
constexpr std::array<std::string_view, 8> kQkvOut = {
    "q_proj",   "k_proj",   "v_proj", "c_attn.q",
    "c_attn.k", "c_attn.v", "o_proj", "attn.c_proj"};
constexpr std::array<std::string_view, 17> kDotsAndAttention = {
    "q_proj",     "k_proj",   "v_proj",      "c_attn.q",   "c_attn.k",
    "c_attn.v",   "o_proj",   "attn.c_proj", "gate_proj",  "up_proj",
    "down_proj",  "c_fc",     "mlp.c_proj",  "experts.w1", "experts.w2",
    "experts.w3", "attention"};
constexpr auto kDots = std::span(kDotsAndAttention).first<16>();
// torchtitan keeps every second product of a layer, counting from the first,
// and attention (parallelize_llama.py, December 2024). Seven products: queries,
// keys, values, output, gate, up, down.
constexpr std::array<std::string_view, 7> kEverySecond = {
    "q_proj",     "v_proj",     "gate_proj", "down_proj",
    "experts.w1", "experts.w2", "attention"};
constexpr std::array<std::string_view, 2> kAttention = {"attn.", "attention"};
constexpr std::array<std::string_view, 7> kMlp = {
    ".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj", ".mlp.act",
    ".mlp.product",   ".mlp.c_fc",    ".mlp.c_proj"};
constexpr std::array<std::string_view, 2> kMlaUp = {"q_b_proj", "kv_b_proj"};
constexpr std::array<std::string_view, 9> kMlaUpAndMlp = {
    "q_b_proj",     "kv_b_proj",      ".mlp.gate_proj",
    ".mlp.up_proj", ".mlp.down_proj", ".mlp.act",
    ".mlp.product", ".mlp.c_fc",      ".mlp.c_proj"};
constexpr std::array<std::string_view, 2> kMoe = {".block_sparse_moe.",
                                                  ".mlp.experts"};
constexpr std::array<std::string_view, 2> kMoeAct = {"experts.act_fn",
                                                     "experts.product"};
constexpr std::array<std::string_view, 3> kNorms = {"norm", "ln_1", "ln_2"};

struct RecomputeName {
  std::string_view word;
  RecomputeLevel level;
  std::span<const std::string_view> kept = {};
  std::span<const std::string_view> again = {};
};

// The first row whose word is there.
constexpr RecomputeLevel kAll = RecomputeLevel::kFull;
constexpr RecomputeLevel kCore = RecomputeLevel::kSelective;
constexpr RecomputeName kRecomputeNames[] = {
    // Policies of JAX: Pax's AutodiffCheckpointType, MaxText's remat_policy,
    // jax.checkpoint_policies.
    {"save_qkv_out_proj", kAll, kQkvOut},
    {"save_out_proj", kAll, kQkvOut},
    {"save_qkv_proj", kAll, kQkv},
    {"save_dot_except_mlp", kAll, kQkvOut},
    {"save_dot_with_no_batch", kAll, kDots},
    {"dots_with_no_batch", kAll, kDots},
    {"save_dot_only", kAll, kDots},
    {"minimal_flash", kAll, kDotsAndAttention},
    {"minimal_with_context", kAll, kDotsAndAttention},
    {"minimal", kAll, kDotsAndAttention},
    {"save_dot", kAll, kDots},
    {"checkpoint_dots", kAll, kDots},
    {"dots_saveable", kAll, kDots},
    {"save_nothing", kAll},
    {"nothing_saveable", kAll},
    {"save_everything", RecomputeLevel::kNone},
    {"everything_saveable", RecomputeLevel::kNone},
    // Megatron-Core's --recompute-modules.
    {"mla_up_proj+mlp", RecomputeLevel::kNone, {}, kMlaUpAndMlp},
    {"mla_up_proj", RecomputeLevel::kNone, {}, kMlaUp},
    {"modules: mlp", RecomputeLevel::kNone, {}, kMlp},
    {"modules: moe+", RecomputeLevel::kNone, {}, kMoe},
    {"layernorm+moe_act", RecomputeLevel::kNone, {}, kMoeAct},
    {"moe_act", RecomputeLevel::kNone, {}, kMoeAct},
    {"modules: layernorm", RecomputeLevel::kNone, {}, kNorms},
    // PaddlePaddle's recompute_granularity.
    {"full_attn", RecomputeLevel::kNone, {}, kAttention},
    // torchtitan's selective_ac_option.
    {"selective (op)", kAll, kEverySecond},
    {"selective op", kAll, kEverySecond},
    {"per op", kAll, kEverySecond},
    {"per-op", kAll, kEverySecond},
    // Megatron-LM: --recompute-activations.
    {"selective", kCore},
    {"core_attn", kCore},
    {"core attention", kCore},
    {"recompute-activations", kCore},
    {"recompute_activations", kCore},
    {"attention only", kCore},
    {"full", kAll},
    {"uniform", kAll},
    {"block", kAll},
    {"checkpoint", kAll},
    {"remat", kAll},
    {"recompute", kAll},
    {"all layers", kAll},
    {"every layer", kAll},
    {"per layer", kAll},
    {"yes", kAll},
    {"true", kAll},
    {"enabled", kAll},
};

struct ValueName {
  std::string_view word;
  std::optional<DType> values;
};

constexpr ValueName kValueNames[] = {
    {"bf16", DType::kBFloat16},
    {"bfloat16", DType::kBFloat16},
    {"fp16", DType::kFloat16},
    {"float16", DType::kFloat16},
    {"half", DType::kFloat16},
    {"16-mixed", DType::kFloat16},
    // Apex's levels.
    {"o1", DType::kFloat16},
    {"o2", DType::kFloat16},
    {"fp64", DType::kFloat64},
    {"float64", DType::kFloat64},
    {"fp32", DType::kFloat32},
    {"float32", DType::kFloat32},
    {"single", DType::kFloat32},
    {"32", DType::kFloat32},
    {"mixed", {}},
    {"amp", {}},
    {"autocast", {}},
    {"16", {}},
};

struct AttentionName {
  std::string_view word;
  StackAttention attention;
};

constexpr AttentionName kAttentionNames[] = {
    {"unfused", StackAttention::kUnfused},
    {"eager", StackAttention::kUnfused},
    {"math", StackAttention::kUnfused},
    {"standard", StackAttention::kUnfused},
    {"flash1", StackAttention::kFlash1},
    {"fa1", StackAttention::kFlash1},
    {"v1", StackAttention::kFlash1},
    {"attention 1", StackAttention::kFlash1},
    {"attn 1", StackAttention::kFlash1},
    {"xformers", StackAttention::kFlash1},
    {"triton", StackAttention::kFlash1},
    {"sdpa", StackAttention::kFused},
    {"cudnn", StackAttention::kFused},
    {"transformer engine", StackAttention::kFused},
    {"te", StackAttention::kFused},
    {"fused", StackAttention::kFused},
    {"fa2", StackAttention::kFused},
    {"fa3", StackAttention::kFused},
    {"fa4", StackAttention::kFused},
    {"v2", StackAttention::kFused},
    {"v3", StackAttention::kFused},
    {"2", StackAttention::kFused},
    {"3", StackAttention::kFused},
};

// Where a word begins in a text; beyond its end where it does not. Of a stem
// more letters may follow.
size_t PositionOf(std::string_view text, std::string_view word,
                  bool is_stem = false) {
  for (size_t at = text.find(word); at != std::string_view::npos;
       at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    const bool begins = at == 0 || !GoesOn(text[at - 1], text[at]);
    const bool ends = end == text.size() || !GoesOn(text[end - 1], text[end]) ||
                      (is_stem && IsLetter(text[end]));
    if (begins && ends) return at;
  }
  return std::string_view::npos;
}

}  // namespace

bool Has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

bool HasWord(std::string_view text, std::string_view part) {
  return PositionOf(text, part) != std::string_view::npos;
}

bool HasStem(std::string_view text, std::string_view part) {
  return PositionOf(text, part, /*is_stem=*/true) != std::string_view::npos;
}

std::string Lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  return text;
}

std::string Asserted(std::string_view text) {
  std::string asserted;
  while (!text.empty()) {
    const size_t end = std::min(text.find_first_of(kClauseEnds), text.size());
    const std::string_view clause = text.substr(0, end);
    const std::vector<std::string_view> words = PartsBetween(clause, " ");
    text.remove_prefix(end);
    const bool only_no = words.size() == 1 && IsNo(words[0]);
    const std::string said = only_no ? "" : AssertedOf(clause);
    // What stands in parentheses behind it says why, or of what.
    if (said.empty() && !words.empty() && text.starts_with('(')) {
      text.remove_prefix(std::min(text.find(')'), text.size()));
    }
    asserted += said;
    if (text.empty()) break;
    asserted += text[0];
    text.remove_prefix(1);
  }
  return asserted;
}

bool DeniesAll(std::string_view text) {
  const std::string ends = " " + std::string(kClauseEnds);
  return text.find_first_not_of(' ') != text.npos &&
         Asserted(text).find_first_not_of(ends) == text.npos;
}

Error CannotMap(std::string what, std::string_view column) {
  return {ErrorCode::kInfeasible, std::move(what), std::string(column)};
}

std::optional<bool> ReadYes(std::string_view text) {
  if (DeniesAll(text)) return false;
  const std::string asserted = Asserted(text);
  for (const std::string_view word :
       {"yes", "true", "on", "1", "y", "enabled", "sp", "sequence parallel"}) {
    if (HasWord(asserted, word)) return true;
  }
  return {};
}

std::optional<ZeroWords> ReadZero(std::string_view words) {
  ZeroWords zero;
  if (DeniesAll(words)) return zero;
  const std::string text = Asserted(words);
  zero.offloads_optimizer = Has(text, "offload");
  zero.within_node = Has(text, "hsdp") || Has(text, "hybrid") ||
                     Has(text, "within node") || Has(text, "within a node");
  for (const std::string_view word :
       {"group", "sharded over", "over", "fsdp", "shard size", "degree"}) {
    // "FSDP=1" says that it is on.
    zero.group = std::max(NumberBehind(text, word), 1);
    if (zero.group > 1) break;
  }
  if (zero.group == 1) zero.group = 0;
  if (text == "fsdp=0" || text == "fsdp 0") return zero;
  if (!text.empty() && text[0] >= '0' && text[0] <= '3' &&
      (text.size() == 1 ||
       (!IsLetter(text[1]) && !IsDigit(text[1]) && text[1] != '.'))) {
    zero.stage = text[0] - '0';
    return zero;
  }
  for (const ZeroName& row : kZeroNames) {
    if (!HasStem(text, row.word)) continue;
    zero.stage = row.stage;
    return zero;
  }
  return {};
}

std::optional<RecomputeWords> ReadRecompute(std::string_view said) {
  if (DeniesAll(said) || said.starts_with("none") || said.starts_with("no ")) {
    return RecomputeWords();
  }
  const std::string text = Asserted(said);
  if (Has(text, "every other layer") || Has(text, "every second layer") ||
      Has(text, "selective layer")) {
    return RecomputeWords{kAll, {}, {}, 2};
  }
  for (const RecomputeName& row : kRecomputeNames) {
    if (!HasStem(text, row.word)) continue;
    RecomputeWords words{row.level, row.kept, row.again};
    // "block 1", "full (block, 4 layers)".
    const size_t digit = text.find_first_of("0123456789");
    if (row.level == kAll && Has(text, "block") && digit != text.npos) {
      (void)std::from_chars(text.data() + digit, text.data() + text.size(),
                            words.of_chunk);
    }
    return words;
  }
  return {};
}

namespace {

// Clauses of what is kept, not computed in: "fp32 master", "8-bit optimizer".
bool IsOfStorage(std::string_view clause) {
  for (const std::string_view word :
       {"master", "accumul", "optimizer", "param"}) {
    if (Has(clause, word)) return true;
  }
  return false;
}

std::optional<PrecisionWords> PrecisionOf(std::string_view text) {
  PrecisionWords words;
  if (Has(text, "fp4") || Has(text, "float4") || Has(text, "e2m1")) {
    words.values = DType::kBFloat16;
    words.products = ProductType::kFp4;
    return words;
  }
  if (Has(text, "fp8") || Has(text, "float8") || Has(text, "e4m3") ||
      Has(text, "e5m2") || HasWord(text, "8bit") || HasWord(text, "8-bit")) {
    words.values = DType::kBFloat16;
    words.products = ProductType::kFp8;
    return words;
  }
  if (Has(text, "tf32")) {
    words.values = DType::kFloat32;
    words.tf32 = true;
    return words;
  }
  // What comes first is what computes: "bf16, fp32 accumulation", "fp32 (no
  // --fp16 flag)".
  size_t first = std::string_view::npos;
  bool found = false;
  for (const ValueName& row : kValueNames) {
    const size_t at = PositionOf(text, row.word);
    if (at == std::string_view::npos || (found && at >= first)) continue;
    // A word for both kinds of 16 bits yields to one that names them.
    if (found && !row.values && words.values) continue;
    first = at;
    found = true;
    words.values = row.values;
  }
  if (!found) return {};
  return words;
}

}  // namespace

std::optional<PrecisionWords> ReadPrecision(std::string_view text) {
  const std::string asserted = Asserted(text);
  std::string computing;
  for (const std::string_view clause : PartsBetween(asserted, kClauseEnds)) {
    if (!IsOfStorage(clause)) computing += std::string(clause) + ",";
  }
  const auto words = PrecisionOf(computing);
  return words ? words : PrecisionOf(asserted);
}

std::optional<StackAttention> ReadAttention(std::string_view text) {
  if (DeniesAll(text)) return StackAttention::kUnfused;
  const std::string asserted = Asserted(text);
  for (const AttentionName& row : kAttentionNames) {
    if (HasWord(asserted, row.word)) return row.attention;
  }
  return {};
}

}  // namespace tessera
