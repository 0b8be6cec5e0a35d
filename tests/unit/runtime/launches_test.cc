// How many launches a step needs, by the executor's own calls: counted on a
// device that does nothing.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "planner/base/table.h"
#include "planner/io/importer.h"
#include "planner/io/json_value.h"
#include "planner/lower/fused_kernels.h"
#include "planner/lower/fused_nodes.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "runtime/comm/thread_world.h"
#include "runtime/executor.h"
#include "tests/support/paths.h"
#include "tests/support/queue_cpu_device.h"

namespace tessera {
namespace {

// Memory that is not there: addresses count up. Kernels are the CPU's by name;
// those of the optimizer take lists, as CUDA's do.
class CountingDevice : public QueueDevice {
 public:
  static constexpr int64_t kTick = 3000;  // picoseconds

  explicit CountingDevice(bool lists, bool fuses = false) {
    for (const Kernel& kernel : CpuKernels()) {
      kernels_.push_back(kernel);
      const bool listed = kernel.name == "adamw" || kernel.name == "cast" ||
                          kernel.name == "stochastic_cast" ||
                          kernel.name == "square_sum";
      if (lists && listed) {
        kernels_.back().run_list = [](std::span<const KernelCall>) {};
      }
    }
    if (!fuses) return;
    for (Kernel& kernel : kernels_) {
      kernel.rows_apart = RowsApartOf(kernel.name);
    }
    for (const FusedKernel& fused : FusedKernels()) {
      Kernel& kernel = fused_.emplace_back();
      kernel.name = fused.name;
      kernel.rows_apart = RowsApartOf(fused.name);
      if (fused.second == "cast") {
        kernel.run_list = [](std::span<const KernelCall>) {};
      }
    }
  }

  std::string_view name() const override { return "counting"; }
  Result<void*> Allocate(Bytes size, MemoryCategory) override {
    next_ += (size.value + 255) / 256 * 256;
    return reinterpret_cast<void*>(next_);
  }
  void Free(void*) override {}
  void Zero(void*, Bytes) override {}
  void Copy(void*, const void*, const StridedCopy&) override {}
  void Write(void*, const void*, Bytes) override {}
  void Read(void*, const void*, Bytes) override {}
  Result<const Kernel*> FindKernel(std::string_view kernel) const override {
    return Find("kernel", std::span<const Kernel>(kernels_), kernel);
  }
  const Kernel* FindFusedKernel(std::string_view name) const override {
    const auto it = std::ranges::find(fused_, name, &Kernel::name);
    return it == fused_.end() ? nullptr : &*it;
  }
  void Launch(const Kernel& kernel, const KernelCall&) override {
    ++launches_[std::string(kernel.name)];
  }
  void LaunchList(const Kernel& kernel, std::span<const KernelCall>) override {
    ++launches_[std::string(kernel.name)];
  }
  Result<int> MakeQueue(StreamRole) override { return ++queues_; }
  void UseQueue(int) override {}
  void Mark(int) override {}
  void Await(int) override {}
  // The time of a mark is its number.
  Result<Duration> Between(int first, int second) override {
    return Duration{kTick * (second - first)};
  }
  void EnqueueWrite(void*, const void*, Bytes) override {}
  void EnqueueRead(void*, const void*, Bytes) override {}
  Result<void> Pin(void*, Bytes) override { return {}; }
  void Unpin(void*) override {}
  void EnqueueOnHost(std::function<Result<void>()>) override {}
  Result<void> BeginCapture() override { return {}; }
  Result<int> EndCapture() override { return 0; }
  void Replay(int) override { ++launches_["graph"]; }
  void BeginRange(const std::string& name) override { ranges_.push_back(name); }
  void EndRange() override {}
  Result<std::shared_ptr<QueueEvent>> RecordEvent() override {
    return std::shared_ptr<QueueEvent>();
  }
  void AwaitEvent(const std::shared_ptr<QueueEvent>&) override {}
  void Sum(std::span<const std::byte* const>, std::byte*, int64_t,
           DType) override {}
  Result<void> Synchronize() override { return {}; }
  void WaitForAll() override {}

  // Since it was called last, by kernel; and the names of ranges.
  std::map<std::string, int> TakeLaunches() {
    return std::exchange(launches_, {});
  }
  std::vector<std::string> TakeRanges() { return std::exchange(ranges_, {}); }

 private:
  std::vector<Kernel> kernels_;
  std::vector<Kernel> fused_;
  uintptr_t next_ = 256;
  int queues_ = 0;
  std::map<std::string, int> launches_;
  std::vector<std::string> ranges_;
};

int Total(const std::map<std::string, int>& launches) {
  int sum = 0;
  for (const auto& [kernel, count] : launches) sum += count;
  return sum;
}

// A step of 16 rows in bf16 with fp32 masters, AdamW and clipping, on one
// device.
class ModelStep : public ::testing::Test {
 protected:
  ModelStep(const char* model, ImportOptions import,
            const char* strategy = "mbs=16") {
    import.global_batch = 16;
    import.dtype = DType::kBFloat16;
    graph_ =
        Differentiate(ImportModel(ExamplePath(model), import).value()).value();
    const Cluster cluster = MakeCluster("dgx-h100:1x1").value();
    options_.clip = 1;
    const Plan plan =
        PlanFromStrategy(graph_, cluster, ParseStrategy(strategy).value())
            .value();
    tasks_ = Lower(graph_, cluster, plan, options_);
  }

  static std::map<std::string, int> FusedOf(
      std::map<std::string, int> launches) {
    std::erase_if(launches, [](const auto& kernel) {
      return kernel.first.find('+') == std::string::npos;
    });
    return launches;
  }
  // What planner/lower/fused_nodes.h takes for fused; with the updates of so
  // many blocks.
  std::map<std::string, int> FusedByCostModel(int blocks) const {
    std::map<std::string, int> counts = {{"adamw+cast", blocks}};
    for (const FusedNode& node :
         FuseNodes(graph_, [](std::string_view) { return true; })) {
      if (node.kernel() != nullptr) ++counts[std::string(node.kernel()->name)];
    }
    return counts;
  }

  std::unique_ptr<RankExecutor> Executor(CountingDevice& device) {
    return RankExecutor::Create(tasks_, graph_, options_, 0, *worlds_[0],
                                device,
                                [](const Tensor&, const LocalTensor&, int64_t) {
                                  return Result<void>();
                                })
        .value();
  }

  Graph graph_;
  TrainingOptions options_;
  TaskGraph tasks_;
  std::vector<std::unique_ptr<CommWorld>> worlds_ = MakeThreadWorlds(1);
};

// GPT-2 of 124M parameters, rows of 1024 tokens. 12 blocks of 16 weights
// (queries, keys and values are three products), the two tables, and the last
// norm's two.
class Gpt2Step : public ModelStep {
 protected:
  static constexpr int kWeights = 12 * 16 + 2 + 2;
  static constexpr int kBlocks = 12 + 2;  // with weights

  explicit Gpt2Step(bool dropout = true)
      : ModelStep("models/gpt2/config.json", Import(dropout)) {}

 private:
  static ImportOptions Import(bool dropout) {
    ImportOptions import;
    import.seq_len = 1024;
    const JsonValue none = ParseJson("{\"p\": 0.0}")->Field("p");
    for (const char* key : {"attn_pdrop", "embd_pdrop", "resid_pdrop"}) {
      if (!dropout) import.overrides[key] = none;
    }
    return import;
  }
};

TEST_F(Gpt2Step, UpdatesOfABlockAreOneLaunch) {
  CountingDevice singly(false);
  CountingDevice in_lists(true);
  ASSERT_TRUE(Executor(singly)->Run(tasks_).has_value());
  ASSERT_TRUE(Executor(in_lists)->Run(tasks_).has_value());
  auto before = singly.TakeLaunches();
  auto after = in_lists.TakeLaunches();
  for (const char* kernel : {"adamw", "cast", "square_sum"}) {
    EXPECT_EQ(before[kernel], kWeights) << kernel;
    EXPECT_EQ(after[kernel], kBlocks) << kernel;
  }
  EXPECT_EQ(Total(before) - Total(after), 3 * (kWeights - kBlocks));
  RecordProperty("launches_singly", Total(before));
  RecordProperty("launches_in_lists", Total(after));
}

// GELUs with the products before them, residual sums with the norms behind
// them, the gradients of a norm, its residual and the bias in front of that;
// updates with their casts. Without dropout, which would be between.
TEST_F(Gpt2Step, WhatIsFusedIsOneLaunch) {
  constexpr int kLayers = 12;
  CountingDevice singly(true);
  CountingDevice fused(true, /*fuses=*/true);
  ASSERT_TRUE(Executor(singly)->Run(tasks_).has_value());
  ASSERT_TRUE(Executor(fused)->Run(tasks_).has_value());
  auto before = singly.TakeLaunches();
  auto after = fused.TakeLaunches();
  EXPECT_EQ(before["gelu"], kLayers);
  EXPECT_EQ(before["gelu_dx"], kLayers);
  EXPECT_EQ(after["linear+gelu"], kLayers);
  EXPECT_EQ(after["linear_dx+gelu_dx"], kLayers);
  // Two norms of a block and the last one; the sums of the blocks, and that of
  // the embeddings. The gradient of the first norm goes on to dropout.
  EXPECT_EQ(before["layer_norm"], 2 * kLayers + 1);
  EXPECT_EQ(after["add+layer_norm"], 2 * kLayers);
  EXPECT_EQ(after["layer_norm"], 1);
  EXPECT_EQ(after["layer_norm_dx+sum+dw"], 2 * kLayers);
  EXPECT_EQ(after["layer_norm_dx+dw"], 1);
  // Of queries, keys and values it is one product.
  EXPECT_EQ(before["sum"], 3 * kLayers);
  for (const char* kernel : {"gelu", "gelu_dx", "layer_norm_dx",
                             "layer_norm_dw", "sum", "adamw", "cast"}) {
    EXPECT_FALSE(after.contains(kernel)) << kernel;
  }
  EXPECT_EQ(after["linear_dx"], before["linear_dx"] - kLayers - 2 * kLayers);
  EXPECT_EQ(after["adamw+cast"], kBlocks);
  EXPECT_EQ(FusedOf(after), FusedByCostModel(kBlocks));
}

// Three tasks that one product does have a third of its time each, one after
// the other.
TEST_F(Gpt2Step, TasksOfOneProductShareItsTime) {
  CountingDevice fused(true, /*fuses=*/true);
  const auto timeline = Executor(fused)->Run(tasks_);
  ASSERT_TRUE(timeline.has_value());
  std::vector<Span> spans;
  size_t last = 0;
  for (size_t i = 0; i < timeline->spans.size(); ++i) {
    const Span& span = timeline->spans[i];
    if (tasks_.task(span.task).kernel != "linear_dx" ||
        NameOf(tasks_, graph_, span.task).find("h.0.attn.c_attn") ==
            std::string::npos) {
      continue;
    }
    spans.push_back(span);
    last = i;
  }
  ASSERT_EQ(spans.size(), 3U);
  std::ranges::sort(spans, {}, &Span::start);
  EXPECT_EQ(spans[0].start, timeline->spans[last - 1].end);
  EXPECT_EQ(spans[0].end, spans[1].start);
  EXPECT_EQ(spans[1].end, spans[2].start);
  // From the end of the job before, whose mark is two less.
  for (const Span& span : spans) {
    EXPECT_EQ(span.end - span.start, Duration{2 * CountingDevice::kTick / 3});
  }
  EXPECT_EQ(spans[2].end, timeline->spans[last + 1].start);
}

class Gpt2StepWithoutDropout : public Gpt2Step {
 protected:
  Gpt2StepWithoutDropout() : Gpt2Step(/*dropout=*/false) {}
};

// The embeddings' sum meets a norm, too; and the dy of a block's two biases
// behind attention and the GELU is what a norm's gradients end in: with a
// residual's but for the model's last norm. Behind the first norm's is no bias.
TEST_F(Gpt2StepWithoutDropout, WhatIsFusedIsOneLaunch) {
  constexpr int kLayers = 12;
  CountingDevice fused(true, /*fuses=*/true);
  ASSERT_TRUE(Executor(fused)->Run(tasks_).has_value());
  const auto after = FusedOf(fused.TakeLaunches());
  const std::map<std::string, int> expected = {
      {"add+layer_norm", 2 * kLayers + 1},
      {"adamw+cast", kBlocks},
      {"layer_norm_dx+dw+db", 1},
      {"layer_norm_dx+sum+dw", 1},
      {"layer_norm_dx+sum+dw+db", 2 * kLayers - 1},
      {"linear+gelu", kLayers},
      {"linear_dx+gelu_dx", kLayers},
  };
  EXPECT_EQ(after, expected);
  EXPECT_EQ(after, FusedByCostModel(kBlocks));
}

class LlamaStep : public ModelStep {
 protected:
  explicit LlamaStep(const char* strategy = "mbs=16")
      : ModelStep("models/llama-3.2-1b/config.json", Import(), strategy) {}

 private:
  static ImportOptions Import() {
    ImportOptions import;
    import.seq_len = 256;
    return import;
  }
};

// The gate of every layer and its two gradients; and the norms, of which the
// last one has no residual beside it.
TEST_F(LlamaStep, WhatIsFusedIsOneLaunch) {
  constexpr int kLayers = 16;
  constexpr int kBlocks = kLayers + 2;  // the table, and the last norm
  CountingDevice fused(true, /*fuses=*/true);
  ASSERT_TRUE(Executor(fused)->Run(tasks_).has_value());
  const auto after = FusedOf(fused.TakeLaunches());
  const std::map<std::string, int> expected = {
      {"adamw+cast", kBlocks},
      {"add+rms_norm", 2 * kLayers},
      {"multiply+silu_dx+multiply", kLayers},
      {"rms_norm_dx+dw", 1},
      {"rms_norm_dx+sum+dw", 2 * kLayers},
      {"silu+multiply", kLayers},
  };
  EXPECT_EQ(after, expected);
  EXPECT_EQ(after, FusedByCostModel(kBlocks));
}

class LlamaStepOfMicrobatches : public LlamaStep {
 protected:
  LlamaStepOfMicrobatches() : LlamaStep("mbs=4") {}
};

// In each of four microbatches, the three that add to gradients, too.
TEST_F(LlamaStepOfMicrobatches, WhatIsFusedIsOneLaunch) {
  constexpr int kLayers = 16;
  CountingDevice fused(true, /*fuses=*/true);
  ASSERT_TRUE(Executor(fused)->Run(tasks_).has_value());
  const std::map<std::string, int> expected = {
      {"adamw+cast", kLayers + 2},
      {"add+rms_norm", 4 * 2 * kLayers},
      {"multiply+silu_dx+multiply", 4 * kLayers},
      {"rms_norm_dx+dw", 4},
      {"rms_norm_dx+sum+dw", 4 * 2 * kLayers},
      {"silu+multiply", 4 * kLayers},
  };
  EXPECT_EQ(FusedOf(fused.TakeLaunches()), expected);
}

// All of the step is one graph.
TEST_F(Gpt2Step, AReplayIsOneLaunch) {
  CountingDevice device(true);
  const auto executor = Executor(device);
  ASSERT_TRUE(executor->UseGraphs().has_value());
  ASSERT_TRUE(executor->Run(tasks_).has_value());  // task by task
  const auto launches = device.TakeLaunches();
  EXPECT_FALSE(launches.contains("graph"));
  auto timeline = executor->Run(tasks_);  // again, to be timed
  ASSERT_TRUE(timeline.has_value());
  EXPECT_EQ(timeline->spans.size(), tasks_.tasks.size());
  EXPECT_EQ(device.TakeLaunches(), launches);
  ASSERT_TRUE(executor->Run(tasks_).has_value());  // captured
  EXPECT_EQ(Total(device.TakeLaunches()), Total(launches) + 1);
  timeline = executor->Run(tasks_);
  ASSERT_TRUE(timeline.has_value());
  EXPECT_TRUE(timeline->spans.empty());
  EXPECT_EQ(device.TakeLaunches(), (std::map<std::string, int>{{"graph", 1}}));
}

// A profile shows the names of all tasks.
TEST_F(Gpt2Step, RangesNameTasks) {
  CountingDevice device(true);
  const auto executor = Executor(device);
  ASSERT_TRUE(executor->UseGraphs().has_value());
  ASSERT_TRUE(executor->Run(tasks_).has_value());
  std::vector<std::string> names;
  for (size_t t = 0; t < tasks_.tasks.size(); ++t) {
    names.push_back(NameOf(tasks_, graph_, TaskId(t)));
  }
  EXPECT_EQ(device.TakeRanges(), names);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(executor->Run(tasks_).has_value());
  }
  (void)device.TakeRanges();
  ASSERT_TRUE(executor->Run(tasks_).has_value());
  const auto ranges = device.TakeRanges();
  EXPECT_EQ(ranges, std::vector<std::string>{"graph from '" + names.front() +
                                             "' to '" + names.back() + "'"});
}

}  // namespace
}  // namespace tessera
