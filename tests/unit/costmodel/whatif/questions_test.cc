#include "costmodel/whatif/questions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/simulate/simulator.h"
#include "costmodel/whatif/degrade.h"
#include "costmodel/whatif/jitter.h"
#include "costmodel/whatif/sensitivity.h"
#include "planner/io/cluster_io.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

Scenario Of(const std::string& model, const std::string& cluster, int64_t batch,
            int64_t seq, const std::string& strategy) {
  Scenario scenario;
  scenario.model = ExamplePath("models/" + model + "/config.json");
  scenario.cluster = cluster;
  scenario.global_batch = batch;
  scenario.seq_len = seq;
  scenario.strategy = strategy;
  return scenario;
}

struct Planned {
  Case made;
  Plan plan;
};
Planned PlannedFor(const Scenario& scenario) {
  ModelCache models;
  Case made = *MakeCase(scenario, models);
  Plan plan = *PlanOf(made);
  return {std::move(made), std::move(plan)};
}

double SecondsOf(const Case& of, const Cluster& cluster, const Plan& plan) {
  return Evaluator(*of.graph, cluster, nullptr, {})
      .Evaluate(plan)
      .step_time.seconds();
}

Sensitivity SensitivityOn(const Planned& p) {
  const Evaluator evaluator(*p.made.graph, p.made.cluster, nullptr, {});
  return SensitivityOf(*p.made.graph, p.made.cluster, p.plan, evaluator,
                       nullptr, {});
}

// Time is homogeneous of degree -1 in all resources together (Euler), on
// devices whose kernels are a roofline.
TEST(Sensitivity, ElasticitiesAddUpToOne) {
  for (const char* cluster : {"local-cpu:4", "local-cpu:1"}) {
    const Planned p = PlannedFor(Of("gpt2-tiny", cluster, 8, 32, "mbs=1"));
    const Sensitivity sensitivity = SensitivityOn(p);
    double sum = 0;
    for (const Elasticity& e : sensitivity.resources) {
      EXPECT_GE(e.value, -1e-9) << e.resource->name;
      sum += e.value;
    }
    // Steps of 0.1 %: their second-order term, and picoseconds.
    EXPECT_NEAR(sum, 1, 2e-3) << cluster;
    EXPECT_NEAR(sensitivity.unexplained, 1 - sum, 1e-12);
  }
}

// All resources twice as good take half of the time, but for what none of them
// scales: of T = A / r + c that is c / T, and T(2) / T(1) = (1 + c / T) / 2.
TEST(Sensitivity, EverythingTwiceAsGoodTakesHalfOfWhatIsExplained) {
  const Planned p = PlannedFor(Of("gpt2-tiny", "local-cpu:4", 8, 32, "tp=2"));
  Cluster twice = p.made.cluster;
  for (const Resource& resource : Resources()) resource.improve(2, twice);
  const double before = SecondsOf(p.made, p.made.cluster, p.plan);
  const Sensitivity sensitivity = SensitivityOn(p);
  EXPECT_NEAR(SecondsOf(p.made, twice, p.plan) / before,
              (1 + sensitivity.unexplained) / 2, 1e-3);
}

// One slow device of four that work alike: all wait for it, but links are as
// fast as before.
TEST(Degraded, TheSlowestOfAGroupCounts) {
  Scenario scenario = Of("gpt2-tiny", "local-cpu:4", 8, 32, "");
  const Planned all = PlannedFor(scenario);
  const double usual = SecondsOf(all.made, all.made.cluster, all.plan);
  scenario.slow = {{"device3", "2x"}};
  const Planned slow = PlannedFor(scenario);
  const double slower = SecondsOf(slow.made, slow.made.cluster, slow.plan);
  EXPECT_GT(slower, 1.2 * usual);
  EXPECT_LE(slower, 2 * usual);
  scenario.slow = {{"node0", "2x"}};
  const Planned every = PlannedFor(scenario);
  EXPECT_DOUBLE_EQ(SecondsOf(every.made, every.made.cluster, every.plan),
                   slower);
}

// Times of all tasks of the case that a profile can have, none as the model has
// it: of every `each`-th kind, in the order of the keys.
ProfileDb ProfileOf(const Planned& p, size_t each) {
  const TaskGraph tasks = Lower(*p.made.graph, p.made.cluster, p.plan, {});
  const Pricer pricer(*p.made.graph, p.made.cluster, nullptr);
  ProfileDb all;
  for (const ProfileKey& key : ProfileKeysOf(pricer, tasks)) {
    all.rows[key] = {.median_s = 1e-3, .samples = 9};
  }
  ProfileDb profile;
  size_t number = 0;
  for (const auto& row : all.rows) {
    if (number++ % each == 0) profile.rows.insert(row);
  }
  return profile;
}

Evaluation EvaluatedOn(const Planned& p, const ProfileDb& profile) {
  return Evaluator(*p.made.graph, p.made.cluster, &profile, {})
      .Evaluate(p.plan);
}

// A device alone: each of its kernels takes twice as long, wherever the time
// comes from, and it comes from where it did.
TEST(Degraded, WhatWasMeasuredTakesAsManyTimesAsLong) {
  for (const char* cluster : {"local-cpu:1", "dgx-h100:1x1"}) {
    Scenario scenario = Of("gpt2-tiny", cluster, 8, 32, "mbs=4");
    const Planned usual = PlannedFor(scenario);
    scenario.slow = {{"node0", "2x"}};
    const Planned slow = PlannedFor(scenario);
    for (const size_t each : {1, 2, 1000}) {
      const ProfileDb profile = ProfileOf(usual, each);
      const Evaluation before = EvaluatedOn(usual, profile);
      const Evaluation after = EvaluatedOn(slow, profile);
      EXPECT_NEAR(after.step_time.seconds() / before.step_time.seconds(), 2,
                  1e-6)
          << cluster << " " << each;
      EXPECT_NEAR(after.sources.measured, before.sources.measured, 1e-6);
      EXPECT_NEAR(after.sources.interpolated, before.sources.interpolated,
                  1e-6);
      if (each == 1) {
        EXPECT_EQ(after.sources.measured, 1);
      } else if (each == 1000) {
        EXPECT_LT(after.sources.measured, 0.9);
      }
    }
  }
}

// Of two hosts one NIC: what was measured of their collectives takes longer the
// slower it is, and nothing else does.
TEST(Degraded, MeasuredCollectivesWaitForSlowLinks) {
  Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:2x1", 8, 32, "mbs=4");
  const ProfileDb profile = ProfileOf(PlannedFor(scenario), 1);
  const auto step = [&](const std::string& part, const std::string& factor) {
    scenario.slow = {{part, factor}};
    const Evaluation evaluation = EvaluatedOn(PlannedFor(scenario), profile);
    EXPECT_EQ(evaluation.sources.measured, 1) << part << factor;
    return evaluation.step_time;
  };
  scenario.slow = {};
  Duration last = EvaluatedOn(PlannedFor(scenario), profile).step_time;
  EXPECT_EQ(step("node1.nic0", "1x"), last);
  for (const char* factor : {"2x", "10x", "1000x"}) {
    const Duration now = step("node1.nic0", factor);
    EXPECT_GT(now, last) << factor;
    last = now;
  }
}

// Around the step as it was measured, not as it is modelled.
TEST(Jitter, KeepsWhatWasMeasured) {
  const Planned p = PlannedFor(Of("gpt2-tiny", "local-cpu:4", 8, 32, "pp=2"));
  const ProfileDb profile = ProfileOf(p, 1);
  const double measured = EvaluatedOn(p, profile).step_time.seconds();
  ASSERT_GT(measured, 2 * SecondsOf(p.made, p.made.cluster, p.plan));
  PredictOptions predict;
  predict.profile = &profile;
  const Jitter still = JitterOf(p.made, p.plan, predict, {1e-9, 5, 1});
  EXPECT_NEAR(still.p50, measured, 1e-6 * measured);
  const Jitter shaken = JitterOf(p.made, p.plan, predict, {0.05, 20, 1});
  EXPECT_GT(shaken.p50, measured);
  EXPECT_LT(shaken.p95, 1.15 * measured);
}

TEST(Jitter, IsSeededAndGrowsWithSigma) {
  const Planned p = PlannedFor(Of("gpt2-tiny", "local-cpu:4", 8, 32, "pp=2"));
  const double usual = SecondsOf(p.made, p.made.cluster, p.plan);
  const auto at = [&](double sigma, uint64_t seed) {
    return JitterOf(p.made, p.plan, {}, {sigma, 20, seed});
  };
  EXPECT_EQ(at(0.05, 1).p95, at(0.05, 1).p95);
  EXPECT_NE(at(0.05, 1).p50, at(0.05, 2).p50);
  EXPECT_NEAR(at(1e-9, 1).p50, usual, 1e-6 * usual);
  EXPECT_LE(at(0.05, 1).p50, at(0.05, 1).p95);
  // Two devices of a stage wait for each other: the median is late.
  EXPECT_GT(at(0.05, 1).p50, usual);
  EXPECT_GT(at(0.2, 1).p50, at(0.05, 1).p50);
}

// The A100 decides, however slow an H100 is that has no more work: half of the
// steps are slower than usual and half are faster. (Were each of the group's
// devices as slow as the slowest, the median would be that of the largest of
// nine, 1.45 sigma: 7 % more.)
TEST(Jitter, OfUnlikeDevicesTheSlowOneCounts) {
  const Planned p = PlannedFor(
      Of("gpt2-medium", "dgx-a100-80gb:1x1+dgx-h100:1", 9 * 8, 1024, "mbs=8"));
  const double usual = SecondsOf(p.made, p.made.cluster, p.plan);
  Cluster slower = p.made.cluster;
  ASSERT_TRUE(SlowDown("node1", 1.15, slower));
  ASSERT_NEAR(SecondsOf(p.made, slower, p.plan), usual, 1e-3 * usual);
  const Jitter jitter = JitterOf(p.made, p.plan, {}, {0.05, 101, 1});
  EXPECT_NEAR(jitter.p50, usual, 0.02 * usual);
}

TEST(Jitter, StopsEarly) {
  const Planned p = PlannedFor(Of("gpt2-tiny", "local-cpu:4", 8, 32, "pp=2"));
  const std::atomic<bool> stop = true;
  PredictOptions predict;
  predict.watch.stop = &stop;
  EXPECT_EQ(JitterOf(p.made, p.plan, predict, {0.05, 20, 1}).samples, 1);
}

TEST(Fit, WhatFitsAndWhatMakesItFit) {
  ModelCache models;
  Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "mbs=8");
  GridOptions options;
  options.predict.fast = true;
  Fit fit = *FitOf(*MakeCase(scenario, models), options);
  EXPECT_TRUE(fit.fits);
  EXPECT_TRUE(fit.changes.empty());
  EXPECT_EQ(fit.strategy, "mbs=8");
  // A byte too little of what it needs.
  scenario.settings = {
      {"device.memory", std::to_string(fit.memory.value - 1) + "B"}};
  Fit small = *FitOf(*MakeCase(scenario, models), options);
  EXPECT_FALSE(small.fits);
  EXPECT_EQ(small.memory_needed, fit.memory);
  EXPECT_EQ(small.step_time, fit.step_time);
  ASSERT_FALSE(small.changes.empty());
  Duration fastest_single = Duration::FromSeconds(1e6);
  for (const FitChange& change : small.changes) {
    EXPECT_LT(change.memory, fit.memory) << change.change;
    // Each is a strategy that fits.
    Scenario changed = scenario;
    changed.strategy = change.strategy;
    const Fit now = *FitOf(*MakeCase(changed, models), options);
    EXPECT_TRUE(now.fits) << change.change;
    EXPECT_EQ(now.step_time, change.step_time) << change.change;
    EXPECT_EQ(change.change.find(", ") != std::string::npos, change.keys == 2);
    if (change.keys == 1) {
      fastest_single = std::min(fastest_single, change.step_time);
    }
  }
  // Two changes only where they are faster than one.
  for (const FitChange& change : small.changes) {
    if (change.keys == 1) continue;
    EXPECT_LT(change.step_time, fastest_single) << change.change;
  }
  // With just what it needs it fits.
  scenario.settings = {
      {"device.memory", std::to_string(fit.memory_needed.value) + "B"}};
  EXPECT_TRUE(FitOf(*MakeCase(scenario, models), options)->fits);
}

// With just the room for what is left where gradients are on the host with the
// optimizer's state.
TEST(Fit, GradientsMayGoToTheHostToo) {
  ModelCache models;
  Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:1", 8, 32, "mbs=1");
  GridOptions options;
  options.predict.fast = true;
  const auto needed = [&](const std::string& strategy) {
    Scenario own = scenario;
    own.strategy = strategy;
    return FitOf(*MakeCase(own, models), options)->memory_needed.value;
  };
  const int64_t on_host = needed("mbs=1,offload=optimizer:host");
  const int64_t with_gradients =
      needed("mbs=1,offload=optimizer:host,gradients:host");
  ASSERT_LT(with_gradients, on_host);
  scenario.settings = {{"device.memory", std::to_string(with_gradients) + "B"}};
  const Fit fit = *FitOf(*MakeCase(scenario, models), options);
  ASSERT_FALSE(fit.fits);
  int offloads = 0;
  bool gradients = false;
  for (const FitChange& change : fit.changes) {
    if (change.keys != 1 || !change.change.starts_with("offload=")) continue;
    ++offloads;
    gradients |= change.change == "offload=optimizer:host,gradients:host";
    EXPECT_LE(change.memory.value, with_gradients) << change.change;
  }
  EXPECT_TRUE(gradients);
  EXPECT_LE(offloads, 2);  // not one key alone
}

TEST(Fit, WhatHostsHaveNoRoomForMayStayOnTheDevices) {
  ModelCache models;
  Scenario scenario =
      Of("gpt2-tiny", "dgx-a100-80gb:1", 8, 32, "mbs=1,offload=optimizer:host");
  scenario.settings = {{"host.memory", "1kB"}};
  GridOptions options;
  options.predict.fast = true;
  const Fit fit = *FitOf(*MakeCase(scenario, models), options);
  ASSERT_FALSE(fit.fits);
  EXPECT_TRUE(std::ranges::any_of(fit.changes, [](const FitChange& change) {
    return change.change == "offload=none";
  }));
}

// The answer is of the plan that is given, not of data parallelism.
TEST(Fit, IsOfTheGivenPlan) {
  ModelCache models;
  const Scenario given =
      Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "pp=2,mbs=4,bucket=1MB");
  Case made = *MakeCase(given, models);
  const Plan plan = *PlanOf(made);
  GridOptions options;
  options.predict.fast = true;
  options.plan = &plan;
  Scenario bare = given;
  bare.strategy.reset();
  const Fit fit = *FitOf(*MakeCase(bare, models), options);
  EXPECT_EQ(fit.step_time.seconds(), SecondsOf(made, made.cluster, plan));
  EXPECT_EQ(fit.strategy, "pp=2,mbs=4,bucket=1MB");
}

// Of two kinds of devices the one with less memory is the fuller one, although
// it keeps no more: both answers name it.
TEST(Fit, TheFullestDeviceIsTheOneOfPredictions) {
  Planned p = PlannedFor(Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "mbs=8"));
  Cluster& cluster = p.made.cluster;
  DeviceType small = cluster.device_types[0];
  small.name = "small";
  small.memory = {small.memory.value / 2};
  cluster.device_types.push_back(small);
  cluster.devices[5].type = 1;
  GridOptions options;
  options.predict.fast = true;
  options.predict.sensitivity = false;
  const Prediction prediction = Predict(p.made, p.plan, options.predict);
  const Fit fit = *FitOf(p.made, options);
  EXPECT_EQ(prediction.capacity, small.memory);
  EXPECT_EQ(fit.capacity, small.memory);
  EXPECT_EQ(fit.memory, prediction.memory);
}

// By its share, not by its bytes: of 12 and 2 GB kept on devices with 80 and
// 20 GB it is the first, 15 % full, though it has more left than the other one
// has at all.
TEST(FullestOf, IsTheOneThatUsesTheLargestShare) {
  Planned p = PlannedFor(Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "pp=2"));
  Cluster& cluster = p.made.cluster;
  DeviceType small = cluster.device_types[0];
  cluster.device_types[0].memory = {80'000'000'000};
  small.memory = {20'000'000'000};
  cluster.device_types.push_back(small);
  for (size_t d = 4; d < 8; ++d) cluster.devices[d].type = 1;
  MemoryUse much;
  much.total = {12'000'000'000};
  MemoryUse little;
  little.total = {2'000'000'000};
  Evaluation evaluation;
  evaluation.memory = {much, little};
  EXPECT_EQ(FullestOf(cluster, p.plan, evaluation).use, much);
  EXPECT_EQ(FullestOf(cluster, p.plan, evaluation).capacity.value,
            80'000'000'000);
  // Device by device, where that is known: 3 of 20 GB are as much.
  little.total = {3'100'000'000};
  evaluation.devices = {{"a", {DeviceId(0)}, much, {}, {}},
                        {"b", {DeviceId(5)}, little, {}, {}}};
  EXPECT_EQ(FullestOf(cluster, p.plan, evaluation).use, little);
}

TEST(Fit, StopsEarly) {
  ModelCache models;
  Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "mbs=8");
  scenario.settings = {{"device.memory", "1MB"}};
  const std::atomic<bool> stop = true;
  GridOptions options;
  options.predict.fast = true;
  options.predict.watch.stop = &stop;
  const Fit fit = *FitOf(*MakeCase(scenario, models), options);
  EXPECT_TRUE(fit.changes.empty());
  EXPECT_TRUE(fit.interrupted);
}

// Reading the data takes longer than a step, failures or not; a restart counts
// on nodes without storage, too.
TEST(Prediction, TimeBesidesTheStepWithoutSomeFigures) {
  Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "mbs=8");
  scenario.settings = {{"host.storage_read", "1MB/s"}};
  PredictOptions options;
  options.fast = true;
  options.sensitivity = false;
  options.run.tokens = 64 * 32;
  const auto predicted = [&] {
    const Planned p = PlannedFor(scenario);
    return Predict(p.made, p.plan, options);
  };
  // 4 bytes of each of 64 * 32 tokens at 1 MB/s are 8.192 ms; a step waits for
  // what it does not hide.
  const Prediction stalls = predicted();
  const double step = stalls.evaluation.step_time.seconds();
  ASSERT_LT(step, 8.192e-3);
  EXPECT_NEAR(stalls.goodput.stall, 8.192e-3 - step, 1e-12);
  EXPECT_NEAR(stalls.run->days, 8.192e-3 / 86400, 1e-15);
  scenario.settings = {{"host.storage", "0B"},
                       {"host.storage_read", "0B/s"},
                       {"host.storage_write", "0B/s"},
                       {"device.mtbf", "8000s"}};
  options.run.restart = 1000;
  // Failures each 1000 s of 8 devices, with a restart of as long: a factor e.
  const double restarted = predicted().goodput.seconds_per_step;
  options.run.restart = 0;
  EXPECT_NEAR(restarted / predicted().goodput.seconds_per_step, std::exp(1.0),
              1e-9);
}

// A failure each 125 ns leaves no time for a step.
TEST(Prediction, ARunThatNeverEndsSaysSo) {
  Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "mbs=8");
  scenario.settings = {{"device.mtbf", "1us"}, {"device.price", "2USD/h"}};
  PredictOptions options;
  options.fast = true;
  options.sensitivity = false;
  const auto predicted = [&] {
    const Planned p = PlannedFor(scenario);
    return Predict(p.made, p.plan, options);
  };
  EXPECT_EQ(EndlessText(predicted()), "");  // No run was asked for.
  options.run.tokens = 1e9;
  const Prediction never = predicted();
  EXPECT_EQ(never.goodput.fraction, 0);
  EXPECT_FALSE(never.run->usd || never.run->kwh);
  EXPECT_THAT(std::string(EndlessText(never)), HasSubstr("device.mtbf"));
  GridOptions grid;
  grid.predict = options;
  ModelCache models;
  const auto cheapest =
      CheapestOf(scenario, {"dgx-a100-80gb:1"}, 0, grid, models);
  ASSERT_TRUE(cheapest);
  EXPECT_FALSE(cheapest->best);
  EXPECT_THAT(cheapest->offers[0].refused, HasSubstr("never ends"));
  scenario.settings[0].value = "1000d";
  EXPECT_EQ(EndlessText(predicted()), "");
}

// As runtime/data stores them: of an image a byte for each of 3 * 224 * 224
// pixels and its label, of a patch the same without the first, of zeros; of a
// click 4 bytes for its label, its numbers and its ids; of a token 4 bytes.
TEST(Prediction, DataAsFilesHaveIt) {
  const auto bytes = [](const std::string& model, int64_t seq) {
    ImportOptions import;
    import.global_batch = 6;
    import.seq_len = seq;
    return DataBytes(*ImportModel(model, import)) / 6;
  };
  EXPECT_DOUBLE_EQ(bytes("zoo:resnet-50", 0), 1 + 3 * 224 * 224);
  EXPECT_DOUBLE_EQ(bytes("zoo:vit-base-patch16-224", 0), 1 + 3 * 224 * 224);
  EXPECT_DOUBLE_EQ(bytes("zoo:dlrm", 0), 4 * (1 + 13 + 26));
  EXPECT_DOUBLE_EQ(bytes("zoo:gpt2", 128), 4 * 128);
  EXPECT_DOUBLE_EQ(bytes("zoo:bert-base", 128), 4 * 128);
}

TEST(Scaling, EfficiencyFallsAndTheKneeIsBetween) {
  GridOptions options;
  options.predict.fast = true;
  options.predict.sensitivity = false;
  ModelCache models;
  const Scenario scenario =
      Of("gpt2-tiny", "dgx-a100-80gb:1", 512, 32, "mbs=1");
  const auto scaling = ScalingOf(
      scenario, {.efficiency = 0.7, .most_devices = 512}, options, models);
  ASSERT_TRUE(scaling);
  ASSERT_GE(scaling->points.size(), 2U);
  EXPECT_DOUBLE_EQ(scaling->points.front().efficiency, 1);
  ASSERT_GT(scaling->devices, scaling->points.front().devices);
  ASSERT_GT(scaling->too_many, scaling->devices);
  double last = 1;
  for (const ScalingPoint& point : scaling->points) {
    EXPECT_LE(point.efficiency, last) << point.devices;
    last = point.efficiency;
    if (point.devices <= scaling->devices) {
      EXPECT_GE(point.efficiency, 0.7);
    } else if (point.devices >= scaling->too_many) {
      EXPECT_LT(point.efficiency, 0.7);
    }
  }
  // Whatever the efficiency, it ends where there are no more devices.
  const auto all = ScalingOf(scenario, {.efficiency = 1e-9, .most_devices = 32},
                             options, models);
  EXPECT_EQ(all->devices, 32);
  EXPECT_EQ(all->too_many, 0);
}

// Of a batch of 64 at most 64 devices make a replica each: at 128 and between
// it does not run, which says nothing of efficiency.
TEST(Scaling, WhatDoesNotRunIsNoLossOfEfficiency) {
  GridOptions options;
  options.predict.fast = true;
  options.predict.sensitivity = false;
  ModelCache models;
  const Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "mbs=1");
  const auto scaling =
      ScalingOf(scenario, {.efficiency = 1e-9}, options, models);
  ASSERT_TRUE(scaling);
  EXPECT_EQ(scaling->devices, 64);
  EXPECT_EQ(scaling->too_many, 0);
  EXPECT_FALSE(scaling->most);
  EXPECT_THAT(scaling->points.back().cell.problem, HasSubstr("divisor"));
  // Nearly all is lost at once; of 9 to 15 nodes none runs.
  const auto lost = ScalingOf(scenario, {.efficiency = 0.999}, options, models);
  EXPECT_EQ(lost->devices, 8);
  EXPECT_EQ(lost->too_many, 16);
  // What is given is a point even beyond the most that are tried, and ranks of
  // one host are counted one by one.
  const auto large = ScalingOf(scenario, {.efficiency = 0.1, .most_devices = 4},
                               options, models);
  ASSERT_EQ(large->points.size(), 1U);
  EXPECT_EQ(large->devices, 8);
  EXPECT_TRUE(large->most);
  const auto ranks =
      ScalingOf(Of("gpt2-tiny", "local-cpu:2", 64, 32, "mbs=1"),
                {.efficiency = 1e-9, .most_devices = 8}, options, models);
  EXPECT_EQ(ranks->points.front().cell.prediction->devices, 2);
  EXPECT_EQ(ranks->devices, 8);
}

TEST(Scaling, WhichNodesOfAMixtureGrowIsNotSaid) {
  ModelCache models;
  const auto scaling = ScalingOf(
      Of("gpt2-tiny", "a3-high:1+a3-mega:1", 64, 32, "mbs=1"), {}, {}, models);
  ASSERT_FALSE(scaling);
  EXPECT_THAT(scaling.error().ToString(),
              ::testing::StartsWith("scaling: nodes: the nodes of "));
}

// The first point has one replica, which ZeRO has nothing to cut of.
TEST(Scaling, KeysWithoutEffectAtTheStartAreDroppedThere) {
  Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "tp=8,zero=1");
  scenario.drops_idle_keys = true;
  GridOptions options;
  options.predict.fast = true;
  options.predict.sensitivity = false;
  ModelCache models;
  const auto scaling = ScalingOf(
      scenario, {.efficiency = 1e-9, .most_devices = 16}, options, models);
  ASSERT_TRUE(scaling);
  ASSERT_EQ(scaling->points.size(), 2U);
  EXPECT_THAT(scaling->points[0].cell.notes,
              ::testing::ElementsAre(HasSubstr("without zero=1")));
  EXPECT_TRUE(scaling->points[1].cell.notes.empty());
}

// Twice so many nodes there cannot be.
TEST(Scaling, EndsBeforeTheMostNodesThereCanBe) {
  GridOptions options;
  options.predict.fast = true;
  options.predict.sensitivity = false;
  ModelCache models;
  const auto scaling =
      ScalingOf(Of("gpt2-tiny", "dgx-a100-80gb:33000x1", 33000, 32, "mbs=1"),
                {.efficiency = 1e-9, .most_devices = 1 << 30}, options, models);
  ASSERT_TRUE(scaling) << scaling.error().ToString();
  EXPECT_EQ(scaling->devices, 33000);
  EXPECT_TRUE(scaling->most);
}

// A file's nodes are copied: on one switch that is what the preset has.
TEST(Scaling, AFileGrowsLikeItsPreset) {
  const std::string path = TempPath("scaling.txtpb");
  ASSERT_TRUE(WriteCluster(path, *MakeCluster("dgx-a100-80gb:2")));
  GridOptions options;
  options.predict.fast = true;
  options.predict.sensitivity = false;
  ModelCache models;
  const auto of = [&](const std::string& cluster) {
    return ScalingOf(Of("gpt2-tiny", cluster, 64, 32, "mbs=1"),
                     {.efficiency = 0.5}, options, models)
        .value();
  };
  const Scaling file = of(path);
  const Scaling preset = of("dgx-a100-80gb:2");
  EXPECT_EQ(file.devices, preset.devices);
  ASSERT_EQ(file.points.size(), preset.points.size());
  for (size_t i = 0; i < file.points.size(); ++i) {
    EXPECT_EQ(file.points[i].efficiency, preset.points[i].efficiency) << i;
  }
}

// One price for all answers nothing of unlike clusters.
TEST(Cheapest, WithoutPricesItSaysHowToGiveThem) {
  const Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "mbs=1");
  GridOptions options;
  options.predict.fast = true;
  options.predict.run.tokens = 1e9;
  ModelCache models;
  const auto refused = [&](const std::vector<std::string>& clusters) {
    return CheapestOf(scenario, clusters, 0, options, models)
        ->offers[0]
        .refused;
  };
  EXPECT_EQ(refused({"dgx-h100:1"}), "no price: --set device.price=…USD/h");
  EXPECT_EQ(refused({"dgx-h100:1", "dgx-a100-80gb:1"}),
            "no price: --set device.price=…USD/h gives all clusters one; for "
            "unlike ones write each by 'tessera discover --cluster NAME -o "
            "FILE' and set price_usd_per_hour of its upkeep");
}

// Priced so that the slower cluster costs a tenth per hour: it is the cheapest
// until the days do not suffice.
TEST(Cheapest, TheLeastMoneyWithinTheDays) {
  Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "mbs=1");
  scenario.settings = {{"device.price", "2USD/h"}};
  GridOptions options;
  options.predict.fast = true;
  options.predict.run.tokens = 1e9;
  ModelCache models;
  const std::vector<std::string> clusters = {"dgx-a100-80gb:2",
                                             "dgx-a100-80gb:1"};
  const auto any = CheapestOf(scenario, clusters, 0, options, models);
  ASSERT_TRUE(any && any->best);
  const auto& runs = any->offers;
  const double two = runs[0].cell.prediction->run->days;
  const double one = runs[1].cell.prediction->run->days;
  ASSERT_LT(two, one);
  // Half of the devices take less than twice as long.
  EXPECT_EQ(*any->best, 1U);
  EXPECT_DOUBLE_EQ(*runs[1].cell.prediction->run->usd, one * 24 * 8 * 2);
  const auto soon =
      CheapestOf(scenario, clusters, (one + two) / 2, options, models);
  EXPECT_EQ(*soon->best, 0U);
  EXPECT_THAT(soon->offers[1].refused, HasSubstr("too slow"));
  EXPECT_FALSE(CheapestOf(scenario, clusters, two / 2, options, models)->best);
  options.predict.run.tokens = 0;
  EXPECT_DEATH((void)CheapestOf(scenario, clusters, 0, options, models),
               "nothing to pay for");
}

}  // namespace
}  // namespace tessera
