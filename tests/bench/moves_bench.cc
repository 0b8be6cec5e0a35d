// What a draw of each move takes, candidates and draws that do not apply
// together: of GPT-3 175B on 1,024 A100, and of graphs of 1,000 and 100,000
// operators of which hardly two are alike.

#include <benchmark/benchmark.h>

#include <deque>

#include "planner/io/importer.h"
#include "planner/plan/strategy.h"
#include "planner/search/move.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"
#include "tests/support/unlike_graph.h"

namespace tessera {
namespace {

// Plans on the way of a walk that takes every candidate: from what a search
// starts at to where its hot chains are.
constexpr int kDrafts = 8;
constexpr int kApart = 8;

struct Walked {
  Graph graph;
  Cluster cluster;
  std::optional<SearchSpace> space;
  std::deque<Draft> drafts;

  Walked(Graph graph_in, Cluster cluster_in, std::string_view strategy)
      : graph(std::move(graph_in)), cluster(std::move(cluster_in)) {
    space.emplace(graph, cluster);
    Plan plan =
        PlanFromStrategy(space->index, cluster, ParseStrategy(strategy).value())
            .value();
    drafts.emplace_back(*space, std::move(plan));
    Rng rng(1);
    while (drafts.size() < kDrafts) {
      drafts.emplace_back(*space, drafts.back().plan());
      for (int kept = 0; kept < kApart;) {
        if (!DrawMove(Moves(), rng).Propose(drafts.back(), rng)) continue;
        drafts.back().Keep();
        ++kept;
      }
    }
  }
};

Walked& Gpt3() {
  static auto* const walked = [] {
    ImportOptions options;
    options.global_batch = 1536;
    options.seq_len = 2048;
    options.dtype = DType::kBFloat16;
    return new Walked(
        Differentiate(
            ImportModel(ExamplePath("models/gpt3-175b/config.json"), options)
                .value())
            .value(),
        MakeCluster("dgx-a100-80gb:128").value(),
        "tp=8,pp=16,sp=1,zero=1,mbs=1");
  }();
  return *walked;
}

template <int64_t kOperators>
Walked& Unlike() {
  static auto* const walked =
      new Walked(testing::UnlikeGraph(kOperators),
                 MakeCluster("dgx-h100:1").value(), "tp=2,pp=2,zero=1,mbs=64");
  return *walked;
}

// `move`: null for all, by their weights, and each candidate's way back.
void Draws(benchmark::State& state, Walked& walked, const Move* move) {
  Rng rng(2);
  int64_t candidates = 0;
  size_t next = 0;
  for (auto _ : state) {
    Draft& draft = walked.drafts[next++ % kDrafts];
    const Move& drawn = move != nullptr ? *move : DrawMove(Moves(), rng);
    if (!drawn.Propose(draft, rng)) continue;
    ++candidates;
    draft.Undo();
  }
  state.SetItemsProcessed(state.iterations());
  state.counters["candidates"] = benchmark::Counter(
      static_cast<double>(candidates), benchmark::Counter::kAvgIterations);
}

const bool kRegistered = [] {
  const auto of = [](const std::string& name, Walked& (*walked)()) {
    const auto add = [&](std::string_view what, const Move* move) {
      const std::string text = "BM_Draw/" + name + "/" + std::string(what);
      benchmark::RegisterBenchmark(text.c_str(), [=](benchmark::State& state) {
        Draws(state, walked(), move);
      })->Unit(benchmark::kMicrosecond);
    };
    add("all", nullptr);
    for (const Move& move : Moves()) add(move.name, &move);
  };
  of("gpt3", Gpt3);
  of("unlike-1k", Unlike<1000>);
  of("unlike-100k", Unlike<100'000>);
  return true;
}();

}  // namespace
}  // namespace tessera
