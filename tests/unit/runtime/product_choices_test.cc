// Algorithms of products that each rank would choose otherwise: all ranks take
// the same.

#include "runtime/product_choices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <string>

#include "planner/lower/lower.h"
#include "runtime/comm/thread_world.h"
#include "runtime/trainer.h"
#include "tests/support/queue_cpu_device.h"
#include "tests/support/tiny_training.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A product is told by its m alone.
MatMulKey Key(int64_t m) {
  MatMulKey key;
  key.problem.m = m;
  return key;
}

// Chooses an algorithm of its own for whatever product.
class FakeTuner : public ProductTuner {
 public:
  explicit FakeTuner(int rank) : rank_(rank) {}

  std::string Maker() const override { return maker; }
  Result<void> ReadChoices(std::string_view choices,
                           std::string_view path) override {
    read_.emplace_back(choices);
    if (choices == "broken")
      return InvalidInput("is broken", std::string(path));
    return {};
  }
  // "1:r0 2:r3 ": of product 1 rank 0's algorithm, of product 2 rank 3's.
  std::string Choices() const override {
    std::string text;
    for (const auto& [key, choice] : rows_) {
      text += std::to_string(key.problem.m) + ":r" +
              std::to_string(choice.algorithm[0]) + " ";
    }
    return text;
  }
  std::vector<MatMulKey> TakeUntuned() override {
    return ++calls_ <= std::ssize(untuned)
               ? untuned[static_cast<size_t>(calls_) - 1]
               : std::vector<MatMulKey>();
  }
  Result<MatMulChoice> Tune(const MatMulKey& key) override {
    tuned_.push_back(key.problem.m);
    if (key.problem.m == no_memory_for) return InvalidInput("no memory");
    return MatMulChoice{{static_cast<uint64_t>(rank_)}, 0.5};
  }
  void Adopt(const std::map<MatMulKey, MatMulChoice>& rows) override {
    for (const auto& [key, choice] : rows) rows_[key] = choice;
  }

  std::string maker = "GPU";
  int64_t no_memory_for = 0;
  std::vector<std::vector<MatMulKey>> untuned;  // by call of TakeUntuned
  const std::vector<int64_t>& tuned() const { return tuned_; }
  const std::vector<std::string>& read() const { return read_; }

 private:
  const int rank_;
  int64_t calls_ = 0;
  std::map<MatMulKey, MatMulChoice> rows_;
  std::vector<int64_t> tuned_;
  std::vector<std::string> read_;
};

// f(rank, its messages, its tuner) on a thread each; with devices that have
// queues, or without.
template <typename F>
std::vector<FakeTuner> OnRanks(int ranks, bool queues, F f) {
  auto worlds = MakeThreadWorlds(ranks, {Duration::FromSeconds(30)});
  std::vector<FakeTuner> tuners;
  for (int rank = 0; rank < ranks; ++rank) tuners.emplace_back(rank);
  std::vector<int> everyone(static_cast<size_t>(ranks));
  std::iota(everyone.begin(), everyone.end(), 0);
  RunThreads(ranks, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    CpuDevice cpu;
    QueueCpuDevice queue_cpu(r);
    const auto queue_world = MakeQueueWorld(*worlds[r], queue_cpu);
    CommWorld& world = queues ? *queue_world : *worlds[r];
    RankDevice& device = queues ? static_cast<RankDevice&>(queue_cpu) : cpu;
    f(rank, HostMessages(device, *world.Group(everyone).value()), tuners[r]);
    worlds[r].reset();
  });
  return tuners;
}

TEST(ProductChoicesTest, TheLowestRankWithAProductChoosesForAll) {
  // Stages that have products of their own, one that has none, and replicas.
  const std::vector<std::vector<MatMulKey>> untuned = {
      {Key(5), Key(1)}, {}, {Key(1), Key(7), Key(2)}, {Key(7), Key(5)}};
  for (const bool queues : {false, true}) {
    const auto tuners =
        OnRanks(4, queues, [&](int rank, HostMessages all, FakeTuner& tuner) {
          const auto agreed =
              AgreeOnProducts(untuned[static_cast<size_t>(rank)], tuner, all);
          EXPECT_TRUE(agreed) << agreed.error().ToString();
        });
    for (const FakeTuner& tuner : tuners) {
      EXPECT_EQ(tuner.Choices(), "1:r0 2:r2 5:r0 7:r2 ");
    }
    EXPECT_THAT(tuners[0].tuned(), ElementsAre(5, 1));
    EXPECT_THAT(tuners[1].tuned(), IsEmpty());
    EXPECT_THAT(tuners[2].tuned(), ElementsAre(7, 2));
    EXPECT_THAT(tuners[3].tuned(), IsEmpty());
  }
}

TEST(ProductChoicesTest, NobodyChoosesWhereTheLowestRankHasNoMemory) {
  const auto tuners =
      OnRanks(2, false, [](int rank, HostMessages all, FakeTuner& tuner) {
        if (rank == 0) tuner.no_memory_for = 3;
        EXPECT_TRUE(AgreeOnProducts({Key(3), Key(4)}, tuner, all));
      });
  EXPECT_EQ(tuners[0].Choices(), "4:r0 ");
  EXPECT_EQ(tuners[1].Choices(), "4:r0 ");
  EXPECT_THAT(tuners[1].tuned(), IsEmpty());
}

TEST(ProductChoicesTest, RankZerosFileIsEveryones) {
  const auto share = [](const std::string& of_zero) {
    return OnRanks(3, false, [&](int rank, HostMessages all, FakeTuner& tuner) {
      const auto shared = ShareProducts(rank == 0 ? of_zero : "of another host",
                                        "FILE", tuner, all);
      EXPECT_EQ(shared.has_value(), of_zero != "broken");
      if (!shared) {
        EXPECT_EQ(shared.error().ToString(), "FILE: is broken");
      }
    });
  };
  for (const FakeTuner& tuner : share("chosen before")) {
    EXPECT_THAT(tuner.read(), ElementsAre("chosen before"));
  }
  for (const FakeTuner& tuner : share("")) EXPECT_THAT(tuner.read(), IsEmpty());
  share("broken");
}

class TunedCpuDevice : public CpuDevice {
 public:
  explicit TunedCpuDevice(FakeTuner& tuner) : tuner_(tuner) {}
  ProductTuner* product_tuner() override { return &tuner_; }

 private:
  FakeTuner& tuner_;
};

// Trains for as many steps on two stages; what the ranks return.
std::vector<Result<TrainingResult>> TrainTuned(std::vector<FakeTuner>& tuners,
                                               int64_t steps) {
  const Graph graph = ImportTiny(TinyGpt2(2), 4, 8);
  const TaskGraph tasks =
      LowerStrategy(graph, 2, "pp=2,mbs=2", TrainingOptions()).value();
  const TokenData data = TinyTokens();
  auto worlds = MakeThreadWorlds(2, {Duration::FromSeconds(30)});
  std::vector<Result<TrainingResult>> results(2, InvalidInput("did not run"));
  RunThreads(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    TunedCpuDevice device(tuners[r]);
    TrainingJob job;
    job.graph = &graph;
    job.tasks = &tasks;
    job.steps = steps;
    job.world = worlds[r].get();
    job.device = &device;
    job.load = LoadAtRandom(data, 0, graph);
    job.tune = true;
    results[r] = Train(job);
    worlds[r].reset();
  });
  return results;
}

TEST(ProductChoicesTest, TrainingAgreesBetweenStepsAndTellsOfAll) {
  std::vector<FakeTuner> tuners = {FakeTuner(0), FakeTuner(1)};
  // The second stage alone comes upon products later.
  tuners[0].untuned = {{Key(1)}};
  tuners[1].untuned = {{Key(1), Key(2)}, {}, {Key(3)}};
  for (const auto& result : TrainTuned(tuners, 3)) {
    ASSERT_TRUE(result) << result.error().ToString();
    EXPECT_EQ(result->products, "1:r0 2:r1 3:r1 ");
  }
}

TEST(ProductChoicesTest, GpusOfOtherKindsAreRefused) {
  std::vector<FakeTuner> tuners = {FakeTuner(0), FakeTuner(1)};
  tuners[1].maker = "another GPU";
  for (const auto& result : TrainTuned(tuners, 1)) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().ToString(),
              "rank 1 was started with another GPU, cuBLASLt or use of --tune "
              "than rank 0");
  }
}

}  // namespace
}  // namespace tessera
