// Relatives of Llama, each by what it does differently (planner/io/decoder.h).

#include <algorithm>

#include "planner/io/decoder.h"
#include "planner/io/huggingface.h"

namespace tessera {

// OLMo: layer norms without parameters.
Result<Graph> BuildOlmo(ModelConfig& config, const ImportOptions& options) {
  const bool bias = config.Bool("attention_bias", false);
  config.Refuse("clip_qkv");
  return BuildDecoder(config, options,
                      {.classes = DecoderClasses("Olmo"),
                       .key_value_heads = KeyValueHeads(config),
                       .keys = {.epsilon = "", .default_epsilon = 1e-5},
                       .qkv_bias = bias,
                       .out_bias = bias,
                       .norm = NormKind::kPlainLayer});
}

// OLMo 2: norms behind attention and MLP alone, and of all queries and keys.
Result<Graph> BuildOlmo2(ModelConfig& config, const ImportOptions& options) {
  const bool bias = config.Bool("attention_bias", false);
  return BuildDecoder(
      config, options,
      {.classes = DecoderClasses("Olmo2"),
       .key_value_heads = KeyValueHeads(config),
       .keys = {.default_epsilon = 1e-5},
       .names = {.before_attention = {},
                 .behind_attention = ".post_attention_layernorm",
                 .before_mlp = {},
                 .behind_mlp = ".post_feedforward_layernorm"},
       .qkv_bias = bias,
       .out_bias = bias,
       .width_norm = true});
}

// Granite: numbers that multiply embeddings, scores, residuals and logits.
Result<Graph> BuildGranite(ModelConfig& config, const ImportOptions& options) {
  const bool bias = config.Bool("attention_bias", false);
  const auto factor = [&](std::string_view key) {
    return config.Number(key, 1, 1e-6, 1e6);
  };
  return BuildDecoder(config, options,
                      {.classes = DecoderClasses("Granite"),
                       .key_value_heads = KeyValueHeads(config),
                       .qkv_bias = bias,
                       .out_bias = bias,
                       .mlp_bias = config.Bool("mlp_bias", false),
                       .score_scale = factor("attention_multiplier"),
                       .embedding_scale = factor("embedding_multiplier"),
                       .residual_scale = factor("residual_multiplier"),
                       .logit_scale = 1 / factor("logits_scaling")});
}

// SmolLM3: some layers without positions, which alone have the window.
Result<Graph> BuildSmolLm3(ModelConfig& config, const ImportOptions& options) {
  const bool bias = config.Bool("attention_bias", false);
  Decoder decoder = {.classes = DecoderClasses("SmolLM3"),
                     .key_value_heads = KeyValueHeads(config, 4),
                     .qkv_bias = bias,
                     .out_bias = bias,
                     .mlp_bias = config.Bool("mlp_bias", false),
                     .tied = true,
                     .reads_layer_types = true,
                     .theta = 2e6};
  if (config.Bool("use_sliding_window", false)) {
    decoder.window = ReadWindow(config, 0);
  }
  const int64_t layers = config.Layers("num_hidden_layers");
  const int64_t period = config.Size("no_rope_layer_interval", 4);
  // 1: the layer has positions, whatever the key's name says.
  std::vector<int64_t> turned;
  for (int64_t layer = 0; layer < layers; ++layer) {
    turned.push_back((layer + 1) % period != 0 ? 1 : 0);
  }
  const auto count = static_cast<size_t>(layers);
  turned = config.WholeNumbers(
      "no_rope_layers",
      {.least_items = count, .most_items = count, .least = 0, .most = 1},
      turned);
  for (const int64_t has : turned) {
    decoder.turned.push_back(has != 0);
    decoder.windowed.push_back(decoder.window > 0 && has == 0);
  }
  return BuildDecoder(config, options, decoder);
}

// StarCoder2: layer norms, biases, and an MLP without a gate.
Result<Graph> BuildStarcoder2(ModelConfig& config,
                              const ImportOptions& options) {
  const bool bias = config.Bool("use_bias", true);
  return BuildDecoder(
      config, options,
      {.classes = DecoderClasses("Starcoder2"),
       .key_value_heads = KeyValueHeads(config, 2),
       .keys = {.epsilon = "norm_epsilon",
                .default_epsilon = 1e-5,
                .default_activation = "gelu_pytorch_tanh"},
       .names = {.mlp = {"", "c_fc", "c_proj"}},
       .qkv_bias = bias,
       .out_bias = bias,
       .mlp_bias = bias,
       .tied = true,
       .norm = NormKind::kLayer,
       .window = ReadWindow(config, 0),
       .stddev = 0.018042,
       // 0.99: with nothing kept there is nothing to scale.
       .embedding_dropout = config.Number("embedding_dropout", 0, 0, 0.99),
       .residual_dropout = config.Number("residual_dropout", 0, 0, 0.99)});
}

// Phi-1 to 2: attention and MLP side by side behind one layer norm, rotary
// positions on a part of each head, biases everywhere.
Result<Graph> BuildPhi(ModelConfig& config, const ImportOptions& options) {
  config.Refuse("qk_layernorm");
  return BuildDecoder(
      config, options,
      {.classes = DecoderClasses("Phi"),
       .key_value_heads = KeyValueHeads(config),
       .keys = {.epsilon = "layer_norm_eps",
                .default_epsilon = 1e-5,
                .default_activation = "gelu_new"},
       .names = {.before_mlp = {},
                 .attention = {"q_proj", "k_proj", "v_proj", "dense"},
                 .mlp = {"", "fc1", "fc2"},
                 .last_norm = "model.final_layernorm"},
       .qkv_bias = true,
       .out_bias = true,
       .mlp_bias = true,
       .head_bias = true,
       .parallel = true,
       .norm = NormKind::kLayer,
       .turns_part = true,
       .turned_part = 0.5,
       .embedding_dropout = config.Number("embd_pdrop", 0, 0, 0.99),
       .residual_dropout = config.Number("resid_pdrop", 0, 0, 0.99)});
}

// Falcon: attention and MLP side by side, behind one layer norm or one each;
// one group of heads, or several.
Result<Graph> BuildFalcon(ModelConfig& config, const ImportOptions& options) {
  config.Refuse("alibi");
  const bool later = config.Bool("new_decoder_architecture", false);
  // Null is false.
  const auto is_set = [&](std::string_view key) {
    return config.Bool(key, !config.values().fields.contains(key));
  };
  const bool parallel = is_set("parallel_attn");
  if (later && !parallel) {
    config.Wrong("parallel_attn",
                 "is false: expected true where new_decoder_architecture is");
  }
  const int64_t norms = config.Size("num_ln_in_parallel_attn", later ? 2 : 1);
  if (norms > (later ? 2 : 1)) {
    config.Wrong("num_ln_in_parallel_attn",
                 "is " + std::to_string(norms) + ": expected at most " +
                     (later ? "2" : "1, as new_decoder_architecture is false"));
  }
  const bool one_group = !later && is_set("multi_query");
  const int64_t heads = config.Size("num_attention_heads");
  const bool bias = config.Bool("bias", false);
  // transformers drops where branches meet, and serial ones unlike each other.
  config.Number("hidden_dropout", 0, 0, 0);
  return BuildDecoder(
      config, options,
      {.classes = DecoderClasses("Falcon", "ForCausalLM", "classifier"),
       .key_value_heads = one_group ? 1
                          : later   ? config.Size("num_kv_heads", heads)
                                    : heads,
       .keys = {.key_value_heads = "num_kv_heads",
                .inner = "ffn_hidden_size",
                .default_positions = 2048,
                .epsilon = "layer_norm_epsilon",
                .default_epsilon = 1e-5,
                .activation = "activation",
                .default_activation = "gelu"},
       .names = {.embedding = "transformer.word_embeddings",
                 .layer = "transformer.h.",
                 .before_attention =
                     norms == 2 ? ".ln_attn" : ".input_layernorm",
                 .before_mlp = norms == 2 ? ".ln_mlp"
                               : parallel ? ""
                                          : ".post_attention_layernorm",
                 .attention_module = ".self_attention",
                 .attention = {"query_key_value.q", "query_key_value.k",
                               "query_key_value.v", "dense"},
                 .mlp = {"", "dense_h_to_4h", "dense_4h_to_h"},
                 .last_norm = "transformer.ln_f"},
       .qkv_bias = bias,
       .out_bias = bias,
       .mlp_bias = bias,
       .tied = true,
       .parallel = parallel,
       .norm = NormKind::kLayer,
       .reads_head_size = false,
       .inner = 4 * config.Size("hidden_size")});
}

// GPT-J: attention without and MLP with biases side by side behind one layer
// norm, rotary positions on some features of each head.
Result<Graph> BuildGptJ(ModelConfig& config, const ImportOptions& options) {
  const int64_t hidden = config.Size("n_embd");
  const int64_t heads = config.Size("n_head");
  const int64_t size = std::max<int64_t>(1, hidden / heads);
  const bool is_null = config.values().fields.contains("rotary_dim") &&
                       !config.Has("rotary_dim");
  if (is_null) config.Wrong("rotary_dim", "is null: not supported");
  const int64_t turned = config.Size("rotary_dim", 64);
  if (turned > size || turned % 2 != 0) {
    config.Wrong("rotary_dim", "is " + std::to_string(turned) +
                                   ": expected an even number of at most " +
                                   std::to_string(size) +
                                   ", the size of a head");
  }
  const Rotary rotary = {
      .theta = kRotaryTheta,
      .fraction = static_cast<double>(turned) / static_cast<double>(size)};
  return BuildDecoder(
      config, options,
      {.classes = DecoderClasses("GPTJ"),
       .key_value_heads = heads,
       .keys = {.hidden = "n_embd",
                .layers = "n_layer",
                .heads = "n_head",
                .key_value_heads = "n_head",
                .inner = "n_inner",
                .positions = "n_positions",
                .epsilon = "layer_norm_epsilon",
                .default_epsilon = 1e-5,
                .activation = "activation_function",
                .default_activation = "gelu_new",
                .attention_dropout = "attn_pdrop"},
       .names = {.embedding = "transformer.wte",
                 .layer = "transformer.h.",
                 .before_attention = ".ln_1",
                 .before_mlp = {},
                 .attention_module = ".attn",
                 .attention = {"q_proj", "k_proj", "v_proj", "out_proj"},
                 .mlp = {"", "fc_in", "fc_out"},
                 .last_norm = "transformer.ln_f"},
       .mlp_bias = true,
       .head_bias = true,
       .parallel = true,
       .norm = NormKind::kLayer,
       .reads_head_size = false,
       .inner = 4 * hidden,
       .turns_part = true,
       .rotary = &rotary,
       .embedding_dropout = config.Number("embd_pdrop", 0, 0, 0.99),
       .residual_dropout = config.Number("resid_pdrop", 0, 0, 0.99)});
}

// StableLM: layer norms, rotary positions on a part of each head.
Result<Graph> BuildStableLm(ModelConfig& config, const ImportOptions& options) {
  config.Refuse("qk_layernorm");
  config.Number("hidden_dropout", 0, 0, 0);  // behind the MLP alone
  const bool parallel = config.Bool("use_parallel_residual", false);
  return BuildDecoder(
      config, options,
      {.classes = DecoderClasses("StableLm"),
       .key_value_heads = KeyValueHeads(config, 32),
       .keys = {.epsilon = "layer_norm_eps", .default_epsilon = 1e-5},
       .names = {.before_mlp = parallel ? "" : ".post_attention_layernorm"},
       .qkv_bias = config.Bool("use_qkv_bias", false),
       .parallel = parallel,
       .norm = NormKind::kLayer,
       .reads_head_size = false,
       .turns_part = true,
       .turned_part = 0.25});
}

// GLM-4 of 2025: norms on both sides, rotary positions on a part of each head.
Result<Graph> BuildGlm4(ModelConfig& config, const ImportOptions& options) {
  return BuildDecoder(
      config, options,
      {.classes = DecoderClasses("Glm4"),
       .key_value_heads = KeyValueHeads(config, 2),
       .keys = {.default_epsilon = 1.5625e-7},
       .names = {.behind_attention = ".post_self_attn_layernorm",
                 .before_mlp = ".post_attention_layernorm",
                 .behind_mlp = ".post_mlp_layernorm",
                 .mlp = {"gate_up_proj.gate", "gate_up_proj.up", "down_proj"}},
       .qkv_bias = config.Bool("attention_bias", true),
       .head_size = 128,
       .turns_part = true,
       .turned_part = 0.5});
}

// Command R: attention and MLP side by side behind one layer norm without a
// shift, scaled logits.
Result<Graph> BuildCohere(ModelConfig& config, const ImportOptions& options) {
  config.Refuse("use_qk_norm");
  const bool bias = config.Bool("attention_bias", false);
  return BuildDecoder(
      config, options,
      {.classes = DecoderClasses("Cohere"),
       .key_value_heads = KeyValueHeads(config),
       .keys = {.epsilon = "layer_norm_eps", .default_epsilon = 1e-5},
       .names = {.before_mlp = {}},
       .qkv_bias = bias,
       .out_bias = bias,
       .tied = true,
       .parallel = true,
       .norm = NormKind::kLayerWithoutShift,
       .theta = 5e5,
       .logit_scale = config.Number("logit_scale", 0.0625, 1e-6, 1e6)});
}

}  // namespace tessera
