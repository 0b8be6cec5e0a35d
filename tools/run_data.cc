#include "tools/run_data.h"

#include <algorithm>
#include <string>
#include <utility>

#include "planner/ir/token_ids.h"

namespace tessera {
namespace {

// Labels are tokens: the loss has to be of labels, and to tell as many apart.
Result<void> CheckClasses(const Graph& graph, const std::string& model) {
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind == TensorKind::kInput && tensor.name == "targets") {
      return InvalidInput(
          "its loss compares with 'targets', numbers that text does not have",
          model);
    }
  }
  for (const Node& node : graph.nodes) {
    if (node.op->name != "cross_entropy") continue;
    const std::string& labels = graph.tensor(node.operands[1]).name;
    if (labels != "labels" && labels != "next_token") continue;
    const int64_t classes = graph.tensor(node.operands[0]).shape.back();
    const int64_t vocabulary = VocabularyOf(graph);
    if (classes < vocabulary) {
      return InvalidInput("has " + std::to_string(classes) +
                              " classes, but its labels here are tokens of a "
                              "vocabulary of " +
                              std::to_string(vocabulary),
                          model);
    }
  }
  return {};
}

// The rows that the run reads.
Result<Batches> BatchesOf(const Options& options, const Graph& graph,
                          uint64_t seed, const TokenData& data) {
  BatchOptions batches = BatchOptionsOf(graph);
  batches.seed = seed;
  batches.validation_batches =
      options.validate_every > 0 ? options.validate_batches : 0;
  batches.end_of_text = options.end_of_text;
  batches.vocabulary = VocabularyOf(graph);
  batches.mask_token =
      options.mask_token >= 0 ? options.mask_token : batches.vocabulary - 1;
  if (options.Given("--mask-token")) {
    if (options.mask_token >= batches.vocabulary) {
      return InvalidInput("is " + std::to_string(options.mask_token) +
                              ": expected less than the vocabulary size " +
                              std::to_string(batches.vocabulary),
                          "--mask-token");
    }
  }
  return Batches::Make(data, batches);
}

// The images or clicks that the run reads, or makes up where there is no
// --data.
template <typename Samples, typename SampleOptions>
Result<Samples> SamplesOf(const Options& options, Result<SampleOptions> of,
                          uint64_t seed) {
  if (!of) return of.error().At(options.model);
  of->seed = seed;
  if (options.validate_every > 0) {
    of->validation_batches = options.validate_batches;
  }
  return Samples::Open(options.data, *of);
}

// Images or clicks, of which each has a label.
template <typename Samples>
void SetSamples(const Samples& samples, TrainingJob& training) {
  training.load = LoadTraining(samples);
  training.data = samples.Fingerprint();
  training.validation.batches = samples.options().validation_batches;
  training.validation.load = LoadValidation(samples);
  training.validation.labels = [batch = samples.options().global_batch](
                                   int64_t) { return Result<int64_t>(batch); };
}

}  // namespace

Result<RunData> ReadData(const Options& options, const Graph& graph,
                         uint64_t seed) {
  if (options.Given("--mask-token") &&
      RowKindOf(graph) != RowKind::kMaskedToken) {
    return InvalidInput(
        "has no effect: the model is not trained on masked tokens",
        "--mask-token");
  }
  RunData data;
  if (UnitOf(graph) == "samples") {
    TESSERA_TRY(data.clicks,
                SamplesOf<Clicks>(options, ClickOptionsOf(graph), seed));
  } else if (UnitOf(graph) != "tokens") {
    TESSERA_TRY(data.images,
                SamplesOf<Images>(options, ImageOptionsOf(graph), seed));
  } else {
    if (options.data.empty()) return InvalidInput("needs --data FILE", "run");
    TESSERA_RETURN_IF_ERROR(CheckClasses(graph, options.model));
    TESSERA_TRY(TokenData tokens,
                OpenTokens(options.data, VocabularyOf(graph)));
    data.tokens = std::make_unique<TokenData>(std::move(tokens));
    TESSERA_TRY(data.batches, BatchesOf(options, graph, seed, *data.tokens));
  }
  return data;
}

bool LooksWider(const TokenData& tokens) {
  constexpr int64_t kLeast = 16;
  constexpr int64_t kLookedAt = 4096;
  constexpr int64_t kNearZero = 4;
  if (tokens.format() != TokenFormat::kNanoGpt || tokens.size() < kLeast) {
    return false;
  }
  bool lower_vary = false;
  for (int64_t i = 0; i + 1 < std::min(tokens.size(), kLookedAt); i += 2) {
    if (tokens[i + 1] >= kNearZero) return false;
    lower_vary = lower_vary || tokens[i] >= kNearZero;
  }
  return lower_vary;
}

void SetData(const RunData& data, TrainingJob& training) {
  if (data.images) return SetSamples(*data.images, training);
  if (data.clicks) return SetSamples(*data.clicks, training);
  training.load = LoadTraining(*data.batches);
  training.data = data.batches->Fingerprint();
  training.places_are_positions = data.batches->options().end_of_text < 0;
  training.validation.batches = data.batches->options().validation_batches;
  training.validation.load = LoadValidation(*data.batches);
  training.validation.labels = [&data](int64_t batch) {
    return data.batches->ValidationLabels(batch);
  };
}

}  // namespace tessera
