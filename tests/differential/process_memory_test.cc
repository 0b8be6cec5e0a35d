// The executor's account of what it keeps on the device and on the host against
// the operating system's: what is offloaded is nowhere else, and what runs
// beside each other holds no memory of its own.

#include "runtime/device/process_memory.h"

#include <gtest/gtest.h>

#include "tests/support/paths.h"
#include "tests/support/tiny_training.h"

namespace tessera {
namespace {

// The sanitizers' allocators keep accounts of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

Graph Gpt2(int64_t batch, int64_t seq_len) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  auto forward = ImportModel(ExamplePath("models/gpt2-tiny"), options);
  return Differentiate(std::move(forward).value()).value();
}

struct Peaks {
  double account = 0;  // both tiers
  double host = 0;
  double process = 0;
};

Peaks PeaksOf(const Graph& graph, const std::string& strategy) {
  const auto tasks = LowerStrategy(graph, 1, strategy, {}).value();
  auto worlds = MakeThreadWorlds(1);
  CpuDevice device;
  const LoadInput load = [](const Tensor&, const LocalTensor& block,
                            int64_t) -> Result<void> {
    std::fill_n(block.as<int32_t>(), block.elements(), 1);
    return {};
  };
  ResetPeakResident();
  const Bytes before = ResidentBytes();
  const auto executor =
      RankExecutor::Create(tasks, graph, {}, 7, *worlds[0], device, load,
                           {.directory = ::testing::TempDir()})
          .value();
  TESSERA_CHECK(InitialiseState(graph, 7, *executor).has_value());
  for (int step = 0; step < 2; ++step) {
    TESSERA_CHECK(executor->Run(tasks).has_value());
  }
  const auto host = static_cast<double>(executor->host_peak().total.value);
  return {static_cast<double>(device.account().peak().total.value) + host, host,
          static_cast<double>((PeakResidentBytes() - before).value)};
}

// 3 million parameters in fp32 and 6 x 256 tokens: more than 100 MB, so that
// what a process needs besides (code, stacks, what matrix products pack into)
// is far below 5 %.
TEST(ProcessMemory, IsTheAccountOfDeviceAndHost) {
  const Graph graph = Gpt2(6, 256);
  // What later runs need besides is there already.
  PeaksOf(graph, "mbs=1");
  for (const char* strategy :
       {"mbs=6,offload=optimizer:host,parameters:host,activations:host",
        "mbs=6,offload=optimizer:file,activations:host"}) {
    const Peaks peaks = PeaksOf(graph, strategy);
    EXPECT_GT(peaks.account, 100e6) << strategy;
    EXPECT_GT(peaks.host, 10e6) << strategy;
    EXPECT_NEAR(peaks.process / peaks.account, 1, 0.05)
        << strategy << ": " << peaks.process << " of " << peaks.account;
  }
}

#endif

}  // namespace
}  // namespace tessera
