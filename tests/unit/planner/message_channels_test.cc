#include "planner/lower/message_channels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

class MessageChannelsTest : public ::testing::Test {
 protected:
  MessageChannelsTest() : graph_(testing::MlpGraph(6, 24, 4, 8, 12, 32)) {}

  TaskGraph Lowered(const std::string& strategy) const {
    const Cluster devices = MakeCluster("dgx-a100-80gb:1").value();
    const Plan plan =
        PlanFromStrategy(graph_, devices, ParseStrategy(strategy).value())
            .value();
    return Lower(graph_, devices, plan, {});
  }

  Graph graph_;
};

// Two groups of one device each, that send whole values to each other.
// `order` has a letter and a number for each task: "a0" is group 0's send of
// message 0, "A0" group 1's receive of it; "b" and "B" the other way round.
TaskGraph Messages(const std::vector<std::string>& order) {
  TaskGraph tasks;
  for (int g : {0, 1}) {
    DeviceGroup group;
    group.devices = {DeviceId(g)};
    tasks.groups.push_back(group);
  }
  std::map<std::string, ValueId> values;
  const auto value = [&](const std::string& name) {
    const auto [it, is_new] = values.try_emplace(name, tasks.values.size());
    if (is_new) tasks.values.emplace_back();
    return it->second;
  };
  for (const std::string& word : order) {
    const char letter = word[0];
    const std::string number = word.substr(1);
    const bool sends = letter == 'a' || letter == 'b';
    const bool forward = letter == 'a' || letter == 'A';
    const ValueId from = value((forward ? "a" : "b") + number);
    const ValueId to = value((forward ? "A" : "B") + number);
    Task task;
    task.group = GroupId(forward == sends ? 0 : 1);
    task.kind = sends ? TaskKind::kSend : TaskKind::kRecv;
    task.stream =
        forward
            ? (sends ? StreamRole::kSendForward : StreamRole::kRecvForward)
            : (sends ? StreamRole::kSendBackward : StreamRole::kRecvBackward);
    (sends ? task.reads : task.writes) = {sends ? from : to};
    task.peer = sends ? to : from;
    tasks.tasks.push_back(task);
  }
  return tasks;
}

TEST_F(MessageChannelsTest, OneChannelForEachDirection) {
  const TaskGraph tasks =
      Messages({"a0", "a1", "A0", "b0", "A1", "B0", "b1", "B1"});
  const MessageChannels channels = FindMessageChannels(tasks);
  EXPECT_EQ(channels.count, 2);
  EXPECT_EQ(channels.of_task, (std::vector{0, 0, 0, 1, 0, 1, 1, 1}));
}

// Sent as 0 1 2 and received as 2 0 1, message 2 overtakes the others: 0 and 1
// share a channel. Sends that wait do not meet their receives: 0 is before 2 at
// the sender and behind it at the receiver.
TEST_F(MessageChannelsTest, MessagesThatOvertakeHaveChannelsOfTheirOwn) {
  const TaskGraph tasks = Messages({"a0", "a1", "a2", "A2", "A0", "A1"});
  const MessageChannels channels = FindMessageChannels(tasks);
  EXPECT_EQ(channels.count, 2);
  EXPECT_EQ(channels.of_task, (std::vector{0, 0, 1, 1, 0, 0}));
  EXPECT_FALSE(MeetingOrder(tasks));
}

// Sends that hand over: all reversed, n channels.
TEST_F(MessageChannelsTest, TheFewestThatKeepOrder) {
  EXPECT_EQ(
      FindMessageChannels(Messages({"a0", "a1", "a2", "A2", "A1", "A0"})).count,
      3);
}

// A rank of both groups would wait for itself.
TEST_F(MessageChannelsTest, GroupsThatShareADeviceHaveNone) {
  TaskGraph tasks = Messages({"a0", "A0"});
  tasks.groups[0].devices = {DeviceId(0), DeviceId(1)};
  tasks.groups[1].devices = {DeviceId(1), DeviceId(2)};
  const MessageChannels channels = FindMessageChannels(tasks);
  EXPECT_EQ(channels.count, 0);
  EXPECT_EQ(channels.of_task, (std::vector{-1, -1}));
  EXPECT_TRUE(MeetingOrder(tasks));
}

std::vector<int> Numbers(const std::vector<TaskId>& order) {
  std::vector<int> numbers;
  for (TaskId id : order) numbers.push_back(id.value);
  return numbers;
}

// a1 waits until A0 is received.
TEST_F(MessageChannelsTest, ReceivesFollowTheirSends) {
  const auto order =
      MeetingOrder(Messages({"a0", "a1", "A0", "A1", "b0", "B0"}));
  ASSERT_TRUE(order);
  EXPECT_EQ(Numbers(*order), (std::vector{0, 2, 1, 3, 4, 5}));
}

// Both send before they receive, in other streams: one receives earlier.
TEST_F(MessageChannelsTest, SendsCross) {
  TaskGraph tasks = Messages({"a0", "b0", "A0", "B0"});
  const auto order = MeetingOrder(tasks);
  ASSERT_TRUE(order);
  EXPECT_EQ(Numbers(*order), (std::vector{0, 2, 1, 3}));
  // Not where a receive is behind what waits for it.
  for (Task& task : tasks.tasks) task.stream = StreamRole::kSendForward;
  EXPECT_FALSE(MeetingOrder(tasks));
}

// What the header promises.
void ExpectMeetings(const TaskGraph& tasks, const std::vector<TaskId>& order,
                    const std::string& text) {
  std::vector<bool> done(tasks.tasks.size(), false);
  std::map<std::tuple<DeviceId, StreamRole, GroupId, AxisSet>, TaskId> last;
  std::map<DeviceId, TaskId> last_work;
  const auto expect_later = [&](TaskId& before, TaskId id) {
    EXPECT_LT(before, id) << text;
    before = id;
  };
  for (size_t i = 0; i < order.size(); ++i) {
    const TaskId id = order[i];
    const Task& task = tasks.task(id);
    EXPECT_FALSE(done[id.index()]) << text;
    done[id.index()] = true;
    for (TaskId dep : task.deps) EXPECT_TRUE(done[dep.index()]) << text;
    const bool collective = task.stream == StreamRole::kComm;
    const bool message =
        task.kind == TaskKind::kSend || task.kind == TaskKind::kRecv;
    for (DeviceId device : tasks.group(task.group).devices) {
      expect_later(
          last[{device, task.stream, collective ? task.group : GroupId(),
                collective ? task.axes : AxisSet{0}}],
          id);
      if (!message) expect_later(last_work[device], id);
    }
    if (task.kind != TaskKind::kRecv) continue;
    ASSERT_GT(i, 0u);
    const Task& send = tasks.task(order[i - 1]);
    EXPECT_EQ(send.kind, TaskKind::kSend) << text;
    EXPECT_EQ(send.peer, task.writes[0]) << text;
  }
  EXPECT_EQ(order.size(), tasks.tasks.size()) << text;
}

// What the header promises, of every schedule; and that on GPUs all meet.
TEST_F(MessageChannelsTest, SchedulesKeepOrderWithinChannels) {
  for (int vp : {1, 2}) {
    for (const PipelineSchedule* schedule :
         SchedulesFor({.stages = 2, .chunks = vp})) {
      const std::string text = "pp=2,mbs=2,dp=2,tp=2,vp=" + std::to_string(vp) +
                               ",schedule=" + std::string(schedule->name);
      const TaskGraph tasks = Lowered(text);
      const MessageChannels channels = FindMessageChannels(tasks);
      const auto order = MeetingOrder(tasks);
      ASSERT_TRUE(order) << text;
      ExpectMeetings(tasks, *order, text);
      EXPECT_GT(channels.count, 0) << text;
      struct Channel {
        std::vector<ValueId> sent;
        std::vector<ValueId> received;
        std::set<std::tuple<TaskKind, GroupId, StreamRole>> streams;
      };
      std::map<int, Channel> by_number;
      for (size_t t = 0; t < tasks.tasks.size(); ++t) {
        const Task& task = tasks.tasks[t];
        const bool sends = task.kind == TaskKind::kSend;
        if (!sends && task.kind != TaskKind::kRecv) {
          EXPECT_EQ(channels.of_task[t], -1);
          continue;
        }
        Channel& channel = by_number[channels.of_task[t]];
        channel.streams.insert({task.kind, task.group, task.stream});
        if (sends) {
          channel.sent.push_back(task.peer);
        } else {
          channel.received.push_back(task.writes[0]);
        }
      }
      for (const auto& [number, channel] : by_number) {
        EXPECT_EQ(channel.sent, channel.received) << text << " " << number;
        EXPECT_EQ(channel.streams.size(), 2u) << text;
      }
    }
  }
}

// Every rank connects its ends in their order, an end when both sides are at
// it.
TEST(ChannelEndTest, RanksThatConnectInOrderNeverStandStill) {
  const int kRanks = 5;
  std::vector<std::vector<ChannelEnd>> ends(kRanks);
  for (int channel = 0; channel < 3; ++channel) {
    for (int from = 0; from < kRanks; ++from) {
      for (int to = 0; to < kRanks; ++to) {
        if (from == to || (from + 2 * to + channel) % 3 == 0) continue;
        for (int rank : {from, to}) {
          ends[static_cast<size_t>(rank)].push_back({channel, from, to});
        }
      }
    }
  }
  size_t left = 0;
  for (auto& list : ends) {
    std::ranges::sort(list, std::greater());  // the next at the back
    left += list.size();
  }
  EXPECT_GT(left, 20u);
  for (bool progress = true; progress;) {
    progress = false;
    for (auto& list : ends) {
      if (list.empty()) continue;
      const ChannelEnd end = list.back();
      const auto from = static_cast<size_t>(end.from);
      const auto to = static_cast<size_t>(end.to);
      if (ends[from].back() != end || ends[to].back() != end) continue;
      ends[from].pop_back();
      ends[to].pop_back();
      left -= 2;
      progress = true;
    }
  }
  EXPECT_EQ(left, 0u);
}

}  // namespace
}  // namespace tessera
