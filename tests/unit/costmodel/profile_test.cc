#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "costmodel/profile/profile_db.h"
#include "costmodel/profile/profile_io.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

ProfileDb Example() {
  ProfileDb profile;
  profile.origin = {"a CPU", "2026-01-02", "Eigen 3.4.0", 4, 2};
  ProfileKey kernel;
  kernel.name = "linear";
  kernel.device = "cpu-core";
  kernel.rule = "bsi,oi+o->bso";
  kernel.extents = {1, 2, 3, 4};
  profile.rows[kernel] = {1.5e-5, 0.02, 9};
  profile.rows[CollectiveKey(CommKind::kAllReduce, "cpu-core", 4, 1, {4096})] =
      {3e-5, 0.1, 7};
  return profile;
}

TEST(ProfileDb, ComparesTheWholeKey) {
  const ProfileDb profile = Example();
  ProfileKey key;
  key.name = "linear";
  key.device = "cpu-core";
  key.rule = "bsi,oi+o->bso";
  key.extents = {1, 2, 3, 4};
  EXPECT_NE(profile.Find(key), nullptr);
  for (auto change : std::vector<void (*)(ProfileKey&)>{
           [](ProfileKey& k) { k.name = "linear_dx"; },
           [](ProfileKey& k) { k.dtype = DType::kBFloat16; },
           [](ProfileKey& k) { k.device = "a100"; },
           [](ProfileKey& k) { k.rule = "bsi,oi->bso"; },
           [](ProfileKey& k) { k.extents[3] = 5; },
           [](ProfileKey& k) { k.ranks = 2; }}) {
    ProfileKey other = key;
    change(other);
    EXPECT_EQ(profile.Find(other), nullptr);
  }
}

TEST(ProfileIo, RoundTrips) {
  for (const char* ending : {".txtpb", ".json", ".pb"}) {
    const std::string path = TempPath(std::string("profile") + ending);
    ASSERT_TRUE(WriteProfile(path, Example()).has_value());
    const auto read = ReadProfile(path);
    ASSERT_TRUE(read.has_value()) << read.error().ToString();
    EXPECT_EQ(*read, Example()) << ending;
  }
}

std::string ErrorOf(const std::string& rows) {
  const std::string path = TempPath("bad.txtpb");
  std::ofstream(path) << "schema_version: 1\n" << rows;
  const auto read = ReadProfile(path);
  return read ? "" : read.error().ToString();
}

TEST(ProfileIo, RefusesWhatMakesNoSense) {
  const std::string good =
      "rows { name: 'gelu' dtype: 'fp32' device: 'd' ranks: 1 nodes: 1 "
      "rule: 'bsh->bsh' extents: [1, 2, 3] median_seconds: 1e-6 samples: 3 }\n";
  EXPECT_EQ(ErrorOf(good), "");
  EXPECT_THAT(ErrorOf(good + good),
              HasSubstr("rows[1]: the same was measured"));
  EXPECT_EQ(ErrorOf("ranks_at_once: 4\n" + good), "");
  EXPECT_THAT(ErrorOf("ranks_at_once: -2\n" + good),
              HasSubstr("ranks_at_once: is -2: expected a number from 1"));
  EXPECT_THAT(ErrorOf("threads: -2\n" + good),
              HasSubstr("threads: is -2: expected a number from 0"));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return ErrorOf(text);
  };
  EXPECT_THAT(with("'fp32'", "'fp31'"), HasSubstr("rows[0].dtype"));
  EXPECT_THAT(with("[1, 2, 3]", "[1, 2]"), HasSubstr("rows[0].extents"));
  // 2^30 * 2^21 * 3 elements.
  EXPECT_THAT(with("[1, 2, 3]", "[1073741824, 2097152, 3]"),
              HasSubstr("rows[0].extents: a tensor of more than 2^50"));
  for (const std::string seconds :
       {"-1", "0", "nan", "inf", "1e+30", "1100000"}) {
    EXPECT_THAT(with("1e-6", seconds),
                HasSubstr("rows[0].median_seconds: is " + seconds +
                          ": expected a time above 0, at most 1e6"));
  }
  EXPECT_EQ(with("samples", "spread: 3 samples"), "");
  for (const std::string spread : {"-1", "nan", "inf"}) {
    EXPECT_THAT(with("samples", "spread: " + spread + " samples"),
                HasSubstr("rows[0].spread: is " + spread +
                          ": expected a number from 0"));
  }
  EXPECT_THAT(with("samples", "payload_bytes: -5 samples"),
              HasSubstr("rows[0].payload_bytes: is -5: expected a number from "
                        "0"));
  EXPECT_THAT(with("samples: 3", "samples: 0"),
              HasSubstr("rows[0].samples: is 0: expected a number from 1"));
  EXPECT_THAT(with("ranks: 1", "ranks: -1"),
              HasSubstr("rows[0].ranks: is -1: expected a number from 1"));
  EXPECT_THAT(with("nodes: 1", "nodes: 0"),
              HasSubstr("rows[0].nodes: is 0: expected a number from 1"));
  EXPECT_THAT(with("[1, 2, 3]", "[1, -2, 3]"),
              HasSubstr("rows[0].extents[1]: is -2: expected a number from 1"));
  EXPECT_THAT(with("bsh->bsh", "bsh>bsh"), HasSubstr("rows[0].rule"));
  // An operator's cost needs the factors of its own rule.
  EXPECT_THAT(with("'gelu'", "'embedding'"), HasSubstr("rows[0].rule"));
  const auto loss = [](const std::string& rule) {
    return ErrorOf(
        "rows { name: 'cross_entropy' dtype: 'fp32' device: 'd' "
        "ranks: 1 nodes: 1 rule: '" +
        rule + "' extents: [2, 3] median_seconds: 1e-6 samples: 3 }\n");
  };
  EXPECT_EQ(loss("bv,b,->,b"), "");  // of samples that are no sequences
  EXPECT_THAT(loss("bh,b,->,b"), HasSubstr("rows[0].rule: lacks the factor"));
  // A row that no task could have.
  const auto exchange = [](const std::string& name, const std::string& dtype,
                           int bytes) {
    return ErrorOf("rows { name: '" + name + "' dtype: '" + dtype +
                   "' device: 'd' ranks: 4 nodes: 1 payload_bytes: " +
                   std::to_string(bytes) +
                   " median_seconds: 1e-6 samples: 3 }\n");
  };
  EXPECT_EQ(exchange("all-reduce", "fp32", 1), "");
  EXPECT_THAT(exchange("all_reduce", "fp32", 1),
              HasSubstr("rows[0].name: unknown communication 'all_reduce'; "
                        "did you mean 'all-reduce'?"));
  EXPECT_THAT(exchange("all-reduce", "bf16", 1),
              HasSubstr("rows[0].dtype: is bf16: expected fp32"));
  EXPECT_THAT(exchange("all-reduce", "fp32", 0),
              HasSubstr("rows[0].payload_bytes: is 0: expected a number from "
                        "1"));
}

}  // namespace
}  // namespace tessera
