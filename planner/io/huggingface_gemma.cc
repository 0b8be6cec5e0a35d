// Gemma 1 to 3: Llama with GELU, scaled embeddings and a tied head; from 2 on
// with norms behind attention and MLP too, and windows in some layers. Their
// norms multiply by 1 + w, w from zero; here they multiply by w from one, which
// trains alike, as norms have no weight decay.

#include <cmath>

#include "planner/io/decoder.h"
#include "planner/io/huggingface.h"

namespace tessera {
namespace {

constexpr int64_t kHeadSize = 256;

// What all of them have.
Decoder Gemma(ModelConfig& config, const std::string& name) {
  const bool bias = config.Bool("attention_bias", false);
  return {.classes = DecoderClasses(name),
          .key_value_heads = KeyValueHeads(config),
          .keys = {.activation = "hidden_activation",
                   .default_activation = "gelu_pytorch_tanh"},
          .qkv_bias = bias,
          .out_bias = bias,
          .tied = true,
          .head_size = kHeadSize,
          .embedding_scale =
              std::sqrt(static_cast<double>(config.Size("hidden_size")))};
}

// From 2 on: norms on both sides, and layers without the window every `period`.
void ReadLater(ModelConfig& config, int64_t period, Decoder& decoder) {
  decoder.key_value_heads = KeyValueHeads(config, 4);
  decoder.names.behind_attention = ".post_attention_layernorm";
  decoder.names.before_mlp = ".pre_feedforward_layernorm";
  decoder.names.behind_mlp = ".post_feedforward_layernorm";
  // As query_pre_attn_scalar is, which heads need not have as their size.
  decoder.score_scale =
      1 / std::sqrt(config.Number("query_pre_attn_scalar",
                                  static_cast<double>(kHeadSize), 1e-6, 1e6));
  decoder.window = ReadWindow(config, 4096);
  decoder.reads_layer_types = true;
  const int64_t layers = config.Layers("num_hidden_layers");
  for (int64_t layer = 0; layer < layers; ++layer) {
    decoder.windowed.push_back(decoder.window > 0 && (layer + 1) % period != 0);
  }
  config.Refuse("use_bidirectional_attention");
}

// A cap; 0 where it is null. `fallback`: where the config does not say.
double ReadCap(ModelConfig& config, std::string_view key, double fallback) {
  if (!config.values().fields.contains(key)) return fallback;
  return config.Number(key, 0, 1e-3, 1e6);
}

// The rotary embedding of the layers of a kind, which transformers 5 gathers in
// "rope_parameters".
Rotary ReadRotaryOf(ModelConfig& config, std::string_view kind,
                    std::string_view theta_key, double theta,
                    const ImportOptions& options) {
  JsonValue values = config.values();
  const JsonValue& all = config.Value("rope_parameters");
  config.Has(theta_key);
  config.Has("rope_scaling");
  if (all.kind == JsonValue::Kind::kObject) {
    values.fields["rope_parameters"] = all.Field(kind);
  }
  // Scaled are the positions of layers without a window.
  if (kind == "sliding_attention") values.fields.erase("rope_scaling");
  ModelConfig keys(config.path(), std::move(values));
  const Rotary rotary =
      ReadRotary(keys, theta_key, "partial_rotary_factor", 1,
                 config.Size("head_dim", kHeadSize), options.seq_len, theta);
  if (auto checked = keys.Check(); !checked) {
    config.Wrong(checked.error().where.substr(config.path().size() + 2),
                 checked.error().message);
  }
  return rotary;
}

}  // namespace

Result<Graph> BuildGemma(ModelConfig& config, const ImportOptions& options) {
  Decoder decoder = Gemma(config, "Gemma");
  // The first releases say "gelu" and mean its approximation by tanh, as
  // transformers takes it.
  if (config.String("hidden_act", "gelu") != "gelu") {
    decoder.keys.activation = "hidden_act";
  }
  config.Refuse("use_bidirectional_attention");
  return BuildDecoder(config, options, decoder);
}

Result<Graph> BuildGemma2(ModelConfig& config, const ImportOptions& options) {
  Decoder decoder = Gemma(config, "Gemma2");
  ReadLater(config, 2, decoder);
  decoder.score_cap = ReadCap(config, "attn_logit_softcapping", 50);
  decoder.logit_cap = ReadCap(config, "final_logit_softcapping", 30);
  return BuildDecoder(config, options, decoder);
}

Result<Graph> BuildGemma3(ModelConfig& config, const ImportOptions& options) {
  Decoder decoder = Gemma(config, "Gemma3Text");
  decoder.classes[0].name = "Gemma3ForCausalLM";
  decoder.classes.push_back({.name = "Gemma3ForConditionalGeneration"});
  // transformers 5 writes it with an underscore, beside layer_types.
  const int64_t period = config.Size("_sliding_window_pattern", 6);
  ReadLater(config, config.Size("sliding_window_pattern", period), decoder);
  decoder.head_norm = true;
  config.Refuse("attn_logit_softcapping");
  // transformers' model of text and images does not read this one.
  if (config.String("model_type", "") == "gemma3") {
    config.Refuse("final_logit_softcapping");
  }
  decoder.logit_cap = ReadCap(config, "final_logit_softcapping", 0);
  const Rotary whole =
      ReadRotaryOf(config, "full_attention", "rope_theta", 1e6, options);
  const Rotary local = ReadRotaryOf(config, "sliding_attention",
                                    "rope_local_base_freq", 1e4, options);
  decoder.rotary = &whole;
  decoder.windowed_rotary = &local;
  return BuildDecoder(config, options, decoder);
}

}  // namespace tessera
