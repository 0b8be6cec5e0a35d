#include "costmodel/whatif/rent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "costmodel/whatif/predict.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// An instance p5.48xlarge is 98.32 USD/h, p4d.24xlarge 32.77, however many of
// their eight devices somebody uses; the others of a preset that nobody rents
// so have their own price.
TEST(Rent, InstancesArePaidForWhole) {
  const auto usd = [](const char* name) {
    return UsdPerHour(*MakeCluster(name)).value_or(-1);
  };
  EXPECT_NEAR(usd("p5.48xlarge:1"), 98.32, 1e-9);
  EXPECT_NEAR(usd("p5.48xlarge:1x1"), 98.32, 1e-9);
  EXPECT_NEAR(usd("p5.48xlarge:3x4"), 3 * 98.32, 1e-9);
  EXPECT_NEAR(usd("p5.48xlarge:2x4@fat-tree"), 2 * 98.32, 1e-9);
  EXPECT_NEAR(usd("p5.48xlarge:2x4+p4d.24xlarge:1x2"), 2 * 98.32 + 32.77, 1e-9);
  EXPECT_EQ(usd("dgx-h100:1"), -1);
  EXPECT_EQ(usd("p5.48xlarge:1+dgx-a100-80gb:1"), -1);

  Cluster owned = *MakeCluster("dgx-h100:1x4");
  owned.device_types[0].upkeep.price = 2;
  EXPECT_EQ(UsdPerHour(owned), 8);
  // Of one device type: only the instance is paid for whole.
  owned = *MakeCluster("dgx-h100:1x4+p5.48xlarge:1x2");
  for (DeviceType& type : owned.device_types) type.upkeep.price = 2;
  EXPECT_EQ(UsdPerHour(owned), 4 * 2 + 8 * 2);
}

TEST(Rent, PartsOfInstancesAreSaid) {
  EXPECT_EQ(PartsOfInstancesNote(*MakeCluster("p5.48xlarge:2")), "");
  EXPECT_EQ(PartsOfInstancesNote(*MakeCluster("dgx-h100:1x4")), "");
  EXPECT_THAT(PartsOfInstancesNote(*MakeCluster("p5.48xlarge:1x4")),
              HasSubstr("all 8 devices of p5.48xlarge are paid for, of which 4 "
                        "are in the cluster"));
  // Without a price there is nothing to say of.
  EXPECT_EQ(PartsOfInstancesNote(*MakeCluster("p5en.48xlarge:1x4")), "");
}

// Of 4 nodes one is drained; of the 24 devices that are left 16 are used.
TEST(Rent, WhatStandsByBehindAFailureIsPaidFor) {
  Scenario scenario;
  scenario.model = ExamplePath("models/gpt2-tiny/config.json");
  scenario.cluster = "p5.48xlarge:4";
  scenario.global_batch = 64;
  scenario.seq_len = 32;
  scenario.strategy = "tp=2,mbs=2";
  scenario.failed = {"device17"};
  ModelCache models;
  Case made = *MakeCase(scenario, models);
  const Plan plan = *PlanOf(made);
  PredictOptions options;
  options.fast = true;
  options.sensitivity = false;
  const Prediction prediction = Predict(made, plan, options);
  EXPECT_EQ(prediction.devices, 24);
  EXPECT_EQ(prediction.used, 16);
  EXPECT_NEAR(*prediction.usd_per_hour, 3 * 98.32, 1e-9);
  EXPECT_EQ(*prediction.watts, 24 * 700);

  // The only node loses a device, and is paid for whole.
  scenario.cluster = "p5.48xlarge:1";
  scenario.failed = {"device3"};
  made = *MakeCase(scenario, models);
  EXPECT_EQ(made.cluster.devices.size(), 7U);
  EXPECT_NEAR(*UsdPerHour(made.cluster), 98.32, 1e-9);
}

}  // namespace
}  // namespace tessera
