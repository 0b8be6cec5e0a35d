#include "profiler/profiler.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "costmodel/simulate/simulator.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "profiler/kernel_case.h"
#include "runtime/comm/loopback_world.h"
#include "runtime/comm/thread_world.h"
#include "runtime/device/cpu_device.h"
#include "runtime/trainer.h"
#include "tests/support/paths.h"
#include "tests/support/queue_cpu_device.h"

namespace tessera {
namespace {

Cluster LocalCpu(int ranks) {
  return MakeCluster("local-cpu:" + std::to_string(ranks)).value();
}

Graph TinyGraph(DType dtype = DType::kFloat32) {
  ImportOptions options;
  options.global_batch = 4;
  options.seq_len = 8;
  options.dtype = dtype;
  return Differentiate(
             ImportModel(ExamplePath("models/gpt2-tiny"), options).value())
      .value();
}

Plan PlanOf(const Graph& graph, const Cluster& cluster,
            std::string_view strategy) {
  return PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value())
      .value();
}

// What the plan of `strategy` runs on `ranks` ranks, and the lower rungs of the
// ladder.
ProfileCases CasesOf(const Graph& graph, int ranks, std::string_view strategy) {
  const Cluster cluster = LocalCpu(ranks);
  const Plan plan = PlanOf(graph, cluster, strategy);
  ProfileCases cases;
  AddLadder(cluster, cases);
  AddCases(graph, cluster, {&plan, 1}, {}, cases);
  std::erase_if(cases.collectives, [](const auto& exchange) {
    return exchange.first.payload > Bytes{1 << 14};
  });
  std::erase_if(cases.kernels, [](const auto& kernel) {
    return kernel.first.name == "copy" && kernel.first.extents[0] > 1 << 12;
  });
  return cases;
}

// Without a limit, one run a sample, and small buffers.
ProfilerOptions Quick() {
  ProfilerOptions options;
  options.time_limit_s = 1e9;
  options.sample_s = 0;
  options.rotated = Bytes{1 << 16};
  return options;
}

class OrderDevice : public CpuDevice {
 public:
  void Launch(const Kernel& kernel, const KernelCall& call) override {
    ++launches;
    in_any_order += call.any_order ? 1 : 0;
    CpuDevice::Launch(kernel, call);
  }
  int launches = 0;
  int in_any_order = 0;
};

// Attention's gradients are faster so.
TEST(PreparedKernelTest, SumsHaveAnyOrderAsInRunsThatNeedNotBeTheSame) {
  const KernelCase::Buffer matrix = {DType::kFloat32, {4, 4}, {4, 4}};
  KernelCase gelu;
  gelu.kernel = "gelu";
  gelu.operands = {matrix};
  gelu.results = {matrix};
  OrderDevice device;
  PreparedKernel::Make(gelu, device, Bytes{0}).value()->Run();
  EXPECT_EQ(device.launches, 1);
  EXPECT_EQ(device.in_any_order, 1);
}

// All ranks profile on their devices; rank 0's result.
ProfilerResult ProfileOn(
    const ProfileCases& cases,
    const std::vector<std::unique_ptr<RankDevice>>& devices,
    std::vector<std::unique_ptr<CommWorld>> worlds,
    const ProfilerOptions& options) {
  std::vector<Result<ProfilerResult>> results(devices.size(),
                                              InvalidInput("did not run"));
  RunThreads(static_cast<int>(devices.size()), [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    results[r] = Profile(cases, *devices[r], *worlds[r], options);
    worlds[r].reset();
  });
  return results[0].value();
}

ProfilerResult ProfileOnThreads(const ProfileCases& cases, int ranks,
                                const ProfilerOptions& options) {
  std::vector<std::unique_ptr<RankDevice>> devices;
  for (int r = 0; r < ranks; ++r) {
    devices.push_back(std::make_unique<CpuDevice>());
  }
  return ProfileOn(cases, devices, MakeThreadWorlds(ranks), options);
}

// The ranks share the memory of devices with queues, as on one GPU. `waits` is
// how often rank 0 waited for its own.
ProfilerResult ProfileOnQueues(const ProfileCases& cases, int ranks,
                               const ProfilerOptions& options, int64_t* waits) {
  std::vector<std::unique_ptr<RankDevice>> devices;
  std::vector<QueueDevice*> queues;
  for (int r = 0; r < ranks; ++r) {
    auto device = std::make_unique<QueueCpuDevice>(static_cast<uint64_t>(r));
    queues.push_back(device.get());
    devices.push_back(std::move(device));
  }
  ProfilerResult result =
      ProfileOn(cases, devices, MakeLoopbackWorlds(queues), options);
  *waits = static_cast<QueueCpuDevice&>(*devices[0]).waits();
  return result;
}

std::vector<ProfileKey> KeysOf(const ProfileDb& profile) {
  std::vector<ProfileKey> keys;
  for (const auto& [key, row] : profile.rows) keys.push_back(key);
  return keys;
}

TEST(UniformPlansTest, AreValidAndDistinct) {
  const Graph graph = TinyGraph();
  const Cluster cluster = LocalCpu(4);
  const int samples[] = {1, 2};
  const std::vector<Plan> plans = UniformPlans(graph, cluster, samples);
  EXPECT_GE(plans.size(), 6u);  // at least one for each (dp, tp, pp)
  for (const Plan& plan : plans) {
    EXPECT_THAT(Validate(graph, cluster, plan), ::testing::IsEmpty());
  }
  for (size_t i = 0; i < plans.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(plans[i], plans[j]);
  }
}

TEST(TypicalGraphsTest, HaveEveryOperatorOfTheirFamilies) {
  const auto graphs = TypicalGraphs();
  ASSERT_TRUE(graphs) << graphs.error().ToString();
  std::set<std::string_view> operators;
  for (const Graph& graph : *graphs) {
    for (const Node& node : graph.nodes) operators.insert(node.op->name);
  }
  EXPECT_THAT(operators, ::testing::IsSupersetOf(
                             {"embedding", "linear", "layer_norm", "rms_norm",
                              "rotary", "attention", "gelu", "silu", "dropout",
                              "multiply", "cross_entropy"}));
}

// What was profiled for a plan prices all of it: kernels and copies exactly,
// exchanges exactly or between two payloads of the ladder.
TEST(ProfileTest, PricesThePlanThatItWasMadeFor) {
  const Graph graph = TinyGraph();
  for (const char* strategy :
       {"dp=2,mbs=2,zero=1", "tp=2,mbs=2,sp=1", "pp=2,mbs=1"}) {
    const Cluster cluster = LocalCpu(2);
    const Plan plan = PlanOf(graph, cluster, strategy);
    ProfileCases cases;
    AddLadder(cluster, cases);
    AddCases(graph, cluster, {&plan, 1}, {}, cases);
    const ProfilerResult result = ProfileOnThreads(cases, 2, Quick());
    EXPECT_EQ(result.left_out, 0u);
    EXPECT_EQ(result.profile.origin.ranks_at_once, 2);
    EXPECT_THAT(Validate(result.profile), ::testing::IsEmpty());
    for (const auto& [key, row] : result.profile.rows) {
      EXPECT_GT(row.median_s, 0) << key.name;
      EXPECT_GE(row.samples, 5) << key.name;
    }

    const Pricer pricer(graph, cluster, &result.profile);
    const TaskGraph tasks = Lower(graph, cluster, plan, {});
    const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
    for (size_t t = 0; t < costs.size(); ++t) {
      const Task& task = tasks.tasks[t];
      const bool exchange =
          task.kind == TaskKind::kComm || task.kind == TaskKind::kSend;
      EXPECT_LE(costs[t].source,
                exchange ? CostSource::kInterpolated : CostSource::kMeasured)
          << strategy << ": "
          << NameOf(tasks, graph, TaskId(static_cast<int64_t>(t)));
    }
  }
}

// On a device that has fused kernels, the plan is priced by their times, and
// what they do besides at nothing.
TEST(ProfileTest, PricesFusedKernels) {
  const Graph graph = TinyGraph();
  const Cluster cluster = LocalCpu(1);
  const Plan plan = PlanOf(graph, cluster, "mbs=4");
  ProfileCases cases;
  AddLadder(cluster, cases);
  AddCases(graph, cluster, {&plan, 1}, {}, cases, /*fused=*/true);
  cases.collectives.clear();
  int64_t waits = 0;
  ProfilerOptions options = Quick();
  const ProfilerResult result = ProfileOnQueues(cases, 1, options, &waits);
  EXPECT_EQ(result.measured, cases.kernels.size());
  std::set<std::string> names;
  for (const auto& [key, row] : result.profile.rows) names.insert(key.name);
  EXPECT_THAT(names, ::testing::IsSupersetOf(
                         {"linear+gelu", "linear_dx+gelu_dx", "add+layer_norm",
                          "layer_norm_dx+sum+dw", "layer_norm_dx", "gelu"}));

  const Pricer pricer(graph, cluster, &result.profile);
  const TaskGraph tasks = Lower(graph, cluster, plan, {});
  const std::vector<ProfileKey> keys = ProfileKeysOf(pricer, tasks);
  const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
  std::map<std::string, int> fused;
  for (size_t t = 0; t < costs.size(); ++t) {
    if (keys[t].name.find('+') == std::string::npos) continue;
    ++fused[keys[t].name];
    EXPECT_EQ(costs[t].duration,
              Duration::FromSeconds(result.profile.rows.at(keys[t]).median_s));
  }
  EXPECT_EQ(fused["linear+gelu"], 4);  // layers
  for (size_t t = 0; t < costs.size(); ++t) {
    if (tasks.tasks[t].kernel != "gelu") continue;
    EXPECT_EQ(costs[t].duration, Duration{});
  }
}

// The rounding of parameters is timed as a training with it runs it.
TEST(ProfileTest, PricesRoundingAtRandom) {
  const Graph graph = TinyGraph(DType::kBFloat16);
  const Cluster cluster = LocalCpu(1);
  const Plan plan = PlanOf(graph, cluster, "mbs=4");
  TrainingOptions training;
  training.stochastic_rounding = true;
  ProfileCases cases;
  AddLadder(cluster, cases);
  AddCases(graph, cluster, {&plan, 1}, training, cases);
  std::erase_if(cases.kernels, [](const auto& kernel) {
    return kernel.first.name != "stochastic_cast";
  });
  EXPECT_FALSE(cases.kernels.empty());
  const ProfileDb profile = ProfileOnThreads(cases, 1, Quick()).profile;

  const Pricer pricer(graph, cluster, &profile, PricerOptionsOf(training));
  const TaskGraph tasks = Lower(graph, cluster, plan, training);
  const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
  int roundings = 0;
  for (size_t t = 0; t < costs.size(); ++t) {
    if (tasks.tasks[t].kernel != "stochastic_cast") continue;
    ++roundings;
    EXPECT_EQ(costs[t].source, CostSource::kMeasured);
  }
  EXPECT_GT(roundings, 0);
}

TEST(ProfileTest, LeavesOutWhatThereIsNoTimeFor) {
  const Cluster cluster = LocalCpu(2);
  ProfileCases cases;
  AddLadder(cluster, cases);
  ProfilerOptions options;
  options.time_limit_s = 0;
  const ProfilerResult result = ProfileOnThreads(cases, 2, options);
  EXPECT_THAT(result.profile.rows, ::testing::IsEmpty());
  EXPECT_EQ(result.left_out, cases.kernels.size() + cases.collectives.size());
}

// Five samples and a first run of a kernel of 200 s would take 1200 s.
TEST(ProfileTest, LeavesOutWhatIsPredictedToTakeTooLong) {
  ProfileCases cases = CasesOf(TinyGraph(), 1, "mbs=2");
  size_t slow = 0;
  for (auto& [key, kernel] : cases.kernels) {
    EXPECT_TRUE(kernel.run_s > 0 || key.name == "copy") << key.name;
    kernel.run_s = 10;
    if (key.name != "linear") continue;
    kernel.run_s = 200;
    ++slow;
  }
  ASSERT_GT(slow, 0u);
  ProfilerOptions options = Quick();
  options.time_limit_s = 1199;
  const ProfilerResult result = ProfileOnThreads(cases, 1, options);
  EXPECT_EQ(result.left_out, slow);
  EXPECT_EQ(result.measured,
            cases.kernels.size() + cases.collectives.size() - slow);
  for (const auto& [key, row] : result.profile.rows) {
    EXPECT_NE(key.name, "linear");
    EXPECT_EQ(row.samples, 5);
  }
}

TEST(ProfileTest, HasTheSameRowsOnADeviceWithQueues) {
  const Graph graph = TinyGraph();
  const ProfileCases cases = CasesOf(graph, 2, "tp=2,mbs=2,sp=1");
  const ProfileDb host = ProfileOnThreads(cases, 2, Quick()).profile;
  int64_t waits = 0;
  const ProfilerResult result = ProfileOnQueues(cases, 2, Quick(), &waits);
  EXPECT_EQ(KeysOf(result.profile), KeysOf(host));
  EXPECT_EQ(result.measured, cases.kernels.size() + cases.collectives.size());
  EXPECT_THAT(Validate(result.profile), ::testing::IsEmpty());
  for (const auto& [key, row] : result.profile.rows) {
    EXPECT_GT(row.median_s, 0) << key.name;
    EXPECT_GE(row.samples, 20) << key.name;
  }
}

// Samples of 64 runs need no more of the host's waits than samples of one.
TEST(ProfileTest, WaitsForSamplesAndNotForRuns) {
  const Graph graph = TinyGraph();
  ProfileCases cases = CasesOf(graph, 1, "mbs=2");
  while (cases.kernels.size() > 3) cases.kernels.erase(cases.kernels.begin());
  int64_t waits_for_one = 0;
  ProfileOnQueues(cases, 1, Quick(), &waits_for_one);
  ProfilerOptions options = Quick();
  options.sample_s = 1e9;
  int64_t waits_for_many = 0;
  ProfileOnQueues(cases, 1, options, &waits_for_many);
  EXPECT_EQ(waits_for_one, waits_for_many);
}

// By its clock, which stands still on the last of three ranks, all samples take
// a millisecond. CUDA's memory of exchanges is counted.
class StoppedClock : public QueueCpuDevice {
 public:
  explicit StoppedClock(bool stands_still)
      : QueueCpuDevice(1), stands_still_(stands_still) {}
  Result<Duration> Between(int, int) override {
    return Duration::FromSeconds(stands_still_ ? 0 : 1e-3);
  }
  Result<void*> Allocate(Bytes size, MemoryCategory category) override {
    if (category == MemoryCategory::kCommunication) sizes.insert(size);
    return QueueCpuDevice::Allocate(size, category);
  }
  std::set<Bytes> sizes;

 private:
  const bool stands_still_;
};

// A rank that is left over has no part in a message's time; and runs take turns
// over buffers.
TEST(ProfileTest, MessagesAreTimedByRanksThatExchangeThem) {
  ProfileCases cases;
  AddLadder(LocalCpu(3), cases);
  cases.kernels.clear();
  std::erase_if(cases.collectives, [](const auto& exchange) {
    return exchange.first.payload != Bytes{1 << 10};
  });
  std::vector<std::unique_ptr<RankDevice>> devices;
  std::vector<QueueDevice*> queues;
  for (int rank = 0; rank < 3; ++rank) {
    auto device = std::make_unique<StoppedClock>(/*stands_still=*/rank == 2);
    queues.push_back(device.get());
    devices.push_back(std::move(device));
  }
  const ProfileDb profile =
      ProfileOn(cases, devices, MakeLoopbackWorlds(queues), Quick()).profile;
  const auto seconds = [&](CommKind kind, int ranks) {
    return profile.rows.at(CollectiveKey(kind, "cpu-core", ranks, 1, {1 << 10}))
        .median_s;
  };
  // There and back take a millisecond; of three ranks two say so of a whole.
  EXPECT_DOUBLE_EQ(seconds(CommKind::kSendRecv, 2), 0.5e-3);
  EXPECT_DOUBLE_EQ(seconds(CommKind::kAllReduce, 3), 2e-3 / 3);
  // 64 KiB of sets of two buffers, and one more set.
  const auto& first = static_cast<const StoppedClock&>(*devices[0]);
  EXPECT_THAT(first.sizes, ::testing::Contains(Bytes{(1 << 16) + (1 << 11)}));
}

// By its clock every sample takes 100,000 s.
class SlowClock : public QueueCpuDevice {
 public:
  SlowClock() : QueueCpuDevice(1) {}
  Result<Duration> Between(int, int) override {
    return Duration::FromSeconds(1e5);
  }
};

// Behind two first runs 1.35 of 1.55 million seconds are left for 13 samples of
// twenty; a limit that is over leaves one.
TEST(ProfileTest, SlowRunsAreFewer) {
  ProfileCases cases = CasesOf(TinyGraph(), 1, "mbs=2");
  cases.collectives.clear();
  std::erase_if(cases.kernels,
                [](const auto& kernel) { return kernel.first.name != "gelu"; });
  ASSERT_EQ(cases.kernels.size(), 1u);
  for (const auto& [limit, samples] :
       {std::pair(1e9, 20), std::pair(1.55e6, 13), std::pair(1.5e5, 1)}) {
    std::vector<std::unique_ptr<RankDevice>> devices;
    auto device = std::make_unique<SlowClock>();
    QueueDevice* queue = device.get();
    devices.push_back(std::move(device));
    ProfilerOptions options = Quick();
    options.time_limit_s = limit;
    const ProfilerResult result =
        ProfileOn(cases, devices, MakeLoopbackWorlds({&queue, 1}), options);
    ASSERT_EQ(result.profile.rows.size(), 1u) << limit;
    EXPECT_EQ(result.profile.rows.begin()->second.samples, samples) << limit;
  }
}

// As many bytes as are rotated lie between two runs on one set.
TEST(SetsInTurnTest, AreColdAndNotTooMany) {
  constexpr int64_t kMiB = 1 << 20;
  EXPECT_EQ(SetsInTurn(Bytes{kMiB}, kMiB / 4), 5);
  EXPECT_EQ(SetsInTurn(Bytes{kMiB}, kMiB / 4 + 256), 5);
  EXPECT_EQ(SetsInTurn(Bytes{kMiB}, kMiB), 2);
  EXPECT_EQ(SetsInTurn(Bytes{kMiB}, 3 * kMiB), 2);
  EXPECT_EQ(SetsInTurn(Bytes{kMiB}, 4 * kMiB), 1);
  EXPECT_EQ(SetsInTurn(Bytes{kMiB}, 1 << 10), kMostSets);
  EXPECT_EQ(SetsInTurn(Bytes{0}, 1 << 10), 1);
}

// Where the operands and results of the runs lie.
class PlacesDevice : public CpuDevice {
 public:
  void Launch(const Kernel& kernel, const KernelCall& call) override {
    places.push_back(call.operands[0].data);
    CpuDevice::Launch(kernel, call);
  }
  std::vector<void*> places;
};

// One of more than is rotated is not in the caches either.
TEST(PreparedKernelTest, ARunWorksOnOtherBuffersThanTheOneBefore) {
  for (const int64_t side : {16, 256}) {
    const KernelCase::Buffer matrix = {
        DType::kFloat32, {side, side}, {side, side}};
    KernelCase gelu;
    gelu.kernel = "gelu";
    gelu.operands = {matrix};
    gelu.results = {matrix};
    PlacesDevice device;
    const auto prepared =
        PreparedKernel::Make(gelu, device, Bytes{1 << 18}).value();
    prepared->Run();
    prepared->Run();
    EXPECT_NE(device.places[0], device.places[1]) << side;
  }
}

// A message's pairs are neighbours: all on one node, all across, or not timed.
TEST(AddLadderTest, MessagesOfPairsThatAreAlike) {
  const auto nodes = [](const std::string& cluster) {
    ProfileCases cases;
    AddLadder(MakeCluster(cluster).value(), cases);
    std::set<int> result;
    for (const auto& [key, seconds] : cases.collectives) {
      if (key.name == NameOf(CommKind::kSendRecv)) result.insert(key.nodes);
    }
    return result;
  };
  EXPECT_EQ(nodes("local-cpu:3"), std::set{1});
  EXPECT_EQ(nodes("dgx-h100:2x2"), std::set{1});
  EXPECT_EQ(nodes("dgx-h100:2x1"), std::set{2});
  EXPECT_EQ(nodes("dgx-h100:2x3"), std::set<int>());
}

// Two hosts of four GPUs in one NVLink domain are a node of eight.
TEST(AddLadderTest, NodesOfSeveralHostsAreThoseOfPlans) {
  const auto nodes = [](const std::string& gpu, const std::string& hosts,
                        const std::string& planned) {
    return LadderCluster({gpu, Bytes{1}}, MakeCluster(hosts).value(),
                         MakeCluster(planned).value())
        .num_nodes();
  };
  const std::string gb200 = "NVIDIA GB200";
  EXPECT_EQ(nodes(gb200, "gb200-nvl72:2x4", "gb200-nvl72:1x8"), 1);
  // Plans for more ranks than there are do not say how these are joined, and a
  // host is one node at least.
  EXPECT_EQ(nodes(gb200, "gb200-nvl72:2x4", "gb200-nvl72:1"), 2);
  EXPECT_EQ(nodes(gb200, "gb200-nvl72:1x8", "gb200-nvl72:2x4"), 1);
  // Of nodes of 8 and 4 there are no groups of 6 that are alike.
  EXPECT_EQ(nodes(gb200, "gb200-nvl72:3x4", "gb200-nvl72:1x8+gb200-nvl72:1x4"),
            3);
  // Two hosts of four are no DGX, whatever plans are for.
  EXPECT_EQ(nodes("NVIDIA H100 80GB HBM3", "dgx-h100:2x4", "dgx-h100:1x8"), 2);
}

// Ranks have a share of four bytes at least of what is timed: of 512 ranks
// others' rows begin at 4 KiB.
TEST(AddLadderTest, SharesAreNotEmpty) {
  ProfileCases cases;
  AddLadder(LocalCpu(512), cases);
  std::map<std::string, int64_t> least;
  for (const auto& [key, seconds] : cases.collectives) {
    if (key.ranks != 512) continue;
    const auto [at, is_new] = least.emplace(key.name, key.payload.value);
    if (!is_new) at->second = std::min(at->second, key.payload.value);
  }
  const std::map<std::string, int64_t> expected = {
      {NameOf(CommKind::kAllReduce).data(), 1 << 10},
      {NameOf(CommKind::kShift).data(), 1 << 10},
      {NameOf(CommKind::kAllGather).data(), 1 << 12},
      {NameOf(CommKind::kReduceScatter).data(), 1 << 12},
      {NameOf(CommKind::kAllToAll).data(), 1 << 12}};
  EXPECT_EQ(least, expected);
}

// Memory for the smaller ones alone.
class SmallDevice : public CpuDevice {
 public:
  Result<void*> Allocate(Bytes size, MemoryCategory category) override {
    if (size > Bytes{1 << 20}) {
      return Error{ErrorCode::kUnavailable, "too large", ""};
    }
    return CpuDevice::Allocate(size, category);
  }
};

TEST(ProfileTest, ProgressCountsWhatIsTooLarge) {
  ProfileCases cases;
  AddLadder(LocalCpu(1), cases);
  ProfilerOptions options = Quick();
  std::vector<size_t> done;
  options.progress = [&](size_t i, size_t all) {
    EXPECT_EQ(all, cases.kernels.size());
    done.push_back(i);
  };
  std::vector<std::unique_ptr<RankDevice>> devices;
  devices.push_back(std::make_unique<SmallDevice>());
  const ProfilerResult result =
      ProfileOn(cases, devices, MakeThreadWorlds(1), options);
  EXPECT_GT(result.measured, 0u);
  EXPECT_GT(result.too_large, 0u);
  EXPECT_EQ(result.measured + result.too_large, cases.kernels.size());
  EXPECT_EQ(done.size(), cases.kernels.size());
  EXPECT_EQ(done.back(), cases.kernels.size());
}

TEST(ProfileTest, MeasuresNothingTwice) {
  const Graph graph = TinyGraph();
  const ProfileCases cases = CasesOf(graph, 2, "dp=2,mbs=2");
  const ProfilerResult whole = ProfileOnThreads(cases, 2, Quick());
  // A third is missing; what is there cannot be a time of this machine.
  ProfilerOptions options = Quick();
  size_t missing = 0;
  for (const auto& [key, row] : whole.profile.rows) {
    const bool exchange = key.rule.empty();
    if (!exchange && ++missing % 3 == 0) continue;
    options.known.rows[key] = {.median_s = 1e6, .spread = 0, .samples = 1};
  }
  const ProfilerResult rest = ProfileOnThreads(cases, 2, options);
  EXPECT_EQ(rest.measured, missing / 3);
  EXPECT_EQ(KeysOf(rest.profile), KeysOf(whole.profile));
  for (const auto& [key, row] : rest.profile.rows) {
    EXPECT_EQ(row.median_s == 1e6, options.known.rows.contains(key));
  }
  options.again = true;
  const ProfilerResult again = ProfileOnThreads(cases, 2, options);
  EXPECT_EQ(again.measured, cases.kernels.size() + cases.collectives.size());
  for (const auto& [key, row] : again.profile.rows) {
    EXPECT_LT(row.median_s, 1e6) << key.name;
  }
}

TEST(ProfileTest, KeepsWhatItHasWhenInterrupted) {
  const Graph graph = TinyGraph();
  const ProfileCases cases = CasesOf(graph, 2, "dp=2,mbs=2");
  std::atomic<bool> stop = false;
  ProfileDb saved;
  ProfilerOptions options = Quick();
  options.stop = &stop;
  options.progress = [&](size_t done, size_t) { stop = done >= 3; };
  options.save = [&](const ProfileDb& profile) -> Result<void> {
    saved = profile;
    return {};
  };
  const ProfilerResult result = ProfileOnThreads(cases, 2, options);
  EXPECT_TRUE(result.interrupted);
  EXPECT_EQ(result.measured, 3u);
  EXPECT_EQ(result.left_out,
            cases.kernels.size() + cases.collectives.size() - 3);
  EXPECT_EQ(saved, result.profile);
}

// By predicted seconds; of kernels with about the same work one; the ladder at
// the end.
TEST(ProfileTest, MeasuresInTheOrderOfValue) {
  const Graph graph = TinyGraph();
  const ProfileCases cases = CasesOf(graph, 2, "tp=2,mbs=2");
  const auto measured = [&](const ProfileDb& known, size_t count) {
    std::atomic<bool> stop = false;
    ProfilerOptions options = Quick();
    options.known = known;
    options.stop = &stop;
    options.progress = [&](size_t done, size_t) { stop = done >= count; };
    ProfileDb profile = ProfileOnThreads(cases, 2, options).profile;
    for (const auto& [key, row] : known.rows) profile.rows.erase(key);
    return profile;
  };
  const auto worth = [&](const ProfileKey& key) {
    const auto kernel = cases.kernels.find(key);
    return kernel != cases.kernels.end() ? kernel->second.seconds
                                         : cases.collectives.at(key);
  };
  double most = 0;
  for (const auto& [key, kernel] : cases.kernels) {
    most = std::max(most, kernel.seconds);
  }
  for (const auto& [key, seconds] : cases.collectives) {
    most = std::max(most, seconds);
  }
  const ProfileDb first = measured({}, 1);
  ASSERT_EQ(first.rows.size(), 1u);
  EXPECT_EQ(worth(first.rows.begin()->first), most);
  // The plan exchanges by few of the kinds.
  const auto exchanges = static_cast<size_t>(std::ranges::count_if(
      cases.collectives, [](auto& c) { return c.second > 0; }));
  EXPECT_GE(exchanges, 2u);
  EXPECT_LT(exchanges, cases.collectives.size());
  size_t needed = 0;
  for (const auto& [key, kernel] : cases.kernels) needed += kernel.seconds > 0;
  for (const auto& [key, row] : measured({}, needed + exchanges).rows) {
    EXPECT_GT(worth(key), 0) << key.name;
  }
}

}  // namespace
}  // namespace tessera
