#include "tools/run_memory.h"

#include <gtest/gtest.h>

#include "planner/lower/lower.h"

namespace tessera {
namespace {

// What the files of offloaded state take on rank 0's host, where two nodes have
// two ranks each that all hold the same.
Bytes FilesOnFirstHost(bool one_host) {
  Options options;
  options.model = "zoo:gpt2-tiny";
  options.global_batch = 4;
  options.seq_len = 8;
  options.cluster = "dgx-h100:2x2";
  options.strategy = "dp=4,offload=optimizer:file";
  options.offload_directory = ::testing::TempDir();
  const Inputs inputs = ReadInputs(options).value();
  const TaskGraph tasks =
      Lower(inputs.graph, inputs.cluster, *inputs.plan, options.training);
  const GpuShare gpu{{"H100", {int64_t{80} << 30}}, 1};
  return CheckMemory(options, inputs, gpu, one_host, *inputs.plan, tasks)
      .value();
}

TEST(CheckMemory, AHostHasTheFilesOfItsOwnRanks) {
  const Bytes all = FilesOnFirstHost(/*one_host=*/true);
  EXPECT_GT(all, Bytes{});
  // 2 of the 4 ranks.
  EXPECT_EQ(FilesOnFirstHost(/*one_host=*/false).value * 2, all.value);
}

}  // namespace
}  // namespace tessera
