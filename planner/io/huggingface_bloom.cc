// BLOOM (Le Scao et al. 2022): pre-norm blocks, ALiBi instead of positions, a
// norm behind the embedding, one matrix for embedding and head. Names and
// defaults are those of transformers' BloomConfig and BloomModel.

#include <cmath>

#include "planner/io/huggingface.h"
#include "planner/io/transformer.h"

namespace tessera {

Result<Graph> BuildBloom(ModelConfig& config, const ImportOptions& options) {
  // Published configs have the older name.
  const char* const hidden_key =
      config.Has("n_embed") ? "n_embed" : "hidden_size";
  const int64_t hidden = config.Size(hidden_key);
  const char* const heads_key =
      config.Has("num_attention_heads") ? "num_attention_heads" : "n_head";
  const int64_t layers = config.Layers("n_layer");
  const Vocabulary vocabulary = ReadVocabulary(config);
  const Heads heads = ReadHeads(config, hidden_key, heads_key,
                                config.Size(heads_key), heads_key);
  const double epsilon = config.Number("layer_norm_epsilon", 1e-5, 0, 1);
  const double stddev = config.Number("initializer_range", 0.02, 0, 10);
  // 0.99: with nothing kept there is nothing to scale.
  const double dropout = config.Number("hidden_dropout", 0, 0, 0.99);
  const bool tied = config.Bool("tie_word_embeddings", true);
  config.Refuse("apply_residual_connection_post_layernorm");
  const Head head = ReadHead(
      config, DecoderClasses("Bloom", "ForCausalLM", "classifier", dropout),
      options);
  TESSERA_RETURN_IF_ERROR(config.Check());
  WarnAttentionDropout(config, "attention_dropout", 0, options);
  TESSERA_RETURN_IF_ERROR(config.Check());

  const LinearOptions linear = {.stddev = stddev, .bias = true};
  const AttentionOptions attention = {
      .heads = heads,
      .scale = 1 / std::sqrt(static_cast<double>(heads.size)),
      .alibi = true,
      .qkv = linear,
      .out = linear};

  Transformer model(config, options, hidden, head);
  const TensorId embedding = model.Matrix("transformer.word_embeddings.weight",
                                          {vocabulary.rows, hidden}, stddev);
  TensorId x = model.Lookup("transformer.word_embeddings", model.tokens(),
                            embedding, vocabulary);
  x = model.LayerNorm("transformer.word_embeddings_layernorm", x, epsilon);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = "transformer.h." + std::to_string(layer);
    model.BeginBlock(name);
    TensorId y = model.LayerNorm(name + ".input_layernorm", x, epsilon);
    y = model.Attention(name + ".self_attention",
                        {"query_key_value.q", "query_key_value.k",
                         "query_key_value.v", "dense"},
                        y, attention);
    y = model.Dropout(name + ".self_attention.dropout", y, dropout);
    x = model.Add(name + ".self_attention.add", x, y);
    y = model.LayerNorm(name + ".post_attention_layernorm", x, epsilon);
    y = model.Mlp(name + ".mlp", "dense_h_to_4h", "dense_4h_to_h", "gelu", y,
                  4 * hidden, linear, linear);
    y = model.Dropout(name + ".mlp.dropout", y, dropout);
    x = model.Add(name + ".mlp.add", x, y);
  }
  model.BeginBlock("head");
  x = model.LayerNorm("transformer.ln_f", x, epsilon);
  return model.FinishDecoder(head, x,
                             {.tied_to = tied ? embedding : TensorId(),
                              .vocabulary = vocabulary,
                              .width = hidden,
                              .stddev = stddev});
}

}  // namespace tessera
