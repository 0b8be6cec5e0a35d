// BERT (Devlin et al. 2019): post-norm blocks of bidirectional attention,
// learned positions and segments. Names and defaults are those of transformers'
// BertConfig and its models: BertForPreTraining, whose loss is that of masked
// tokens and of the next sentence, or, where `architectures` says so,
// BertForMaskedLM, which has no pooler, BertForTokenClassification, which has a
// label for each token, BertForSequenceClassification, which has one for each
// sample, or BertModel, which ends in the pooler.

#include <array>
#include <cmath>

#include "planner/io/huggingface.h"
#include "planner/io/transformer.h"

namespace tessera {

Result<Graph> BuildBert(ModelConfig& config, const ImportOptions& options) {
  const int64_t hidden = config.Size("hidden_size", 768);
  const int64_t layers = config.Layers("num_hidden_layers");
  const Vocabulary vocabulary = ReadVocabulary(config, 30522);
  const int64_t positions = config.Size("max_position_embeddings");
  const int64_t segments = config.Size("type_vocab_size", 2);
  if (segments < 2) {
    config.Wrong("type_vocab_size",
                 "is 1: expected at least 2, a sample has two segments");
  }
  const int64_t inner = config.Size("intermediate_size", 3072);
  const Heads heads =
      ReadHeads(config, "hidden_size", "num_attention_heads",
                config.Size("num_attention_heads"), "num_attention_heads");
  const std::string activation = ReadActivation(config, "hidden_act", "gelu");
  const double epsilon = config.Number("layer_norm_eps", 1e-12, 0, 1);
  const double stddev = config.Number("initializer_range", 0.02, 0, 10);
  // 0.99: with nothing kept there is nothing to scale.
  const double dropout = config.Number("hidden_dropout_prob", 0.1, 0, 0.99);
  const bool tied = config.Bool("tie_word_embeddings", true);
  config.Refuse("is_decoder");
  if (config.String("position_embedding_type", "absolute") != "absolute") {
    config.Wrong("position_embedding_type", "is not 'absolute': not supported");
  }
  const std::array classes = {
      HeadClass{.name = "BertForPreTraining"},
      HeadClass{.name = "BertForMaskedLM"},
      HeadClass{.name = "BertModel", .kind = HeadKind::kNone},
      HeadClass{.name = "BertForSequenceClassification",
                .kind = HeadKind::kLabel,
                .module = "classifier",
                .bias = true,
                .dropout = dropout},
      HeadClass{.name = "BertForTokenClassification",
                .kind = HeadKind::kTokenLabels,
                .module = "classifier",
                .bias = true,
                .dropout = dropout}};
  const Head head = ReadHead(config, classes, options);
  CheckSeqLen(config, "max_position_embeddings", options);
  TESSERA_RETURN_IF_ERROR(config.Check());
  WarnAttentionDropout(config, "attention_probs_dropout_prob", 0.1, options);
  TESSERA_RETURN_IF_ERROR(config.Check());

  const LinearOptions linear = {.stddev = stddev, .bias = true};
  const AttentionOptions attention = {
      .heads = heads,
      .scale = 1 / std::sqrt(static_cast<double>(heads.size)),
      .causal = false,
      .qkv = linear,
      .out = linear};

  Transformer model(config, options, hidden, head);
  const TensorId segment_ids = model.Input("segments", {options.seq_len});
  const std::string embeddings = "bert.embeddings.";
  const auto lookup = [&](const std::string& name, TensorId ids, int64_t rows) {
    return model.Lookup(
        embeddings + name, ids,
        model.Matrix(embeddings + name + ".weight", {rows, hidden}, stddev));
  };
  const TensorId words = model.Matrix(embeddings + "word_embeddings.weight",
                                      {vocabulary.rows, hidden}, stddev);
  TensorId x = model.Lookup(embeddings + "word_embeddings", model.tokens(),
                            words, vocabulary);
  x = model.Add(embeddings + "add_positions", x,
                lookup("position_embeddings", model.positions(), positions));
  x = model.Add(embeddings + "add_segments", x,
                lookup("token_type_embeddings", segment_ids, segments));
  x = model.LayerNorm(embeddings + "LayerNorm", x, epsilon);
  x = model.Dropout(embeddings + "dropout", x, dropout);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = "bert.encoder.layer." + std::to_string(layer);
    model.BeginBlock(name);
    TensorId y = model.Attention(
        name + ".attention",
        {"self.query", "self.key", "self.value", "output.dense"}, x, attention);
    y = model.Dropout(name + ".attention.output.dropout", y, dropout);
    x = model.Add(name + ".attention.output.add", x, y);
    x = model.LayerNorm(name + ".attention.output.LayerNorm", x, epsilon);
    y = model.Mlp(name, "intermediate.dense", "output.dense", activation, x,
                  inner, linear, linear);
    y = model.Dropout(name + ".output.dropout", y, dropout);
    x = model.Add(name + ".output.add", x, y);
    x = model.LayerNorm(name + ".output.LayerNorm", x, epsilon);
  }
  model.BeginBlock("head");
  const auto pool = [&] {
    TensorId y = model.Select("bert.pooler.first_token", x, 0);
    y = model.Linear("bert.pooler.dense", y, "o", "i", {hidden, hidden},
                     linear);
    return model.Activate("tanh", "bert.pooler.activation", y);
  };
  if (head.kind == HeadKind::kTokenLabels) {
    return model.Finish(head, x, options.seq_len, hidden, stddev);
  }
  if (head.kind != HeadKind::kOwn) {
    return model.Finish(head, pool(), /*places=*/1, hidden, stddev);
  }
  const std::string masked = "cls.predictions";
  TensorId y = model.Linear(masked + ".transform.dense", x, "o", "i",
                            {hidden, hidden}, linear);
  y = model.Activate(activation, masked + ".transform.transform_act_fn", y);
  y = model.LayerNorm(masked + ".transform.LayerNorm", y, epsilon);
  const TensorId decoder =
      tied ? words
           : model.Matrix(masked + ".decoder.weight", {vocabulary.rows, hidden},
                          stddev);
  y = model.LinearBy(masked, y, "v", "i", decoder, {vocabulary.rows, hidden},
                     /*bias=*/true);
  TensorId loss =
      model.Loss("loss", y, model.labels(), "count", vocabulary.attributes());
  if (head.name == classes[0].name) {
    const TensorId next = model.Input("next_sentence", {1});
    y = model.Linear("cls.seq_relationship", pool(), "v", "i", {2, hidden},
                     linear);
    loss = model.AddLosses(
        "loss.total", loss,
        model.Loss("loss.next_sentence", y, next, "count.next_sentence"));
  }
  return model.Finish(loss);
}

}  // namespace tessera
