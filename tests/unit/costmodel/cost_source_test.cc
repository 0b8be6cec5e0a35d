#include "costmodel/source/cost_source.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera {
namespace {

DeviceType Device() {
  DeviceType type;
  type.name = "device";
  type.peak_fp32 = {1e12};
  type.peak_bf16 = {4e12};
  type.memory_bandwidth = {1e11};
  type.compute_efficiency = 0.5;
  type.memory_efficiency = 0.8;
  type.launch_overhead = Duration::FromSeconds(2e-6);
  return type;
}

ProfileKey Linear(int64_t rows) {
  ProfileKey key;
  key.name = "linear";
  key.device = "device";
  key.rule = "bsi,oi->bso";
  key.extents = {rows, 8, 16, 32};  // b, s, i, o
  return key;
}

// 1e9 operations at 1e12 * 0.5 per second are 2 ms; 1e6 bytes at 1e11 * 0.8 are
// 12.5 us; 2 us to launch.
TEST(Analytical, IsARoofline) {
  const DeviceType device = Device();
  CostQuery query;
  query.device = &device;
  query.op_class = OpClass::kMatmul;
  query.flops = {1e9};
  query.bytes = {1'000'000};
  EXPECT_DOUBLE_EQ(PriceOf(query, nullptr).seconds, 2e-3 + 2e-6);
  EXPECT_EQ(PriceOf(query, nullptr).source, CostSource::kAnalytical);
  // bf16: a quarter of the time.
  query.key.dtype = DType::kBFloat16;
  EXPECT_DOUBLE_EQ(PriceOf(query, nullptr).seconds, 0.5e-3 + 2e-6);
  query.op_class = OpClass::kMemory;
  EXPECT_DOUBLE_EQ(PriceOf(query, nullptr).seconds, 12.5e-6 + 2e-6);
}

// Rows of another extent are not mixed with those of another way of cutting:
// 4 samples on all of 8 shards and 8 samples on 4 have the same work.
TEST(Interpolated, OfAnOwnOperatorAlongOneFactor) {
  OwnOp own;
  own.name = "timed_layer";
  own.rule = "ba!,tp!->bo!";
  ASSERT_TRUE(DefineOp(own).has_value());
  const auto key = [](int64_t samples, int64_t shards) {
    ProfileKey key;
    key.name = "timed_layer";
    key.device = "device";
    key.rule = "ba!,tp!->bo!";
    key.extents = {samples, 3, shards, 5, 3};  // b, a, t, p, o
    return key;
  };
  ProfileDb profile;
  profile.rows[key(2, 8)] = {2e-3, 0, 1};
  profile.rows[key(4, 8)] = {4e-3, 0, 1};
  profile.rows[key(2, 4)] = {1.5e-3, 0, 1};
  profile.rows[key(4, 4)] = {3e-3, 0, 1};
  const DeviceType device = Device();
  const auto price = [&](int64_t samples, int64_t shards) {
    CostQuery query;
    query.key = key(samples, shards);
    query.device = &device;
    query.op_class = OpClass::kRoofline;
    return PriceOf(query, &profile);
  };
  EXPECT_EQ(price(4, 4).source, CostSource::kMeasured);
  EXPECT_DOUBLE_EQ(price(4, 4).seconds, 3e-3);
  // Twice the time for twice the samples, among rows of 8 and of 4 shards: 3
  // samples take 3/2 of 2.
  EXPECT_EQ(price(3, 8).source, CostSource::kInterpolated);
  EXPECT_NEAR(price(3, 8).seconds, 3e-3, 1e-12);
  EXPECT_NEAR(price(3, 4).seconds, 2.25e-3, 1e-12);
  // However far: nothing else is known. 64 samples take 16 times those of 4.
  EXPECT_NEAR(price(64, 4).seconds, 48e-3, 1e-12);
  // Along the shards: half of them took 3/4, 2^-0.415; below the smallest row
  // by the same slope, a quarter takes 9/16.
  EXPECT_NEAR(price(2, 2).seconds, 2e-3 * 9 / 16, 1e-12);
}

TEST(WorkOf, CountsOperationsOrBytes) {
  // 2 * b * s * o * i.
  EXPECT_DOUBLE_EQ(*WorkOf(Linear(4)), 2.0 * 4 * 8 * 32 * 16);
  ProfileKey gelu = Linear(4);
  gelu.name = "gelu";
  gelu.rule = "bsh->bsh";
  gelu.extents = {4, 8, 16};
  EXPECT_DOUBLE_EQ(*WorkOf(gelu), 2 * 4 * 4 * 8 * 16);  // read and written
  gelu.name = "unheard_of";
  EXPECT_FALSE(WorkOf(gelu).has_value());
}

TEST(Sources, MeasuredThenInterpolated) {
  const DeviceType device = Device();
  ProfileDb profile;
  profile.rows[Linear(4)] = {1e-3, 0, 5};
  profile.rows[Linear(16)] = {2e-3, 0, 5};
  CostQuery query;
  query.device = &device;
  query.op_class = OpClass::kMatmul;
  const auto price = [&](int64_t rows) {
    query.key = Linear(rows);
    return PriceOf(query, &profile);
  };
  EXPECT_EQ(price(4).source, CostSource::kMeasured);
  EXPECT_DOUBLE_EQ(price(4).seconds, 1e-3);
  // Four times the work takes twice the time: time grows as sqrt(work).
  EXPECT_EQ(price(8).source, CostSource::kInterpolated);
  EXPECT_NEAR(price(8).seconds, std::sqrt(2) * 1e-3, 1e-12);
  // The same line up to a quarter and to four times of what was measured.
  EXPECT_NEAR(price(64).seconds, 4e-3, 1e-12);
  EXPECT_NEAR(price(1).seconds, 0.5e-3, 1e-12);
  EXPECT_EQ(price(65).source, CostSource::kExtrapolated);
  // Another type or device is another family.
  query.key = Linear(4);
  query.key.dtype = DType::kFloat64;
  EXPECT_EQ(PriceOf(query, &profile).source, CostSource::kAnalytical);
}

// Beyond its reach a profile's rate stays: an eighth of the stated one here, as
// the slope at the end is 1. There is no step where the reach ends, and none of
// it is what a kernel takes to start.
TEST(Sources, FarFromTheRowsTheirRateStays) {
  DeviceType device = Device();
  const auto roofline = [&](int64_t rows) {
    return *WorkOf(Linear(rows)) / 0.5e12 + 2e-6;
  };
  ProfileDb profile;
  for (const int64_t rows : {1000, 2000}) {
    profile.rows[Linear(rows)] = {8 * *WorkOf(Linear(rows)) / 0.5e12, 0, 5};
  }
  CostQuery query;
  query.device = &device;
  query.op_class = OpClass::kMatmul;
  const auto price = [&](int64_t rows) {
    query.key = Linear(rows);
    query.flops = {*WorkOf(query.key)};
    return PriceOf(query, &profile);
  };
  EXPECT_EQ(price(8000).source, CostSource::kInterpolated);
  for (const int64_t rows : {8001, 100'000, 10'000'000}) {
    EXPECT_EQ(price(rows).source, CostSource::kExtrapolated);
    EXPECT_DOUBLE_EQ(price(rows).seconds,
                     price(8000).seconds * roofline(rows) / roofline(8000));
  }
  EXPECT_NEAR(price(8001).seconds / price(8000).seconds, 8001.0 / 8000, 1e-4);
  EXPECT_NEAR(price(10'000'000).seconds / (8 * roofline(10'000'000)), 1, 0.02);
  // Below: 250 rows are the end.
  EXPECT_EQ(price(249).source, CostSource::kExtrapolated);
  EXPECT_DOUBLE_EQ(price(1).seconds,
                   price(250).seconds * roofline(1) / roofline(250));
  EXPECT_GT(price(1).seconds, 2e-6);
  // A device whose kernels' times are fitted is priced by these.
  device.generation = GpuGeneration::kHopper;
  device.multiprocessors = 132;
  EXPECT_EQ(price(8001).source, CostSource::kAnalytical);
}

// Two rows of nearly one size whose times differ by noise: a line through them
// would reach e^30 at twice the size. Their mean is 1.5 ms at 1000.5 rows.
TEST(Sources, NoiseBetweenLikeSizesIsNoSlope) {
  const DeviceType device = Device();
  ProfileDb profile;
  profile.rows[Linear(1000)] = {1e-3, 0, 5};
  profile.rows[Linear(1001)] = {2e-3, 0, 5};
  CostQuery query;
  query.device = &device;
  query.key = Linear(2001);
  EXPECT_NEAR(PriceOf(query, &profile).seconds, 3e-3, 1e-9);
  // Falling or steep at the end: flat, or in proportion beyond it.
  profile.rows[Linear(500)] = {6e-3, 0, 5};
  EXPECT_NEAR(PriceOf(query, &profile).seconds, 1.5e-3, 1e-9);
  profile.rows[Linear(500)] = {1e-6, 0, 5};
  EXPECT_NEAR(PriceOf(query, &profile).seconds, 3e-3, 1e-9);
}

// Rows of the same rule count before others of the kernel.
TEST(Sources, RulesOfTheirOwnFirst) {
  const DeviceType device = Device();
  ProfileDb profile;
  profile.rows[Linear(4)] = {1e-3, 0, 5};
  ProfileKey other = Linear(8);
  other.rule = "bsi,oi+o->bso";
  CostQuery query;
  query.device = &device;
  query.key = other;
  EXPECT_DOUBLE_EQ(PriceOf(query, &profile).seconds, 2e-3);
  profile.rows[other] = {5e-3, 0, 5};
  query.key.extents[0] = 16;
  EXPECT_DOUBLE_EQ(PriceOf(query, &profile).seconds, 10e-3);
}

TEST(Sources, CollectivesAreLinearInBytes) {
  const DeviceType device = Device();
  ProfileDb profile;
  const auto key = [](int64_t bytes) {
    return CollectiveKey(CommKind::kAllReduce, "device", 4, 1, {bytes});
  };
  profile.rows[key(1000)] = {10e-6, 0, 5};
  profile.rows[key(3000)] = {30e-6, 0, 5};
  CostQuery query;
  query.device = &device;
  query.collective = true;
  query.collective_seconds = 1;
  const auto price = [&](int64_t bytes) {
    query.key = key(bytes);
    return PriceOf(query, &profile).seconds;
  };
  EXPECT_NEAR(price(2000), 20e-6, 1e-15);
  EXPECT_NEAR(price(5000), 50e-6, 1e-15);  // by the last slope
  EXPECT_NEAR(price(10), 10e-6, 1e-15);    // never less than the smallest
  query.key = CollectiveKey(CommKind::kAllReduce, "device", 8, 1, {1000});
  EXPECT_EQ(PriceOf(query, &profile).seconds, 1);  // other ranks: the model
  // A row with a rule is a kernel's, of whatever name.
  ProfileKey kernel = key(0);
  kernel.rule = "n->n";
  kernel.extents = {5};
  profile.rows[kernel] = {1e-9, 0, 5};
  EXPECT_NEAR(price(1000), 10e-6, 1e-15);
  EXPECT_NEAR(price(2000), 20e-6, 1e-15);
  EXPECT_NEAR(price(5000), 50e-6, 1e-15);
  profile.rows = {{kernel, {1e-9, 0, 5}}};
  EXPECT_EQ(price(2000), 1);
}

// What disturbed a row does not make larger payloads cheaper, nor any payload
// free: time never falls, and grows beyond the rows.
TEST(Sources, CollectivesTakeNoLessForMore) {
  const DeviceType device = Device();
  ProfileDb profile;
  const auto key = [](int64_t bytes) {
    return CollectiveKey(CommKind::kAllReduce, "device", 4, 1, {bytes});
  };
  CostQuery query;
  query.device = &device;
  query.collective = true;
  query.collective_seconds = 1;
  const auto price = [&](int64_t bytes) {
    query.key = key(bytes);
    return PriceOf(query, &profile).seconds;
  };
  for (const auto& [bytes, seconds] :
       std::vector<std::pair<int64_t, double>>{{1'000'000, 10e-6},
                                               {1'050'000, 14e-6},
                                               {4'000'000, 40e-6},
                                               {8'000'000, 20e-6},
                                               {16'000'000, 50e-6},
                                               {16'500'000, 45e-6}}) {
    profile.rows[key(bytes)] = {seconds, 0, 5};
  }
  EXPECT_EQ(price(4'000'000), 20e-6);
  EXPECT_EQ(PriceOf(query, &profile).source, CostSource::kMeasured);
  EXPECT_EQ(price(6'000'000), 20e-6);
  EXPECT_EQ(price(16'000'000), 45e-6);
  double last = 0;
  for (int64_t bytes = 900'000; bytes < 40'000'000; bytes += 25'000) {
    const double seconds = price(bytes);
    EXPECT_GE(seconds, last) << bytes;
    last = seconds;
  }
  // The last row that is lower: 25 us less for 8.5 MB less; 45 us in proportion
  // to 16.5 MB are less steep.
  EXPECT_NEAR(price(33'000'000), 90e-6, 1e-12);
  // Where no row rises, too.
  profile.rows = {{key(1'000'000), {50e-6, 0, 5}},
                  {key(2'000'000), {40e-6, 0, 5}}};
  EXPECT_EQ(price(1'000'000), 40e-6);
  EXPECT_NEAR(price(1'000'000'000), 20e-3, 1e-9);
}

TEST(Sources, EveryRowHasANameAndTheLastAlwaysAnswers) {
  const DeviceType device = Device();
  CostQuery query;
  query.device = &device;
  for (const CostSourceRow& source : CostSources()) {
    EXPECT_FALSE(source.name.empty());
    EXPECT_FALSE(source.summary.empty());
  }
  EXPECT_TRUE(CostSources().back().price(query, nullptr).has_value());
}

}  // namespace
}  // namespace tessera
