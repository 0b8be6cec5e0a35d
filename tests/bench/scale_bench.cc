// How the cost of a prediction grows, and large cases: Llama-3-405B on 16,384
// H100, and sweeps over uniform strategies of GPT-3 175B on 1,024 A100.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>

#include "costmodel/collective/collective.h"
#include "costmodel/evaluate/evaluator.h"
#include "costmodel/simulate/simulator.h"
#include "planner/base/rng.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/search/search_space.h"
#include "planner/search/sweep.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"
#include "tests/support/unlike_graph.h"

namespace tessera {
namespace {

// What a record needs besides the date and the load, which the library adds.
const bool kContext = [] {
  benchmark::AddCustomContext("compiler", __VERSION__);
  std::ifstream cpus("/proc/cpuinfo");
  for (std::string line; std::getline(cpus, line);) {
    if (!line.starts_with("model name")) continue;
    benchmark::AddCustomContext("cpu", line.substr(line.find(':') + 2));
    break;
  }
  return true;
}();

Graph Model(std::string_view name, int64_t batch, int64_t seq_len) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  options.dtype = DType::kBFloat16;
  const std::string path =
      ExamplePath("models/" + std::string(name) + "/config.json");
  return Differentiate(ImportModel(path, options).value()).value();
}

Strategy Parsed(std::string_view text) {
  return ParseStrategy(text).value();
}

// All that `tessera simulate` does for one step, files read and printing left
// out: cluster, graph and plan, evaluation, lowering, simulation with links
// shared, memory of every kind of device.
void BM_SimulateLlama405B(benchmark::State& state) {
  for (auto _ : state) {
    const Graph graph = Model("llama-3-405b", 2048, 8192);
    const Cluster cluster = MakeCluster("dgx-h100:2048").value();
    const Plan plan =
        PlanFromStrategy(
            graph, cluster,
            Parsed("tp=8,pp=16,mbs=1,vp=4,schedule=interleaved,sp=1,zero=1"))
            .value();
    const Evaluator evaluator(graph, cluster, nullptr, TrainingOptions());
    const Evaluation step = evaluator.Explain(plan);
    state.counters["step_s"] = step.step_time.seconds();
  }
}
BENCHMARK(BM_SimulateLlama405B)->Unit(benchmark::kSecond)->Iterations(1);

// The simulator alone on that step's tasks.
void BM_SimulatorLlama405B(benchmark::State& state) {
  const Graph graph = Model("llama-3-405b", 2048, 8192);
  const Cluster cluster = MakeCluster("dgx-h100:2048").value();
  const Plan plan =
      PlanFromStrategy(
          graph, cluster,
          Parsed("tp=8,pp=16,mbs=1,vp=4,schedule=interleaved,sp=1,zero=1"))
          .value();
  const Pricer pricer(graph, cluster, nullptr);
  const TaskGraph tasks = Lower(graph, cluster, plan, TrainingOptions());
  (void)Simulate(pricer, tasks);
  for (auto _ : state) benchmark::DoNotOptimize(Simulate(pricer, tasks));
  state.SetItemsProcessed(state.iterations() *
                          static_cast<int64_t>(tasks.tasks.size()));
}
BENCHMARK(BM_SimulatorLlama405B)->Unit(benchmark::kMillisecond);

// The ways to do `kind` over every device of a cluster, routes and all.
void RunCollective(benchmark::State& state, CommKind kind,
                   const std::string& preset, const std::string& network) {
  const Cluster cluster =
      MakeCluster(preset + ":" + std::to_string(state.range(0) / 8) + network)
          .value();
  std::vector<DeviceId> ranks;
  for (size_t d = 0; d < cluster.devices.size(); ++d) ranks.emplace_back(d);
  for (auto _ : state) {
    const CollectiveModel model(cluster);
    benchmark::DoNotOptimize(model.Options(kind, std::span(&ranks, 1)));
  }
  state.SetComplexityN(state.range(0));
}

void BM_Collective(benchmark::State& state) {
  RunCollective(state, CommKind::kAllReduce, "dgx-h100", "");
}
BENCHMARK(BM_Collective)
    ->RangeMultiplier(4)
    ->Range(64, 16384)
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);

// Nodes that are all unlike.
void BM_CollectiveOnTorus(benchmark::State& state) {
  RunCollective(state, CommKind::kAllReduce, "dgx-h100", "@torus");
}
BENCHMARK(BM_CollectiveOnTorus)
    ->RangeMultiplier(4)
    ->Range(64, 16384)
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);

// Hosts whose rings are looked for among direct links.
void BM_CollectiveOnMeshes(benchmark::State& state) {
  RunCollective(state, CommKind::kAllReduce, "dgx1-v100-32gb", "");
}
BENCHMARK(BM_CollectiveOnMeshes)
    ->RangeMultiplier(4)
    ->Range(64, 16384)
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);

void BM_Exchange(benchmark::State& state) {
  RunCollective(state, CommKind::kAllToAll, "dgx-h100", "");
}
BENCHMARK(BM_Exchange)
    ->RangeMultiplier(4)
    ->Range(64, 16384)
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);

std::vector<int> Divisors(int64_t n, int64_t most) {
  std::vector<int> divisors;
  for (int64_t d = 1; d <= std::min(n, most); ++d) {
    if (n % d == 0) divisors.push_back(static_cast<int>(d));
  }
  return divisors;
}

struct UniformSpace {
  Graph graph = Model("gpt3-175b", 1536, 2048);
  Cluster cluster = MakeCluster("dgx-a100-80gb:128").value();
  SearchSpace space{graph, cluster};
  std::vector<Strategy> strategies;

  // The first `size` of the space, or as many spread over all of it.
  UniformSpace(size_t size, bool spread) {
    for (int tp : {1, 2, 4, 8}) {
      for (int pp : Divisors(1024 / tp, 96)) {
        const int dp = 1024 / tp / pp;
        if (graph.global_batch % dp != 0) continue;
        for (int vp : Divisors(96, 96 / pp)) AddPipelines(tp, pp, vp, dp);
      }
    }
    Rng rng(1);
    for (size_t i = spread ? strategies.size() : 0; i > 1; --i) {
      std::swap(strategies[i - 1],
                strategies[rng.Below(static_cast<uint32_t>(i))]);
    }
    TESSERA_CHECK(strategies.size() >= size) << strategies.size();
    strategies.resize(size);
  }

  void AddPipelines(int tp, int pp, int vp, int dp) {
    using D = MeshDimension;
    const std::vector<D> orders[] = {
        {D::kTensor, D::kContext, D::kExpert, D::kData, D::kPipeline},
        {D::kTensor, D::kContext, D::kExpert, D::kPipeline, D::kData}};
    for (const PipelineSchedule* schedule :
         SchedulesFor({.stages = pp, .chunks = vp})) {
      if (pp == 1 && schedule->name != "1f1b") continue;
      for (int mbs : Divisors(graph.global_batch / dp, 96)) {
        for (int zero = 0; zero <= (dp > 1 ? 3 : 0); ++zero) {
          for (int sp = 0; sp <= (tp > 1 ? 1 : 0); ++sp) {
            for (auto recompute :
                 {RecomputeLevel::kNone, RecomputeLevel::kSelective,
                  RecomputeLevel::kFull}) {
              for (const auto& order : orders) {
                Strategy s;
                s.tp = tp;
                s.pp = pp;
                s.vp = vp;
                s.dp = dp;
                s.mbs = mbs;
                s.zero = zero;
                s.sp = sp == 1;
                s.recompute = recompute;
                s.schedule = schedule->name;
                s.order = order;
                strategies.push_back(std::move(s));
              }
            }
          }
        }
      }
    }
  }

  Score Best(const Evaluator& evaluator) const {
    Score best;
    best.overflow = {std::numeric_limits<int64_t>::max()};
    for (const Strategy& strategy : strategies) {
      const auto score =
          evaluator.EvaluateUniform(space.index, cluster, strategy);
      if (score.has_value() && Better(*score, best)) best = *score;
    }
    return best;
  }
};

// Strategies that the evaluator has not met: plan, templates, prices and all.
// Neighbours, which share templates, or spread over the space.
void BM_SweepCold(benchmark::State& state) {
  const UniformSpace sweep(static_cast<size_t>(state.range(0)),
                           state.range(1) != 0);
  for (auto _ : state) {
    const Evaluator evaluator(sweep.graph, sweep.cluster, nullptr,
                              TrainingOptions());
    benchmark::DoNotOptimize(sweep.Best(evaluator));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_SweepCold)
    ->ArgNames({"strategies", "spread"})
    ->Args({400, 0})
    ->Args({200, 1})
    ->Unit(benchmark::kSecond)
    ->Iterations(1);

// The same, asked again.
void BM_SweepWarm(benchmark::State& state) {
  const UniformSpace sweep(static_cast<size_t>(state.range(0)), true);
  const Evaluator evaluator(sweep.graph, sweep.cluster, nullptr,
                            TrainingOptions());
  benchmark::DoNotOptimize(sweep.Best(evaluator));
  for (auto _ : state) benchmark::DoNotOptimize(sweep.Best(evaluator));
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_SweepWarm)->Arg(200)->Unit(benchmark::kMillisecond);

constexpr size_t kWholeSpace = 70'000;

// The best of the whole space, by an evaluator that has seen none of it.
// Argument: threads.
void BM_ExhaustiveCold(benchmark::State& state) {
  const UniformSpace sweep(kWholeSpace, false);
  for (auto _ : state) {
    const Evaluator evaluator(sweep.graph, sweep.cluster, nullptr,
                              TrainingOptions());
    const SweepResult result =
        Sweep(sweep.space, evaluator, sweep.strategies, 1,
              static_cast<int>(state.range(0)), nullptr);
    state.counters["closely"] = static_cast<double>(result.closely);
    state.counters["priced"] = static_cast<double>(result.priced);
    state.counters["step_s"] = result.best[0].score.step_time.seconds();
  }
  state.SetItemsProcessed(state.iterations() *
                          static_cast<int64_t>(kWholeSpace));
}
BENCHMARK(BM_ExhaustiveCold)
    ->Unit(benchmark::kMillisecond)
    ->Iterations(1)
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime();

// The same, asked again.
void BM_ExhaustiveWarm(benchmark::State& state) {
  const UniformSpace sweep(kWholeSpace, false);
  const Evaluator evaluator(sweep.graph, sweep.cluster, nullptr,
                            TrainingOptions());
  const auto best = [&] {
    return Sweep(sweep.space, evaluator, sweep.strategies, 1, 1, nullptr);
  };
  benchmark::DoNotOptimize(best());
  for (auto _ : state) benchmark::DoNotOptimize(best());
  state.SetItemsProcessed(state.iterations() *
                          static_cast<int64_t>(kWholeSpace));
}
BENCHMARK(BM_ExhaustiveWarm)->Unit(benchmark::kMillisecond);

// How near the bounds of a sample are to its scores.
void BM_BoundTightness(benchmark::State& state) {
  const UniformSpace sweep(static_cast<size_t>(state.range(0)), true);
  const Evaluator evaluator(sweep.graph, sweep.cluster, nullptr,
                            TrainingOptions());
  std::vector<double> quick;
  std::vector<double> close;
  for (auto _ : state) {
    for (const Strategy& strategy : sweep.strategies) {
      const auto score =
          evaluator.EvaluateUniform(sweep.space.index, sweep.cluster, strategy);
      if (!score) continue;
      const auto ratio = [&](Objective::Bound kind) {
        const Score bound =
            evaluator.BoundUniform(sweep.space.index, strategy, kind);
        TESSERA_CHECK(!Better(*score, bound)) << ToString(strategy);
        return bound.step_time.seconds() / score->step_time.seconds();
      };
      quick.push_back(ratio(Objective::Bound::kQuick));
      close.push_back(ratio(Objective::Bound::kClose));
    }
  }
  std::ranges::sort(quick);
  std::ranges::sort(close);
  state.counters["quick_median"] = quick[quick.size() / 2];
  state.counters["quick_p5"] = quick[quick.size() / 20];
  state.counters["close_median"] = close[close.size() / 2];
  state.counters["close_p5"] = close[close.size() / 20];
}
BENCHMARK(BM_BoundTightness)->Arg(300)->Unit(benchmark::kSecond)->Iterations(1);

// A GPT of `layers` layers with 8 of tensor parallelism and 4 stages on
// `devices` devices, `microbatches` of one sample a replica: from nothing to
// the evaluator's price, and to the simulated timeline.
struct Case {
  Graph graph;
  Cluster cluster;
  Plan plan;
};
Case CaseOf(int devices, int layers, int microbatches) {
  const std::string path =
      std::filesystem::temp_directory_path() /
      ("tessera_scale_bench_" + std::to_string(layers) + ".json");
  std::ofstream(path) << R"({"architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2", "activation_function": "gelu_new",
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
    "n_ctx": 2048, "n_positions": 2048, "n_embd": 4096, "n_head": 32,
    "vocab_size": 50304, "n_layer": )"
                      << layers << "}";
  const int dp = devices / 32;
  ImportOptions options;
  options.global_batch = int64_t{microbatches} * dp;
  options.seq_len = 2048;
  options.dtype = DType::kBFloat16;
  Case c;
  c.graph = Differentiate(ImportModel(path, options).value()).value();
  c.cluster = MakeCluster("dgx-h100:" + std::to_string(devices / 8)).value();
  c.plan = PlanFromStrategy(c.graph, c.cluster, Parsed("tp=8,pp=4,sp=1,zero=1"))
               .value();
  std::filesystem::remove(path);
  return c;
}

void Evaluate(benchmark::State& state, const Case& c) {
  for (auto _ : state) {
    const Evaluator evaluator(c.graph, c.cluster, nullptr, TrainingOptions());
    benchmark::DoNotOptimize(evaluator.Evaluate(c.plan));
  }
  state.SetComplexityN(state.range(0));
}

void SimulateStep(benchmark::State& state, const Case& c) {
  size_t tasks = 0;
  for (auto _ : state) {
    const Pricer pricer(c.graph, c.cluster, nullptr);
    const TaskGraph lowered =
        Lower(c.graph, c.cluster, c.plan, TrainingOptions());
    benchmark::DoNotOptimize(Simulate(pricer, lowered));
    tasks = lowered.tasks.size();
  }
  state.counters["tasks"] = static_cast<double>(tasks);
  state.SetComplexityN(state.range(0));
}

template <auto Price>
void BM_Devices(benchmark::State& state) {
  Price(state, CaseOf(static_cast<int>(state.range(0)), 24, 16));
}
BENCHMARK(BM_Devices<Evaluate>)
    ->RangeMultiplier(4)
    ->Range(64, 16384)
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);
BENCHMARK(BM_Devices<SimulateStep>)
    ->RangeMultiplier(4)
    ->Range(64, 16384)
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);

template <auto Price>
void BM_Layers(benchmark::State& state) {
  Price(state, CaseOf(64, static_cast<int>(state.range(0)), 16));
}
BENCHMARK(BM_Layers<Evaluate>)
    ->RangeMultiplier(2)
    ->Range(8, 256)
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);
BENCHMARK(BM_Layers<SimulateStep>)
    ->RangeMultiplier(2)
    ->Range(8, 256)
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);

template <auto Price>
void BM_Microbatches(benchmark::State& state) {
  Price(state, CaseOf(64, 24, static_cast<int>(state.range(0))));
}
BENCHMARK(BM_Microbatches<Evaluate>)
    ->RangeMultiplier(4)
    ->Range(4, 1024)
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);
BENCHMARK(BM_Microbatches<SimulateStep>)
    ->RangeMultiplier(4)
    ->Range(4, 1024)
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);

// Seconds of each step from a model to its timeline, by the number of
// operators.
void BM_Operators(benchmark::State& state, const char* strategy) {
  const Cluster cluster = MakeCluster("dgx-h100:1").value();
  for (auto _ : state) {
    auto start = std::chrono::steady_clock::now();
    const auto step = [&](const char* name) {
      const auto now = std::chrono::steady_clock::now();
      state.counters[name] = std::chrono::duration<double>(now - start).count();
      start = now;
    };
    const Graph graph = testing::UnlikeGraph(state.range(0));
    step("graph");
    const Plan plan =
        PlanFromStrategy(graph, cluster, Parsed(strategy)).value();
    step("plan");
    const Evaluator evaluator(graph, cluster, nullptr, TrainingOptions());
    benchmark::DoNotOptimize(evaluator.Evaluate(plan));
    step("evaluate");
    const TaskGraph tasks = Lower(graph, cluster, plan, TrainingOptions());
    step("lower");
    const Pricer pricer(graph, cluster, nullptr);
    benchmark::DoNotOptimize(Simulate(pricer, tasks));
    step("simulate");
    state.counters["tasks"] = static_cast<double>(tasks.tasks.size());
  }
  state.SetComplexityN(state.range(0));
}
BENCHMARK_CAPTURE(BM_Operators, data, "dp=8,zero=1,mbs=128")
    ->RangeMultiplier(10)
    ->Range(1000, 100'000)
    ->Iterations(1)
    ->Unit(benchmark::kSecond)
    ->Complexity(benchmark::oNLogN);
BENCHMARK_CAPTURE(BM_Operators, all, "dp=2,tp=2,pp=2,zero=1,mbs=64")
    ->RangeMultiplier(10)
    ->Range(1000, 100'000)
    ->Iterations(1)
    ->Unit(benchmark::kSecond)
    ->Complexity(benchmark::oNLogN);

}  // namespace
}  // namespace tessera
