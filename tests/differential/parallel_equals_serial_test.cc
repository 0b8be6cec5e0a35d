// Whatever the plan, the training is the same: every (dp, tp, pp, ZeRO)
// factorisation of 2, 4 and 8 ranks gives the losses and weights of one rank.
// In fp64, so that only the order of sums differs: what is left of a wrong
// mask, a lost sum or a swapped shard is far above the tolerance. Negative
// controls plant each of these and must be seen.

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>

#include "tests/support/tiny_outcome.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 8;
constexpr int64_t kSeqLen = 8;

Outcome RunTasks(const Graph& graph, const TaskGraph& tasks) {
  return OutcomeOf(graph, tasks, {});
}

TaskGraph LowerTiny(const Graph& graph, int ranks,
                    const std::string& strategy) {
  auto tasks = LowerStrategy(graph, ranks, strategy, {});
  TESSERA_CHECK(tasks.has_value())
      << strategy << ": " << tasks.error().ToString();
  return std::move(tasks).value();
}

enum class Model {
  kGpt2,
  kLlama,
  kMixtral,
  kDeepseek,
  kQwen2Moe,
  kQwen3,
  kGemma,
  kPhi3,
  kOpt,
  kBloom,
  kBert,
  kT5,
  kT5Gated
};

struct Case {
  Model model = Model::kGpt2;
  int layers = 2;
  int ranks = 1;
  std::string strategy;
};

void PrintTo(const Case& c, std::ostream* out) {
  constexpr const char* kNames[] = {
      "gpt2", "llama", "mixtral", "deepseek", "qwen2_moe", "qwen3",   "gemma",
      "phi3", "opt",   "bloom",   "bert",     "t5",        "gated t5"};
  *out << kNames[static_cast<size_t>(c.model)] << " " << c.layers << " layers, "
       << c.strategy;
}

// Every factorisation of `ranks`, with both ZeRO stages, and sequence splits
// where tensors are split, and both schedules where there is a pipeline.
std::vector<Case> Cases(int ranks) {
  std::vector<Case> cases;
  for (Model model : {Model::kGpt2, Model::kLlama}) {
    for (int tp = 1; tp <= ranks; tp *= 2) {
      for (int pp = 1; tp * pp <= ranks; pp *= 2) {
        // Llama's four heads do not split eight ways.
        if (model == Model::kLlama && tp > 4) continue;
        // ZeRO cuts what replicas have alike.
        const bool replicas = tp * pp < ranks;
        for (int zero = 0; zero <= (replicas ? 1 : 0); ++zero) {
          for (int sp = 0; sp <= (tp > 1 ? 1 : 0); ++sp) {
            for (const char* schedule : {"gpipe", "1f1b"}) {
              if (pp == 1 && std::string(schedule) == "gpipe") continue;
              Case c;
              c.model = model;
              c.layers = std::max(2, pp);
              c.ranks = ranks;
              c.strategy =
                  "dp=" + std::to_string(ranks / tp / pp) +
                  ",tp=" + std::to_string(tp) + ",pp=" + std::to_string(pp) +
                  ",zero=" + std::to_string(zero) +
                  ",sp=" + std::to_string(sp) + ",schedule=" + schedule;
              cases.push_back(c);
            }
          }
        }
      }
    }
  }
  return cases;
}

std::string ConfigOf(Model model, int layers) {
  switch (model) {
    case Model::kGpt2:
      return TinyGpt2(layers);
    case Model::kLlama:
      return TinyLlama(layers);
    case Model::kMixtral:
      return TinyMixtral(layers);
    case Model::kDeepseek:
      return TinyDeepseek(layers);
    case Model::kQwen2Moe:
      return TinyQwen(layers, /*experts=*/true);
    case Model::kQwen3:
      return TinyQwen(layers, /*experts=*/false);
    case Model::kGemma:
      return TinyOf("gemma", layers);
    case Model::kPhi3:
      return TinyOf("phi3", layers);
    case Model::kOpt:
      return TinyOf("opt", layers);
    case Model::kBloom:
      return TinyOf("bloom", layers);
    case Model::kBert:
      return TinyBert(layers);
    case Model::kT5:
      return TinyT5(layers);
    case Model::kT5Gated:
      return TinyT5(layers, /*gated=*/true);
  }
  return "";
}

const Graph& TinyGraph(Model model, int layers) {
  static auto* const graphs = new std::map<std::pair<Model, int>, Graph>();
  const auto key = std::pair(model, layers);
  auto it = graphs->find(key);
  if (it == graphs->end()) {
    const std::string config = ConfigOf(model, layers);
    it = graphs->emplace(key, ImportTiny(config, kBatch, kSeqLen)).first;
  }
  return it->second;
}

const Outcome& Serial(Model model, int layers) {
  static auto* const outcomes = new std::map<std::pair<Model, int>, Outcome>();
  const auto key = std::pair(model, layers);
  auto it = outcomes->find(key);
  if (it == outcomes->end()) {
    const Graph& graph = TinyGraph(model, layers);
    const Outcome outcome = RunTasks(graph, LowerTiny(graph, 1, "dp=1,mbs=8"));
    it = outcomes->emplace(key, outcome).first;
  }
  return it->second;
}

// One test for all cases of a number of ranks: the serial runs are shared.
class ParallelEqualsSerial : public ::testing::TestWithParam<int> {};

TEST_P(ParallelEqualsSerial, EveryFactorisation) {
  for (const Case& c : Cases(GetParam())) {
    SCOPED_TRACE(::testing::PrintToString(c));
    const Graph& graph = TinyGraph(c.model, c.layers);
    const TaskGraph tasks = LowerTiny(graph, c.ranks, c.strategy);
    EXPECT_EQ(Difference(RunTasks(graph, tasks), Serial(c.model, c.layers)),
              "");
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ParallelEqualsSerial,
                         ::testing::Values(2, 4, 8));

// Runs each strategy on as many ranks as its degrees make up.
void ExpectEqualsSerial(Model model,
                        std::initializer_list<const char*> strategies) {
  for (const char* text : strategies) {
    SCOPED_TRACE(text);
    const Strategy s = ParseStrategy(text).value();
    const int ranks = std::max(1, s.dp) * s.tp * s.pp * s.cp * s.ep;
    const Graph& graph = TinyGraph(model, 2);
    EXPECT_EQ(Difference(RunTasks(graph, LowerTiny(graph, ranks, text)),
                         Serial(model, 2)),
              "");
  }
}

// Experts over their own axes, beside every other kind of split.
TEST(ParallelEqualsSerial, Experts) {
  ExpectEqualsSerial(
      Model::kMixtral,
      {"ep=2,mbs=2", "ep=4", "tp=2,ep=2", "tp=2,sp=1,ep=2,zero=1",
       "dp=2,ep=2,zero=1", "dp=2,ep=2,zero=3", "cp=2,ep=2", "pp=2,ep=2",
       "dp=2,tp=2,ep=2", "pp=2,tp=2,ep=2,zero=2", "cp=2,tp=2,sp=1,ep=2",
       "cp=2,ep=2,tp=2,cp-kind=ulysses"});
}

// Tensor ranks with whole experts, all or (of 4) two and two.
TEST(ParallelEqualsSerial, ExpertsOverTensorRanks) {
  for (const Model model : {Model::kMixtral, Model::kDeepseek}) {
    ExpectEqualsSerial(model,
                       {"tp=2,etp=1", "tp=4,etp=2", "tp=2,sp=1,etp=1",
                        "tp=2,ep=2,etp=1", "tp=2,sp=1,ep=2,etp=1,zero=3",
                        "tp=2,cp=2,etp=1,sp=1", "pp=2,tp=2,ep=2,etp=1,zero=1",
                        "dp=2,tp=2,ep=2,etp=1,order=dp-tp-cp-ep-pp"});
  }
}

TEST(ParallelEqualsSerial, LatentAttentionAndSharedExperts) {
  ExpectEqualsSerial(Model::kDeepseek,
                     {"dp=2,zero=3", "tp=2", "tp=4,sp=1", "ep=4,zero=1",
                      "tp=2,sp=1,ep=2", "cp=2,ep=2", "cp=2,cp-kind=ring,tp=2",
                      "cp=2,tp=2,cp-kind=ulysses", "pp=2,ep=2,tp=2,zero=1"});
}

TEST(ParallelEqualsSerial, WeighedSharedExperts) {
  ExpectEqualsSerial(Model::kQwen2Moe, {"tp=2", "tp=2,sp=1,ep=2,zero=1",
                                        "cp=2,ep=2", "pp=2,ep=2"});
}

TEST(ParallelEqualsSerial, NormsOfHeads) {
  ExpectEqualsSerial(Model::kQwen3, {"tp=2,dp=2,zero=2", "tp=4,sp=1",
                                     "cp=2,tp=2", "pp=2,cp=2,cp-kind=ulysses"});
}

TEST(ParallelEqualsSerial, OtherDecoders) {
  for (const Model model :
       {Model::kGemma, Model::kPhi3, Model::kOpt, Model::kBloom}) {
    ExpectEqualsSerial(model,
                       {"dp=2,tp=2,zero=2", "tp=4,sp=1", "cp=2,cp-kind=ring",
                        "cp=2,tp=2,cp-kind=ulysses,zero=1",
                        "pp=2,dp=2,cp=2,cp-balance=zigzag"});
  }
}

// Gradients that are added on the host: of one rank and of several, reduced as
// each stage of ZeRO has them, over several microbatches, with and without
// clipping, of tied weights and of weights in tiles, and of stages in which
// some weight's stay on the device; and on a device that works behind the
// host's back.
void ExpectGradientsOnTheHost(Model model, double clip) {
  const Graph& graph = TinyGraph(model, 2);
  TinyRun run;
  run.options.clip = clip;
  const Outcome serial = OutcomeOf(graph, 1, "dp=1", run);
  for (const std::string text :
       {"dp=1,mbs=2", "dp=1,tiles=3,mbs=4", "dp=2,mbs=2", "dp=2,mbs=1,zero=1",
        "dp=4,mbs=1,zero=2", "dp=2,tp=2,zero=3,mbs=1", "dp=2,tiles=3,zero=2",
        "dp=2,tiles=2,zero=3,prefetch=0", "dp=2,dp-kind=rooted,mbs=2",
        "pp=2,dp=2,mbs=1,zero=1", "pp=2,mbs=2,schedule=zb-h1",
        "cp=2,mbs=2,bucket=1B", "tp=2,sp=1,recompute=full,mbs=2",
        "dp=4,zero=3,zero-group=2,mbs=1"}) {
    for (const char* offload :
         {",offload=optimizer:host,gradients:host",
          ",offload=optimizer:file,parameters:host,gradients:host"}) {
      const std::string strategy = text + offload;
      SCOPED_TRACE(strategy);
      const Strategy s = ParseStrategy(strategy).value();
      const int ranks = std::max(1, s.dp) * s.tp * s.pp * s.cp;
      run.in_queues = !run.in_queues;
      EXPECT_EQ(Difference(OutcomeOf(graph, ranks, strategy, run), serial), "");
    }
    run.in_queues = !run.in_queues;
  }
}

TEST(ParallelEqualsSerial, GradientsOnTheHost) {
  ExpectGradientsOnTheHost(Model::kLlama, 0);
}

TEST(ParallelEqualsSerial, GradientsOfTiedWeightsOnTheHostClipped) {
  ExpectGradientsOnTheHost(Model::kGpt2, 0.1);
}

// Gradient descent with one moment and with none, with weight decay; Adam,
// which decays nothing.
TEST(ParallelEqualsSerial, OtherOptimizers) {
  const Graph& graph = TinyGraph(Model::kGpt2, 2);
  for (const auto& [optimizer, rate] :
       {std::pair("momentum", 0.05), std::pair("sgd", 0.05),
        std::pair("adam", 0.01)}) {
    TinyRun run;
    run.options.optimizer = optimizer;
    run.options.learning_rate = rate;
    if (run.options.optimizer != "adam") run.options.weight_decay = 0.1;
    const Outcome serial = OutcomeOf(graph, 1, "dp=1", run);
    EXPECT_LT(serial.losses.back(), serial.losses.front()) << optimizer;
    for (const auto& [strategy, ranks] :
         {std::pair("dp=2,zero=1", 2), std::pair("dp=2,tp=2,zero=3", 4),
          std::pair("pp=2,tp=2", 4),
          std::pair("dp=2,zero=2,offload=optimizer:host", 2)}) {
      EXPECT_EQ(Difference(OutcomeOf(graph, ranks, strategy, run), serial), "")
          << optimizer << " " << strategy;
    }
  }
}

TinyRun Adafactor() {
  TinyRun run;
  run.options.optimizer = "adafactor";
  run.options.learning_rate = 0.02;
  // Of a key's bias the gradient is rounding, of 1e-17, and its size is what
  // the step does not depend on until it is below this.
  run.options.epsilon1 = 1e-8;
  return run;
}

// Sums of rows and columns over whatever cuts a weight: its rows, its columns,
// the heads among several dimensions of either, experts, ZeRO's runs, tiles.
TEST(ParallelEqualsSerial, Adafactor) {
  const TinyRun run = Adafactor();
  const auto expect = [&](Model model,
                          std::initializer_list<const char*> strategies) {
    const Graph& graph = TinyGraph(model, 2);
    const Outcome serial = OutcomeOf(graph, 1, "dp=1", run);
    EXPECT_LT(serial.losses.back(), serial.losses.front());
    for (const char* text : strategies) {
      SCOPED_TRACE(text);
      const Strategy s = ParseStrategy(text).value();
      const int ranks = std::max(1, s.dp) * s.tp * s.pp * s.cp * s.ep;
      EXPECT_EQ(Difference(OutcomeOf(graph, ranks, text, run), serial), "");
    }
  };
  expect(Model::kGpt2,
         {"dp=2", "cp=3,mbs=8,zero=1", "dp=4,zero=2", "cp=3,mbs=8,zero=3",
          "tp=2", "tp=4,sp=1", "pp=2", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3",
          "pp=2,tp=2,schedule=gpipe", "pp=2,dp=2,zero=2", "cp=2,tp=2",
          "dp=4,zero=1,zero-group=2", "dp=2,tiles=3", "dp=2,zero=3,tiles=3",
          "tp=2,dp=2,zero=2,tiles=2", "dp=2,dp-kind=rooted"});
  expect(Model::kLlama, {"tp=4", "dp=2,tp=2,sp=1,zero=3"});
  expect(Model::kMixtral, {"ep=2,tp=2", "dp=2,ep=2,zero=3", "ep=4,zero=1"});
  expect(Model::kT5, {"tp=4", "dp=2,tp=2,zero=1", "pp=2,dp=2,zero=2"});
  expect(Model::kGpt2,
         {"dp=2,zero=2,offload=optimizer:host", "tp=2,offload=optimizer:host",
          "dp=2,tp=2,zero=1,offload=optimizer:file,parameters:host",
          "dp=2,tp=2,zero=3,offload=optimizer:file,parameters:file",
          "tp=2,tiles=3,offload=optimizer:host",
          "dp=2,zero=2,mbs=2,offload=optimizer:host,gradients:host",
          "dp=2,tiles=3,mbs=2,offload=optimizer:file,gradients:host"});
}

// The machine epsilon of fp64, where no gradient is zero but for rounding.
TEST(ParallelEqualsSerial, AdafactorOfDefaults) {
  TinyRun run = Adafactor();
  run.options.epsilon1 = std::nullopt;
  const Graph& graph = TinyGraph(Model::kLlama, 2);
  const Outcome serial = OutcomeOf(graph, 1, "dp=1", run);
  EXPECT_EQ(Difference(OutcomeOf(graph, 4, "dp=2,tp=2,zero=1", run), serial),
            "");
}

// Attention without a causal mask; the second loss reads one place, which is on
// one of the ranks that split the sequence.
TEST(ParallelEqualsSerial, Bert) {
  ExpectEqualsSerial(
      Model::kBert,
      {"dp=4,zero=3", "tp=4", "tp=2,sp=1,dp=2,zero=1", "cp=2", "cp=4,mbs=2",
       "cp=3,cp-kind=ring,mbs=8", "cp=2,tp=2,sp=1,cp-kind=ring",
       "cp=2,cp-kind=ulysses", "pp=2,dp=2,zero=2,schedule=gpipe",
       "pp=2,tp=2,recompute=full", "pp=4,mbs=1,schedule=zb-h1"});
}

// The encoder's result is read by all layers of the decoder, wherever they are;
// so are the biases, whose gradient is a sum over layers, samples and, of the
// heads that a rank has, places.
TEST(ParallelEqualsSerial, EncoderAndDecoder) {
  for (const Model model : {Model::kT5, Model::kT5Gated}) {
    ExpectEqualsSerial(
        model,
        {"dp=4,zero=3", "tp=4", "tp=2,sp=1,dp=2,zero=1", "cp=2", "cp=4,mbs=2",
         "cp=2,tp=2,sp=1", "cp=2,cp-kind=ulysses", "cp=3,cp-kind=ring,mbs=8",
         "pp=2,dp=2,zero=2,schedule=gpipe", "pp=3,tp=2,mbs=1",
         "pp=6,mbs=2,schedule=1f1b", "pp=3,mbs=1,schedule=zb-h1",
         "pp=2,tp=2,recompute=full", "pp=2,vp=3,mbs=2,schedule=interleaved"});
  }
}

TEST(ParallelEqualsSerial, ContextByHeads) {
  ExpectEqualsSerial(Model::kGpt2,
                     {"cp=2,cp-kind=ulysses", "cp=4,mbs=2,cp-kind=ulysses",
                      "cp=2,tp=2,sp=1,cp-kind=ulysses",
                      "pp=2,dp=2,cp=2,zero=3,cp-kind=ulysses"});
  // Two key/value heads for four ranks: gathered.
  ExpectEqualsSerial(Model::kLlama,
                     {"cp=4,cp-kind=ulysses", "cp=2,tp=2,cp-kind=ulysses"});
}

// Keys and values go round, in equal and in ragged shards of 8 positions, with
// the sequence in order and in zigzag order.
TEST(ParallelEqualsSerial, ContextInARing) {
  ExpectEqualsSerial(
      Model::kGpt2,
      {"cp=2,cp-kind=ring", "cp=3,mbs=8,cp-kind=ring",

       "cp=7,mbs=4,cp-kind=ring", "cp=2,tp=2,sp=1,cp-kind=ring",
       "pp=2,dp=2,cp=2,zero=3,cp-kind=ring",
       "cp=4,cp-kind=ring,recompute=full,cp-balance=zigzag",
       "dp=2,cp=4,zero=2,cp-kind=ring,cp-balance=zigzag",
       "pp=2,cp=2,tp=2,cp-kind=ring,cp-balance=zigzag,schedule=zb-h1"});
  // Two key/value heads, and four ranks for heads.
  ExpectEqualsSerial(Model::kLlama,
                     {"cp=4,cp-kind=ring", "cp=2,tp=4,mbs=2,cp-kind=ring",
                      "cp=4,tp=2,mbs=2,cp-kind=ring,cp-balance=zigzag"});
}

TEST(ParallelEqualsSerial, ZigzagOrder) {
  ExpectEqualsSerial(Model::kGpt2,
                     {"cp=2,cp-balance=zigzag", "cp=4,cp-balance=zigzag",
                      "dp=2,cp=2,pp=2,cp-balance=zigzag"});
  ExpectEqualsSerial(Model::kLlama, {"cp=2,tp=2,sp=1,cp-balance=zigzag"});
}

// The loss falls: equal runs are not equal because nothing happens.
TEST(ParallelEqualsSerial, SerialLossFalls) {
  for (Model model : {Model::kGpt2, Model::kLlama, Model::kMixtral}) {
    const Outcome& serial = Serial(model, 2);
    ASSERT_EQ(serial.losses.size(), 20u);
    EXPECT_GT(serial.losses.front() - serial.losses.back(), 1e-3);
    // About log(40) = 3.69 at first, more for weights of this size.
    EXPECT_GT(serial.losses.front(), 2.5);
    EXPECT_LT(serial.losses.front(), 6);
  }
}

// Microbatches alone change nothing.
TEST(ParallelEqualsSerial, Microbatches) {
  const Graph& graph = TinyGraph(Model::kGpt2, 2);
  EXPECT_EQ(Difference(RunTasks(graph, LowerTiny(graph, 1, "dp=1,mbs=2")),
                       Serial(Model::kGpt2, 2)),
            "");
}

// ---- Negative controls: each plants one mistake.

// The first collective that `wrong` accepts moves nothing: every rank keeps its
// own part.
template <typename Predicate>
void LoseFirst(TaskGraph& tasks, Predicate wrong) {
  const auto it = std::find_if(tasks.tasks.begin(), tasks.tasks.end(), wrong);
  ASSERT_NE(it, tasks.tasks.end());
  it->kind = TaskKind::kSlice;
}

TEST(NegativeControl, LostForwardAllReduce) {
  const Graph& graph = TinyGraph(Model::kGpt2, 2);
  TaskGraph tasks = LowerTiny(graph, 2, "dp=1,tp=2");
  LoseFirst(tasks, [](const Task& task) {
    return task.kind == TaskKind::kComm && task.comm == CommKind::kAllReduce &&
           task.pass == Pass::kForward;
  });
  EXPECT_NE(Difference(RunTasks(graph, tasks), Serial(Model::kGpt2, 2)), "");
}

TEST(NegativeControl, LostGradientAllReduce) {
  const Graph& graph = TinyGraph(Model::kLlama, 2);
  TaskGraph tasks = LowerTiny(graph, 2, "dp=2");
  LoseFirst(tasks, [&](const Task& task) {
    return task.kind == TaskKind::kComm && task.comm == CommKind::kAllReduce &&
           tasks.value(task.reads[0]).what == "gradient";
  });
  EXPECT_NE(Difference(RunTasks(graph, tasks), Serial(Model::kLlama, 2)), "");
}

// Each rank steps by the rows and columns, or by the length, of its own part.
TEST(NegativeControl, LostSumsOfAdafactor) {
  const Graph& graph = TinyGraph(Model::kLlama, 2);
  const TinyRun run = Adafactor();
  const Outcome serial = OutcomeOf(graph, 1, "dp=1", run);
  // Thirds of 16 x 16 elements end amid a row.
  for (const auto& [strategy, ranks] :
       {std::pair("cp=3,mbs=8,zero=1", 3), std::pair("tp=2", 2)}) {
    for (const char* what : {"row sums", "column sums", "sum of squares",
                             "parameter squares", "update squares"}) {
      SCOPED_TRACE(std::string(strategy) + " " + what);
      TaskGraph tasks =
          LowerStrategy(graph, ranks, strategy, run.options).value();
      // The sums of one kind, wherever they travel, stay what they are.
      int lost = 0;
      for (Task& task : tasks.tasks) {
        if (task.kind != TaskKind::kComm) continue;
        for (size_t i = task.reads.size(); i-- > 0;) {
          if (tasks.value(task.reads[i]).what != what) continue;
          const auto at = static_cast<int64_t>(i);
          task.reads.erase(task.reads.begin() + at);
          task.writes.erase(task.writes.begin() + at);
          ++lost;
        }
      }
      EXPECT_GT(lost, 0);
      EXPECT_NE(Difference(OutcomeOf(graph, tasks, run), serial), "");
    }
  }
}

// Each rank reads the tokens of the other; the labels stay.
TEST(NegativeControl, SwappedShards) {
  const Graph& graph = TinyGraph(Model::kLlama, 2);
  TaskGraph tasks = LowerTiny(graph, 2, "dp=2");
  DeviceGroup swapped = tasks.groups[0];
  std::swap(swapped.devices[0], swapped.devices[1]);
  tasks.groups.push_back(swapped);
  for (Value& value : tasks.values) {
    if (value.tensor.valid() && graph.tensor(value.tensor).name == "tokens") {
      value.group = GroupId(tasks.groups.size() - 1);
    }
  }
  EXPECT_NE(Difference(RunTasks(graph, tasks), Serial(Model::kLlama, 2)), "");
}

// A block stays where it is, and its keys count twice.
TEST(NegativeControl, LostShift) {
  const Graph& graph = TinyGraph(Model::kGpt2, 2);
  TaskGraph tasks = LowerTiny(graph, 2, "cp=2,cp-kind=ring");
  const auto it =
      std::find_if(tasks.tasks.begin(), tasks.tasks.end(), [](const Task& t) {
        return t.kind == TaskKind::kComm && t.comm == CommKind::kShift;
      });
  ASSERT_NE(it, tasks.tasks.end());
  it->kind = TaskKind::kSlice;
  for (ValueId id : it->writes) {
    tasks.values[id.index()].layout.ring = 0;
    tasks.values[id.index()].layout.turn = 0;
  }
  EXPECT_NE(Difference(RunTasks(graph, tasks), Serial(Model::kGpt2, 2)), "");
}

TEST(NegativeControl, LostExpertGradientAllReduce) {
  const Graph& graph = TinyGraph(Model::kMixtral, 2);
  TaskGraph tasks = LowerTiny(graph, 4, "dp=2,ep=2");
  LoseFirst(tasks, [&](const Task& task) {
    return task.kind == TaskKind::kComm && task.axes == 1 &&
           tasks.value(task.reads[0]).what == "gradient";
  });
  EXPECT_NE(Difference(RunTasks(graph, tasks), Serial(Model::kMixtral, 2)), "");
}

// Every rank adds the bias of a layer whose reduction is split.
TEST(NegativeControl, UnmaskedBias) {
  const Graph& graph = TinyGraph(Model::kGpt2, 2);
  TaskGraph tasks = LowerTiny(graph, 2, "dp=1,tp=2");
  int masked = 0;
  for (Task& task : tasks.tasks) {
    if (!task.node.valid() || task.masks.empty()) continue;
    task.masks.clear();
    ++masked;
  }
  EXPECT_GT(masked, 0);
  EXPECT_NE(Difference(RunTasks(graph, tasks), Serial(Model::kGpt2, 2)), "");
}

}  // namespace
}  // namespace tessera
