#include "tools/run_memory.h"

#include <gtest/gtest.h>

#include <string>

#include "planner/lower/lower.h"

namespace tessera {
namespace {

// What the files of offloaded state take on rank 0's host, of four ranks that
// all hold the same, so many on a host.
Bytes FilesOnFirstHost(const std::string& cluster, int ranks_here) {
  Options options;
  options.model = "zoo:gpt2-tiny";
  options.global_batch = 4;
  options.seq_len = 8;
  options.cluster = cluster;
  options.strategy = "dp=4,offload=optimizer:file";
  options.offload_directory = ::testing::TempDir();
  const Inputs inputs = ReadInputs(options).value();
  const TaskGraph tasks =
      Lower(inputs.graph, inputs.cluster, *inputs.plan, options.training);
  const GpuShare gpu{{"H100", {int64_t{80} << 30}}, 1};
  return CheckMemory(options, inputs, gpu, ranks_here, *inputs.plan, tasks)
      .value();
}

TEST(CheckMemory, AHostHasTheFilesOfItsOwnRanks) {
  const Bytes all = FilesOnFirstHost("dgx-h100:2x2", 4);
  EXPECT_GT(all, Bytes{});
  // 2 of the 4 ranks.
  EXPECT_EQ(FilesOnFirstHost("dgx-h100:2x2", 2).value * 2, all.value);
  // Of a node that is several hosts 1 of 4, and where that is not known 4.
  EXPECT_EQ(FilesOnFirstHost("dgx-h100:1x4", 1).value * 4, all.value);
  EXPECT_EQ(FilesOnFirstHost("dgx-h100:1x4", 4), all);
  // Of a host that is two of four nodes 2.
  EXPECT_EQ(FilesOnFirstHost("dgx-h100:4x1", 2).value * 2, all.value);
}

}  // namespace
}  // namespace tessera
