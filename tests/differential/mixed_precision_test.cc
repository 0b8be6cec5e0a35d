// 16-bit training under plans: what moves no sum keeps every bit, what splits
// sums stays within the format's rounding, checkpoints go on exactly, and
// memory is what the formats say. Steps are not clipped where runs are compared
// bit for bit: the norm's sum runs over the shards of a plan.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>

#include "planner/base/element_count.h"
#include "runtime/checksums.h"
#include "runtime/loss_scale.h"
#include "tests/support/file_bytes.h"
#include "tests/support/tiny_training.h"

namespace tessera {
namespace {

constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16};

using testing::ReadBytes;
using testing::WriteBytes;

struct Outcome {
  std::vector<double> losses;
  std::string checkpoint;
  std::string state;  // masters and moments, in the graph's order
};

// The elements of all weights and of the optimizer's state in a checkpoint.
std::string StateIn(const std::string& path, const Graph& graph) {
  const auto file = SafetensorsFile::Open(path).value();
  std::string state;
  for (TensorId id : Weights(graph)) {
    const Tensor& tensor = graph.tensor(id);
    const int64_t bytes = 4 * ElementCount(tensor.shape);
    for (const char* prefix : {"", "optimizer.m.", "optimizer.v."}) {
      const std::byte* const data =
          file.Find({prefix + tensor.name, DType::kFloat32, tensor.shape})
              .value();
      state.append(reinterpret_cast<const char*>(data),
                   static_cast<size_t>(bytes));
    }
  }
  return state;
}

Outcome Trained(const Graph& graph, int ranks, const std::string& strategy,
                TinyRun run = {}) {
  static const TokenData* const data = new TokenData(TinyTokens());
  const auto tasks = LowerStrategy(graph, ranks, strategy, run.options);
  Outcome outcome;
  if (!tasks) {
    ADD_FAILURE() << strategy << ": " << tasks.error().ToString();
    return outcome;
  }
  if (run.save_path.empty()) run.save_path = TempPath("checkpoint");
  const auto result = TrainTiny(graph, *tasks, *data, run);
  if (!result) {
    ADD_FAILURE() << strategy << ": " << result.error().ToString();
    return outcome;
  }
  outcome.losses = result->losses;
  outcome.checkpoint = ReadBytes(run.save_path);
  if (graph.dtype != DType::kFloat64) {
    outcome.state = StateIn(run.save_path, graph);
  }
  std::filesystem::remove(run.save_path);
  return outcome;
}

TinyRun Unclipped() {
  TinyRun run;
  run.steps = 5;
  run.options.clip = 0;
  return run;
}

// Without tied weights, whose two gradients meet in another order in a pipeline
// and where gradients are stored cut.
TEST(MixedPrecision, WhatMovesNoSumKeepsEveryBit) {
  for (const DType dtype : kTypes) {
    const Graph graph = ImportTiny(TinyLlama(2), 4, 8, dtype);
    const auto expect_equal = [&](int ranks, const std::string& strategy,
                                  const Outcome& expected) {
      const Outcome actual = Trained(graph, ranks, strategy, Unclipped());
      EXPECT_EQ(actual.losses, expected.losses) << strategy;
      EXPECT_TRUE(actual.state == expected.state) << strategy;
    };
    const Outcome ddp = Trained(graph, 2, "dp=2,mbs=2", Unclipped());
    for (const char* zero : {"1", "2", "3"}) {
      expect_equal(2, std::string("dp=2,mbs=2,zero=") + zero, ddp);
    }
    const Outcome serial = Trained(graph, 1, "dp=1,mbs=2", Unclipped());
    expect_equal(2, "dp=1,pp=2,mbs=2,schedule=1f1b", serial);
    // A control: the comparison sees one rounding more.
    EXPECT_FALSE(ddp.state == serial.state);
  }
}

// What is rounded at random is so by its place in the weight, whatever part of
// it is where.
TEST(MixedPrecision, RandomRoundingIsTheSameUnderEveryPlan) {
  const Graph graph = ImportTiny(TinyLlama(2), 4, 8, DType::kBFloat16);
  const auto trained = [&](int ranks, const std::string& strategy,
                           bool at_random = true) {
    TinyRun run = Unclipped();
    run.options.stochastic_rounding = at_random;
    return Trained(graph, ranks, strategy, run);
  };
  const Outcome ddp = trained(2, "dp=2,mbs=2");
  for (const char* more : {"zero=1", "zero=2", "zero=3", "zero=3,tiles=2"}) {
    const Outcome other = trained(2, std::string("dp=2,mbs=2,") + more);
    EXPECT_EQ(other.losses, ddp.losses) << more;
    EXPECT_TRUE(other.state == ddp.state) << more;
  }
  const Outcome serial = trained(1, "dp=1,mbs=2");
  const Outcome pipeline = trained(2, "dp=1,pp=2,mbs=2,schedule=1f1b");
  EXPECT_EQ(pipeline.losses, serial.losses);
  EXPECT_TRUE(pipeline.state == serial.state);
  const Outcome host = trained(1, "dp=1,mbs=2,offload=optimizer:host");
  EXPECT_EQ(host.losses, serial.losses);
  // Sums of tensor parallelism are rounded otherwise, by some 2^-8 of a loss of
  // 4 in a dozen places; parameters rounded elsewhere would be off by as much
  // in each of their elements.
  const Outcome split = trained(2, "dp=1,tp=2,mbs=2");
  for (size_t i = 0; i < serial.losses.size(); ++i) {
    EXPECT_NEAR(split.losses[i], serial.losses[i], 32e-3) << i;
  }
  const Outcome nearest = trained(1, "dp=1,mbs=2", /*at_random=*/false);
  EXPECT_EQ(nearest.losses[0], serial.losses[0]);  // before the first update
  EXPECT_NE(nearest.losses, serial.losses);
}

// Splits of a reduction round each part to 16 bits before they are added: per
// partial sum half a unit in the last place, 2^-8 of it in bf16, in a dozen
// places of the model. A loss of about 4 then moves by some 4 * 2^-8 = 16e-3,
// and less in fp16 by 8; twice that for what the optimizer makes of it in 10
// small steps. A lost or doubled sum changes it by tenths.
TEST(MixedPrecision, SplitsStayWithinRounding) {
  for (const DType dtype : kTypes) {
    const double bound = dtype == DType::kBFloat16 ? 32e-3 : 4e-3;
    for (const bool llama : {false, true}) {
      const Graph graph =
          ImportTiny(llama ? TinyLlama(2) : TinyGpt2(2, 4), 8, 8, dtype);
      TinyRun run;
      run.steps = 10;
      const Outcome serial = Trained(graph, 1, "dp=1,mbs=8", run);
      const std::pair<int, const char*> splits[] = {
          {2, "dp=2"},
          {2, "dp=1,tp=2"},
          {2, "dp=1,tp=2,sp=1"},
          {4, "dp=1,cp=4,mbs=8,cp-kind=ring,cp-balance=zigzag"},
          {2, "dp=1,pp=2,mbs=2"},
          {8, "dp=2,tp=2,pp=2,zero=1,mbs=2"}};
      for (const auto& [ranks, strategy] : splits) {
        const Outcome split = Trained(graph, ranks, strategy, run);
        ASSERT_EQ(split.losses.size(), serial.losses.size());
        for (size_t i = 0; i < serial.losses.size(); ++i) {
          EXPECT_NEAR(split.losses[i], serial.losses[i], bound)
              << NameOf(dtype) << " " << strategy << " step " << i;
        }
      }
      // The same model in fp64, for what rounding does at all: something.
      const Graph exact =
          ImportTiny(llama ? TinyLlama(2) : TinyGpt2(2, 4), 8, 8);
      const Outcome doubles = Trained(exact, 1, "dp=1,mbs=8", run);
      double difference = 0;
      for (size_t i = 0; i < serial.losses.size(); ++i) {
        difference = std::max(difference,
                              std::abs(serial.losses[i] - doubles.losses[i]));
      }
      EXPECT_LT(difference, bound);
      EXPECT_GT(difference, 1e-5);
    }
  }
}

// The checkpoint holds the masters, and what fp16 knows of its scale.
TEST(MixedPrecision, ResumeIsExact) {
  for (const DType dtype : kTypes) {
    const Graph graph = ImportTiny(TinyGpt2(2, 4), 4, 8, dtype);
    const std::string strategy = "dp=2,tp=1,pp=1,mbs=2,zero=1";
    TinyRun whole;
    whole.steps = 6;
    whole.options.stochastic_rounding = dtype == DType::kBFloat16;
    const Outcome straight = Trained(graph, 2, strategy, whole);

    const std::string path = TempPath("half");
    TinyRun first = whole;
    first.steps = 2;
    const Outcome half = Trained(graph, 2, strategy, first);
    WriteBytes(path, half.checkpoint);
    const auto file = SafetensorsFile::Open(path).value();
    EXPECT_TRUE(
        file.Find({"wte.weight", DType::kFloat32, {40, 16}}).has_value());
    EXPECT_EQ(file.Has("optimizer.loss_scale"), dtype == DType::kFloat16);
    EXPECT_EQ(SavedRunOf(path).value()->stochastic_rounding,
              dtype == DType::kBFloat16);

    TinyRun second = whole;
    second.steps = 4;
    second.load_path = path;
    const Outcome resumed = Trained(graph, 2, strategy, second);
    EXPECT_TRUE(resumed.checkpoint == straight.checkpoint);
    EXPECT_EQ(resumed.losses, std::vector<double>(straight.losses.begin() + 2,
                                                  straight.losses.end()));
    std::filesystem::remove(path);
  }
}

// Makes the checksums of a checkpoint that was changed those of what it has.
void Reseal(std::string& checkpoint) {
  uint64_t header = 0;
  std::memcpy(&header, checkpoint.data(), sizeof(header));
  const size_t begin = sizeof(header) + header;
  // The last tensor: the header's checksum, then one for each block before it.
  constexpr size_t kBlock = kChecksumBlock;
  size_t end = checkpoint.size() - sizeof(uint32_t);
  while ((end - begin + kBlock - 1) / kBlock * sizeof(uint32_t) !=
         checkpoint.size() - sizeof(uint32_t) - end) {
    end -= sizeof(uint32_t);
  }
  for (size_t at = begin, k = 1; at < end; at += kBlock, ++k) {
    const uint32_t checksum = Crc32(std::as_bytes(
        std::span(checkpoint).subspan(at, std::min(kBlock, end - at))));
    std::memcpy(checkpoint.data() + end + k * sizeof(checksum), &checksum,
                sizeof(checksum));
  }
}

// A scale at which the gradients overflow is halved, step by step, while the
// weights stay as they are; then training goes on as if nothing had been.
TEST(MixedPrecision, OverflowSkipsStepsOnAllRanks) {
  const Graph graph = ImportTiny(TinyGpt2(2, 4), 4, 8, DType::kFloat16);
  for (const char* strategy : {"dp=2,tp=1,pp=1", "dp=1,tp=1,pp=2,mbs=2"}) {
    const std::string path = TempPath("start");
    TinyRun none;
    none.steps = 1;
    none.options.learning_rate = 0;
    std::string start = Trained(graph, 2, strategy, none).checkpoint;
    // The state, with a scale of 2^40: dlogits of 2^-7 or so become 2^33.
    const LossScale before = {65536, 1, 0};
    const LossScale raised = {0x1p40F, 1, 0};
    const std::string_view old_bytes(reinterpret_cast<const char*>(&before),
                                     sizeof(before));
    const size_t place = start.find(old_bytes);
    ASSERT_NE(place, std::string::npos);
    ASSERT_EQ(start.find(old_bytes, place + 1), std::string::npos);
    start.replace(
        place, sizeof(raised),
        std::string(reinterpret_cast<const char*>(&raised), sizeof(raised)));
    Reseal(start);
    WriteBytes(path, start);

    TinyRun run;
    run.load_path = path;
    run.steps = 5;
    run.options.learning_rate = 1;  // it would show
    const Outcome skipped = Trained(graph, 2, strategy, run);
    WriteBytes(path, skipped.checkpoint);
    const auto file = SafetensorsFile::Open(path).value();
    LossScale after;
    std::memcpy(
        &after,
        file.Find({"optimizer.loss_scale", DType::kFloat32, {3}}).value(),
        sizeof(after));
    EXPECT_EQ(after.scale, 0x1p35F) << strategy;
    EXPECT_EQ(after.good_steps, 0);
    EXPECT_EQ(after.skipped_steps, 5);
    WriteBytes(path, start);
    EXPECT_TRUE(StateIn(path, graph) == skipped.state) << strategy;
    std::filesystem::remove(path);
  }
}

// Per parameter: bf16 2 + fp32 gradient 4 + fp32 master, m and v 12.
TEST(MixedPrecision, BytesPerParameter) {
  const TokenData data = TinyTokens();
  struct Row {
    DType dtype;
    int64_t parameter, gradient, optimizer;
  };
  for (const Row& row :
       {Row{DType::kFloat32, 4, 4, 8}, Row{DType::kBFloat16, 2, 4, 12}}) {
    const Graph graph = ImportTiny(TinyLlama(2), 2, 8, row.dtype);
    TinyRun run;
    run.steps = 2;
    const auto tasks =
        LowerStrategy(graph, 1, "dp=1,mbs=2", run.options).value();
    const auto result = TrainTiny(graph, tasks, data, run).value();
    const auto& parts = result.memory[0].parts;
    const int64_t n = ParameterCount(graph);
    const auto bytes = [&](MemoryCategory category) {
      return parts[static_cast<size_t>(category)].value;
    };
    EXPECT_EQ(bytes(MemoryCategory::kParameter), n * row.parameter);
    EXPECT_EQ(bytes(MemoryCategory::kOptimizer), n * row.optimizer);
    // The scalars of the norm, fp32 each, lie beside the gradients.
    EXPECT_EQ(bytes(MemoryCategory::kGradient), n * row.gradient + 2 * 4);
  }
}

}  // namespace
}  // namespace tessera
