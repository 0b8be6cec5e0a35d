#include "planner/search/stage_cuts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <vector>

#include "planner/base/rng.h"

namespace tessera {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr uint64_t kAnywhere = ~uint64_t{0};

// A stage's time as stage_cuts.h has it, block by block.
double TimeOf(const StageProblem& problem, const StageOption& option, int begin,
              int end, int in_flight) {
  const auto sum = [&](const std::vector<LayerCost>& costs) {
    LayerCost all;
    for (int b = begin; b < end; ++b) {
      const LayerCost& cost = costs[static_cast<size_t>(b)];
      all.compute += cost.compute;
      all.exchange += cost.exchange;
      all.reduction += cost.reduction;
      all.update += cost.update;
      all.kept += cost.kept;
      all.stored += cost.stored;
      all.backward_peak = cost.backward_peak;
    }
    return all;
  };
  const auto time = [&](const LayerCost& all) {
    const double pace = std::max(all.compute, all.exchange);
    const double behind = std::max(0.0, all.reduction - pace * 2 / 3);
    return pace +
           (behind + all.update) / static_cast<double>(problem.microbatches);
  };
  const auto bytes = [&](const LayerCost& all) {
    return all.stored + in_flight * all.kept + all.backward_peak;
  };
  for (int b = begin; b < end && !option.may.empty(); ++b) {
    if (!option.may[static_cast<size_t>(b)]) return kNever;
  }
  const LayerCost none = sum(option.costs);
  if (bytes(none) <= option.memory) return time(none);
  if (option.again.empty()) return kNever;
  const LayerCost again = sum(option.again);
  if (bytes(again) > option.memory) return kNever;
  const double part =
      (bytes(none) - option.memory) / (bytes(none) - bytes(again));
  return (1 - part * part) * time(none) + part * part * time(again);
}

// Every way to cut the blocks and the devices: by number of stages the best.
struct BruteForce {
  const StageProblem& problem;
  std::map<int, double> best = {};

  // From the last stage to the first.
  void Add(int stages, int end, int units, double sum, double slowest) {
    if (end == 0) {
      if (units != 0 || stages < 2) return;
      const double time =
          sum + static_cast<double>(problem.microbatches - 1) * slowest;
      const auto [at, is_new] = best.try_emplace(stages, time);
      if (!is_new) at->second = std::min(at->second, time);
      return;
    }
    for (const StageOption& option : problem.options) {
      const int left = units - option.units;
      if (left < 0 || (option.begins >> left & 1) == 0) continue;
      for (int begin = 0; begin < end; ++begin) {
        const double time =
            TimeOf(problem, option, begin, end, problem.in_flight(stages + 1));
        if (time == kNever) continue;
        Add(stages + 1, begin, left, sum + time, std::max(slowest, time));
      }
    }
  }
};

StageProblem RandomProblem(Rng& rng) {
  StageProblem problem;
  problem.units = 2 + static_cast<int>(rng.Below(4));
  problem.microbatches = std::vector<int64_t>{1, 2, 7, 64}[rng.Below(4)];
  const auto most = static_cast<int>(problem.microbatches);
  problem.in_flight = [most](int stages) { return std::min(stages, most); };
  const size_t blocks = 2 + rng.Below(4);
  const auto draw = [&](uint32_t below) {
    return static_cast<double>(rng.Below(below));
  };
  const double memory = 100 + draw(1000);
  for (int units = 1; units < problem.units; ++units) {
    for (uint32_t ways = 1 + rng.Below(2); ways > 0; --ways) {
      StageOption& option = problem.options.emplace_back();
      option.units = units;
      option.begins = rng.Below(2) == 0 ? kAnywhere : rng.Below(32);
      option.memory = memory * (1 + draw(2));
      const bool again = rng.Below(2) == 0;
      const bool bars = rng.Below(3) == 0;
      for (size_t b = 0; b < blocks; ++b) {
        LayerCost cost;
        cost.compute = (1000 + draw(3000)) / units;
        cost.exchange = draw(2) * draw(6000);
        cost.reduction = draw(2) * draw(6000);
        cost.update = draw(500);
        cost.stored = draw(100);
        cost.kept = draw(100);
        cost.backward_peak = draw(50);
        option.costs.push_back(cost);
        if (bars) option.may.push_back(rng.Below(4) > 0);
        if (!again) continue;
        cost.compute *= 1.3;
        cost.kept *= 0.2;
        option.again.push_back(cost);
      }
    }
  }
  return problem;
}

TEST(UnlikeStages, AreTheBestOfAll) {
  Rng rng(7, 0);
  int possible = 0;
  for (int i = 0; i < 400; ++i) {
    const StageProblem problem = RandomProblem(rng);
    BruteForce all{problem};
    all.Add(0, static_cast<int>(problem.options[0].costs.size()), problem.units,
            0, 0);
    const auto found = CheapestStages(problem, [] { return false; });
    if (all.best.empty()) {
      EXPECT_TRUE(found.empty());
      continue;
    }
    ++possible;
    double least = kNever;
    for (const auto& [stages, time] : all.best) least = std::min(least, time);
    ASSERT_FALSE(found.empty());
    EXPECT_LE(found[0].time, least * (1 + kPaceStep));
    for (const StagesFound& one : found) {
      const int stages = static_cast<int>(one.stages.size());
      ASSERT_TRUE(all.best.contains(stages));
      EXPECT_GE(one.time, all.best[stages] * (1 - 1e-12));
      // It is what it says: devices and blocks are used up, and so much time.
      double sum = 0;
      double slowest = 0;
      int begin = 0;
      int units = 0;
      for (int s = 0; s < stages; ++s) {
        const StageCut& cut = one.stages[static_cast<size_t>(s)];
        const StageOption& option =
            problem.options[static_cast<size_t>(cut.option)];
        EXPECT_EQ(option.begins >> units & 1, 1);
        const double time = TimeOf(problem, option, begin, cut.end,
                                   problem.in_flight(stages - s));
        sum += time;
        slowest = std::max(slowest, time);
        begin = cut.end;
        units += option.units;
      }
      EXPECT_EQ(units, problem.units);
      EXPECT_EQ(begin, std::ssize(problem.options[0].costs));
      EXPECT_NEAR(sum + static_cast<double>(problem.microbatches - 1) * slowest,
                  one.time, 1e-9 * one.time);
    }
  }
  EXPECT_GT(possible, 200);
}

// Two layers of equal work and one of twice as much, on four devices: the third
// gets as many as the two together.
TEST(UnlikeStages, GiveMoreDevicesToMoreWork) {
  StageProblem problem;
  problem.units = 4;
  problem.microbatches = 100;
  problem.in_flight = [](int stages) { return stages; };
  for (int units = 1; units < 4; ++units) {
    StageOption option;
    option.units = units;
    option.begins = kAnywhere;
    option.memory = 1;
    for (double work : {600.0, 600.0, 1200.0}) {
      LayerCost cost;
      cost.compute = work / units;
      option.costs.push_back(cost);
    }
    problem.options.push_back(option);
  }
  const auto found = CheapestStages(problem, [] { return false; });
  // Two stages of two devices do as well, and fill faster: 2 x 600 in place
  // of 3.
  ASSERT_GE(found.size(), 2u);
  EXPECT_EQ(found[0].stages.size(), 2u);
  EXPECT_DOUBLE_EQ(found[0].time, 101 * 600);
  ASSERT_EQ(found[1].stages.size(), 3u);
  EXPECT_DOUBLE_EQ(found[1].time, 102 * 600);
  EXPECT_EQ(
      problem.options[static_cast<size_t>(found[1].stages[2].option)].units, 2);
}

// Four equal layers on a slow device with room for two and one of three times
// the speed with room for more: it takes three of them.
TEST(UnlikeStages, GiveMoreWorkToFasterDevices) {
  StageProblem problem;
  problem.units = 2;
  problem.microbatches = 100;
  problem.in_flight = [](int) { return 1; };
  for (const double speed : {1.0, 3.0}) {
    StageOption& option = problem.options.emplace_back();
    option.begins = speed == 1 ? 1 : 2;
    option.memory = speed == 1 ? 2 : 4;
    for (int b = 0; b < 4; ++b) {
      LayerCost cost;
      cost.compute = 600 / speed;
      cost.stored = 1;
      option.costs.push_back(cost);
    }
  }
  auto found = CheapestStages(problem, [] { return false; });
  // 600 and 3 x 200: filled in 1,200, and 99 times the slower's 600.
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].stages[0].end, 1);
  EXPECT_DOUBLE_EQ(found[0].time, 1200 + 99 * 600);
  // With room for two on the fast one the slow one has two.
  problem.options[1].memory = 2;
  found = CheapestStages(problem, [] { return false; });
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].stages[0].end, 2);
  EXPECT_DOUBLE_EQ(found[0].time, 1600 + 99 * 1200);
  problem.options[1].memory = 1;
  EXPECT_TRUE(CheapestStages(problem, [] { return false; }).empty());
}

// What is slower than the limit is not given.
TEST(UnlikeStages, KeepTheLimit) {
  Rng rng(9, 0);
  int possible = 0;
  for (int i = 0; i < 100; ++i) {
    StageProblem problem = RandomProblem(rng);
    const auto all = CheapestStages(problem, [] { return false; });
    if (all.empty()) continue;
    ++possible;
    problem.limit = all[0].time;
    const auto best = CheapestStages(problem, [] { return false; });
    ASSERT_EQ(best.size(), 1u);
    EXPECT_LE(best[0].time, problem.limit);
    problem.limit = all[0].time * 0.9;
    EXPECT_TRUE(CheapestStages(problem, [] { return false; }).empty());
  }
  EXPECT_GT(possible, 10);
}

// A limit takes away what is slower, and nothing else; nothing is faster than
// the least time.
TEST(UnlikeStages, GiveAllThatIsInTime) {
  Rng rng(13, 0);
  int possible = 0;
  for (int i = 0; i < 200; ++i) {
    StageProblem problem = RandomProblem(rng);
    BruteForce all{problem};
    all.Add(0, static_cast<int>(problem.options[0].costs.size()), problem.units,
            0, 0);
    if (all.best.empty()) continue;
    ++possible;
    double least = kNever;
    for (const auto& [stages, time] : all.best) least = std::min(least, time);
    EXPECT_LE(LeastTime(problem), least * (1 + 1e-12));
    for (const double times : {1 + 2 * kPaceStep, 1.1, 2.0}) {
      problem.limit = times * least;
      const auto found = CheapestStages(problem, [] { return false; });
      ASSERT_FALSE(found.empty());
      EXPECT_LE(found[0].time, least * (1 + kPaceStep));
      EXPECT_LE(found.back().time, problem.limit);
    }
  }
  EXPECT_GT(possible, 100);
}

// Costs of no time, which nothing can be cut by.
TEST(UnlikeStages, NeedTimes) {
  Rng rng(11, 0);
  StageProblem problem = RandomProblem(rng);
  for (StageOption& option : problem.options) {
    for (LayerCost& cost : option.costs) cost.compute = 0;
  }
  EXPECT_TRUE(CheapestStages(problem, [] { return false; }).empty());
}

}  // namespace
}  // namespace tessera
