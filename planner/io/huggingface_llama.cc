// Llama and its relatives: pre-norm blocks with RMS norm, rotary positions,
// grouped-query heads and a gated MLP. The relatives differ in their biases
// and windows. Names and defaults are those of transformers' LlamaConfig,
// MistralConfig, Qwen2Config and their models.

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
    y = model.GatedMlp(name + ".mlp", activation, y, inner, mlp);
    x = model.Add(name + ".mlp.add", x, y);
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
