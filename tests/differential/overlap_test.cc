// Communication runs under computation: in a data-parallel step, and with cut
// gradients in every microbatch, the reduction of a block's gradients is under
// way while the backward of an earlier block computes, offloaded activations
// are copied while the forward goes on, and within every stream the order is
// the simulator's. Nothing is timed: the two wait for each other,
// and would wait for ever if one ran after the other.

#include <gmock/gmock.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/simulate/simulator.h"
#include "tests/support/tiny_training.h"

namespace tessera {
namespace {

// Two tasks that have both begun before either goes on. An exchange waits where
// it exchanges, a copy where it begins.
struct Meeting {
  std::string exchange;
  std::string kernel;
  bool is_copy = false;
};

// Where the threads of one rank meet.
class Meetings {
 public:
  explicit Meetings(std::vector<Meeting> meetings)
      : meetings_(std::move(meetings)) {}

  // This thread begins a task.
  void Begin(std::string_view task) {
    std::unique_lock lock(mutex_);
    tasks_[std::this_thread::get_id()] = task;
    begun_.insert(std::string(task));
    changed_.notify_all();
    for (const Meeting& meeting : meetings_) {
      if (meeting.kernel == task) Await(lock, meeting.exchange);
      if (meeting.exchange == task && meeting.is_copy) {
        Await(lock, meeting.kernel);
      }
    }
  }

  // Within the task that this thread began last.
  void Reduce() {
    std::unique_lock lock(mutex_);
    const std::string task = tasks_[std::this_thread::get_id()];
    for (const Meeting& meeting : meetings_) {
      if (meeting.exchange == task) Await(lock, meeting.kernel);
    }
  }

  // What was awaited in vain.
  const std::set<std::string>& missed() const { return missed_; }

 private:
  void Await(std::unique_lock<std::mutex>& lock, const std::string& task) {
    if (!changed_.wait_for(lock, std::chrono::seconds(20),
                           [&] { return begun_.contains(task); })) {
      missed_.insert(task);
    }
  }

  const std::vector<Meeting> meetings_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::thread::id, std::string> tasks_;
  std::set<std::string> begun_;
  std::set<std::string> missed_;
};

class MeetingCommunicator : public Communicator {
 public:
  MeetingCommunicator(Communicator& inner, Meetings& meetings)
      : inner_(inner), meetings_(meetings) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Result<void> AllReduce(void* data, int64_t count, DType dtype) override {
    meetings_.Reduce();
    return inner_.AllReduce(data, count, dtype);
  }
  Result<void> AllGather(const void* send, int64_t send_bytes, void* recv,
                         std::span<const int64_t> bytes) override {
    return inner_.AllGather(send, send_bytes, recv, bytes);
  }
  Result<void> ReduceScatter(const void* send, void* recv,
                             std::span<const int64_t> counts,
                             DType dtype) override {
    meetings_.Reduce();
    return inner_.ReduceScatter(send, recv, counts, dtype);
  }
  Result<void> AllToAll(const void* send, std::span<const int64_t> send_bytes,
                        void* recv,
                        std::span<const int64_t> recv_bytes) override {
    meetings_.Reduce();
    return inner_.AllToAll(send, send_bytes, recv, recv_bytes);
  }
  Result<void> Broadcast(void* data, int64_t bytes, int root) override {
    return inner_.Broadcast(data, bytes, root);
  }
  Result<void> Barrier() override { return inner_.Barrier(); }
  Result<void> Send(const void* data, int64_t bytes, int peer,
                    uint64_t tag) override {
    return inner_.Send(data, bytes, peer, tag);
  }
  Result<void> Recv(void* data, int64_t bytes, int peer,
                    uint64_t tag) override {
    return inner_.Recv(data, bytes, peer, tag);
  }

 private:
  Communicator& inner_;
  Meetings& meetings_;
};

class MeetingWorld : public CommWorld {
 public:
  MeetingWorld(CommWorld& inner, Meetings& meetings)
      : inner_(inner), meetings_(meetings) {}

  int world_rank() const override { return inner_.world_rank(); }
  int world_size() const override { return inner_.world_size(); }
  Result<Communicator*> Group(std::span<const int> ranks) override {
    TESSERA_TRY(Communicator* const group, inner_.Group(ranks));
    auto& mine = groups_[group];
    if (mine == nullptr) {
      mine = std::make_unique<MeetingCommunicator>(*group, meetings_);
    }
    return mine.get();
  }
  Result<void> Flush() override { return inner_.Flush(); }
  void Abort(std::string_view reason) override { inner_.Abort(reason); }
  void SetCurrentTask(std::string_view task) override {
    meetings_.Begin(task);
    inner_.SetCurrentTask(task);
  }

 private:
  CommWorld& inner_;
  Meetings& meetings_;
  std::map<Communicator*, std::unique_ptr<Communicator>> groups_;
};

// Reductions of gradients, each with the kernel that is issued next after it.
// Those of the first blocks of each backward pass are left out: there memory is
// at its peak, and a kernel may wait for what a reduction gives back.
std::vector<Meeting> ReductionsUnderBackward(const TaskGraph& tasks,
                                             const Graph& graph) {
  std::vector<Meeting> meetings;
  std::map<int, int> reductions;  // by microbatch
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.kind != TaskKind::kComm || task.optimizer ||
        task.pass != Pass::kBackward || ++reductions[task.microbatch] <= 2) {
      continue;
    }
    for (size_t k = t + 1; k < tasks.tasks.size(); ++k) {
      const Task& kernel = tasks.tasks[k];
      if (kernel.kind != TaskKind::kCompute || !kernel.node.valid()) continue;
      meetings.push_back(
          {NameOf(tasks, graph, TaskId(t)), NameOf(tasks, graph, TaskId(k))});
      break;
    }
  }
  return meetings;
}

// The first block of keys and values that a layer passes on, with the attention
// to the block that is there. (Later ones have the same names.)
std::vector<Meeting> FirstShiftsUnderAttention(const TaskGraph& tasks,
                                               const Graph& graph) {
  std::vector<Meeting> meetings;
  std::set<std::string> seen;
  for (size_t t = 0; t + 1 < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    const std::string name = NameOf(tasks, graph, TaskId(t));
    if (task.kind != TaskKind::kComm || task.comm != CommKind::kShift ||
        task.pass != Pass::kForward || !seen.insert(name).second) {
      continue;
    }
    meetings.push_back({name, NameOf(tasks, graph, TaskId(t + 1))});
  }
  return meetings;
}

// The first copies off the device, and into files, in a pass, each with the
// kernel that is issued next after it and does not wait for it. Memory is far
// from its peak there, so no kernel waits for what a copy gives back.
template <Pass pass>
std::vector<Meeting> CopiesUnder(const TaskGraph& tasks, const Graph& graph) {
  std::vector<Meeting> meetings;
  std::map<StreamRole, int> copies;
  std::set<std::string> seen;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.kind != TaskKind::kCopy || task.pass != pass || task.optimizer ||
        copies[task.stream] == 2) {
      continue;
    }
    for (size_t k = t + 1; k < tasks.tasks.size(); ++k) {
      const Task& kernel = tasks.tasks[k];
      if (kernel.kind != TaskKind::kCompute || !kernel.node.valid()) continue;
      const std::string name = NameOf(tasks, graph, TaskId(k));
      if (!seen.insert(name).second) break;
      meetings.push_back({NameOf(tasks, graph, TaskId(t)), name, true});
      ++copies[task.stream];
      break;
    }
  }
  return meetings;
}

// Tasks of each stream, in the order in which they start.
std::map<std::tuple<GroupId, StreamRole, AxisSet>, std::vector<TaskId>>
StreamOrders(Timeline timeline) {
  std::stable_sort(
      timeline.spans.begin(), timeline.spans.end(),
      [](const Span& a, const Span& b) { return a.start < b.start; });
  std::map<std::tuple<GroupId, StreamRole, AxisSet>, std::vector<TaskId>>
      orders;
  for (const Span& span : timeline.spans) {
    const AxisSet axes = span.stream == StreamRole::kComm ? span.axes : 0;
    orders[{span.group, span.stream, axes}].push_back(span.task);
  }
  return orders;
}

void ExpectOverlap(const std::string& strategy, size_t least_meetings,
                   std::vector<Meeting> (*meetings_of)(const TaskGraph&,
                                                       const Graph&)) {
  const Graph graph = ImportTiny(TinyGpt2(3), 4, 8);
  const TokenData data = TinyTokens();
  const Cluster cluster = MakeCluster("local-cpu:2").value();
  const Plan plan =
      PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value()).value();
  const TaskGraph tasks = Lower(graph, cluster, plan, {});
  const std::vector<Meeting> meetings = meetings_of(tasks, graph);
  ASSERT_GE(meetings.size(), least_meetings);

  const Evaluator evaluator(graph, cluster, nullptr, {});
  const Timeline predicted = Simulate(evaluator.pricer(), tasks);
  auto worlds = MakeThreadWorlds(2, {Duration::FromSeconds(60)});
  RunThreads(2, [&](int rank) {
    Meetings meet(meetings);
    MeetingWorld world(*worlds[static_cast<size_t>(rank)], meet);
    CpuDevice device;
    auto executor = RankExecutor::Create(tasks, graph, {}, 7, world, device,
                                         LoadAtRandom(data, 7, graph),
                                         {.directory = ::testing::TempDir()});
    ASSERT_TRUE(executor.has_value()) << executor.error().ToString();
    ASSERT_TRUE(InitialiseState(graph, 7, **executor).has_value());
    const auto timeline = (*executor)->Run(tasks);
    ASSERT_TRUE(timeline.has_value()) << timeline.error().ToString();
    EXPECT_THAT(meet.missed(), ::testing::IsEmpty());
    EXPECT_EQ(StreamOrders(*timeline), StreamOrders(predicted));
  });
}

TEST(OverlapTest, DdpReducesUnderBackward) {
  ExpectOverlap("dp=2", 1, ReductionsUnderBackward);
}

TEST(OverlapTest, ActivationsLeaveUnderForward) {
  ExpectOverlap("dp=2,offload=activations:host", 2,
                CopiesUnder<Pass::kForward>);
}

// Each microbatch's gradients leave while the backward goes on.
TEST(OverlapTest, GradientsLeaveUnderBackward) {
  ExpectOverlap("dp=2,mbs=1,offload=optimizer:host,gradients:host", 2,
                CopiesUnder<Pass::kBackward>);
}

// Two copies each: to the host, and on into the file.
TEST(OverlapTest, ActivationsGoToFilesUnderForward) {
  ExpectOverlap("dp=2,offload=activations:file", 4,
                CopiesUnder<Pass::kForward>);
}

TEST(OverlapTest, RingPassesBlocksOnUnderAttention) {
  // 3 layers and a microbatch of all samples.
  ExpectOverlap("cp=2,cp-kind=ring,mbs=4", 3, FirstShiftsUnderAttention);
}

// Each microbatch's gradients are reduced, and their shards added, while the
// backward goes on.
TEST(OverlapTest, CutGradientsAreReducedUnderBackward) {
  ExpectOverlap("dp=2,zero=2,mbs=1", 3, ReductionsUnderBackward);
}

}  // namespace
}  // namespace tessera
