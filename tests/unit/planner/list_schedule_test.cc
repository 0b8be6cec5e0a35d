#include "planner/schedule/list_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "planner/base/rng.h"
#include "planner/schedule/action_table.h"

namespace tessera {
namespace {

struct Followed {
  double end = 0;
  std::vector<int> most_in_flight;  // by stage
};

// When all stages have done what the orders say, one action after another as
// soon as its own needs are met.
Followed Follow(const StageOrders& orders, const ListScheduleOptions& options) {
  const PipelineShape& shape = options.shape;
  const int last = shape.stages * shape.chunks - 1;
  std::vector<std::vector<double>> forward(
      options.times.size(),
      std::vector<double>(static_cast<size_t>(shape.microbatches)));
  auto backward = forward;
  std::vector<double> free(static_cast<size_t>(shape.stages));
  std::vector<int> in_flight(free.size());
  Followed run;
  run.most_in_flight.resize(free.size());
  for (const auto& [stage, action] : GlobalOrder(orders, shape)) {
    const auto s = static_cast<size_t>(stage);
    const int position = action.chunk * shape.stages + stage;
    const auto p = static_cast<size_t>(position);
    const auto m = static_cast<size_t>(action.microbatch);
    double start = free[s];
    double time = 0;
    const PassTimes& times = options.times[p];
    switch (action.kind) {
      case ActionKind::kForward:
        if (position > 0) start = std::max(start, forward[p - 1][m]);
        time = times.forward;
        forward[p][m] = start + time;
        run.most_in_flight[s] = std::max(run.most_in_flight[s], ++in_flight[s]);
        break;
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        if (position < last) start = std::max(start, backward[p + 1][m]);
        time = times.backward_input;
        if (action.kind == ActionKind::kBackward) {
          time += times.backward_weight;
          --in_flight[s];
        }
        backward[p][m] = start + time;
        break;
      case ActionKind::kBackwardWeight:
        time = times.backward_weight;
        --in_flight[s];
        break;
    }
    free[s] = start + time;
    run.end = std::max(run.end, free[s]);
  }
  return run;
}

ListScheduleOptions Equal(const PipelineShape& shape, int in_flight) {
  ListScheduleOptions options;
  options.shape = shape;
  options.times.assign(static_cast<size_t>(shape.stages * shape.chunks),
                       {1, 1, 1});
  options.most_in_flight.assign(static_cast<size_t>(shape.stages), in_flight);
  return options;
}

// 4 equal stages, 8 microbatches, whole backwards of 2: with as many in flight
// as 1F1B has, (8 + 3) * 3.
TEST(ListSchedule, IsAsGoodAs1F1BOnEqualStages) {
  ListScheduleOptions options = Equal({4, 1, 8}, 4);
  options.splits = false;
  options.most_in_flight = {4, 3, 2, 1};
  const StageOrders orders = ListSchedule(options);
  EXPECT_DOUBLE_EQ(Follow(orders, options).end, 33);
  EXPECT_EQ(orders, OrdersOf(**FindSchedule("1f1b"), options.shape));
}

// Split backwards: no stage works less than 8 * 3, and the last begins at 3. Of
// 1F1B's bubble of 9 a third is left.
TEST(ListSchedule, FillsTheBubbleWithGradientsOfWeights) {
  const ListScheduleOptions options = Equal({4, 1, 8}, 6);
  EXPECT_DOUBLE_EQ(Follow(ListSchedule(options), options).end, 24 + 3);
}

// The last stage works for 8 * 7 and begins at 6. Named orders, which count all
// stages as equal, take 9 % longer at least.
TEST(ListSchedule, BeatsNamedOrdersOnUnequalStages) {
  ListScheduleOptions options = Equal({4, 1, 8}, 6);
  options.times = {{2, 1, 3}, {3, 1, 3}, {1, 1, 3}, {2, 4, 1}};
  const double end = Follow(ListSchedule(options), options).end;
  EXPECT_DOUBLE_EQ(end, 56 + 6);
  for (const std::string_view name : {"gpipe", "1f1b", "zb-h1", "zb-h2"}) {
    const StageOrders named = OrdersOf(**FindSchedule(name), options.shape);
    EXPECT_GT(Follow(named, options).end, 1.09 * end) << name;
  }
}

// Whatever the times and limits: a valid table that keeps the limits.
TEST(ListSchedule, IsValidAndKeepsItsLimits) {
  Rng rng(7);
  for (int trial = 0; trial < 400; ++trial) {
    const auto draw = [&](uint32_t n) {
      return 1 + static_cast<int>(rng.Below(n));
    };
    ListScheduleOptions options;
    options.shape = {draw(5), draw(3), draw(9)};
    for (int p = 0; p < options.shape.stages * options.shape.chunks; ++p) {
      options.times.push_back({static_cast<double>(draw(4)),
                               static_cast<double>(draw(4)),
                               static_cast<double>(rng.Below(4))});
    }
    for (int s = 0; s < options.shape.stages; ++s) {
      options.most_in_flight.push_back(options.shape.chunks - 1 + draw(6));
    }
    options.splits = rng.Below(3) > 0;
    const StageOrders orders = ListSchedule(options);
    const auto problems = CheckOrders(orders, options.shape);
    ASSERT_TRUE(problems.empty()) << problems[0].message;
    const Followed run = Follow(orders, options);
    for (size_t s = 0; s < orders.size(); ++s) {
      EXPECT_LE(run.most_in_flight[s], options.most_in_flight[s]);
    }
    EXPECT_EQ(orders, ListSchedule(options));
  }
}

}  // namespace
}  // namespace tessera
