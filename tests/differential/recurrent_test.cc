// Recurrent networks: every way of splitting one trains as it does on one rank.

#include <gtest/gtest.h>

#include "planner/plan/strategy.h"
#include "tests/support/tiny_training.h"
#include "tests/support/train_in_memory.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 8;
constexpr int64_t kSteps = 6;

// Two layers of 8 features in blocks of four steps.
std::string TinyRnn(const std::string& kind, const std::string& cell,
                    const std::string& more) {
  return R"({"model_type": ")" + kind + R"(", "cell": ")" + cell +
         R"(", "hidden_size": 8, "embedding_size": 6, "num_layers": 2,
            "vocab_size": 40, "dropout": 0.1, "steps_per_block": 4)" +
         more + "}";
}

Trained Train(const Graph& graph, const std::string& strategy) {
  const Strategy s = ParseStrategy(strategy).value();
  const int ranks = std::max(1, s.dp) * s.tp * s.pp;
  const TrainInMemoryOptions options;
  const auto tasks = LowerStrategy(graph, ranks, strategy, options.training);
  EXPECT_TRUE(tasks.has_value()) << strategy << tasks.error().ToString();
  auto trained = TrainInMemory(graph, *tasks, options);
  EXPECT_TRUE(trained.has_value()) << strategy << trained.error().ToString();
  return std::move(trained).value();
}

void ExpectEqualsSerial(const Graph& graph,
                        std::initializer_list<const char*> strategies) {
  const Trained serial = Train(graph, "dp=1,mbs=8");
  EXPECT_GT(std::abs(serial.losses.front() - serial.losses.back()), 1e-4);
  for (const char* strategy : strategies) {
    EXPECT_EQ(Difference(Train(graph, strategy), serial), "") << strategy;
  }
}

TEST(RecurrentEqualsSerial, LanguageModelOfLstms) {
  ExpectEqualsSerial(
      ImportTiny(TinyRnn("rnn_lm", "lstm", ""), kBatch, kSteps),
      {"dp=4,mbs=2", "dp=4,mbs=2,zero=3", "tp=4,mbs=8", "dp=2,tp=2,zero=1",
       "pp=4,mbs=2", "pp=2,tp=2,mbs=4,schedule=zb-h1",
       "pp=2,dp=2,mbs=2,zero=1,recompute=full"});
}

TEST(RecurrentEqualsSerial, ClassifierOfGrus) {
  ExpectEqualsSerial(
      ImportTiny(TinyRnn("rnn_classifier", "gru", R"(, "num_labels": 40)"),
                 kBatch, kSteps),
      {"dp=4,mbs=2,zero=2", "tp=4,mbs=8", "pp=4,mbs=2", "pp=2,dp=2,mbs=2"});
}

TEST(RecurrentEqualsSerial, Translator) {
  ExpectEqualsSerial(
      ImportTiny(TinyRnn("rnn_translator", "lstm",
                         R"(, "source_len": 7, "num_attention_heads": 4)"),
                 kBatch, kSteps),
      {"dp=4,mbs=2", "dp=2,mbs=4,zero=3", "tp=4,mbs=8", "dp=2,tp=2,zero=2",
       "pp=4,mbs=2", "pp=2,tp=2,mbs=4", "pp=2,vp=2,mbs=4,schedule=interleaved",
       "pp=4,mbs=1,recompute=full"});
}

}  // namespace
}  // namespace tessera
