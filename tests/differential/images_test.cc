// Models of images: every way of splitting one trains as it does on one rank.

#include <gtest/gtest.h>

#include <algorithm>

#include "planner/plan/strategy.h"
#include "tests/support/tiny_training.h"
#include "tests/support/train_in_memory.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 8;

// With that number of microbatches.
Trained Train(const Graph& graph, std::string strategy, int microbatches) {
  const Strategy s = ParseStrategy(strategy).value();
  strategy +=
      ",mbs=" + std::to_string(kBatch / microbatches / std::max(1, s.dp));
  const int ranks = std::max(1, s.dp) * s.tp * s.pp * s.cp;
  const TrainInMemoryOptions options;
  const auto tasks = LowerStrategy(graph, ranks, strategy, options.training);
  EXPECT_TRUE(tasks.has_value()) << strategy << tasks.error().ToString();
  auto trained = TrainInMemory(graph, *tasks, options);
  EXPECT_TRUE(trained.has_value()) << strategy << trained.error().ToString();
  return std::move(trained).value();
}

// A batch norm's statistics are of a microbatch: plans of as many microbatches
// are alike.
void ExpectEqualsSerial(const Graph& graph, int microbatches,
                        std::initializer_list<const char*> strategies) {
  const Trained serial = Train(graph, "dp=1", microbatches);
  EXPECT_GT(std::abs(serial.losses.front() - serial.losses.back()), 1e-3);
  for (const char* strategy : strategies) {
    EXPECT_EQ(Difference(Train(graph, strategy, microbatches), serial), "")
        << strategy;
  }
}

TEST(ImagesEqualSerial, Bottlenecks) {
  const Graph graph = ImportTiny(TinyResNet(), kBatch, 1);
  ExpectEqualsSerial(
      graph, 1,
      {"dp=2", "dp=4,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=4",
       "dp=2,tp=2,zero=3", "dp=2,recompute=full"});
  ExpectEqualsSerial(graph, 2,
                     {"dp=2", "dp=2,zero=2", "pp=2", "pp=2,dp=2,tp=2,zero=1",
                      "pp=2,schedule=zb-h1", "pp=4"});
}

// Groups of samples with their own statistics. Shards that cut no group
// exchange nothing, others do; heights are merged as ever.
TEST(ImagesEqualSerial, GhostBatchNorm) {
  for (const int groups : {1, 2, 4}) {
    SCOPED_TRACE(groups);
    std::string config = TinyResNet("basic");
    config.insert(config.size() - 1,
                  ", \"batch_norm_groups\": " + std::to_string(groups));
    const Graph graph = ImportTiny(config, kBatch, 1);
    ExpectEqualsSerial(graph, 1,
                       {"dp=2", "dp=4", "dp=8,zero=1", "dp=2,tp=2,zero=3",
                        "dp=2,cp=2", "dp=4,recompute=full"});
    ExpectEqualsSerial(graph, 2, {"dp=2,zero=2", "dp=4", "pp=2,dp=2"});
  }
}

// A group's statistics are its own: networks of other groups train otherwise.
TEST(ImagesEqualSerial, GroupsAreAPartOfTheModel) {
  const auto losses = [](const std::string& groups) {
    std::string config = TinyResNet("basic");
    config.insert(config.size() - 1, ", \"batch_norm_groups\": " + groups);
    return Train(ImportTiny(config, kBatch, 1), "dp=1", 1).losses;
  };
  EXPECT_GT(std::abs(losses("1").back() - losses("4").back()), 1e-4);
}

// 4 groups over 2 or 4 ranks: no state travels. 2 groups over 4: they do.
TEST(ImagesEqualSerial, WholeGroupsExchangeNothing) {
  const auto states = [](int groups, const std::string& strategy, int ranks) {
    std::string config = TinyResNet("basic");
    config.insert(config.size() - 1,
                  ", \"batch_norm_groups\": " + std::to_string(groups));
    const Graph graph = ImportTiny(config, kBatch, 1);
    const auto tasks =
        LowerStrategy(graph, ranks, strategy, TrainInMemoryOptions().training);
    EXPECT_TRUE(tasks.has_value()) << tasks.error().ToString();
    return std::ranges::count_if(tasks->tasks, [&](const Task& task) {
      return task.kind == TaskKind::kComm &&
             tasks->value(task.reads[0]).what == "state";
    });
  };
  EXPECT_EQ(states(4, "dp=2,mbs=4", 2), 0);
  EXPECT_EQ(states(4, "dp=4,mbs=2", 4), 0);
  EXPECT_GT(states(2, "dp=4,mbs=2", 4), 0);
  EXPECT_GT(states(1, "dp=2,mbs=4", 2), 0);
}

// Targets are split by samples and by classes; a shard has its share of a mean.
TEST(ImagesEqualSerial, LossesOfElements) {
  for (const char* loss : {"mean_squared_error", "binary_cross_entropy"}) {
    std::string config = TinyResNet("basic");
    config.insert(config.size() - 1,
                  ", \"loss\": \"" + std::string(loss) + '"');
    const Graph graph = ImportTiny(config, kBatch, 1);
    ExpectEqualsSerial(graph, 1, {"dp=2,zero=1", "tp=2", "dp=2,tp=2,zero=3"});
    ExpectEqualsSerial(graph, 2, {"pp=2", "dp=2"});
  }
}

// Groups are split before the channels in them.
TEST(ImagesEqualSerial, Groups) {
  std::string config = TinyResNet();
  config.insert(config.size() - 1, R"(, "groups": 4, "width_per_group": 32)");
  const Graph graph = ImportTiny(config, kBatch, 1);
  ExpectEqualsSerial(graph, 1, {"dp=2,zero=3", "tp=2", "tp=4", "dp=2,tp=2"});
}

TEST(ImagesEqualSerial, BasicLayers) {
  const Graph graph = ImportTiny(TinyResNet("basic", 2), kBatch, 1);
  ExpectEqualsSerial(graph, 1, {"dp=2,zero=3", "tp=2", "dp=2,tp=2"});
}

// The class is that of one place, which is on one of the ranks that split them.
TEST(ImagesEqualSerial, Patches) {
  const Graph graph = ImportTiny(TinyVit(2), kBatch, 1);
  ExpectEqualsSerial(
      graph, 2,
      {"dp=2,zero=1", "dp=4,zero=3", "tp=2", "tp=4", "tp=2,sp=1", "cp=2",
       "cp=5", "cp=3,cp-kind=ring", "cp=2,tp=2,cp-kind=ulysses",
       "pp=2,dp=2,zero=2", "pp=4,schedule=zb-h1", "pp=2,tp=2,recompute=full"});
}

// The height is what of images is in place of a sequence: rows of neighbours
// are exchanged (halos), of shards of unlike heights, too. Its last images are
// 2 pixels high, which three ranks do not share.
TEST(ImagesEqualSerial, Height) {
  const Graph graph = ImportTiny(TinyResNet(), kBatch, 1);
  ExpectEqualsSerial(graph, 1,
                     {"cp=2", "cp=2,dp=2,zero=2", "tp=2,sp=1", "cp=2,tp=2"});
  ExpectEqualsSerial(graph, 2, {"cp=2,pp=2"});
}

// Windows of every kind over images of an odd size, as the letters say that
// follow: strided, padded, dilated, that leave pixels out, that overlap.
TEST(ImagesEqualSerial, HeightUnderWindows) {
  const auto network = [](const std::string& layers) {
    return ImportTiny(
        R"({"model_type": "cnn", "image_size": 13, "num_labels": 5,
            "layers": ["conv 4 3 pad 1", )" +
            layers + R"(, "relu", "mean", "classifier"]})",
        kBatch, 1);
  };
  for (const char* layers :
       {R"("conv 4 3 pad 1")", R"("conv 4 3 pad 2 dilation 2")",
        R"("conv 4 5 pad 2 stride 2")", R"("conv 4 7 stride 3")",
        R"("conv 4 2x3 pad 1x0")", R"("conv 4 1 stride 2")", R"("max-pool 2")",
        R"("max-pool 3 stride 2 pad 1")", R"("max-pool 3 stride 1")",
        R"("average-pool 3 stride 2 pad 1")", R"("average-pool 2 stride 1")",
        R"("average-pool 3 stride 2 ceil")"}) {
    SCOPED_TRACE(layers);
    ExpectEqualsSerial(network(layers), 1, {"cp=2", "cp=3", "cp=2,dp=2"});
  }
}

// Convolutions with biases, branches, a dense layer over images, a second loss.
TEST(ImagesEqualSerial, Branches) {
  const Graph graph = ImportTiny(
      R"({"model_type": "cnn", "image_size": 9, "num_labels": 5, "layers": [
            "conv 6 3 stride 2 pad 1", "relu", "max-pool 3 stride 1 pad 1",
            {"branches": [["conv-norm-relu 4 1"],
                          ["conv 2 1x3 pad 0x1", "conv 4 3x1 pad 1x0"],
                          ["average-pool 3 stride 1 pad 1", "conv 2 1"]]},
            {"residual": ["conv 10 3 pad 1", "relu"]},
            {"auxiliary": ["mean", "classifier"]},
            "max-pool 2", "dropout 0.2", "linear 8", "relu", "classifier"]})",
      kBatch, 1);
  ExpectEqualsSerial(graph, 1,
                     {"dp=2", "dp=2,zero=3", "tp=2", "tp=2,dp=4", "cp=2"});
  ExpectEqualsSerial(graph, 2, {"pp=2", "pp=2,tp=2"});
}

}  // namespace
}  // namespace tessera
