#include "planner/lower/check_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CheckOrderTest : public ::testing::Test {
 protected:
  CheckOrderTest() : graph_(testing::MlpGraph(6, 24, 4, 8, 12, 32)) {}

  TaskGraph Lowered(const std::string& strategy, const std::string& cluster) {
    const Cluster devices = MakeCluster(cluster).value();
    const Plan plan =
        PlanFromStrategy(graph_, devices, ParseStrategy(strategy).value())
            .value();
    return Lower(graph_, devices, plan, {});
  }

  std::vector<std::string> Problems(const TaskGraph& tasks) const {
    std::vector<std::string> texts;
    for (const Error& error : CheckOrder(tasks, graph_)) {
      texts.push_back(error.ToString());
    }
    return texts;
  }

  // The first task that `wanted` accepts.
  template <typename Predicate>
  static size_t Find(const TaskGraph& tasks, Predicate wanted) {
    const auto it =
        std::find_if(tasks.tasks.begin(), tasks.tasks.end(), wanted);
    TESSERA_CHECK(it != tasks.tasks.end()) << "no such task";
    return static_cast<size_t>(it - tasks.tasks.begin());
  }

  Graph graph_;
};

// With streams that run beside each other, and without.
TEST_F(CheckOrderTest, EverySchedulePasses) {
  for (const char* cluster : {"local-cpu:8", "dgx-a100-80gb:1"}) {
    for (int vp : {1, 2}) {
      for (const PipelineSchedule* schedule :
           SchedulesFor({.stages = 2, .chunks = vp})) {
        for (const char* inner :
             {"dp=4,mbs=1,zero=0", "dp=4,mbs=2,zero=1", "dp=4,mbs=2,zero=2",
              "dp=4,mbs=2,zero=3", "dp=1,tp=4,sp=1,mbs=4"}) {
          const std::string text = "pp=2,vp=" + std::to_string(vp) +
                                   ",schedule=" + std::string(schedule->name) +
                                   "," + inner;
          EXPECT_THAT(Problems(Lowered(text, cluster)), IsEmpty())
              << text << " on " << cluster;
        }
      }
    }
  }
}

// Two groups that each wait for the other's message before they send theirs.
TEST_F(CheckOrderTest, FindsADeadlock) {
  TaskGraph tasks = Lowered("pp=2,dp=1,mbs=24", "local-cpu:2");
  const size_t send = Find(
      tasks, [](const Task& task) { return task.kind == TaskKind::kSend; });
  const size_t back = Find(tasks, [&](const Task& task) {
    return task.kind == TaskKind::kRecv &&
           task.group == tasks.tasks[send].group;
  });
  ASSERT_LT(send, back);
  // The first group's send goes behind its receive; ids and dependencies of
  // the tasks between are shifted along.
  std::rotate(tasks.tasks.begin() + static_cast<int64_t>(send),
              tasks.tasks.begin() + static_cast<int64_t>(send) + 1,
              tasks.tasks.begin() + static_cast<int64_t>(back) + 1);
  for (Task& task : tasks.tasks) {
    for (TaskId& dep : task.deps) {
      if (dep.index() == send) {
        dep = TaskId(back);
      } else if (dep.index() > send && dep.index() <= back) {
        dep = TaskId(dep.index() - 1);
      }
    }
  }
  EXPECT_THAT(Problems(tasks), Contains(HasSubstr("deadlock")));
}

TEST_F(CheckOrderTest, FindsTransfersThatDoNotMatch) {
  const TaskGraph right = Lowered("pp=2,dp=1,mbs=12", "local-cpu:2");
  const size_t receive = Find(
      right, [](const Task& task) { return task.kind == TaskKind::kRecv; });
  TaskGraph lost = right;
  lost.tasks[receive].peer = lost.tasks[receive].writes[0];
  EXPECT_THAT(Problems(lost), Contains(HasSubstr("nobody sends it")));
  EXPECT_THAT(Problems(lost), Contains(HasSubstr("nobody receives it")));

  TaskGraph cut = right;
  cut.values[cut.tasks[receive].writes[0].index()].shape[0] /= 2;
  EXPECT_THAT(Problems(cut), Contains(HasSubstr("is not what")));

  // A receive gets another microbatch than its own.
  TaskGraph crossed = right;
  crossed.values[crossed.tasks[receive].writes[0].index()].sample_offset += 12;
  EXPECT_THAT(Problems(crossed), Contains(HasSubstr("is not what")));
}

TEST_F(CheckOrderTest, FindsRacesAndOldNames) {
  // On a device with streams of their own a lost dependency is a race.
  TaskGraph tasks = Lowered("dp=8,mbs=1", "dgx-a100-80gb:1");
  const size_t reduce = Find(tasks, [](const Task& task) {
    return task.kind == TaskKind::kComm && !task.deps.empty();
  });
  tasks.tasks[reduce].deps.clear();
  EXPECT_THAT(Problems(tasks), Contains(HasSubstr("races with")));

  // The norm reads the gradient's buffer under the name that it had before the
  // all-reduce in place.
  tasks = Lowered("dp=8,mbs=1", "local-cpu:8");
  const size_t norm = Find(tasks, [](const Task& task) {
    return task.kernel == "square_sum" && !task.reads.empty();
  });
  ValueId& read = tasks.tasks[norm].reads[0];
  ASSERT_TRUE(tasks.value(read).alias_of.valid());
  read = tasks.value(read).alias_of;
  EXPECT_THAT(Problems(tasks), Contains(HasSubstr("another value")));
}

TEST_F(CheckOrderTest, FindsWhatIsReadBeforeItIsWritten) {
  TaskGraph tasks = Lowered("dp=1,mbs=24", "local-cpu:1");
  const size_t load = Find(
      tasks, [](const Task& task) { return task.kind == TaskKind::kLoad; });
  tasks.tasks[load].writes = tasks.tasks.back().writes;
  EXPECT_THAT(Problems(tasks), Contains(HasSubstr("never written")));
}

}  // namespace
}  // namespace tessera
