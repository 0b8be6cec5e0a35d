// How many threads a rank's kernels run on does not show in a single bit: work
// is cut into the same blocks and added in the same order. The tensors are
// large enough that every kind of kernel has work for several threads.

#include <gtest/gtest.h>

#include "tests/support/paths.h"
#include "tests/support/tiny_training.h"
#include "tests/support/train_in_memory.h"

namespace tessera {
namespace {

Graph Gpt2(int64_t batch, int64_t seq_len) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  auto forward = ImportModel(ExamplePath("models/gpt2-tiny"), options);
  return Differentiate(std::move(forward).value()).value();
}

Trained TrainOn(const Graph& graph, const std::string& strategy, int threads) {
  const Strategy parsed = ParseStrategy(strategy).value();
  const int ranks = std::max(1, parsed.dp) * parsed.tp * parsed.pp;
  TrainInMemoryOptions options;
  options.steps = 2;
  options.threads = threads;
  const auto tasks =
      LowerStrategy(graph, ranks, strategy, options.training).value();
  const auto trained = TrainInMemory(graph, tasks, options);
  TESSERA_CHECK(trained.has_value()) << trained.error().ToString();
  return *trained;
}

bool SameBits(const Trained& a, const Trained& b) {
  return a.losses == b.losses && a.weights == b.weights &&
         a.first_moments == b.first_moments;
}

void ExpectSameBits(const Graph& graph,
                    const std::vector<std::string>& strategies) {
  for (const std::string& strategy : strategies) {
    const Trained one = TrainOn(graph, strategy, 1);
    EXPECT_TRUE(SameBits(TrainOn(graph, strategy, 2), one)) << strategy;
  }
}

TEST(KernelThreads, SameBits) {
  const Graph graph = Gpt2(4, 32);
  ExpectSameBits(graph, {"mbs=4", "dp=2,mbs=2,zero=3",
                         "dp=1,mbs=4,recompute=full,offload=optimizer:host,"
                         "activations:host"});
  // The comparison can fail.
  EXPECT_FALSE(
      SameBits(TrainOn(graph, "mbs=4", 2), TrainOn(graph, "mbs=2", 2)));
}

}  // namespace
}  // namespace tessera
