// A model whose vocabulary is padded trains as it does without padding, on one
// rank and on four: losses and weights are equal up to rounding, and rows of
// padding stay zero. With 40 tokens in 64 rows, a rank of four that split them
// has 16: the third's second half is padding, the fourth's all.

#include <gtest/gtest.h>

#include <algorithm>

#include "planner/ir/vocabulary.h"
#include "tests/support/tiny_outcome.h"
#include "tests/support/tiny_training.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 8;
constexpr int64_t kLength = 8;
constexpr int64_t kSteps = 6;

std::string Padded(std::string config, const std::string& multiple) {
  const std::string key = R"("vocab_size": 40)";
  const size_t at = config.find(key);
  TESSERA_CHECK(at != std::string::npos) << config;
  return config.insert(at + key.size(), R"(, "vocab_multiple": )" + multiple);
}

// The outcome without rows of padding, which must be zero.
Outcome WithoutPadding(Outcome outcome, const Graph& graph) {
  for (const auto& [weight, tokens] : PaddedWeights(graph)) {
    const Tensor& tensor = graph.tensor(weight);
    std::vector<double>& elements = outcome.weights[tensor.name];
    const auto kept =
        static_cast<int64_t>(elements.size()) / tensor.shape[0] * tokens;
    EXPECT_TRUE(std::all_of(elements.begin() + kept, elements.end(),
                            [](double x) { return x == 0; }))
        << tensor.name;
    elements.resize(static_cast<size_t>(kept));
  }
  return outcome;
}

void ExpectEqualsUnpadded(const std::string& config, TrainingOptions options,
                          const std::vector<std::string>& strategies) {
  TinyRun run;
  run.steps = kSteps;
  run.options = options;
  run.options.learning_rate = 0.01;
  const Graph plain = ImportTiny(config, kBatch, kLength);
  const Outcome expected = OutcomeOf(plain, 1, "dp=1,mbs=8", run);
  ASSERT_EQ(expected.losses.size(), static_cast<size_t>(kSteps));
  const Graph padded = ImportTiny(Padded(config, "64"), kBatch, kLength);
  ASSERT_FALSE(PaddedWeights(padded).empty());
  const auto difference = [&](int ranks, const std::string& strategy) {
    return Difference(
        WithoutPadding(OutcomeOf(padded, ranks, strategy, run), padded),
        expected);
  };
  EXPECT_EQ(difference(1, "dp=1,mbs=8"), "");
  for (const std::string& strategy : strategies) {
    EXPECT_EQ(difference(4, strategy), "") << strategy;
  }
}

TEST(PaddedVocabulary, OfGpt2EqualsUnpadded) {
  ExpectEqualsUnpadded(
      TinyGpt2(2, 4), {},
      {"dp=4,mbs=2", "dp=4,mbs=1,zero=3", "tp=4,mbs=4", "pp=4,mbs=2",
       "dp=2,tp=2,zero=1", "tp=2,pp=2,mbs=4", "tp=4,sp=1,mbs=8"});
}

// A head beside the table.
TEST(PaddedVocabulary, OfLlamaEqualsUnpadded) {
  ExpectEqualsUnpadded(TinyLlama(1), {}, {"tp=4,mbs=4", "dp=2,tp=2,zero=2"});
}

// A bias of the head.
TEST(PaddedVocabulary, OfBertEqualsUnpadded) {
  ExpectEqualsUnpadded(TinyBert(1), {}, {"dp=4,mbs=2", "tp=4,mbs=8"});
}

// Two lookups in one table.
TEST(PaddedVocabulary, OfT5EqualsUnpadded) {
  ExpectEqualsUnpadded(TinyT5(1), {}, {"tp=4,mbs=8", "dp=2,pp=2,mbs=2"});
}

// Its steps depend on means over all elements of a weight: of a matrix, and of
// the head's bias.
TEST(PaddedVocabulary, ByAdafactorEqualsUnpadded) {
  ExpectEqualsUnpadded(
      R"({"model_type": "rnn_lm", "cell": "lstm", "hidden_size": 8,
          "embedding_size": 6, "num_layers": 1, "vocab_size": 40,
          "steps_per_block": 4})",
      {.optimizer = "adafactor"}, {"dp=4,mbs=2,zero=1", "tp=4,mbs=8"});
}

// Clipping by a norm that every step exceeds.
TEST(PaddedVocabulary, DoesNotChangeTheNormOfGradients) {
  ExpectEqualsUnpadded(TinyGpt2(1, 4), {.optimizer = "sgd", .clip = 1e-3},
                       {"tp=4,mbs=8", "dp=2,tp=2"});
}

}  // namespace
}  // namespace tessera
