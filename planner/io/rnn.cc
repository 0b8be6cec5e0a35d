// Recurrent networks, "model_type": "rnn_lm", "rnn_classifier" and
// "rnn_translator". The format is Tessera's own, docs/models.md describes it.
// The networks are those on which FlexFlow was judged (Jia et al., SysML 2019,
// section 8.1).

#include "planner/io/huggingface.h"
#include "planner/io/recurrent.h"

namespace tessera {
namespace {

// Sequences have as many places as an operator takes apart; of a single one the
// product with the state before would have no gradient.
void CheckPlaces(ModelConfig& config, std::string_view key, int64_t places) {
  if (places >= 2 && places <= static_cast<int64_t>(kMostSteps)) return;
  config.Wrong(key, std::to_string(places) + " steps: expected from 2 to " +
                        std::to_string(kMostSteps));
}

}  // namespace

Result<Graph> BuildRnnLm(ModelConfig& config, const ImportOptions& options) {
  const RecurrentSizes sizes = ReadRecurrentSizes(config);
  const Vocabulary vocabulary = ReadVocabulary(config);
  CheckPlaces(config, "steps", options.seq_len);
  TESSERA_RETURN_IF_ERROR(config.Check());
  Recurrent model(config, options, sizes);
  const TensorId tokens = model.Input("tokens", options.seq_len);
  const TensorId labels = model.Input("labels", options.seq_len);
  Steps x = model.Lookup("embed", tokens, vocabulary);
  std::vector<Recurrent::State> states;
  x = model.Layers("rnn", x, sizes.embedding, states, /*continues=*/false);
  model.BeginBlock("head");
  const TensorId logits = model.Linear("head", model.Stack("head.steps", x),
                                       vocabulary.rows, sizes.hidden,
                                       /*bias=*/true);
  return model.Finish(logits, labels, vocabulary.attributes());
}

Result<Graph> BuildRnnClassifier(ModelConfig& config,
                                 const ImportOptions& options) {
  const RecurrentSizes sizes = ReadRecurrentSizes(config);
  const Vocabulary vocabulary = ReadVocabulary(config);
  const int64_t classes = config.Size("num_labels");
  CheckPlaces(config, "steps", options.seq_len);
  TESSERA_RETURN_IF_ERROR(config.Check());
  Recurrent model(config, options, sizes);
  const TensorId tokens = model.Input("tokens", options.seq_len);
  const TensorId label = model.Input("next_token", 1);
  Steps x = model.Lookup("embed", tokens, vocabulary);
  std::vector<Recurrent::State> states;
  x = model.Layers("rnn", x, sizes.embedding, states, /*continues=*/false);
  model.BeginBlock("head");
  const TensorId logits =
      model.Linear("head", model.Stack("head.step", {x.back()}), classes,
                   sizes.hidden, /*bias=*/true);
  return model.Finish(logits, label);
}

Result<Graph> BuildRnnTranslator(ModelConfig& config,
                                 const ImportOptions& options) {
  const RecurrentSizes sizes = ReadRecurrentSizes(config);
  const Vocabulary vocabulary = ReadVocabulary(config);
  const int64_t source_len = config.Size("source_len", options.seq_len);
  CheckPlaces(config, "steps", options.seq_len);
  CheckPlaces(config, "source_len", source_len);
  const int64_t heads = config.Size("num_attention_heads", 1);
  if (sizes.hidden % heads != 0) {
    config.Wrong("num_attention_heads",
                 "is " + std::to_string(heads) +
                     ": expected a divisor of hidden_size " +
                     std::to_string(sizes.hidden));
  }
  TESSERA_RETURN_IF_ERROR(config.Check());
  Recurrent model(config, options, sizes);
  const TensorId source = model.Input("source", source_len);
  const TensorId places = model.Input("source_positions", source_len);
  const TensorId tokens = model.Input("tokens", options.seq_len);
  const TensorId labels = model.Input("labels", options.seq_len);
  const TensorId positions = model.Input("positions", options.seq_len);
  std::vector<Recurrent::State> states;
  const Steps encoded =
      model.Layers("encoder", model.Lookup("embed.source", source, vocabulary),
                   sizes.embedding, states, /*continues=*/true);
  model.BeginBlock("embed.target");
  const TensorId memory = model.Stack("encoder.steps", encoded);
  // Each layer of the decoder begins where that of the encoder ends.
  const Steps decoded =
      model.Layers("decoder", model.Lookup("embed.target", tokens, vocabulary),
                   sizes.embedding, states, /*continues=*/false);
  model.BeginBlock("attention");
  const TensorId x =
      model.Attend("attention", heads, model.Stack("decoder.steps", decoded),
                   memory, positions, places);
  model.BeginBlock("head");
  const TensorId logits =
      model.Linear("head", x, vocabulary.rows, sizes.hidden, /*bias=*/true);
  return model.Finish(logits, labels, vocabulary.attributes());
}

}  // namespace tessera
