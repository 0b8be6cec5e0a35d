// Evaluations a second of GPT-2 XL on 32 devices in four stages and 64
// microbatches, warm and along a random walk, and tasks simulated a second.

#include <benchmark/benchmark.h>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/memory/peak_memory.h"
#include "costmodel/simulate/simulator.h"
#include "planner/base/rng.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/search/move.h"
#include "planner/search/search_space.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

struct Problem {
  Graph graph;
  Cluster cluster;
  TrainingOptions options;
  Plan plan;
};

const Problem& Gpt2Xl() {
  static const Problem* const problem = [] {
    auto* p = new Problem();
    ImportOptions options;
    options.global_batch = 512;
    options.seq_len = 1024;
    options.dtype = DType::kBFloat16;
    p->graph =
        Differentiate(
            ImportModel(ExamplePath("models/gpt2-xl/config.json"), options)
                .value())
            .value();
    p->cluster = MakeCluster("dgx-a100-80gb:4").value();
    Strategy strategy;
    strategy.pp = 4;
    strategy.tp = 4;
    strategy.mbs = 4;  // 512 / (2 * 4) = 64 microbatches
    p->plan = PlanFromStrategy(p->graph, p->cluster, strategy).value();
    return p;
  }();
  return *problem;
}

void BM_EvaluateWarm(benchmark::State& state) {
  const Problem& p = Gpt2Xl();
  const Evaluator evaluator(p.graph, p.cluster, nullptr, p.options);
  for (auto _ : state) {
    benchmark::DoNotOptimize(evaluator.Evaluate(p.plan));
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BM_EvaluateWarm)->Unit(benchmark::kMicrosecond);

// As a search does: the next plan is a move away, and mostly new.
void BM_EvaluateWalk(benchmark::State& state) {
  const Problem& p = Gpt2Xl();
  const Evaluator evaluator(p.graph, p.cluster, nullptr, p.options);
  const SearchSpace space(p.graph, p.cluster);
  Rng rng(1);
  Plan plan = p.plan;
  if (!MakeCanonical(space, plan)) state.SkipWithError("not canonical");
  for (auto _ : state) {
    state.PauseTiming();
    for (;;) {
      if (auto next = DrawMove(Moves(), rng).Propose(plan, space, rng)) {
        plan = next->plan;
        break;
      }
    }
    state.ResumeTiming();
    benchmark::DoNotOptimize(evaluator.Evaluate(plan));
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BM_EvaluateWalk)->Unit(benchmark::kMicrosecond);

// A new evaluator each time: all is lowered, priced and folded anew.
void BM_EvaluateCold(benchmark::State& state) {
  const Problem& p = Gpt2Xl();
  for (auto _ : state) {
    const Evaluator evaluator(p.graph, p.cluster, nullptr, p.options);
    benchmark::DoNotOptimize(evaluator.Evaluate(p.plan));
  }
}
BENCHMARK(BM_EvaluateCold)->Unit(benchmark::kMillisecond);

void BM_Lower(benchmark::State& state) {
  const Problem& p = Gpt2Xl();
  for (auto _ : state) {
    benchmark::DoNotOptimize(Lower(p.graph, p.cluster, p.plan, p.options));
  }
}
BENCHMARK(BM_Lower)->Unit(benchmark::kMillisecond);

void BM_PriceTasks(benchmark::State& state) {
  const Problem& p = Gpt2Xl();
  const TaskGraph tasks = Lower(p.graph, p.cluster, p.plan, p.options);
  const Pricer pricer(p.graph, p.cluster, nullptr);
  for (auto _ : state) benchmark::DoNotOptimize(PriceTasks(pricer, tasks));
  state.SetItemsProcessed(state.iterations() *
                          static_cast<int64_t>(tasks.tasks.size()));
}
BENCHMARK(BM_PriceTasks)->Unit(benchmark::kMillisecond);

void BM_LongestPath(benchmark::State& state) {
  const Problem& p = Gpt2Xl();
  const TaskGraph tasks = Lower(p.graph, p.cluster, p.plan, p.options);
  const Pricer pricer(p.graph, p.cluster, nullptr);
  const auto costs = PriceTasks(pricer, tasks);
  for (auto _ : state) benchmark::DoNotOptimize(LongestPath(tasks, costs));
  state.SetItemsProcessed(state.iterations() *
                          static_cast<int64_t>(tasks.tasks.size()));
}
BENCHMARK(BM_LongestPath)->Unit(benchmark::kMillisecond);

void BM_SimulateSharingLinks(benchmark::State& state) {
  const Problem& p = Gpt2Xl();
  const TaskGraph tasks = Lower(p.graph, p.cluster, p.plan, p.options);
  const Pricer pricer(p.graph, p.cluster, nullptr);
  for (auto _ : state) benchmark::DoNotOptimize(Simulate(pricer, tasks));
  state.SetItemsProcessed(state.iterations() *
                          static_cast<int64_t>(tasks.tasks.size()));
}
BENCHMARK(BM_SimulateSharingLinks)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tessera
