// Every row of Schedules().

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

class ScheduleContract : public ::testing::TestWithParam<std::string> {
 protected:
  const PipelineSchedule& schedule() const {
    const auto found = FindSchedule(GetParam());
    TESSERA_CHECK(found.has_value());
    return **found;
  }

  // All small shapes that the schedule runs.
  std::vector<PipelineShape> Shapes() const {
    std::vector<PipelineShape> shapes;
    for (int stages = 1; stages <= 6; ++stages) {
      for (int chunks = 1; chunks <= 4; ++chunks) {
        for (int microbatches = 1; microbatches <= 14; ++microbatches) {
          const PipelineShape shape = {stages, chunks, microbatches};
          if (Accepts(schedule(), shape)) shapes.push_back(shape);
        }
      }
    }
    TESSERA_CHECK(!shapes.empty()) << GetParam();
    return shapes;
  }
};

std::string Text(const PipelineShape& shape) {
  return std::to_string(shape.stages) + " stages, " +
         std::to_string(shape.chunks) + " chunks, " +
         std::to_string(shape.microbatches) + " microbatches";
}

// What one stage does, followed for every (chunk, microbatch).
TEST_P(ScheduleContract, EveryActionOnceForwardBeforeBackward) {
  for (const PipelineShape& shape : Shapes()) {
    for (int s = 0; s < shape.stages; ++s) {
      SCOPED_TRACE(Text(shape) + ", stage " + std::to_string(s));
      // 0: nothing yet, 1: forward done, 2: gradients of activations, 3: all.
      std::map<std::pair<int, int>, int> state;
      int in_flight = 0;
      int most = 0;
      for (const Action& action : schedule().order(s, shape)) {
        ASSERT_GE(action.microbatch, 0);
        ASSERT_LT(action.microbatch, shape.microbatches);
        ASSERT_GE(action.chunk, 0);
        ASSERT_LT(action.chunk, shape.chunks);
        int& now = state[{action.chunk, action.microbatch}];
        switch (action.kind) {
          case ActionKind::kForward:
            ASSERT_EQ(now, 0);
            now = 1;
            most = std::max(most, ++in_flight);
            break;
          case ActionKind::kBackward:
            ASSERT_EQ(now, 1);
            now = 3;
            --in_flight;
            break;
          case ActionKind::kBackwardInput:
            ASSERT_EQ(now, 1);
            now = 2;
            break;
          case ActionKind::kBackwardWeight:
            ASSERT_EQ(now, 2);
            now = 3;
            --in_flight;
            break;
        }
      }
      EXPECT_EQ(state.size(),
                static_cast<size_t>(shape.chunks * shape.microbatches));
      for (const auto& [key, now] : state) EXPECT_EQ(now, 3);
      EXPECT_LE(most, schedule().in_flight(s, shape));
    }
  }
}

// What runs ahead of the first backward and what is put off behind the last are
// as the row says; and a stage begins with the first chunk and ends its
// gradients of activations with it.
TEST_P(ScheduleContract, StartsAndEndsAsStated) {
  for (const PipelineShape& shape : Shapes()) {
    for (int s = 0; s < shape.stages; ++s) {
      SCOPED_TRACE(Text(shape) + ", stage " + std::to_string(s));
      const std::vector<Action> order = schedule().order(s, shape);
      int ahead = 0;
      int put_off = 0;
      bool backward = false;
      Action last;
      for (const Action& action : order) {
        switch (action.kind) {
          case ActionKind::kForward:
            ahead += backward ? 0 : 1;
            break;
          case ActionKind::kBackward:
          case ActionKind::kBackwardInput:
            backward = true;
            put_off = 0;
            last = action;
            break;
          case ActionKind::kBackwardWeight:
            ++put_off;
            break;
        }
      }
      EXPECT_EQ(ahead, schedule().ahead(s, shape));
      EXPECT_EQ(put_off, schedule().put_off == nullptr
                             ? 0
                             : schedule().put_off(s, shape));
      EXPECT_EQ(order.front(), (Action{ActionKind::kForward, 0, 0}));
      EXPECT_EQ(last.chunk, 0);
      EXPECT_EQ(last.microbatch, shape.microbatches - 1);
    }
  }
}

// Gradients accumulate in the same order whatever the schedule.
TEST_P(ScheduleContract, GradientsOfAChunkRunInTheOrderOfTheMicrobatches) {
  for (const PipelineShape& shape : Shapes()) {
    for (int s = 0; s < shape.stages; ++s) {
      std::vector<int> next(static_cast<size_t>(shape.chunks), 0);
      for (const Action& action : schedule().order(s, shape)) {
        if (action.kind != ActionKind::kBackward &&
            action.kind != ActionKind::kBackwardWeight) {
          continue;
        }
        EXPECT_EQ(action.microbatch, next[static_cast<size_t>(action.chunk)]++)
            << Text(shape);
      }
    }
  }
}

TEST_P(ScheduleContract, OneOrderForAllStagesWithoutDeadlock) {
  for (const PipelineShape& shape : Shapes()) {
    SCOPED_TRACE(Text(shape));
    const StageOrders orders = OrdersOf(schedule(), shape);
    size_t actions = 0;
    for (const auto& order : orders) actions += order.size();
    const auto global = GlobalOrder(orders, shape);
    ASSERT_EQ(global.size(), actions);
    StageOrders by_stage(orders.size());
    std::set<std::pair<int, int>> forward;  // position, microbatch
    std::set<std::pair<int, int>> backward;
    const int positions = shape.stages * shape.chunks;
    for (const StageAction& step : global) {
      const int m = step.action.microbatch;
      const int p = step.action.chunk * shape.stages + step.stage;
      by_stage[static_cast<size_t>(step.stage)].push_back(step.action);
      switch (step.action.kind) {
        case ActionKind::kForward:
          EXPECT_TRUE(p == 0 || forward.contains({p - 1, m}));
          forward.insert({p, m});
          break;
        case ActionKind::kBackward:
        case ActionKind::kBackwardInput:
          EXPECT_TRUE(forward.contains({p, m}));
          EXPECT_TRUE(p + 1 == positions || backward.contains({p + 1, m}));
          backward.insert({p, m});
          break;
        case ActionKind::kBackwardWeight:
          EXPECT_TRUE(backward.contains({p, m}));
          break;
      }
    }
    EXPECT_EQ(by_stage, orders);
  }
}

// Runs the schedule with a clock. Sends take nothing; a chunk takes its part of
// the stage's times.
double BubbleByClock(const PipelineSchedule& schedule,
                     const PipelineShape& shape, const PassTimes& times) {
  const double n = shape.chunks;
  std::vector<double> free_at(static_cast<size_t>(shape.stages), 0);
  std::map<std::pair<int, int>, double> forward_end;  // position, microbatch
  std::map<std::pair<int, int>, double> backward_end;
  for (const StageAction& step :
       GlobalOrder(OrdersOf(schedule, shape), shape)) {
    const int m = step.action.microbatch;
    const int p = step.action.chunk * shape.stages + step.stage;
    double& now = free_at[static_cast<size_t>(step.stage)];
    switch (step.action.kind) {
      case ActionKind::kForward:
        if (p > 0) now = std::max(now, forward_end.at({p - 1, m}));
        now += times.forward / n;
        forward_end[{p, m}] = now;
        break;
      case ActionKind::kBackwardWeight:
        now += times.backward_weight / n;
        break;
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        if (p + 1 < shape.stages * shape.chunks) {
          now = std::max(now, backward_end.at({p + 1, m}));
        }
        now += times.backward_input / n;
        if (step.action.kind == ActionKind::kBackward) {
          now += times.backward_weight / n;
        }
        backward_end[{p, m}] = now;
        break;
    }
  }
  const double work =
      times.forward + times.backward_input + times.backward_weight;
  return *std::max_element(free_at.begin(), free_at.end()) -
         shape.microbatches * work;
}

// Times that a number of chunks of at most 4 divides, so that sums are exact.
TEST_P(ScheduleContract, BubbleIsItsFormula) {
  for (const PassTimes& times :
       {PassTimes{12, 12, 12}, PassTimes{24, 36, 12}, PassTimes{12, 24, 12}}) {
    for (const PipelineShape& shape : Shapes()) {
      EXPECT_EQ(BubbleByClock(schedule(), shape, times),
                schedule().bubble(shape, times))
          << Text(shape);
    }
  }
}

std::vector<std::string> ScheduleNames() {
  std::vector<std::string> names;
  for (const PipelineSchedule& schedule : Schedules()) {
    // A table has no order of its own.
    if (schedule.order != nullptr) names.emplace_back(schedule.name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, ScheduleContract,
                         ::testing::ValuesIn(ScheduleNames()),
                         [](const auto& info) {
                           std::string name = "of_" + info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Narayanan et al. 2021, figure 4: four stages, two chunks, eight microbatches.
// The first stage runs (2 - 1) * 4 + 2 * 3 = 10 forwards ahead.
TEST(Interleaved, FirstStageOfFigure4) {
  const PipelineShape shape = {4, 2, 8};
  const StageOrders orders =
      OrdersOf(*FindSchedule("interleaved").value(), shape);
  std::string text;
  for (const Action& action : orders[0]) {
    text += ToString(action, shape.chunks) + " ";
  }
  EXPECT_EQ(text,
            "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 "
            "F6.0 B0.1 F7.0 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0.0 F7.1 B1.0 "
            "B2.0 B3.0 B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0 ");
}

// Qi et al. 2024, figure 2 (ZB-H1): the last of four stages puts three
// microbatches' gradients of weights off, the first none.
TEST(ZeroBubble, StagesOfFigure2) {
  const PipelineShape shape = {4, 1, 5};
  const StageOrders orders = OrdersOf(*FindSchedule("zb-h1").value(), shape);
  const auto text = [&](size_t stage) {
    std::string out;
    for (const Action& action : orders[stage]) {
      out += ToString(action, shape.chunks) + " ";
    }
    return out;
  };
  EXPECT_EQ(text(0), "F0 F1 F2 F3 I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4 ");
  EXPECT_EQ(text(3), "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4 ");
}

// Figure 3 (ZB-H2): the first of four stages runs seven forwards ahead, the
// last puts six microbatches' gradients of weights off.
TEST(ZeroBubble, StagesOfFigure3) {
  const PipelineShape shape = {4, 1, 8};
  const StageOrders orders = OrdersOf(*FindSchedule("zb-h2").value(), shape);
  const auto text = [&](size_t stage) {
    std::string out;
    for (const Action& action : orders[stage]) {
      out += ToString(action, shape.chunks) + " ";
    }
    return out;
  };
  EXPECT_EQ(text(0),
            "F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 "
            "W6 I7 W7 ");
  EXPECT_EQ(text(3),
            "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 "
            "W5 W6 W7 ");
}

TEST(Schedules, SayWhatTheyNeed) {
  EXPECT_EQ(
      Accepts(*FindSchedule("interleaved").value(), {4, 1, 8}).error().message,
      "interleaved needs at least 2 chunks a stage (vp), not 1");
  EXPECT_EQ(Accepts(*FindSchedule("zb-h1").value(), {4, 2, 8}).error().message,
            "zb-h1 runs one chunk a stage, not 2 (vp); interleaved runs "
            "several");
}

}  // namespace
}  // namespace tessera
