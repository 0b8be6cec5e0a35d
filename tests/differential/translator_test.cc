// Translators as their users train them: an encoder-decoder of attention and
// one of LSTMs, on padded rows in an order that is another every epoch, with a
// learning rate that falls in steps, on 4 ranks as on one.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "planner/plan/strategy.h"
#include "runtime/learning_rate.h"
#include "tests/support/tiny_outcome.h"
#include "tests/support/tiny_training.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 8;
constexpr int64_t kTargetLen = 8;
constexpr int64_t kSteps = 20;

constexpr const char* kLstms = R"({
  "model_type": "rnn_translator", "cell": "lstm", "hidden_size": 8,
  "embedding_size": 6, "num_layers": 2, "vocab_size": 40, "dropout": 0.1,
  "steps_per_block": 4, "source_len": 9, "num_attention_heads": 4})";

Graph T5() {
  return ImportTiny(TinyT5(2), kBatch, kTargetLen);
}
Graph Lstms() {
  return ImportTiny(kLstms, kBatch, kTargetLen);
}

BatchOptions Padded(const Graph& graph) {
  BatchOptions options = BatchOptionsOf(graph);
  options.seed = 7;
  options.end_of_text = 3;
  return options;
}

// 20 steps of 8 rows: of the 1000 tokens 58 rows of 9 + 8, so almost three
// epochs. The rate is a tenth from step 10 on, a hundredth from step 15.
Outcome Train(const Graph& graph, const std::string& strategy) {
  const TokenData data = TinyTokens();
  const Batches batches = Batches::Make(data, Padded(graph)).value();
  TinyRun run;
  run.steps = kSteps;
  run.batches = &batches;
  run.learning_rate = LearningRate{.decay = FindDecay("step").value(),
                                   .peak = 0.02,
                                   .warmup = 0,
                                   .steps = kSteps};
  const Strategy s = ParseStrategy(strategy).value();
  return OutcomeOf(graph, std::max(1, s.dp) * s.tp * s.pp, strategy, run);
}

void ExpectEqualsSerial(const Graph& graph) {
  const Outcome serial = Train(graph, "dp=1,mbs=8");
  ASSERT_EQ(serial.losses.size(), static_cast<size_t>(kSteps));
  for (const char* strategy :
       {"dp=4,mbs=2", "dp=4,mbs=1,zero=3", "tp=4,mbs=4", "pp=4,mbs=2",
        "dp=2,tp=2,zero=1", "dp=2,pp=2,mbs=2,zero=2", "tp=2,pp=2,mbs=4"}) {
    EXPECT_EQ(Difference(Train(graph, strategy), serial), "") << strategy;
  }
}

TEST(Translator, OfAttentionEqualsSerial) {
  ExpectEqualsSerial(T5());
}

TEST(Translator, OfLstmsEqualsSerial) {
  ExpectEqualsSerial(Lstms());
}

// What makes the above hard: ranks and microbatches have unlike numbers of
// labels, and an epoch is not a whole number of batches.
TEST(Translator, RowsArePaddedAndShuffled) {
  const TokenData data = TinyTokens();
  const Batches batches = Batches::Make(data, Padded(T5())).value();
  EXPECT_EQ(batches.rows(), 58);
  const auto labels = [&](int64_t sample) {
    const BatchRow row = batches.TrainingRow(sample).value();
    return kTargetLen - std::ranges::count(row.labels, -1);
  };
  std::set<int64_t> of_rank;
  for (int64_t rank = 0; rank < 4; ++rank) {
    of_rank.insert(labels(2 * rank) + labels(2 * rank + 1));
  }
  EXPECT_GT(of_rank.size(), 1u);
  std::set<std::vector<int32_t>> first;
  std::set<std::vector<int32_t>> second;
  int64_t in_place = 0;
  for (int64_t i = 0; i < 58; ++i) {
    const auto a = batches.TrainingRow(i).value().source;
    const auto b = batches.TrainingRow(58 + i).value().source;
    in_place += a == b ? 1 : 0;
    first.insert(a);
    second.insert(b);
  }
  EXPECT_EQ(first, second);
  EXPECT_LT(in_place, 10);
}

// Without weights every token of 40 is as likely: log 40 for each label, so in
// their mean too, whatever the number of places without one. A mean over all
// places would be less.
TEST(Translator, LossIsTheMeanOverLabels) {
  for (Graph graph : {T5(), Lstms()}) {
    for (Tensor& tensor : graph.tensors) tensor.init = {};
    for (const char* strategy : {"dp=1,mbs=8", "dp=4,mbs=1", "pp=4,mbs=2"}) {
      EXPECT_NEAR(Train(graph, strategy).losses[0], std::log(40.0), 1e-12)
          << strategy;
    }
  }
}

}  // namespace
}  // namespace tessera
