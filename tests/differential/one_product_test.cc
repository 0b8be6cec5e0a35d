// The gradients of queries, keys and values, or of a gate, as one product with
// their weights (runtime/fuse_calls.cc), on a device that has CUDA's fused
// kernels: the losses and weights of the CPU, which makes a product of each.

#include <string>

#include "tests/support/tiny_training.h"
#include "tests/support/train_in_memory.h"

namespace tessera {
namespace {

struct Case {
  std::string name;
  std::string model;
  int ranks = 1;
  std::string strategy;
  // Kernels with rows that lie apart, in a step of all ranks: those that make
  // gradients of queries, keys and values, and read them but for that product.
  int64_t calls = 0;
  bool graphs = false;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class OneProductTest : public ::testing::TestWithParam<Case> {};

TEST_P(OneProductTest, TrainsAsOneProductForEach) {
  const Case& c = GetParam();
  const Graph graph = ImportTiny(c.model, /*batch=*/8, /*seq_len=*/8);
  TrainInMemoryOptions options;
  // The gradients of keys' biases are rounding alone, of which AdamW would make
  // steps.
  options.training.optimizer = "momentum";
  const auto tasks =
      LowerStrategy(graph, c.ranks, c.strategy, options.training);
  ASSERT_TRUE(tasks.has_value()) << tasks.error().ToString();
  options.streams = StreamsRun::kInOrder;
  const auto expected = TrainInMemory(graph, *tasks, options);
  ASSERT_TRUE(expected.has_value()) << expected.error().ToString();
  for (const StreamsRun streams :
       {StreamsRun::kInQueues, StreamsRun::kOnLoopback}) {
    options.streams = streams;
    options.graphs = c.graphs;
    const auto actual = TrainInMemory(graph, *tasks, options);
    ASSERT_TRUE(actual.has_value()) << actual.error().ToString();
    EXPECT_EQ(Difference(*actual, *expected), "");
    if (c.graphs) {
      EXPECT_GT(actual->calls_with_gaps, 0);
    } else {
      EXPECT_EQ(actual->calls_with_gaps, options.steps * c.calls);
    }
  }
}

// Of GPT-2 attention's gradients make all three, which the gradients of three
// weights and three biases read; of Llama they make those of values, and
// rotations the other two. Its gate has two products of one input, too, whose
// gradients one kernel makes.
constexpr int64_t kGpt2 = 1 + 3 + 3;
constexpr int64_t kLlama = 1 + 2 + 3 + 1 + 2;

INSTANTIATE_TEST_SUITE_P(
    All, OneProductTest,
    ::testing::Values(
        Case{"gpt2", TinyGpt2(2), 1, "mbs=8", 2 * kGpt2},
        Case{"gpt2_graphs", TinyGpt2(2), 1, "mbs=4", 0, true},
        Case{"gpt2_microbatches", TinyGpt2(2), 1, "mbs=2", 4 * 2 * kGpt2},
        Case{"gpt2_zero1", TinyGpt2(2), 2, "dp=2,mbs=2,zero=1",
             2 * 2 * 2 * kGpt2},
        Case{"gpt2_zero2", TinyGpt2(1), 2, "dp=2,mbs=2,zero=2", 2 * 2 * kGpt2},
        Case{"gpt2_optimizer_on_the_host", TinyGpt2(1), 1,
             "mbs=8,offload=optimizer:host", kGpt2},
        Case{"gpt2_tp", TinyGpt2(1), 2, "tp=2,mbs=8", 2 * kGpt2},
        Case{"gpt2_pp", TinyGpt2(2), 2, "pp=2,mbs=2", 4 * 2 * kGpt2},
        Case{"gpt2_split_backward", TinyGpt2(2), 2, "pp=2,mbs=2,schedule=zb-h1",
             4 * 2 * kGpt2},
        Case{"gpt2_recompute", TinyGpt2(1), 1, "mbs=8,recompute=full", kGpt2},
        Case{"llama", TinyLlama(2), 1, "mbs=8", 2 * kLlama},
        Case{"llama_microbatches", TinyLlama(1), 1, "mbs=4", 2 * kLlama},
        // Queries and keys go through norms of heads.
        Case{"qwen3", TinyQwen(1, false), 1, "mbs=8", 0},
        // Gathered parameters have places of their own; shards of 4 keys are
        // no 8; attention's gradients of a ring are added up.
        Case{"gpt2_zero3", TinyGpt2(1), 2, "dp=2,mbs=4,zero=3", 0},
        Case{"llama_tp", TinyLlama(1), 2, "tp=2,mbs=8", 0},
        Case{"gpt2_ring", TinyGpt2(1), 2, "cp=2,mbs=8,cp-kind=ring", 0},
        Case{"llama_offload", TinyLlama(1), 1, "mbs=8,offload=parameters:host",
             0}),
    [](const auto& info) { return info.param.name; });

// What is saved of weights that lie one behind the other is what is saved of
// others: training goes on alike.
TEST(OneProduct, SavesItsWeights) {
  const Graph graph = ImportTiny(TinyLlama(1), /*batch=*/8, /*seq_len=*/8);
  TrainInMemoryOptions options;
  options.training.optimizer = "momentum";
  const auto tasks = LowerStrategy(graph, 1, "mbs=8", options.training);
  ASSERT_TRUE(tasks.has_value()) << tasks.error().ToString();
  const auto go_on = [&](StreamsRun saves, StreamsRun loads) {
    const std::string path = TempPath("checkpoint");
    options.streams = saves;
    options.load_path = {};
    options.save_path = path;
    EXPECT_TRUE(TrainInMemory(graph, *tasks, options).has_value());
    options.streams = loads;
    options.load_path = path;
    options.save_path = {};
    auto trained = TrainInMemory(graph, *tasks, options);
    std::filesystem::remove(path);
    return std::move(trained).value();
  };
  const Trained expected = go_on(StreamsRun::kInOrder, StreamsRun::kInOrder);
  for (const auto& [saves, loads] :
       {std::pair{StreamsRun::kInQueues, StreamsRun::kInOrder},
        std::pair{StreamsRun::kInOrder, StreamsRun::kInQueues}}) {
    EXPECT_EQ(Difference(go_on(saves, loads), expected), "");
  }
}

// x -> silu(x a + x b) (x c): the gradient of x a is that of x b, which two
// products read.
TEST(OneProduct, IsNoneWhereTwoProductsReadOneGradient) {
  constexpr int64_t kBatch = 8;
  constexpr int64_t kWidth = 16;
  GraphBuilder builder("sums", kBatch, 1, DType::kFloat64);
  builder.BeginBlock("gate");
  const TensorId tokens = builder.Input("tokens", {kBatch, 1}, DType::kInt32);
  const TensorId labels = builder.Input("labels", {kBatch, 1}, DType::kInt32);
  const auto weight = [&](const std::string& name, int64_t rows) {
    return builder.Weight(name, {rows, kWidth}, {.stddev = 0.3}, true);
  };
  const TensorId x =
      builder.Add1("embedding", "lookup", {tokens, weight("table", 40)});
  const auto linear = [&](const std::string& name, TensorId in, int64_t rows) {
    return builder.Add1("linear", name, {in, weight(name + ".weight", rows)},
                        "bsi,oi->bso");
  };
  const TensorId sum = builder.Add1(
      "add", "sum", {linear("a", x, kWidth), linear("b", x, kWidth)},
      "bsh,bsh->bsh");
  const TensorId gate = builder.Add1("silu", "silu", {sum}, "bsh->bsh");
  const TensorId gated = builder.Add1(
      "multiply", "gated", {gate, linear("c", x, kWidth)}, "bsh,bsh->bsh");
  const TensorId count = builder.Add1("count_labels", "count", {labels});
  const Graph graph =
      Differentiate(
          builder
              .Finish(builder.Add1("cross_entropy", "loss",
                                   {linear("head", gated, 40), labels, count}))
              .value())
          .value();
  TrainInMemoryOptions options;
  options.training.optimizer = "momentum";
  const auto tasks = LowerStrategy(graph, 1, "mbs=8", options.training);
  ASSERT_TRUE(tasks.has_value()) << tasks.error().ToString();
  options.streams = StreamsRun::kInOrder;
  const auto expected = TrainInMemory(graph, *tasks, options);
  ASSERT_TRUE(expected.has_value()) << expected.error().ToString();
  options.streams = StreamsRun::kInQueues;
  const auto actual = TrainInMemory(graph, *tasks, options);
  ASSERT_TRUE(actual.has_value()) << actual.error().ToString();
  EXPECT_EQ(Difference(*actual, *expected), "");
  EXPECT_EQ(actual->calls_with_gaps, 0);
}

}  // namespace
}  // namespace tessera
