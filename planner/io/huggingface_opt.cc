// OPT (Zhang et al. 2022): pre-norm blocks (of one size post-norm, between
// projections of narrower embeddings), learned positions, ReLU, one matrix for
// embedding and head. Names and defaults are those of transformers'
// OPTConfig and OPTModel. Its table of positions has two rows more than there
// are positions; which of them no position reads is no matter: here the last.

#include <cmath>

#include "planner/io/huggingface.h"
#include "planner/io/transformer.h"

namespace tessera {

Result<Graph> BuildOpt(ModelConfig& config, const ImportOptions& options) {
  const int64_t hidden = config.Size("hidden_size");
  const int64_t layers = config.Layers("num_hidden_layers");
  const Vocabulary vocabulary = ReadVocabulary(config);
  const int64_t positions = config.Size("max_position_embeddings") + 2;
  const int64_t inner = config.Size("ffn_dim");
  const Heads heads =
      ReadHeads(config, "hidden_size", "num_attention_heads",
                config.Size("num_attention_heads"), "num_attention_heads");
  const std::string activation =
      ReadActivation(config, "activation_function", "relu");
  const double epsilon = 1e-5;  // torch.nn.LayerNorm's
  const double stddev = config.Number("init_std", 0.02, 0, 10);
  // 0.99: with nothing kept there is nothing to scale.
  const double dropout = config.Number("dropout", 0.1, 0, 0.99);
  const bool bias = config.Bool("enable_bias", true);
  const bool tied = config.Bool("tie_word_embeddings", true);
  const int64_t width = config.Size("word_embed_proj_dim", hidden);
  const bool norm_before = config.Bool("do_layer_norm_before", true);
  if (!config.Bool("layer_norm_elementwise_affine", true)) {
    config.Wrong("layer_norm_elementwise_affine", "is false: not supported");
  }
  config.Refuse("_remove_final_layer_norm");
  config.Number("layerdrop", 0, 0, 0);
  const Head head = ReadHead(config, DecoderClasses("OPT"), options);
  CheckSeqLen(config, "max_position_embeddings", options);
  TESSERA_RETURN_IF_ERROR(config.Check());
  WarnAttentionDropout(config, "attention_dropout", 0, options);
  TESSERA_RETURN_IF_ERROR(config.Check());

  const LinearOptions linear = {.stddev = stddev, .bias = bias};
  const AttentionOptions attention = {
      .heads = heads,
      .scale = 1 / std::sqrt(static_cast<double>(heads.size)),
      .qkv = linear,
      .out = linear};

  const std::string decoder = "model.decoder.";
  Transformer model(config, options, hidden, head);
  const LinearOptions projection = {.stddev = stddev};
  const TensorId tokens = model.Matrix(decoder + "embed_tokens.weight",
                                       {vocabulary.rows, width}, stddev);
  const TensorId table = model.Matrix(decoder + "embed_positions.weight",
                                      {positions, hidden}, stddev);
  TensorId x = model.Lookup(decoder + "embed_tokens", model.tokens(), tokens,
                            vocabulary);
  if (width != hidden) {
    x = model.Linear(decoder + "project_in", x, "o", "i", {hidden, width},
                     projection);
  }
  x = model.Add(
      decoder + "embed.add", x,
      model.Lookup(decoder + "embed_positions", model.positions(), table));
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = decoder + "layers." + std::to_string(layer);
    model.BeginBlock(name);
    const auto norm = [&](const std::string& part, bool here, TensorId z) {
      return here ? model.LayerNorm(name + part, z, epsilon) : z;
    };
    TensorId y = norm(".self_attn_layer_norm", norm_before, x);
    y = model.Attention(name + ".self_attn",
                        {"q_proj", "k_proj", "v_proj", "out_proj"}, y,
                        attention);
    y = model.Dropout(name + ".self_attn.dropout", y, dropout);
    x = model.Add(name + ".self_attn.add", x, y);
    x = norm(".self_attn_layer_norm", !norm_before, x);
    y = norm(".final_layer_norm", norm_before, x);
    y = model.Mlp(name, "fc1", "fc2", activation, y, inner, linear, linear);
    y = model.Dropout(name + ".dropout", y, dropout);
    x = model.Add(name + ".add", x, y);
    x = norm(".final_layer_norm", !norm_before, x);
  }
  model.BeginBlock("head");
  if (norm_before) {
    x = model.LayerNorm(decoder + "final_layer_norm", x, epsilon);
  }
  if (width != hidden) {
    x = model.Linear(decoder + "project_out", x, "o", "i", {width, hidden},
                     projection);
  }
  return model.FinishDecoder(head, x,
                             {.tied_to = tied ? tokens : TensorId(),
                              .vocabulary = vocabulary,
                              .width = width,
                              .stddev = stddev});
}

}  // namespace tessera
