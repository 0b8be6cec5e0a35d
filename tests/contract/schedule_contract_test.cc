// Every row of Schedules().

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
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
};

TEST_P(ScheduleContract, EveryActionOnceForwardBeforeBackward) {
  for (int stages = 1; stages <= 6; ++stages) {
    for (int microbatches = 1; microbatches <= 9; ++microbatches) {
      for (int s = 0; s < stages; ++s) {
        const auto order = schedule().order(s, stages, microbatches);
        ASSERT_EQ(order.size(), static_cast<size_t>(2 * microbatches));
        std::vector<int> seen(static_cast<size_t>(microbatches), 0);
        int in_flight = 0;
        int most = 0;
        for (const Action& action : order) {
          ASSERT_GE(action.microbatch, 0);
          ASSERT_LT(action.microbatch, microbatches);
          int& state = seen[static_cast<size_t>(action.microbatch)];
          // 0: nothing yet, 1: forward done, 2: both.
          ASSERT_EQ(state, action.pass == Pass::kForward ? 0 : 1);
          ++state;
          in_flight += action.pass == Pass::kForward ? 1 : -1;
          most = std::max(most, in_flight);
        }
        EXPECT_EQ(in_flight, 0);
        EXPECT_LE(most, schedule().in_flight(s, stages, microbatches));
      }
    }
  }
}

// Gradients accumulate in the same order whatever the schedule.
TEST_P(ScheduleContract, BackwardsRunInTheOrderOfTheMicrobatches) {
  for (int stages : {1, 2, 4}) {
    for (int s = 0; s < stages; ++s) {
      int next = 0;
      for (const Action& action : schedule().order(s, stages, 8)) {
        if (action.pass == Pass::kBackward) {
          EXPECT_EQ(action.microbatch, next++);
        }
      }
    }
  }
}

TEST_P(ScheduleContract, OneOrderForAllStagesWithoutDeadlock) {
  for (int stages = 1; stages <= 6; ++stages) {
    for (int microbatches = 1; microbatches <= 9; ++microbatches) {
      const auto order = GlobalOrder(schedule(), stages, microbatches);
      ASSERT_EQ(order.size(), static_cast<size_t>(2 * stages * microbatches));
      std::vector<std::vector<Action>> by_stage(static_cast<size_t>(stages));
      std::map<std::pair<int, int>, bool> forward;
      std::map<std::pair<int, int>, bool> backward;
      for (const StageAction& step : order) {
        const int m = step.action.microbatch;
        by_stage[static_cast<size_t>(step.stage)].push_back(step.action);
        if (step.action.pass == Pass::kForward) {
          if (step.stage > 0) {
            EXPECT_TRUE((forward[{step.stage - 1, m}]));
          }
          forward[{step.stage, m}] = true;
        } else {
          EXPECT_TRUE((forward[{step.stage, m}]));
          if (step.stage + 1 < stages) {
            EXPECT_TRUE((backward[{step.stage + 1, m}]));
          }
          backward[{step.stage, m}] = true;
        }
      }
      for (int s = 0; s < stages; ++s) {
        EXPECT_EQ(by_stage[static_cast<size_t>(s)],
                  schedule().order(s, stages, microbatches));
      }
    }
  }
}

// Runs the schedule with a clock: forward takes 1, backward 2, sends nothing.
TEST_P(ScheduleContract, BubbleIsItsFormula) {
  constexpr int kForward = 1;
  constexpr int kBackward = 2;
  for (int stages = 1; stages <= 6; ++stages) {
    for (int microbatches : {stages, stages + 1, 3 * stages}) {
      std::vector<int> free_at(static_cast<size_t>(stages), 0);
      std::map<std::pair<int, int>, int> forward_end;
      std::map<std::pair<int, int>, int> backward_end;
      for (const StageAction& step :
           GlobalOrder(schedule(), stages, microbatches)) {
        const int s = step.stage;
        const int m = step.action.microbatch;
        int& now = free_at[static_cast<size_t>(s)];
        if (step.action.pass == Pass::kForward) {
          if (s > 0) now = std::max(now, forward_end[{s - 1, m}]);
          now += kForward;
          forward_end[{s, m}] = now;
        } else {
          if (s + 1 < stages) now = std::max(now, backward_end[{s + 1, m}]);
          now += kBackward;
          backward_end[{s, m}] = now;
        }
      }
      const int end = *std::max_element(free_at.begin(), free_at.end());
      // Idle time of a stage: the whole less its own work.
      const int idle = end - microbatches * (kForward + kBackward);
      EXPECT_DOUBLE_EQ(idle, schedule().bubble(stages, microbatches) *
                                 (kForward + kBackward))
          << stages << " stages, " << microbatches << " microbatches";
    }
  }
}

std::vector<std::string> ScheduleNames() {
  std::vector<std::string> names;
  for (const PipelineSchedule& schedule : Schedules()) {
    names.emplace_back(schedule.name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, ScheduleContract,
                         ::testing::ValuesIn(ScheduleNames()),
                         [](const auto& info) { return "of_" + info.param; });

}  // namespace
}  // namespace tessera
