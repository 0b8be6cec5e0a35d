// GPT-2: pre-norm blocks, learned positions, one matrix for embedding and head.
// Names and defaults are those of transformers' GPT2Config and GPT2Model.

#include <cmath>

#include "planner/io/huggingface.h"
#include "planner/io/transformer.h"

namespace tessera {

Result<Graph> BuildGpt2(ModelConfig& config, const ImportOptions& options) {
  const int64_t hidden = config.Size("n_embd");
  const int64_t layers = config.Layers("n_layer");
  const Vocabulary vocabulary = ReadVocabulary(config);
  const int64_t positions = config.Size("n_positions");
  const int64_t inner = config.Size("n_inner", 4 * hidden);
  const Heads heads =
      ReadHeads(config, "n_embd", "n_head", config.Size("n_head"), "n_head");
  const std::string activation =
      ReadActivation(config, "activation_function", "gelu_new");
  const double epsilon = config.Number("layer_norm_epsilon", 1e-5, 0, 1);
  const double stddev = config.Number("initializer_range", 0.02, 0, 10);
  // 0.99: with nothing kept there is nothing to scale.
  const double embed_dropout = config.Number("embd_pdrop", 0.1, 0, 0.99);
  const double residual_dropout = config.Number("resid_pdrop", 0.1, 0, 0.99);
  const bool scale_scores = config.Bool("scale_attn_weights", true);
  const bool tied = config.Bool("tie_word_embeddings", true);
  config.Refuse("scale_attn_by_inverse_layer_idx");
  const Head head = ReadHead(
      config, DecoderClasses("GPT2", "LMHeadModel", "classifier"), options);
  CheckSeqLen(config, "n_positions", options);
  TESSERA_RETURN_IF_ERROR(config.Check());
  WarnAttentionDropout(config, "attn_pdrop", 0.1, options);
  TESSERA_RETURN_IF_ERROR(config.Check());

  const LinearOptions plain = {.stddev = stddev, .bias = true};
  // Residual layers start smaller by the root of their number (Radford et al.
  // 2019, section 2.3).
  const LinearOptions residual = {
      .stddev = stddev / std::sqrt(2.0 * static_cast<double>(layers)),
      .bias = true};
  const AttentionOptions attention = {
      .heads = heads,
      .scale =
          scale_scores ? 1 / std::sqrt(static_cast<double>(heads.size)) : 1.0,
      .qkv = plain,
      .out = residual};

  Transformer model(config, options, hidden, head);
  const TensorId wte =
      model.Matrix("wte.weight", {vocabulary.rows, hidden}, stddev);
  const TensorId wpe = model.Matrix("wpe.weight", {positions, hidden}, stddev);
  TensorId x = model.Add("embed.add",
                         model.Lookup("wte", model.tokens(), wte, vocabulary),
                         model.Lookup("wpe", model.positions(), wpe));
  x = model.Dropout("drop", x, embed_dropout);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string h = "h." + std::to_string(layer);
    model.BeginBlock(h);
    TensorId y = model.LayerNorm(h + ".ln_1", x, epsilon);
    y = model.Attention(h + ".attn",
                        {"c_attn.q", "c_attn.k", "c_attn.v", "c_proj"}, y,
                        attention);
    y = model.Dropout(h + ".attn.resid_dropout", y, residual_dropout);
    x = model.Add(h + ".attn.add", x, y);
    y = model.LayerNorm(h + ".ln_2", x, epsilon);
    y = model.Mlp(h + ".mlp", "c_fc", "c_proj", activation, y, inner, plain,
                  residual);
    y = model.Dropout(h + ".mlp.dropout", y, residual_dropout);
    x = model.Add(h + ".mlp.add", x, y);
  }
  model.BeginBlock("head");
  x = model.LayerNorm("ln_f", x, epsilon);
  return model.FinishDecoder(head, x,
                             {.tied_to = tied ? wte : TensorId(),
                              .vocabulary = vocabulary,
                              .width = hidden,
                              .stddev = stddev});
}

}  // namespace tessera
