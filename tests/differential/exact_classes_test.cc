// Runs that do the same arithmetic in the same order, and so give the same
// bits: losses, weights and optimizer states. Beside each such class stands a
// run that must differ, if only by rounding, or the comparison is blind.
//
// Without clipping: the norm of cut gradients is summed shard by shard, which
// is another order.

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "planner/base/element_count.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/random_graph.h"
#include "tests/support/tiny_training.h"
#include "tests/support/train_in_memory.h"

namespace tessera {
namespace {

constexpr int kSteps = 4;

enum class How : uint8_t {
  kThreads,
  kShm,      // on processes that share memory
  kResumed,  // saved after half of the steps, and loaded
  kWeights,  // so, without optimizer state and step
};

struct Run {
  std::string strategy;  // its degrees say how many ranks
  How how = How::kThreads;
};

struct ExactClass {
  const char* name;
  std::vector<Run> equal;
  Run control;  // differs from them
  bool tied = true;
  DType dtype = DType::kFloat32;
};

const std::vector<ExactClass>& Classes() {
  static const auto* const classes = new std::vector<ExactClass>{
      {"zero_1", {{"dp=3,mbs=1"}, {"dp=3,mbs=1,zero=1"}}, {"dp=3,mbs=2"}},
      // Stage 2 reduces every microbatch, and each term of a tied weight: the
      // same sums where there is one of both.
      {"zero_2_and_3",
       {{"dp=3,mbs=4"},
        {"dp=3,mbs=4,zero=1"},
        {"dp=3,mbs=4,zero=2"},
        {"dp=3,mbs=4,zero=3"}},
       {"dp=3,mbs=1,zero=2"},
       false},
      {"zero_with_tensors_and_stages",
       {{"dp=2,tp=2,pp=2,mbs=2"}, {"dp=2,tp=2,pp=2,mbs=2,zero=1"}},
       {"dp=2,tp=2,pp=2,mbs=2,zero=2"}},
      // Every schedule runs a stage's backwards in the microbatches' order.
      {"schedules",
       {{"pp=3,mbs=2,schedule=1f1b"},
        {"pp=3,mbs=2,schedule=gpipe"},
        {"pp=3,mbs=2,schedule=zb-h1"}},
       {"pp=3,mbs=3,schedule=1f1b"}},
      {"schedules_with_replicas",
       {{"pp=2,dp=2,tp=2,mbs=1,schedule=1f1b"},
        {"pp=2,dp=2,tp=2,mbs=1,schedule=gpipe"},
        {"pp=2,dp=2,tp=2,mbs=1,schedule=zb-h1"}},
       {"pp=2,dp=4,mbs=1,schedule=1f1b"}},
      {"buckets",
       {{"dp=3,mbs=1"},
        {"dp=3,mbs=1,bucket=1"},
        {"dp=3,mbs=1,bucket=600"},
        {"dp=3,mbs=1,bucket=1MB"}},
       {"dp=3,mbs=2,bucket=600"}},
      {"prefetch",
       {{"dp=2,tp=2,zero=3,prefetch=0"},
        {"dp=2,tp=2,zero=3,prefetch=1"},
        {"dp=2,tp=2,zero=3,prefetch=3"}},
       {"dp=4,zero=3,prefetch=1"}},
      // What tiles compute does not depend on how they are stored.
      {"tiles",
       {{"dp=3,mbs=4,tiles=3"},
        {"dp=3,mbs=4,tiles=3,zero=1"},
        {"dp=3,mbs=4,tiles=3,zero=2"},
        {"dp=3,mbs=4,tiles=3,zero=3,prefetch=0"},
        {"dp=3,mbs=4,tiles=3,zero=3,prefetch=2"},
        {"dp=3,mbs=4,tiles=3,zero=3,recompute=full"},
        {"dp=3,mbs=4,tiles=3,zero=3", How::kResumed}},
       {"dp=3,mbs=4,tiles=2"},
       false},
      {"tiles_bf16",
       {{"dp=2,tp=2,mbs=6,tiles=3"},
        {"dp=2,tp=2,mbs=6,tiles=3,zero=3"},
        {"dp=2,tp=2,mbs=6,tiles=3,zero=3", How::kResumed}},
       {"dp=2,tp=2,mbs=3,tiles=3"},
       false,
       DType::kBFloat16},
      {"recompute",
       {{"dp=2,tp=2,mbs=2"},
        {"dp=2,tp=2,mbs=2,recompute=selective"},
        {"dp=2,tp=2,mbs=2,recompute=full"}},
       {"dp=2,tp=2,mbs=3,recompute=full"}},
      {"recompute_with_stages",
       {{"pp=2,dp=2,mbs=2,zero=1"},
        {"pp=2,dp=2,mbs=2,zero=1,recompute=selective"},
        {"pp=2,dp=2,mbs=2,zero=1,recompute=full"}},
       {"pp=2,dp=2,mbs=3,zero=1,recompute=full"}},
      {"zero_bf16",
       {{"dp=3,mbs=4"},
        {"dp=3,mbs=4,zero=1"},
        {"dp=3,mbs=4,zero=2"},
        {"dp=3,mbs=4,zero=3"}},
       {"dp=3,mbs=1,zero=2"},
       false,
       DType::kBFloat16},
      {"schedules_bf16",
       {{"pp=3,mbs=2,schedule=1f1b"},
        {"pp=3,mbs=2,schedule=gpipe"},
        {"pp=3,mbs=2,schedule=zb-h1,recompute=full"}},
       {"pp=3,mbs=3,schedule=1f1b"},
       true,
       DType::kBFloat16},
      {"resumed_bf16",
       {{"dp=2,tp=2,mbs=3,zero=1"}, {"dp=2,tp=2,mbs=3,zero=1", How::kResumed}},
       {"dp=2,tp=2,mbs=2,zero=1"},
       true,
       DType::kBFloat16},
      // Where something lives.
      {"offload",
       {{"dp=2,tp=2,mbs=2"},
        {"dp=2,tp=2,mbs=2,offload=optimizer:host"},
        {"dp=2,tp=2,mbs=2,offload=optimizer:file"},
        {"dp=2,tp=2,mbs=2,offload=parameters:host"},
        {"dp=2,tp=2,mbs=2,offload=parameters:file"},
        {"dp=2,tp=2,mbs=2,offload=activations:host"},
        {"dp=2,tp=2,mbs=2,offload=activations:file"},
        {"dp=2,tp=2,mbs=2,zero=1,prefetch=0,offload=optimizer:host,"
         "parameters:host,activations:host"},
        {"dp=2,tp=2,mbs=2,offload=optimizer:file,parameters:host,"
         "activations:file",
         How::kShm}},
       {"dp=2,tp=2,mbs=3,offload=optimizer:host"}},
      {"offload_zero_2_and_3",
       {{"dp=3,mbs=4"},
        {"dp=3,mbs=4,zero=2,offload=optimizer:host"},
        {"dp=3,mbs=4,zero=3,offload=optimizer:host,parameters:host"},
        {"dp=3,mbs=4,zero=3,offload=optimizer:file,parameters:file,"
         "activations:file"},
        {"dp=3,mbs=4,zero=3,offload=parameters:file"}},
       {"dp=3,mbs=1,zero=2,offload=optimizer:host"},
       false},
      {"offload_bf16",
       {{"dp=3,mbs=4"},
        {"dp=3,mbs=4,offload=optimizer:host"},
        {"dp=3,mbs=4,zero=1,offload=optimizer:file,parameters:host"},
        {"dp=3,mbs=4,zero=2,offload=optimizer:host,parameters:file"},
        {"dp=3,mbs=4,zero=3,offload=optimizer:host,parameters:host,"
         "activations:host"},
        {"dp=3,mbs=4,zero=3,offload=optimizer:file,parameters:file,"
         "activations:file"}},
       {"dp=3,mbs=1,zero=2,offload=optimizer:file"},
       false,
       DType::kBFloat16},
      // Gradients that wait on the host are reduced in every microbatch, as
      // those of stage 2 are.
      {"offload_gradients",
       {{"dp=2,tp=2,mbs=1,zero=2"},
        {"dp=2,tp=2,mbs=1,zero=1,offload=optimizer:host,gradients:host"},
        {"dp=2,tp=2,mbs=1,zero=2,offload=optimizer:host,gradients:host"},
        {"dp=2,tp=2,mbs=1,zero=2,bucket=1B,offload=optimizer:file,"
         "gradients:host",
         How::kShm},
        {"dp=2,tp=2,mbs=1,zero=3,offload=optimizer:host,parameters:host,"
         "gradients:host",
         How::kResumed},
        {"dp=2,tp=2,mbs=1,zero=3,offload=optimizer:file,parameters:file,"
         "gradients:host,activations:file"}},
       {"dp=2,tp=2,mbs=1,zero=1,offload=optimizer:host"}},
      // The same sums where there is one microbatch.
      {"offload_gradients_bf16",
       {{"dp=3,mbs=4"},
        {"dp=3,mbs=4,offload=optimizer:host,gradients:host"},
        {"dp=3,mbs=4,zero=1,offload=optimizer:file,gradients:host"},
        {"dp=3,mbs=4,zero=3,offload=optimizer:host,parameters:file,"
         "gradients:host"}},
       {"dp=3,mbs=1,offload=optimizer:host,gradients:host"},
       false,
       DType::kBFloat16},
      {"offload_with_stages",
       {{"pp=2,dp=2,mbs=2,zero=1"},
        {"pp=2,dp=2,mbs=2,zero=1,schedule=zb-h1,offload=activations:file"},
        {"pp=2,dp=2,mbs=2,zero=1,recompute=selective,offload=optimizer:file,"
         "parameters:file,activations:host"},
        {"pp=2,dp=2,mbs=2,zero=1,recompute=full,offload=optimizer:host,"
         "parameters:host,activations:file"}},
       {"pp=2,dp=2,mbs=3,zero=1,offload=activations:host"}},
      {"offload_resumed_bf16",
       {{"dp=2,tp=2,mbs=3"},
        {"dp=2,tp=2,mbs=3,zero=1,offload=optimizer:host", How::kResumed},
        {"dp=2,tp=2,mbs=3,offload=optimizer:file,parameters:file",
         How::kResumed}},
       {"dp=2,tp=2,mbs=2,offload=optimizer:host", How::kResumed},
       true,
       DType::kBFloat16},
      {"worlds",
       {{"dp=3,mbs=2"}, {"dp=3,mbs=2", How::kShm}},
       {"dp=3,mbs=4", How::kShm}},
      {"worlds_with_tensors_and_stages",
       {{"dp=2,tp=2,pp=2,mbs=2,zero=1"},
        {"dp=2,tp=2,pp=2,mbs=2,zero=1", How::kShm}},
       {"dp=2,tp=2,pp=2,mbs=3,zero=1", How::kShm}},
      {"resumed",
       {{"dp=2,tp=2,mbs=3,zero=1"}, {"dp=2,tp=2,mbs=3,zero=1", How::kResumed}},
       {"dp=2,tp=2,mbs=3,zero=1", How::kWeights}},
      {"resumed_with_stages",
       {{"dp=2,pp=3,mbs=2,zero=3"}, {"dp=2,pp=3,mbs=2,zero=3", How::kResumed}},
       {"dp=2,pp=3,mbs=2,zero=3", How::kWeights}},
  };
  return *classes;
}

// With biases, dropout and grouped queries: what could go wrong does.
Graph Model(bool tied, DType dtype) {
  return MakeGraph({.layers = 3,
                    .rms = 1,
                    .gated = 1,
                    .tied = tied ? 1 : 0,
                    .bias = 1,
                    .dropout = 1,
                    .groups = 2,
                    .per_group = 2,
                    .head_size = 4,
                    .hidden = 8,
                    .inner = 12,
                    .vocabulary = 16,
                    .sequence = 8,
                    .batch = 12},
                   dtype);
}

// Losses and the bytes of the last checkpoint.
struct Outcome {
  std::vector<double> losses;
  std::string checkpoint;
  bool operator==(const Outcome&) const = default;
};

std::string Bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

// The weights of a checkpoint, without state and step.
void WriteWeights(const Graph& graph, const std::string& from,
                  const std::string& to) {
  const auto file = SafetensorsFile::Open(from).value();
  std::vector<SafetensorsEntry> entries;
  for (TensorId id : Weights(graph)) {
    const Tensor& tensor = graph.tensor(id);
    entries.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  auto writer = SafetensorsWriter::Create(to, entries, {}).value();
  for (const SafetensorsEntry& entry : entries) {
    const int64_t bytes = ElementCount(entry.shape) * SizeOf(entry.dtype);
    const auto written =
        writer.Write({file.Find(entry).value(), static_cast<size_t>(bytes)});
    TESSERA_CHECK(written.has_value()) << written.error().ToString();
  }
  TESSERA_CHECK(writer.Commit().has_value());
}

int RanksOf(const std::string& strategy) {
  const Strategy s = ParseStrategy(strategy).value();
  return std::max(1, s.dp) * s.tp * s.pp * s.cp;
}

Outcome RunOf(const Graph& graph, const Run& run) {
  const auto tasks =
      LowerStrategy(graph, RanksOf(run.strategy), run.strategy, {.clip = 0});
  TESSERA_CHECK(tasks.has_value()) << tasks.error().ToString();
  TrainInMemoryOptions options;
  options.training = {.learning_rate = 0.01, .clip = 0};
  options.steps = kSteps;
  options.save_path = TempPath("last.safetensors");
  Outcome outcome;
  if (run.how == How::kShm) {
    auto losses = TrainOverShm(graph, *tasks, options);
    TESSERA_CHECK(losses.has_value()) << losses.error().ToString();
    outcome.losses = *std::move(losses);
  } else {
    if (run.how != How::kThreads) {
      options.steps = kSteps / 2;
      const auto first = TrainInMemory(graph, *tasks, options);
      TESSERA_CHECK(first.has_value()) << first.error().ToString();
      outcome.losses = first->losses;
      options.load_path = options.save_path;
      if (run.how == How::kWeights) {
        options.load_path = TempPath("weights.safetensors");
        WriteWeights(graph, options.save_path, options.load_path);
      }
    }
    const auto trained = TrainInMemory(graph, *tasks, options);
    TESSERA_CHECK(trained.has_value()) << trained.error().ToString();
    outcome.losses.insert(outcome.losses.end(), trained->losses.begin(),
                          trained->losses.end());
  }
  outcome.checkpoint = Bytes(options.save_path);
  std::filesystem::remove(options.save_path);
  if (run.how == How::kWeights) std::filesystem::remove(options.load_path);
  return outcome;
}

void PrintTo(const ExactClass& c, std::ostream* out) {
  *out << c.name;
}

class ExactClasses : public ::testing::TestWithParam<ExactClass> {};

TEST_P(ExactClasses, SameBits) {
  const ExactClass& c = GetParam();
  const Graph graph = Model(c.tied, c.dtype);
  const Outcome first = RunOf(graph, c.equal[0]);
  ASSERT_EQ(first.losses.size(), static_cast<size_t>(kSteps));
  ASSERT_GT(first.checkpoint.size(), 1000u);
  for (size_t i = 1; i < c.equal.size(); ++i) {
    const Outcome other = RunOf(graph, c.equal[i]);
    EXPECT_EQ(other.losses, first.losses) << c.equal[i].strategy;
    EXPECT_TRUE(other.checkpoint == first.checkpoint) << c.equal[i].strategy;
  }
  EXPECT_FALSE(RunOf(graph, c.control) == first) << c.control.strategy;
}

INSTANTIATE_TEST_SUITE_P(Classes, ExactClasses, ::testing::ValuesIn(Classes()),
                         [](const auto& info) {
                           return std::string(info.param.name);
                         });

}  // namespace
}  // namespace tessera
