#include "tests/support/delta_walk.h"

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/price.h"
#include "costmodel/simulate/simulator.h"
#include "planner/base/rng.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/describe.h"
#include "planner/plan/strategy.h"
#include "planner/search/draft.h"
#include "planner/search/move.h"
#include "planner/search/search_space.h"
#include "planner/search/uniform_strategies.h"
#include "planner/topology/topologies.h"

namespace tessera::testing {
namespace {

// Candidates from one uniform plan on.
constexpr int64_t kLeg = 200;
constexpr double kTemperature = 0.05;
constexpr size_t kMostDifferences = 5;

template <typename Do>
double Seconds(Do what) {
  const auto begin = std::chrono::steady_clock::now();
  what();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

}  // namespace

std::span<const DeltaCase> SmallDeltaCases() {
  static constexpr DeltaCase kCases[] = {
      {"gpt2-tiny", 16, 64, DType::kFloat32, "dgx-a100-80gb:2x2"},
      {"mixtral-tiny", 16, 32, DType::kFloat32, "dgx-h100:1x4"},
      {"deepseek-tiny", 16, 32, DType::kFloat32, "hgx-h800:1x4"},
      {"t5-tiny", 16, 32, DType::kFloat32, "g5.48xlarge:1x4"},
      {"bert-tiny", 16, 32, DType::kFloat32, "p100-edr:2x2"},
      {"vit-tiny", 16, 0, DType::kFloat32, "dgx-a100-80gb:1x4"},
      {"resnet-tiny", 16, 0, DType::kFloat32, "k80-fdr:2x2"},
      {"nmt-tiny", 16, 16, DType::kFloat32, "k80-fdr:2x4"},
      {"dlrm-tiny", 16, 0, DType::kFloat32, "dgx-a100-80gb:1x4"},
  };
  return kCases;
}

DeltaWalk WalkByDeltas(const DeltaCase& of, uint64_t seed, int64_t candidates,
                       int64_t simulate_every) {
  ImportOptions options;
  options.global_batch = of.batch;
  if (of.seq_len > 0) options.seq_len = of.seq_len;
  options.dtype = of.dtype;
  const Graph graph =
      Differentiate(
          ImportModel("zoo:" + std::string(of.model), options).value())
          .value();
  const Cluster cluster = MakeCluster(of.cluster).value();
  const SearchSpace space(graph, cluster);
  const Evaluator by_change(graph, cluster, nullptr, {},
                            Evaluator::kMostInSearch);
  const Evaluator by_whole(graph, cluster, nullptr, {},
                           Evaluator::kMostInSearch);
  const LoweringFacts facts(graph, cluster, {});
  std::vector<Move> moves(Moves().begin(), Moves().end());
  std::erase_if(moves, [](const Move& move) {
    return move.needs == MoveNeeds::kOffloads;
  });
  const std::vector<Strategy> strategies = UniformStrategies(space);
  Rng rng(seed);
  const auto random_plan = [&] {
    for (;;) {
      const auto& strategy =
          strategies[rng.Below(static_cast<uint32_t>(strategies.size()))];
      auto plan = PlanFromStrategy(space.index, cluster, strategy);
      if (plan && MakeCanonical(space, *plan)) return *std::move(plan);
    }
  };

  DeltaWalk walk;
  std::optional<Draft> draft;
  std::shared_ptr<const PlanBasis> basis;
  Duration current;
  while (walk.candidates < candidates) {
    if (!draft || walk.candidates % kLeg == 0) {
      draft.emplace(space, random_plan());
      draft->Fold(rng.Below(2) == 0);
      basis = nullptr;
      current = by_change.EvaluateChange(draft->plan(), {true, {}, {}}, basis)
                    .step_time;
    }
    const Move& move = DrawMove(moves, rng);
    if (!move.Propose(*draft, rng)) continue;
    const Plan& plan = draft->plan();
    auto next = basis;
    Evaluation changed;
    Evaluation whole;
    walk.change_s += Seconds([&] {
      changed = by_change.EvaluateChange(plan, draft->change(), next);
    });
    walk.whole_s += Seconds([&] { whole = by_whole.Evaluate(plan); });
    ++walk.candidates;
    walk.different += changed != whole;
    if (changed != whole && walk.differences.size() < kMostDifferences) {
      walk.differences.push_back(std::string(move.name) + ": " +
                                 std::to_string(changed.step_time.seconds()) +
                                 " s in place of " +
                                 std::to_string(whole.step_time.seconds()) +
                                 " s: " + Describe(graph, cluster, plan));
    }
    if (simulate_every > 0 && walk.candidates % simulate_every == 0 &&
        whole.step_time > Duration{}) {
      walk.simulated_s += Seconds([&] {
        const TaskGraph tasks = Lower(facts, plan);
        LongestPath(tasks, PriceTasks(by_whole.pricer(), tasks));
      });
      ++walk.simulated;
    }
    // What is too large to be priced takes no time.
    const double worse =
        current > Duration{}
            ? changed.step_time.seconds() / current.seconds() - 1
            : 0;
    if (whole.step_time > Duration{} &&
        rng.Uniform01() < std::exp(-worse / kTemperature)) {
      draft->Keep();
      basis = std::move(next);
      current = changed.step_time;
      ++walk.accepted;
    } else {
      draft->Undo();
    }
  }
  return walk;
}

}  // namespace tessera::testing
