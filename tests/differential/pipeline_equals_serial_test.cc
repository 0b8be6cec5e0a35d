// Pipelines of every shape and schedule against one rank, in fp64; and against
// each other, bit for bit: a schedule changes when a stage works, never in
// which order it sums.

#include "planner/plan/graph_index.h"
#include "tests/support/tiny_outcome.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 12;
constexpr int64_t kSeqLen = 4;
constexpr int64_t kSteps = 3;

TrainingOptions Unclipped() {
  TrainingOptions options;
  options.clip = 0;
  return options;
}

Outcome RunTasks(const Graph& graph, const TaskGraph& tasks,
                 const TrainingOptions& options) {
  TinyRun run;
  run.steps = kSteps;
  run.options = options;
  return OutcomeOf(graph, tasks, run);
}

Outcome RunStrategy(const Graph& graph, int ranks, const std::string& strategy,
                    const TrainingOptions& options = {}) {
  TinyRun run;
  run.steps = kSteps;
  run.options = options;
  return OutcomeOf(graph, ranks, strategy, run);
}

std::string ScheduleText(int pp, int vp, int mbs, std::string_view schedule) {
  return "pp=" + std::to_string(pp) + ",vp=" + std::to_string(vp) +
         ",mbs=" + std::to_string(mbs) + ",schedule=" + std::string(schedule);
}

// Samples of a microbatch: 12, 4, 3, 2 and 1 microbatches of the 12 samples,
// multiples of the number of stages and others, fewer and more than it.
constexpr int kSamples[] = {1, 3, 4, 6, 12};

class Pipelines : public ::testing::TestWithParam<int> {};  // stages

// Ten layers in up to twelve positions; the embedding is tied.
TEST_P(Pipelines, EqualOneRank) {
  const int pp = GetParam();
  const Graph graph = ImportTiny(TinyGpt2(10, 2, 4), kBatch, kSeqLen);
  const Outcome serial = RunStrategy(graph, 1, "mbs=12");
  ASSERT_EQ(serial.losses.size(), static_cast<size_t>(kSteps));
  int runs = 0;
  for (int vp : {1, 2, 3}) {
    for (const PipelineSchedule* schedule :
         SchedulesFor({.stages = pp, .chunks = vp})) {
      for (int mbs : kSamples) {
        const auto text = ScheduleText(pp, vp, mbs, schedule->name);
        EXPECT_EQ(Difference(RunStrategy(graph, pp, text), serial), "") << text;
        ++runs;
      }
    }
  }
  EXPECT_GE(runs, 5 * 5);
}

// Bits are equal where the blocks of a rank are: the norm of the gradients is
// summed by rank. Without clipping they are equal in any case.
TEST_P(Pipelines, EqualEachOtherBitForBit) {
  const int pp = GetParam();
  const Graph graph =
      ImportTiny(TinyGpt2(6, 2, 4), kBatch, kSeqLen, DType::kFloat32);
  for (int mbs : {2, 4}) {
    const Outcome clipped =
        RunStrategy(graph, pp, ScheduleText(pp, 1, mbs, "1f1b"));
    const Outcome unclipped =
        RunStrategy(graph, pp, ScheduleText(pp, 1, mbs, "1f1b"), Unclipped());
    EXPECT_FALSE(clipped == unclipped);
    for (int vp : {1, 2}) {
      for (const PipelineSchedule* schedule :
           SchedulesFor({.stages = pp, .chunks = vp})) {
        const auto text = ScheduleText(pp, vp, mbs, schedule->name);
        if (vp == 1) {
          EXPECT_EQ(RunStrategy(graph, pp, text), clipped) << text;
        }
        EXPECT_EQ(RunStrategy(graph, pp, text, Unclipped()), unclipped) << text;
      }
    }
    // A negative control: another size of microbatches sums in another order.
    EXPECT_FALSE(RunStrategy(graph, pp, ScheduleText(pp, 1, 1, "1f1b"),
                             Unclipped()) == unclipped);
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, Pipelines, ::testing::Values(2, 3, 4));

// With data and tensor parallelism and every ZeRO stage within the stages.
TEST(PipelinesWith, DataTensorAndZero) {
  for (bool llama : {false, true}) {
    const Graph graph =
        ImportTiny(llama ? TinyLlama(3) : TinyGpt2(3, 4, 8), kBatch, kSeqLen);
    const Outcome serial = RunStrategy(graph, 1, "mbs=12");
    for (int vp : {1, 2}) {
      for (const PipelineSchedule* schedule :
           SchedulesFor({.stages = 2, .chunks = vp})) {
        for (const char* inner :
             {"dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2,sp=1"}) {
          const std::string text =
              ScheduleText(2, vp, 2, schedule->name) + "," + inner;
          EXPECT_EQ(Difference(RunStrategy(graph, 4, text), serial), "")
              << text;
        }
      }
    }
  }
}

// One stage of several chunks: the tied weight's readers are in two of them.
TEST(PipelinesWith, OneStageOfSeveralChunks) {
  const Graph graph = ImportTiny(TinyGpt2(2, 2, 4), kBatch, kSeqLen);
  const Outcome serial = RunStrategy(graph, 1, "mbs=12");
  for (const char* inner : {"", ",zero=1", ",zero=2", ",zero=3"}) {
    const std::string text =
        ScheduleText(1, 3, 2, "interleaved") + ",dp=2" + inner;
    EXPECT_EQ(Difference(RunStrategy(graph, 2, text), serial), "") << text;
  }
}

// On queues, where a send waits for its receive, with buffers that two streams
// use from forward to backward: what takes their room waits for sends, too.
TEST(PipelinesWith, SendsThatWait) {
  const Graph graph = ImportTiny(TinyLlama(4), kBatch, kSeqLen);
  const Outcome serial = RunStrategy(graph, 1, "mbs=12");
  TinyRun run;
  run.steps = kSteps;
  run.in_queues = true;
  for (const auto& [ranks, text] : std::vector<std::pair<int, std::string>>{
           {2, "pp=2,vp=2,mbs=3,schedule=interleaved"},
           {2, "pp=2,mbs=2,schedule=zb-h1"},
           {3, "pp=3,mbs=2,schedule=zb-h2"},
           {6, "pp=3,mbs=1,cp=2"},
           {8, "pp=4,mbs=1,tp=2,sp=1"}}) {
    for (bool graphs : {false, true}) {
      run.graphs = graphs;
      EXPECT_EQ(Difference(OutcomeOf(graph, ranks, text, run), serial), "")
          << text;
    }
  }
}

// Chunks of one to three blocks, that no strategy gives.
TEST(PipelinesWith, UnevenChunks) {
  const Graph graph = ImportTiny(TinyGpt2(6, 2, 4), kBatch, kSeqLen);
  const Outcome serial = RunStrategy(graph, 1, "mbs=12");
  const Cluster cluster = MakeCluster("local-cpu:2").value();
  Plan plan = PlanFromStrategy(
                  graph, cluster,
                  ParseStrategy(ScheduleText(2, 2, 4, "interleaved")).value())
                  .value();
  const GraphIndex index(graph);
  const int positions[] = {0, 0, 0, 1, 2, 2, 2, 3};  // of eight blocks
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    for (NodeId node : index.nodes_of_block[b]) {
      plan.ops[node.index()].group = GroupId(positions[b] % 2);
      plan.ops[node.index()].chunk = positions[b] / 2;
    }
  }
  ASSERT_TRUE(Validate(graph, cluster, plan).empty());
  const TaskGraph tasks = Lower(graph, cluster, plan, {});
  EXPECT_EQ(Difference(RunTasks(graph, tasks, {}), serial), "");
}

}  // namespace
}  // namespace tessera
