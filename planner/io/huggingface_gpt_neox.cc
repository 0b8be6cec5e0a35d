// GPT-NeoX: blocks whose attention and MLP read the same residual stream, each
// through its own norm ("parallel residual"), or one after the other; rotary
// positions on a part of each head; an untied head. Names and defaults are
// those of transformers' GPTNeoXConfig and GPTNeoXModel.

#include <cmath>

#include "planner/io/huggingface.h"
#include "planner/io/transformer.h"

namespace tessera {

Result<Graph> BuildGptNeox(ModelConfig& config, const ImportOptions& options) {
  const int64_t hidden = config.Size("hidden_size");
  const int64_t layers = config.Layers("num_hidden_layers");
  const Vocabulary vocabulary = ReadVocabulary(config);
  const int64_t inner = config.Size("intermediate_size");
  const Heads heads =
      ReadHeads(config, "hidden_size", "num_attention_heads",
                config.Size("num_attention_heads"), "num_attention_heads");
  const std::string activation = ReadActivation(config, "hidden_act", "gelu");
  const double epsilon = config.Number("layer_norm_eps", 1e-5, 0, 1);
  const double stddev = config.Number("initializer_range", 0.02, 0, 10);
  // 0.99: with nothing kept there is nothing to scale.
  const double dropout = config.Number("hidden_dropout", 0, 0, 0.99);
  const bool parallel = config.Bool("use_parallel_residual", true);
  const bool attention_bias = config.Bool("attention_bias", true);
  const bool tied = config.Bool("tie_word_embeddings", false);
  const Head head = ReadHead(
      config, DecoderClasses("GPTNeoX", "ForCausalLM", "classifier"), options);
  CheckSeqLen(config, "max_position_embeddings", options);
  TESSERA_RETURN_IF_ERROR(config.Check());
  const Rotary rotary = ReadRotary(config, "rotary_emb_base", "rotary_pct",
                                   0.25, heads.size, options.seq_len);
  TESSERA_RETURN_IF_ERROR(config.Check());
  WarnAttentionDropout(config, "attention_dropout", 0, options);
  TESSERA_RETURN_IF_ERROR(config.Check());

  const LinearOptions attention_linear = {.stddev = stddev,
                                          .bias = attention_bias};
  const LinearOptions mlp = {.stddev = stddev, .bias = true};
  const AttentionOptions attention = {
      .heads = heads,
      .scale = 1 / std::sqrt(static_cast<double>(heads.size)),
      .rotary = &rotary,
      .qkv = attention_linear,
      .out = attention_linear};

  Transformer model(config, options, hidden, head);
  const TensorId embedding = model.Matrix("gpt_neox.embed_in.weight",
                                          {vocabulary.rows, hidden}, stddev);
  TensorId x =
      model.Lookup("gpt_neox.embed_in", model.tokens(), embedding, vocabulary);
  x = model.Dropout("gpt_neox.emb_dropout", x, dropout);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = "gpt_neox.layers." + std::to_string(layer);
    model.BeginBlock(name);
    TensorId y = model.LayerNorm(name + ".input_layernorm", x, epsilon);
    y = model.Attention(name + ".attention",
                        {"query_key_value.q", "query_key_value.k",
                         "query_key_value.v", "dense"},
                        y, attention);
    y = model.Dropout(name + ".post_attention_dropout", y, dropout);
    if (!parallel) x = model.Add(name + ".attention.add", x, y);
    TensorId z =
        model.LayerNorm(name + ".post_attention_layernorm", x, epsilon);
    z = model.Mlp(name + ".mlp", "dense_h_to_4h", "dense_4h_to_h", activation,
                  z, inner, mlp, mlp);
    z = model.Dropout(name + ".post_mlp_dropout", z, dropout);
    if (parallel) z = model.Add(name + ".branches.add", y, z);
    x = model.Add(name + ".mlp.add", x, z);
  }
  model.BeginBlock("head");
  x = model.LayerNorm("gpt_neox.final_layer_norm", x, epsilon);
  return model.FinishDecoder(head, x,
                             {.name = "embed_out",
                              .tied_to = tied ? embedding : TensorId(),
                              .vocabulary = vocabulary,
                              .width = hidden,
                              .stddev = stddev});
}

}  // namespace tessera
