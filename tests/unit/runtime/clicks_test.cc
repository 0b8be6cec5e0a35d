#include "runtime/data/clicks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "planner/io/importer.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ClickOptions Options(int64_t validation = 0) {
  return {.dense = 2,
          .rows = {10, 4},
          .global_batch = 2,
          .seed = 5,
          .validation_batches = validation};
}

// Record i has the label i mod 2, the counts i and -i, the ids i and 3.
std::vector<int32_t> Records(int count) {
  std::vector<int32_t> records;
  for (int i = 0; i < count; ++i) {
    for (int value : {i % 2, i, -i, i, 3}) records.push_back(value);
  }
  return records;
}

Result<Clicks> Open(const std::vector<int32_t>& records,
                    const ClickOptions& options, int64_t cut = 0) {
  const std::string path = TempPath("clicks");
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(records.data()),
             std::ssize(records) * 4 - cut);
  auto clicks = Clicks::Open(path, options);
  std::filesystem::remove(path);
  return clicks;
}

TEST(Clicks, AreRecordsOfALabelCountsAndIds) {
  const Clicks clicks = Open(Records(6), Options()).value();
  EXPECT_EQ(clicks.size(), 6);
  const Click click = clicks.At(5);
  EXPECT_EQ(click.label(), 1);
  EXPECT_DOUBLE_EQ(click.Number(0), std::log(6));
  EXPECT_DOUBLE_EQ(click.Number(1), 0);  // counts are not negative
  EXPECT_EQ(click.Id(0, 0), 5);
  EXPECT_EQ(click.Id(1, 0), 3);
}

TEST(Clicks, TheLastAreHeldOut) {
  const Clicks clicks = Open(Records(7), Options(1)).value();
  EXPECT_EQ(clicks.size(), 5);
  EXPECT_EQ(clicks.order().Validation(1), 6);
}

// Of samples 1 and 2 the second number, the ids and the targets.
TEST(Clicks, BlocksAreCutFromTheWhole) {
  const Clicks clicks = Open(Records(6), Options()).value();
  std::vector<double> numbers(2);
  LocalTensor block;
  block.data = numbers.data();
  block.dtype = DType::kFloat64;
  block.shape = {2, 1};
  block.offset = {1, 1};
  block.global_shape = {4, 2};
  Tensor tensor;
  tensor.name = "dense";
  ASSERT_TRUE(LoadTraining(clicks)(tensor, block, 0).has_value());
  const int64_t first = clicks.order().Training(1);
  const int64_t second = clicks.order().Training(2);
  EXPECT_THAT(numbers, ElementsAre(clicks.At(first).Number(1),
                                   clicks.At(second).Number(1)));
  block.offset = {1, 0};
  tensor.name = "targets";
  ASSERT_TRUE(LoadTraining(clicks)(tensor, block, 0).has_value());
  EXPECT_THAT(numbers, ElementsAre(first % 2, second % 2));
  std::vector<int32_t> ids(2);
  block.data = ids.data();
  block.dtype = DType::kInt32;
  tensor.name = "categories.0";
  ASSERT_TRUE(LoadTraining(clicks)(tensor, block, 0).has_value());
  EXPECT_THAT(ids, ElementsAre(first, second));
  for (const char* name : {"categories.2", "categories.x", "images"}) {
    tensor.name = name;
    EXPECT_THAT(LoadTraining(clicks)(tensor, block, 0).error().ToString(),
                HasSubstr("expected dense, targets or categories.N"));
  }
}

TEST(Clicks, MadeUpOnesAreInTheirTables) {
  const Clicks clicks = Clicks::Open("", Options()).value();
  int clicked = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    const Click click = clicks.At(i);
    clicked += click.label();
    for (int64_t table : {0, 1}) {
      const int32_t id = click.Id(table, 0);
      EXPECT_GE(id, 0);
      EXPECT_LT(id, Options().rows[static_cast<size_t>(table)]);
    }
  }
  // A quarter of 1000, within four deviations of 14.
  EXPECT_NEAR(clicked, 250, 56);
  ClickOptions other = Options();
  other.seed = 6;
  EXPECT_NE(clicks.Fingerprint(), Clicks::Open("", other)->Fingerprint());
}

TEST(Clicks, BadFiles) {
  EXPECT_THAT(Open(Records(2), Options(), 1).error().ToString(),
              HasSubstr("has 39 bytes: expected records of 20, a label, 2 "
                        "counts and 2 ids"));
  std::vector<int32_t> records = Records(3);
  records[5] = 2;
  EXPECT_THAT(Open(records, Options()).error().ToString(),
              HasSubstr("record 1 has the label 2: expected 0 or 1"));
  records = Records(3);
  records[14] = 4;
  EXPECT_THAT(Open(records, Options()).error().ToString(),
              HasSubstr("record 2 has the id 4 for table 1 of 4 rows"));
  EXPECT_THAT(Open(Records(2), Options(1)).error().ToString(),
              HasSubstr("holds 2 samples: --validate-batches holds 2 out, and "
                        "none is left to train on"));
  ClickOptions bags = Options();
  bags.bag = 3;
  EXPECT_THAT(Open(Records(2), bags).error().ToString(),
              HasSubstr("has one id for each table: expected bags of 3"));
}

// Of 10,000 records every second one is looked at at first.
TEST(Clicks, BadRecordsAreErrorsWhenTheyAreLoaded) {
  std::vector<int32_t> records = Records(10000);
  for (size_t i = 0; i < records.size(); i += 5) records[i + 3] = 1;
  records[5 * 4001] = -1;
  records[5 * 4001 + 4] = 4;
  std::vector<double> numbers(2 * 10000);
  LocalTensor block;
  block.data = numbers.data();
  block.dtype = DType::kFloat64;
  block.offset = {0, 0};
  const auto load = [&](const std::string& name, int64_t width) {
    block.shape = block.global_shape = {10000, width};
    Tensor tensor;
    tensor.name = name;
    const Clicks clicks = Open(records, Options()).value();
    const auto loaded = LoadTraining(clicks)(tensor, block, 0);
    return loaded ? "" : loaded.error().ToString();
  };
  EXPECT_THAT(load("targets", 1),
              HasSubstr("clicks: record 4001 has the label -1"));
  EXPECT_THAT(load("categories.1", 1),
              HasSubstr("record 4001 has the id 4 for table 1 of 4 rows"));
  EXPECT_EQ(load("categories.0", 1), "");
  EXPECT_EQ(load("dense", 2), "");
}

TEST(Clicks, OfAFileThatIsCut) {
  const std::string path = TempPath("cut");
  const std::vector<int32_t> records = Records(6);
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(records.data()),
             std::ssize(records) * 4);
  const Clicks clicks = Clicks::Open(path, Options()).value();
  std::filesystem::resize_file(path, 0);
  float number = 0;
  LocalTensor block;
  block.data = &number;
  block.dtype = DType::kFloat32;
  block.shape = {1, 1};
  block.offset = {0, 0};
  block.global_shape = {2, 2};
  Tensor tensor;
  tensor.name = "dense";
  EXPECT_THAT(LoadTraining(clicks)(tensor, block, 0).error().ToString(),
              HasSubstr("cut: has become shorter while it was read: 0 bytes"));
}

// Of a number of records that a thousand divides too.
TEST(Clicks, FingerprintsAreOfWholeRecords) {
  for (const int count : {7, 2000}) {
    std::vector<int32_t> records = Records(count);
    for (size_t i = 0; i < records.size(); i += 5) records[i + 3] = 1;
    const uint64_t whole = Open(records, Options())->Fingerprint();
    EXPECT_EQ(Open(records, Options())->Fingerprint(), whole);
    for (size_t place = 0; place < 5; ++place) {
      std::vector<int32_t> other = records;
      other[place] ^= 1;
      EXPECT_NE(Open(other, Options())->Fingerprint(), whole) << place;
    }
  }
}

TEST(Clicks, OptionsAreThoseOfTheModel) {
  ImportOptions import;
  import.global_batch = 4;
  const Graph graph = ImportModel("zoo:dlrm-tiny", import).value();
  const ClickOptions options = ClickOptionsOf(graph).value();
  EXPECT_EQ(options.dense, 13);
  EXPECT_THAT(options.rows, ElementsAre(1000, 3, 40, 200, 7, 500));
  EXPECT_EQ(options.bag, 1);
  import.seq_len = 8;
  EXPECT_THAT(ClickOptionsOf(ImportModel("zoo:gpt2-tiny", import).value())
                  .error()
                  .ToString(),
              HasSubstr("the graph has no clicks"));
}

}  // namespace
}  // namespace tessera
