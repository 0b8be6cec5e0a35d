// T5 (Raffel et al. 2020): an encoder and a decoder that reads its result, RMS
// norms before each part, biases of scores by distance that all layers of a
// stack share, no biases elsewhere. Names and defaults are those of
// transformers' T5Config and T5ForConditionalGeneration. Where `architectures`
// says so, it ends before the head (T5Model), or is the encoder alone
// (T5EncoderModel), also with a label for each token
// (T5ForTokenClassification).
//
// The sequence length is that of the target. That of the source is Tessera's
// own key "source_len"; where there is none they are alike.

#include <array>
#include <cmath>

#include "planner/io/huggingface.h"
#include "planner/io/transformer.h"

namespace tessera {
namespace {

struct Sizes {
  int64_t hidden;
  int64_t inner;
  Heads heads;
  std::string activation;
  bool gated;
  double epsilon;
  double dropout;
  double factor;  // of how weights start
};

double InverseRoot(int64_t n) {
  return 1 / std::sqrt(static_cast<double>(n));
}

AttentionOptions AttentionOf(const Sizes& sizes) {
  const double stddev = sizes.factor * InverseRoot(sizes.hidden);
  const auto& [g, r, d] = sizes.heads;
  // Scores are not scaled: queries start smaller instead.
  return {.heads = sizes.heads,
          .scale = 1,
          .qkv = {.stddev = stddev},
          .query_stddev = stddev * InverseRoot(d),
          .out = {.stddev = sizes.factor * InverseRoot(g * r * d)}};
}

// x + dropout(attention(norm(x))), the layer NAME of a block.
TensorId AttentionLayer(const std::string& name, const std::string& module,
                        TensorId x, const AttentionOptions& options,
                        const Sizes& sizes, Transformer& model) {
  TensorId y = model.RmsNorm(name + ".layer_norm", x, sizes.epsilon);
  y = model.Attention(name + "." + module, {"q", "k", "v", "o"}, y, options);
  y = model.Dropout(name + ".dropout", y, sizes.dropout);
  return model.Add(name + ".add", x, y);
}

TensorId FeedForwardLayer(const std::string& name, TensorId x,
                          const Sizes& sizes, Transformer& model) {
  const std::string dense = name + ".DenseReluDense.";
  const LinearOptions in = {.stddev = sizes.factor * InverseRoot(sizes.hidden)};
  const Shape shape = {sizes.inner, sizes.hidden};
  TensorId y = model.RmsNorm(name + ".layer_norm", x, sizes.epsilon);
  const TensorId gate = model.Linear(dense + (sizes.gated ? "wi_0" : "wi"), y,
                                     "f", "i", shape, in);
  TensorId z = model.Activate(sizes.activation, dense + "act", gate);
  if (sizes.gated) {
    z = model.Multiply(dense + "product", z,
                       model.Linear(dense + "wi_1", y, "f", "i", shape, in));
  }
  z = model.Dropout(dense + "dropout", z, sizes.dropout);
  z = model.Linear(dense + "wo", z, "o", "f", {sizes.hidden, sizes.inner},
                   {.stddev = sizes.factor * InverseRoot(sizes.inner)});
  z = model.Dropout(name + ".dropout", z, sizes.dropout);
  return model.Add(name + ".add", x, z);
}

// "relu", "gated-gelu" and the like.
void ReadFeedForward(ModelConfig& config, Sizes& sizes) {
  constexpr std::string_view kGated = "gated-";
  std::string text = config.String("feed_forward_proj", "relu");
  sizes.gated = text.starts_with(kGated);
  if (sizes.gated) text.erase(0, kGated.size());
  // As transformers' T5Config reads it.
  if (sizes.gated && text == "gelu") text = "gelu_new";
  const auto op = ActivationNamed(text);
  if (!op) return config.Wrong("feed_forward_proj", op.error().message);
  sizes.activation = *op;
}

}  // namespace

Result<Graph> BuildT5(ModelConfig& config, const ImportOptions& options) {
  Sizes sizes;
  sizes.hidden = config.Size("d_model");
  sizes.inner = config.Size("d_ff");
  sizes.heads =
      ReadHeads(config, "d_model", "num_heads", config.Size("num_heads"),
                "num_heads", config.Size("d_kv", 64));
  ReadFeedForward(config, sizes);
  sizes.epsilon = config.Number("layer_norm_epsilon", 1e-6, 0, 1);
  // 0.99: with nothing kept there is nothing to scale.
  sizes.dropout = config.Number("dropout_rate", 0.1, 0, 0.99);
  sizes.factor = config.Number("initializer_factor", 1, 0, 1e3);
  const int64_t encoders = config.Layers("num_layers");
  const int64_t decoders = config.Has("num_decoder_layers")
                               ? config.Layers("num_decoder_layers")
                               : encoders;
  const Vocabulary vocabulary = ReadVocabulary(config, 32128);
  const int64_t buckets = config.Size("relative_attention_num_buckets", 32);
  const int64_t max_distance =
      config.Size("relative_attention_max_distance", 128);
  const bool tied = config.Bool("tie_word_embeddings", true);
  // transformers 5 writes it; without it untied heads are not scaled.
  const bool scaled = config.Bool("scale_decoder_outputs", tied);
  const std::array classes = {
      HeadClass{.name = "T5ForConditionalGeneration"},
      HeadClass{.name = "T5WithLMHeadModel"},  // of 2019
      HeadClass{.name = "T5Model", .kind = HeadKind::kNone},
      HeadClass{.name = "T5EncoderModel", .kind = HeadKind::kNone},
      HeadClass{.name = "T5ForTokenClassification",
                .kind = HeadKind::kTokenLabels,
                .module = "classifier",
                .bias = true,
                .dropout = 0}};
  const Head head = ReadHead(config, classes, options);
  const bool decodes = head.kind == HeadKind::kOwn || head.name == "T5Model";
  // An encoder alone reads tokens as they are.
  const int64_t source_len =
      decodes ? config.Size("source_len", options.seq_len) : options.seq_len;
  TESSERA_RETURN_IF_ERROR(config.Check());
  WarnAttentionDropout(config, "dropout_rate", 0.1, options);

  // What stands behind the end of a document is padding.
  ImportOptions without_documents = options;
  without_documents.documents = false;
  Transformer model(config, without_documents, sizes.hidden, head);
  const TensorId source =
      decodes ? model.Input("source", {source_len}) : model.tokens();
  const TensorId places = decodes
                              ? model.Input("source_positions", {source_len})
                              : model.positions();
  const double factor = sizes.factor;
  const TensorId table =
      model.Matrix("shared.weight", {vocabulary.rows, sizes.hidden}, factor);
  const auto biases = [&](const std::string& stack) {
    return model.RelativeBias(
        stack + ".block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        buckets, sizes.heads, factor * InverseRoot(sizes.hidden));
  };

  TensorId x = model.Lookup("encoder.embed_tokens", source, table, vocabulary);
  x = model.Dropout("encoder.dropout", x, sizes.dropout);
  AttentionOptions self = AttentionOf(sizes);
  self.causal = false;
  self.relative_bias = biases("encoder");
  self.max_distance = max_distance;
  self.query_positions = self.key_positions = places;
  for (int64_t layer = 0; layer < encoders; ++layer) {
    const std::string name = "encoder.block." + std::to_string(layer);
    model.BeginBlock(name);
    x = AttentionLayer(name + ".layer.0", "SelfAttention", x, self, sizes,
                       model);
    x = FeedForwardLayer(name + ".layer.1", x, sizes, model);
  }
  model.BeginBlock(decodes ? "decoder.embed" : "head");
  x = model.RmsNorm("encoder.final_layer_norm", x, sizes.epsilon);
  const TensorId memory =
      model.Dropout("encoder.final_dropout", x, sizes.dropout);
  if (!decodes) {
    return model.Finish(head, memory, options.seq_len, sizes.hidden,
                        sizes.factor);
  }
  x = model.Lookup("decoder.embed_tokens", model.tokens(), table, vocabulary);
  x = model.Dropout("decoder.dropout", x, sizes.dropout);
  self = AttentionOf(sizes);
  self.relative_bias = biases("decoder");
  self.max_distance = max_distance;
  AttentionOptions cross = AttentionOf(sizes);
  cross.causal = false;
  cross.memory = memory;
  cross.key_positions = places;
  for (int64_t layer = 0; layer < decoders; ++layer) {
    const std::string name = "decoder.block." + std::to_string(layer);
    model.BeginBlock(name);
    x = AttentionLayer(name + ".layer.0", "SelfAttention", x, self, sizes,
                       model);
    x = AttentionLayer(name + ".layer.1", "EncDecAttention", x, cross, sizes,
                       model);
    x = FeedForwardLayer(name + ".layer.2", x, sizes, model);
  }
  model.BeginBlock("head");
  x = model.RmsNorm("decoder.final_layer_norm", x, sizes.epsilon);
  x = model.Dropout("decoder.final_dropout", x, sizes.dropout);
  if (head.kind == HeadKind::kNone) {
    return model.Finish(head, x, options.seq_len, sizes.hidden, sizes.factor);
  }
  if (scaled) x = model.Scale("lm_head.scale", x, InverseRoot(sizes.hidden));
  const TensorId matrix =
      tied ? table
           : model.Matrix("lm_head.weight", {vocabulary.rows, sizes.hidden},
                          factor);
  return model.Finish("lm_head", x, matrix, vocabulary);
}

}  // namespace tessera
