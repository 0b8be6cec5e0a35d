// Llama, Mistral, Qwen and Phi-3: pre-norm blocks with RMS norm, rotary
// positions, grouped-query heads and a gated MLP, or experts of this kind.

#include "planner/io/decoder.h"
#include "planner/io/huggingface.h"

namespace tessera {
namespace {

// The default of sliding_window in transformers 5.24: MistralConfig,
// Qwen2Config and their decoders.
constexpr int64_t kDefaultWindow = 4096;

// Qwen's, which is used only where the config tells to.
void ReadQwenWindow(ModelConfig& config, Decoder& decoder) {
  decoder.reads_layer_types = true;
  if (!config.Bool("use_sliding_window", false)) return;
  decoder.window = ReadWindow(config, kDefaultWindow);
}

bool IsAbove(int64_t layer, int64_t bound) {
  return layer >= bound;
}

// Which layers have it, by their numbers and "max_window_layers".
void SetWindowed(ModelConfig& config, Decoder& decoder,
                 bool (*has)(int64_t layer, int64_t bound)) {
  const auto bound =
      static_cast<int64_t>(config.Number("max_window_layers", 28, 0, 1e6));
  const int64_t layers = config.Layers("num_hidden_layers");
  for (int64_t layer = 0; layer < layers; ++layer) {
    decoder.windowed.push_back(decoder.window > 0 && has(layer, bound));
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
void ReadExpertLayers(ModelConfig& config, Decoder& decoder) {
  decoder.expert_step = config.Size("decoder_sparse_step", 1);
  decoder.dense_layers =
      config.WholeNumbers("mlp_only_layers", {.least_items = 0,
                                              .most_items = kMostModelLayers,
                                              .least = 0,
                                              .most = kMostModelLayers});
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
  Decoder decoder = {.classes = DecoderClasses("Llama"),
                     // Configs from before grouped-query attention lack it.
                     .key_value_heads = KeyValueHeads(config),
                     .qkv_bias = bias,
                     .out_bias = bias,
                     .mlp_bias = config.Bool("mlp_bias", false)};
  decoder.classes.push_back({.name = "LLaMAForCausalLM"});  // of 2023
  return BuildDecoder(config, options, decoder);
}

Result<Graph> BuildMistral(ModelConfig& config, const ImportOptions& options) {
  return BuildDecoder(config, options,
                      {.classes = DecoderClasses("Mistral"),
                       .key_value_heads = config.Size("num_key_value_heads"),
                       .window = ReadWindow(config, kDefaultWindow)});
}

Result<Graph> BuildMixtral(ModelConfig& config, const ImportOptions& options) {
  Decoder decoder = {
      .classes = DecoderClasses("Mixtral"),
      .key_value_heads = KeyValueHeads(config, 8),
      .window = ReadWindow(config, 0),
      .theta = 1e6,
      .experts = ReadExperts(config, "num_local_experts", 8, 2, true),
      .expert_module = ".block_sparse_moe",
      .expert_inner = config.Size("intermediate_size")};
  decoder.experts.names = {"w1", "w3", "w2"};
  config.Number("router_jitter_noise", 0, 0, 0);
  return BuildDecoder(config, options, decoder);
}

Result<Graph> BuildQwen2(ModelConfig& config, const ImportOptions& options) {
  Decoder decoder = {.classes = DecoderClasses("Qwen2"),
                     .key_value_heads = config.Size("num_key_value_heads"),
                     .qkv_bias = true};
  ReadQwenWindow(config, decoder);
  SetWindowed(config, decoder, IsAbove);
  return BuildDecoder(config, options, decoder);
}

Result<Graph> BuildQwen2Moe(ModelConfig& config, const ImportOptions& options) {
  Decoder decoder = {
      .classes = DecoderClasses("Qwen2Moe"),
      .key_value_heads = config.Size("num_key_value_heads"),
      .qkv_bias = config.Bool("qkv_bias", true),
      .experts = ReadExperts(config, ExpertsKey(config), 60, 4,
                             config.Bool("norm_topk_prob", false)),
      .expert_inner = config.Size("moe_intermediate_size"),
      .shared_inner = config.Size("shared_expert_intermediate_size")};
  ReadQwenWindow(config, decoder);
  // Every other one of the first layers.
  SetWindowed(config, decoder, [](int64_t layer, int64_t bound) {
    return layer % 2 == 0 && layer < bound;
  });
  ReadExpertLayers(config, decoder);
  return BuildDecoder(config, options, decoder);
}

Result<Graph> BuildQwen3(ModelConfig& config, const ImportOptions& options) {
  const bool bias = config.Bool("attention_bias", false);
  Decoder decoder = {.classes = DecoderClasses("Qwen3"),
                     .key_value_heads = KeyValueHeads(config),
                     .qkv_bias = bias,
                     .out_bias = bias,
                     .head_norm = true,
                     .head_size = 128};
  ReadQwenWindow(config, decoder);
  SetWindowed(config, decoder, IsAbove);
  return BuildDecoder(config, options, decoder);
}

Result<Graph> BuildQwen3Moe(ModelConfig& config, const ImportOptions& options) {
  const bool bias = config.Bool("attention_bias", false);
  Decoder decoder = {
      .classes = DecoderClasses("Qwen3Moe"),
      .key_value_heads = config.Size("num_key_value_heads"),
      .qkv_bias = bias,
      .out_bias = bias,
      .head_norm = true,
      .experts = ReadExperts(config, ExpertsKey(config), 128, 8,
                             config.Bool("norm_topk_prob", false)),
      .expert_inner = config.Size("moe_intermediate_size")};
  ReadQwenWindow(config, decoder);
  decoder.reads_layer_types = false;  // all layers have the window
  ReadExpertLayers(config, decoder);
  return BuildDecoder(config, options, decoder);
}

Result<Graph> BuildPhi3(ModelConfig& config, const ImportOptions& options) {
  return BuildDecoder(
      config, options,
      {.classes = DecoderClasses("Phi3"),
       .key_value_heads = KeyValueHeads(config),
       .names = {.attention = {"qkv_proj.q", "qkv_proj.k", "qkv_proj.v",
                               "o_proj"},
                 .mlp = {"gate_up_proj.gate", "gate_up_proj.up", "down_proj"}},
       .window = ReadWindow(config, 0),
       .turns_part = true,
       // 0.99: with nothing kept there is nothing to scale.
       .embedding_dropout = config.Number("embd_pdrop", 0, 0, 0.99),
       .residual_dropout = config.Number("resid_pdrop", 0, 0, 0.99)});
}

}  // namespace tessera
