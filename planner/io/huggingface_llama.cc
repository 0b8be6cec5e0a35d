// Llama and its relatives: pre-norm blocks with RMS norm, rotary positions,
// grouped-query heads and a gated MLP, or experts of this kind. The relatives
// differ in their biases and windows. Names and defaults are those of
// transformers' LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config and
// their models.

#include <cmath>

#include "planner/io/decoder.h"
#include "planner/io/huggingface.h"

namespace tessera {
namespace {

// What tells the relatives apart.
struct Relative {
  bool qkv_bias = false;
  bool out_bias = false;
  bool mlp_bias = false;
  int64_t window = 0;  // 0: none
  int64_t first_windowed_layer = 0;
  ExpertOptions experts = {};  // none: an MLP
};

Result<Graph> Build(ModelConfig& config, const ImportOptions& options,
                    int64_t key_value_heads, const Relative& relative) {
  const int64_t hidden = config.Size("hidden_size");
  const int64_t layers = config.Layers("num_hidden_layers");
  const int64_t vocabulary = config.Size("vocab_size");
  const int64_t inner = config.Size("intermediate_size");
  const int64_t head_size =
      config.Has("head_dim") ? config.Size("head_dim") : 0;
  const Heads heads =
      ReadHeads(config, "hidden_size", "num_attention_heads", key_value_heads,
                "num_key_value_heads", head_size);
  const std::string activation = ReadActivation(config, "hidden_act", "silu");
  const double epsilon = config.Number("rms_norm_eps", 1e-6, 0, 1);
  const double stddev = config.Number("initializer_range", 0.02, 0, 10);
  const bool tied = config.Bool("tie_word_embeddings", false);
  CheckSeqLen(config, "max_position_embeddings", options);
  TESSERA_RETURN_IF_ERROR(config.Check());
  const Rotary rotary =
      ReadRotary(config, "rope_theta", "partial_rotary_factor", 1, heads.size);
  TESSERA_RETURN_IF_ERROR(config.Check());
  WarnAttentionDropout(config, "attention_dropout", 0, options);
  TESSERA_RETURN_IF_ERROR(config.Check());

  ExpertOptions experts = relative.experts;
  experts.stddev = stddev;
  const LinearOptions mlp = {.stddev = stddev, .bias = relative.mlp_bias};
  AttentionOptions attention = {
      .heads = heads,
      .scale = 1 / std::sqrt(static_cast<double>(heads.size)),
      .rotary = &rotary,
      .qkv = {.stddev = stddev, .bias = relative.qkv_bias},
      .out = {.stddev = stddev, .bias = relative.out_bias}};

  Decoder model(config, options, hidden);
  const TensorId embedding =
      model.Matrix("model.embed_tokens.weight", {vocabulary, hidden}, stddev);
  TensorId x = model.Lookup("model.embed_tokens", model.tokens(), embedding);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = "model.layers." + std::to_string(layer);
    model.BeginBlock(name);
    attention.window =
        layer >= relative.first_windowed_layer ? relative.window : 0;
    TensorId y = model.RmsNorm(name + ".input_layernorm", x, epsilon);
    y = model.Attention(name + ".self_attn",
                        {"q_proj", "k_proj", "v_proj", "o_proj"}, y, attention);
    x = model.Add(name + ".self_attn.add", x, y);
    y = model.RmsNorm(name + ".post_attention_layernorm", x, epsilon);
    const bool dense = experts.experts == 0;
    const std::string mlp_name = name + (dense ? ".mlp" : ".block_sparse_moe");
    y = dense ? model.GatedMlp(mlp_name, activation, y, inner, mlp)
              : model.Experts(mlp_name, activation, y, inner, experts);
    x = model.Add(mlp_name + ".add", x, y);
  }
  model.BeginBlock("head");
  x = model.RmsNorm("model.norm", x, epsilon);
  const TensorId head =
      tied ? embedding
           : model.Matrix("lm_head.weight", {vocabulary, hidden}, stddev);
  return model.Finish("lm_head", x, head);
}

}  // namespace

Result<Graph> BuildLlama(ModelConfig& config, const ImportOptions& options) {
  const bool bias = config.Bool("attention_bias", false);
  const Relative relative = {.qkv_bias = bias,
                             .out_bias = bias,
                             .mlp_bias = config.Bool("mlp_bias", false)};
  // Configs from before grouped-query attention lack its key.
  const int64_t heads = config.Size("num_attention_heads");
  return Build(config, options, config.Size("num_key_value_heads", heads),
               relative);
}

Result<Graph> BuildMistral(ModelConfig& config, const ImportOptions& options) {
  const Relative relative = {.window = config.Has("sliding_window")
                                           ? config.Size("sliding_window")
                                           : 0};
  return Build(config, options, config.Size("num_key_value_heads"), relative);
}

// `expert_capacity_factor` is Tessera's own key: transformers drops no tokens,
// and neither does a config without it. The auxiliary loss is always part of
// the loss; its unit is the sample (transformers': the batch, all layers).
Result<Graph> BuildMixtral(ModelConfig& config, const ImportOptions& options) {
  Relative relative = {.window = config.Has("sliding_window")
                                     ? config.Size("sliding_window")
                                     : 0};
  relative.experts = {
      .experts = config.Size("num_local_experts", 8),
      .top_k = config.Size("num_experts_per_tok", 2),
      .capacity_factor = config.Number("expert_capacity_factor", 0, 0, 1e6),
      .balance = config.Number("router_aux_loss_coef", 0.001, 0, 1e6)};
  config.Number("router_jitter_noise", 0, 0, 0);
  if (relative.experts.top_k > relative.experts.experts) {
    config.Wrong("num_experts_per_tok",
                 "is " + std::to_string(relative.experts.top_k) +
                     ": expected at most num_local_experts " +
                     std::to_string(relative.experts.experts));
  }
  return Build(config, options, config.Size("num_key_value_heads", 8),
               relative);
}

Result<Graph> BuildQwen2(ModelConfig& config, const ImportOptions& options) {
  Relative relative = {.qkv_bias = true};
  if (config.Bool("use_sliding_window", false)) {
    relative.window = config.Size("sliding_window");
    // The layers below use full attention.
    relative.first_windowed_layer =
        static_cast<int64_t>(config.Number("max_window_layers", 28, 0, 1e6));
  }
  return Build(config, options, config.Size("num_key_value_heads"), relative);
}

}  // namespace tessera
