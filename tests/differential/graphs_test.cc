// A step that is replayed as graphs gives the bits of one whose tasks are
// enqueued one by one, also where step and learning rate change what kernels
// do.

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "tests/support/tiny_training.h"

namespace tessera {
namespace {

// With dropout, a learning rate that is another one in every step, and for fp16
// a loss scale.
TinyRun ScheduledRun(const std::string& optimizer) {
  TinyRun run;
  run.steps = 6;
  run.options.optimizer = optimizer;
  run.options.clip = 0.5;
  run.in_queues = true;
  LearningRate rate;
  rate.peak = 0.02;
  rate.warmup = 3;
  run.learning_rate = rate;
  return run;
}

class Graphs : public ::testing::TestWithParam<
                   std::tuple<std::string, int, DType, std::string>> {};

TEST_P(Graphs, GiveTheBitsOfSingleTasks) {
  const auto& [optimizer, ranks, dtype, strategy] = GetParam();
  const Graph graph = ImportTiny(TinyGpt2(2), 8, 8, dtype);
  TinyRun run = ScheduledRun(optimizer);
  const auto tasks = LowerStrategy(graph, ranks, strategy, run.options);
  ASSERT_TRUE(tasks) << tasks.error().ToString();
  const TokenData tokens = TinyTokens();
  const auto singly = TrainTiny(graph, *tasks, tokens, run);
  ASSERT_TRUE(singly) << singly.error().ToString();
  EXPECT_EQ(singly->graphs.tasks, 0);
  run.graphs = true;
  const auto replayed = TrainTiny(graph, *tasks, tokens, run);
  ASSERT_TRUE(replayed) << replayed.error().ToString();
  EXPECT_EQ(replayed->losses, singly->losses);
  EXPECT_GT(replayed->graphs.graphs, 0);
  EXPECT_GT(replayed->graphs.captured, replayed->graphs.graphs);
  // Every task has a time of its own.
  for (const Timeline& timeline : replayed->timelines) {
    for (const Span& span : timeline.spans) {
      EXPECT_GE(span.end.picoseconds, span.start.picoseconds);
      EXPECT_LE(span.end.picoseconds, timeline.step_time.picoseconds);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Plans, Graphs,
    ::testing::Values(std::tuple("adamw", 1, DType::kFloat32, "mbs=4"),
                      std::tuple("adamw", 1, DType::kFloat16, ""),
                      std::tuple("adafactor", 1, DType::kBFloat16, ""),
                      std::tuple("momentum", 2, DType::kFloat32, "dp=2,zero=1"),
                      std::tuple("sgd", 2, DType::kFloat32, "dp=1,pp=2,mbs=2"),
                      std::tuple("adamw", 2, DType::kBFloat16,
                                 "dp=1,tp=2,sp=1"),
                      std::tuple("adamw", 1, DType::kFloat32,
                                 "offload=optimizer:host,activations:host")));

// Two microbatches, too.
TEST(GraphsOfOneRank, HoldAllOfAStep) {
  const Graph graph = ImportTiny(TinyGpt2(2), 8, 8, DType::kFloat32);
  TinyRun run = ScheduledRun("adamw");
  run.graphs = true;
  const auto tasks = LowerStrategy(graph, 1, "mbs=4", run.options);
  const auto trained = TrainTiny(graph, *tasks, TinyTokens(), run);
  ASSERT_TRUE(trained) << trained.error().ToString();
  EXPECT_EQ(trained->graphs.graphs, 1);
  EXPECT_EQ(trained->graphs.captured, std::ssize(tasks->tasks));
  EXPECT_TRUE(trained->graphs.left.empty());
}

}  // namespace
}  // namespace tessera
