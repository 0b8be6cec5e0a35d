// Plans priced as edits of one another against plans priced as wholes: a sample
// of what tests/fuzz/delta.cc runs.

#include <gtest/gtest.h>

#include "planner/io/importer.h"
#include "planner/topology/topologies.h"
#include "tests/support/delta_walk.h"

namespace tessera {
namespace {

struct Case {
  const char* model;
  int64_t seq_len;  // 0: it has none
  const char* cluster;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.model;
}

class Delta : public ::testing::TestWithParam<Case> {};

TEST_P(Delta, IsTheWholeToTheBit) {
  const Case& c = GetParam();
  ImportOptions options;
  options.global_batch = 16;
  if (c.seq_len > 0) options.seq_len = c.seq_len;
  options.dtype = DType::kFloat32;
  const Graph graph =
      Differentiate(ImportModel("zoo:" + std::string(c.model), options).value())
          .value();
  const Cluster cluster = MakeCluster(c.cluster).value();
  const testing::DeltaWalk walk =
      testing::WalkByDeltas(graph, cluster, /*seed=*/7, /*candidates=*/400);
  EXPECT_EQ(walk.candidates, 400);
  EXPECT_GT(walk.accepted, 40);
  EXPECT_TRUE(walk.differences.empty()) << walk.differences[0];
}

INSTANTIATE_TEST_SUITE_P(
    Zoo, Delta,
    ::testing::Values(Case{"gpt2-tiny", 64, "dgx-a100-80gb:2x2"},
                      Case{"mixtral-tiny", 32, "dgx-h100:1x4"},
                      Case{"deepseek-tiny", 32, "hgx-h800:1x4"},
                      Case{"t5-tiny", 32, "g5.48xlarge:1x4"},
                      Case{"bert-tiny", 32, "p100-edr:2x2"},
                      Case{"vit-tiny", 0, "dgx-a100-80gb:1x4"},
                      Case{"resnet-tiny", 0, "k80-fdr:2x2"},
                      Case{"nmt-tiny", 16, "k80-fdr:2x4"},
                      Case{"dlrm-tiny", 0, "dgx-a100-80gb:1x4"}));

}  // namespace
}  // namespace tessera
