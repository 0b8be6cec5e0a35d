// Llama and its relatives: pre-norm blocks with RMS norm, rotary positions,
// grouped-query heads and a gated MLP, or experts of this kind. A family is
// what it does differently; names and defaults are those of transformers'
// configs and models.

#include <algorithm>
#include <cmath>
#include <sstream>

#include "planner/base/indexed.h"
#include "planner/io/huggingface.h"
#include "planner/io/transformer.h"

namespace tessera {
namespace {

// What tells the relatives apart.
struct Relative {
  std::vector<HeadClass> classes;
  bool qkv_bias = false;
  bool out_bias = false;
  bool mlp_bias = false;
  bool head_norm = false;  // RMS norms of queries and keys
  bool tied = false;       // where the config does not say
  // Where the config does not say, as its class in transformers 5.24 has it; 0:
  // hidden / heads.
  int64_t head_size = 0;
  int64_t window = 0;               // 0: none
  std::vector<bool> windowed = {};  // by layer; empty: all have the window
  bool reads_layer_types = false;   // which say it where there are some
  bool turns_part = false;          // partial_rotary_factor is one of its keys
  double embedding_scale = 1;
  double embedding_dropout = 0;
  double residual_dropout = 0;
  std::string_view activation = "silu";  // where the config does not say
  std::string_view activation_key = "hidden_act";
  AttentionNames attention = {"q_proj", "k_proj", "v_proj", "o_proj"};
  GatedNames mlp = {};
  // Experts, in the layers that have some; none: an MLP everywhere.
  ExpertOptions experts = {};
  std::string_view expert_module = ".mlp";
  int64_t expert_inner = 0;
  int64_t shared_inner = 0;  // of an MLP beside them, weighed; 0: none
  int64_t expert_step = 1;   // every so many layers
  std::vector<int64_t> dense_layers = {};
};

bool HasExperts(const Relative& relative, int64_t layer) {
  return relative.experts.experts > 0 &&
         (layer + 1) % relative.expert_step == 0 &&
         std::ranges::find(relative.dense_layers, layer) ==
             relative.dense_layers.end();
}

// Which layers have the window. transformers writes it down in "layer_types"
// since 4.53; families that do not read it have to agree with it.
std::vector<bool> WindowedLayers(ModelConfig& config, const Relative& relative,
                                 int64_t layers) {
  constexpr std::string_view kTypes = "layer_types";
  constexpr std::string_view kSliding = "sliding_attention";
  constexpr std::string_view kFull = "full_attention";
  std::vector<bool> windowed = relative.windowed;
  if (windowed.empty()) {
    windowed.assign(static_cast<size_t>(layers), relative.window > 0);
  }
  if (!config.Has(kTypes)) return windowed;
  std::vector<std::string> types = config.Strings(kTypes);
  // One type for all says it of any number of layers (--set model.layers=N).
  const bool one = !types.empty() &&
                   std::ranges::count(types, types[0]) == std::ssize(types);
  if (one) types.resize(windowed.size(), std::string(types[0]));
  if (types.size() != windowed.size()) {
    config.Wrong(kTypes, "has " + std::to_string(types.size()) +
                             " items: expected one for each of " +
                             std::to_string(layers) +
                             " layers, or null for what the family has");
    return windowed;
  }
  for (size_t i = 0; i < types.size(); ++i) {
    const bool sliding = types[i] == kSliding;
    std::string expected;
    if (!sliding && types[i] != kFull) {
      expected = std::string(kFull) + " or " + std::string(kSliding);
    } else if (sliding && relative.window == 0) {
      expected = std::string(kFull) + ", as the model has no window";
    } else if (!relative.reads_layer_types && sliding != windowed[i]) {
      expected = std::string(windowed[i] ? kSliding : kFull) +
                 ", as the family has in all such layers";
    }
    if (!expected.empty()) {
      config.Wrong(Indexed(kTypes, static_cast<int>(i)),
                   "is '" + types[i] + "': expected " + expected);
      break;
    }
    windowed[i] = sliding;
  }
  return windowed;
}

Result<Graph> Build(ModelConfig& config, const ImportOptions& options,
                    int64_t key_value_heads, const Relative& relative) {
  const int64_t hidden = config.Size("hidden_size");
  const int64_t layers = config.Layers("num_hidden_layers");
  const Vocabulary vocabulary = ReadVocabulary(config);
  const int64_t inner = config.Size("intermediate_size");
  const int64_t head_size = config.Size("head_dim", relative.head_size);
  const std::vector<bool> windowed = WindowedLayers(config, relative, layers);
  const Heads heads =
      ReadHeads(config, "hidden_size", "num_attention_heads", key_value_heads,
                "num_key_value_heads", head_size);
  const std::string activation =
      ReadActivation(config, relative.activation_key, relative.activation);
  const double epsilon = config.Number("rms_norm_eps", 1e-6, 0, 1);
  const double stddev = config.Number("initializer_range", 0.02, 0, 10);
  const bool tied = config.Bool("tie_word_embeddings", relative.tied);
  const Head head = ReadHead(config, relative.classes, options);
  CheckSeqLen(config, "max_position_embeddings", options);
  TESSERA_RETURN_IF_ERROR(config.Check());
  const Rotary rotary =
      ReadRotary(config, "rope_theta", "partial_rotary_factor", 1, heads.size,
                 options.seq_len);
  TESSERA_RETURN_IF_ERROR(config.Check());
  WarnAttentionDropout(config, "attention_dropout", 0, options);
  TESSERA_RETURN_IF_ERROR(config.Check());
  if (rotary.fraction != 1 && rotary.op == "rotary" && !relative.turns_part &&
      options.warnings != nullptr) {
    std::ostringstream message;
    message << config.path() << ": partial_rotary_factor=" << rotary.fraction
            << ": is applied; transformers' model of this family turns all "
               "features";
    options.warnings->push_back(message.str());
  }

  ExpertOptions experts = relative.experts;
  experts.stddev = stddev;
  const LinearOptions mlp = {.stddev = stddev, .bias = relative.mlp_bias};
  AttentionOptions attention = {
      .heads = heads,
      .scale = 1 / std::sqrt(static_cast<double>(heads.size)),
      .rotary = &rotary,
      .head_norm = relative.head_norm ? epsilon : 0,
      .qkv = {.stddev = stddev, .bias = relative.qkv_bias},
      .out = {.stddev = stddev, .bias = relative.out_bias}};

  Transformer model(config, options, hidden, head);
  const TensorId embedding = model.Matrix("model.embed_tokens.weight",
                                          {vocabulary.rows, hidden}, stddev);
  TensorId x =
      model.Lookup("model.embed_tokens", model.tokens(), embedding, vocabulary);
  if (relative.embedding_scale != 1) {
    x = model.Scale("model.embed_scale", x, relative.embedding_scale);
  }
  x = model.Dropout("model.embed_dropout", x, relative.embedding_dropout);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = "model.layers." + std::to_string(layer);
    model.BeginBlock(name);
    attention.window =
        windowed[static_cast<size_t>(layer)] ? relative.window : 0;
    TensorId y = model.RmsNorm(name + ".input_layernorm", x, epsilon);
    y = model.Attention(name + ".self_attn", relative.attention, y, attention);
    y = model.Dropout(name + ".resid_attn_dropout", y,
                      relative.residual_dropout);
    x = model.Add(name + ".self_attn.add", x, y);
    y = model.RmsNorm(name + ".post_attention_layernorm", x, epsilon);
    std::string module = name + ".mlp";
    if (!HasExperts(relative, layer)) {
      y = model.GatedMlp(module, activation, y, inner, mlp, relative.mlp);
    } else {
      module = name + std::string(relative.expert_module);
      TensorId routed =
          model.Experts(module, activation, y, relative.expert_inner, experts);
      if (relative.shared_inner > 0) {
        const TensorId shared = model.WeighedMlp(
            module + ".shared_expert", module + ".shared_expert_gate",
            activation, y, relative.shared_inner, mlp);
        routed = model.Add(module + ".shared_add", routed, shared);
      }
      y = routed;
    }
    y = model.Dropout(name + ".resid_mlp_dropout", y,
                      relative.residual_dropout);
    x = model.Add(module + ".add", x, y);
  }
  model.BeginBlock("head");
  x = model.RmsNorm("model.norm", x, epsilon);
  return model.FinishDecoder(head, x,
                             {.tied_to = tied ? embedding : TensorId(),
                              .vocabulary = vocabulary,
                              .width = hidden,
                              .stddev = stddev});
}

// The default of sliding_window in transformers 5.24: MistralConfig,
// Qwen2Config and their relatives.
constexpr int64_t kDefaultWindow = 4096;

// The window; 0 where it is null. `fallback`: where the config does not say.
int64_t ReadWindow(ModelConfig& config, int64_t fallback) {
  if (!config.values().fields.contains("sliding_window")) return fallback;
  return config.Size("sliding_window", 0);
}

// Qwen's, which is used only where the config tells to.
void ReadQwenWindow(ModelConfig& config, Relative& relative) {
  relative.reads_layer_types = true;
  if (!config.Bool("use_sliding_window", false)) return;
  relative.window = ReadWindow(config, kDefaultWindow);
}

bool IsAbove(int64_t layer, int64_t bound) {
  return layer >= bound;
}

// Which layers have it, by their numbers and "max_window_layers".
void SetWindowed(ModelConfig& config, Relative& relative,
                 bool (*has)(int64_t layer, int64_t bound)) {
  const auto bound =
      static_cast<int64_t>(config.Number("max_window_layers", 28, 0, 1e6));
  const int64_t layers = config.Layers("num_hidden_layers");
  for (int64_t layer = 0; layer < layers; ++layer) {
    relative.windowed.push_back(relative.window > 0 && has(layer, bound));
  }
}

// `expert_capacity_factor` is Tessera's own key; transformers drops no tokens.
// The auxiliary loss is part of the loss, as in published training, but where
// the config says that it is none; its unit is the sample (transformers': the
// batch, all layers).
ExpertOptions ReadExperts(ModelConfig& config, std::string_view experts_key,
                          int64_t experts, int64_t top_k, bool renormalise) {
  const double balance = config.Number("router_aux_loss_coef", 0.001, 0, 1e6);
  const ExpertOptions options = {
      .experts = config.Size(experts_key, experts),
      .top_k = config.Size("num_experts_per_tok", top_k),
      .renormalise = renormalise,
      .capacity_factor = config.Number("expert_capacity_factor",
                                       kExpertCapacityFactor, 0, 1e6),
      .balance = config.Bool("output_router_logits", true) ? balance : 0};
  if (options.top_k > options.experts) {
    config.Wrong("num_experts_per_tok", "is " + std::to_string(options.top_k) +
                                            ": expected at most " +
                                            std::string(experts_key) + " " +
                                            std::to_string(options.experts));
  }
  return options;
}

// Qwen's layers of experts: every so many, but for a list.
void ReadExpertLayers(ModelConfig& config, Relative& relative) {
  relative.expert_step = config.Size("decoder_sparse_step", 1);
  relative.dense_layers =
      config.WholeNumbers("mlp_only_layers", {.least_items = 0,
                                              .most_items = kMostModelLayers,
                                              .least = 0,
                                              .most = kMostModelLayers});
}

int64_t KeyValueHeads(ModelConfig& config) {
  return config.Size("num_key_value_heads", config.Size("num_attention_heads"));
}

// Qwen's name of the number of experts, or that which transformers writes in
// its place since 5.
std::string_view ExpertsKey(const ModelConfig& config) {
  const bool other =
      !config.Has("num_experts") && config.Has("num_local_experts");
  return other ? "num_local_experts" : "num_experts";
}

}  // namespace

Result<Graph> BuildLlama(ModelConfig& config, const ImportOptions& options) {
  const bool bias = config.Bool("attention_bias", false);
  Relative relative = {.classes = DecoderClasses("Llama"),
                       .qkv_bias = bias,
                       .out_bias = bias,
                       .mlp_bias = config.Bool("mlp_bias", false)};
  relative.classes.push_back({.name = "LLaMAForCausalLM"});  // of 2023
  // Configs from before grouped-query attention lack its key.
  return Build(config, options, KeyValueHeads(config), relative);
}

Result<Graph> BuildMistral(ModelConfig& config, const ImportOptions& options) {
  return Build(config, options, config.Size("num_key_value_heads"),
               {.classes = DecoderClasses("Mistral"),
                .window = ReadWindow(config, kDefaultWindow)});
}

Result<Graph> BuildMixtral(ModelConfig& config, const ImportOptions& options) {
  Relative relative = {
      .classes = DecoderClasses("Mixtral"),
      .window = ReadWindow(config, 0),
      .experts = ReadExperts(config, "num_local_experts", 8, 2, true),
      .expert_module = ".block_sparse_moe",
      .expert_inner = config.Size("intermediate_size")};
  relative.experts.names = {"w1", "w3", "w2"};
  config.Number("router_jitter_noise", 0, 0, 0);
  return Build(config, options, config.Size("num_key_value_heads", 8),
               relative);
}

Result<Graph> BuildQwen2(ModelConfig& config, const ImportOptions& options) {
  Relative relative = {.classes = DecoderClasses("Qwen2"), .qkv_bias = true};
  ReadQwenWindow(config, relative);
  SetWindowed(config, relative, IsAbove);
  return Build(config, options, config.Size("num_key_value_heads"), relative);
}

Result<Graph> BuildQwen2Moe(ModelConfig& config, const ImportOptions& options) {
  Relative relative = {
      .classes = DecoderClasses("Qwen2Moe"),
      .qkv_bias = config.Bool("qkv_bias", true),
      .experts = ReadExperts(config, ExpertsKey(config), 60, 4,
                             config.Bool("norm_topk_prob", false)),
      .expert_inner = config.Size("moe_intermediate_size"),
      .shared_inner = config.Size("shared_expert_intermediate_size")};
  ReadQwenWindow(config, relative);
  // Every other one of the first layers.
  SetWindowed(config, relative, [](int64_t layer, int64_t bound) {
    return layer % 2 == 0 && layer < bound;
  });
  ReadExpertLayers(config, relative);
  return Build(config, options, config.Size("num_key_value_heads"), relative);
}

Result<Graph> BuildQwen3(ModelConfig& config, const ImportOptions& options) {
  const bool bias = config.Bool("attention_bias", false);
  Relative relative = {.classes = DecoderClasses("Qwen3"),
                       .qkv_bias = bias,
                       .out_bias = bias,
                       .head_norm = true,
                       .head_size = 128};
  ReadQwenWindow(config, relative);
  SetWindowed(config, relative, IsAbove);
  return Build(config, options, KeyValueHeads(config), relative);
}

Result<Graph> BuildQwen3Moe(ModelConfig& config, const ImportOptions& options) {
  const bool bias = config.Bool("attention_bias", false);
  Relative relative = {
      .classes = DecoderClasses("Qwen3Moe"),
      .qkv_bias = bias,
      .out_bias = bias,
      .head_norm = true,
      .experts = ReadExperts(config, ExpertsKey(config), 128, 8,
                             config.Bool("norm_topk_prob", false)),
      .expert_inner = config.Size("moe_intermediate_size")};
  ReadQwenWindow(config, relative);
  relative.reads_layer_types = false;  // all layers have the window
  ReadExpertLayers(config, relative);
  return Build(config, options, config.Size("num_key_value_heads"), relative);
}

// Gemma's norms multiply by 1 + w, w from zero; here they multiply by w from
// one, which trains alike, as norms have no weight decay. What "hidden_act"
// says is ignored, as by transformers.
Result<Graph> BuildGemma(ModelConfig& config, const ImportOptions& options) {
  const bool bias = config.Bool("attention_bias", false);
  const Relative relative = {
      .classes = DecoderClasses("Gemma"),
      .qkv_bias = bias,
      .out_bias = bias,
      .tied = true,
      .head_size = 256,
      .embedding_scale =
          std::sqrt(static_cast<double>(config.Size("hidden_size"))),
      .activation = "gelu_pytorch_tanh",
      .activation_key = "hidden_activation"};
  return Build(config, options, KeyValueHeads(config), relative);
}

Result<Graph> BuildPhi3(ModelConfig& config, const ImportOptions& options) {
  const Relative relative = {
      .classes = DecoderClasses("Phi3"),
      .window = ReadWindow(config, 0),
      .turns_part = true,
      // 0.99: with nothing kept there is nothing to scale.
      .embedding_dropout = config.Number("embd_pdrop", 0, 0, 0.99),
      .residual_dropout = config.Number("resid_pdrop", 0, 0, 0.99),
      .attention = {"qkv_proj.q", "qkv_proj.k", "qkv_proj.v", "o_proj"},
      .mlp = {"gate_up_proj.gate", "gate_up_proj.up", "down_proj"}};
  return Build(config, options, KeyValueHeads(config), relative);
}

}  // namespace tessera
