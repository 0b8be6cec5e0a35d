#include "costmodel/evaluate/block_template.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <string>

#include "tests/support/small_models.h"

namespace tessera {
namespace {

// embed | all | head: `readers` dense layers on one tensor, and their sum.
Graph WideGraph(int readers) {
  GraphBuilder builder("wide", 2, 1, DType::kFloat32);
  builder.BeginBlock("embed");
  const TensorId tokens = builder.Input("tokens", {2, 1}, DType::kInt32);
  const TensorId labels = builder.Input("labels", {2, 1}, DType::kInt32);
  const TensorId table = builder.Weight("table", {8, 2}, {.stddev = 1}, true);
  const TensorId x = builder.Add1("embedding", "lookup", {tokens, table});
  TensorId sum = x;
  builder.BeginBlock("all");
  for (int i = 0; i < readers; ++i) {
    const std::string number = std::to_string(i);
    const TensorId weight =
        builder.Weight("weight." + number, {2, 2}, {.stddev = 1}, true);
    const TensorId y =
        builder.Add1("linear", "layer." + number, {x, weight}, "bsi,oi->bso");
    sum = builder.Add1("add", "sum." + number, {sum, y}, "bsh,bsh->bsh");
  }
  builder.BeginBlock("head");
  return testing::FinishWithLoss(
      builder, builder.Add1("linear", "head", {sum, table}, "bsi,vi->bsv"),
      labels);
}

// Of this process so far.
int64_t PeakBytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{1024} * usage.ru_maxrss;
}

// A tensor's readers are told once, not once for each of them: of 6,000, each
// of some words, in a few megabytes.
TEST(BlockShape, OfATensorReadByThousandsIsSmall) {
  const Graph graph = WideGraph(6'000);
  const int64_t before = PeakBytes();
  const std::vector<BlockShape> shapes = ShapesOf(graph, 0);
  ASSERT_EQ(shapes.size(), 3u);
  EXPECT_LT(PeakBytes() - before, 100'000'000);
}

TEST(BlockShape, OfLayersAlikeIsOne) {
  const Graph graph = testing::MlpGraph(6, 2, 4, 8, 12, 32);
  const std::vector<BlockShape> shapes = ShapesOf(graph, 1);
  ASSERT_EQ(shapes.size(), 8u);
  // The first and the last layers have other neighbours.
  for (const size_t b : {4, 5}) {
    EXPECT_EQ(shapes[b].wiring, shapes[3].wiring) << b;
  }
  for (const size_t b : {0, 1, 7}) {
    EXPECT_NE(shapes[b].wiring, shapes[3].wiring) << b;
  }
}

}  // namespace
}  // namespace tessera
