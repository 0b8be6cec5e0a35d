#include "planner/search/tidy.h"

#include <algorithm>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

// What equal blocks have alike, of an OpPlacement and of a WeightPlacement.
template <typename Op>
auto TiedOp(Op& op) {
  return std::tie(op.axes, op.streamed, op.recompute, op.tiles,
                  op.activation_tier);
}
template <typename Weight>
auto TiedWeight(Weight& weight) {
  return std::tie(weight.zero_stage, weight.zero_axes, weight.parameter_tier,
                  weight.optimizer_tier, weight.gradient_tier);
}

class Tidier {
 public:
  Tidier(const SearchSpace& space, const Objective& objective,
         const std::function<bool()>& stop, Plan& plan, Evaluation& evaluation)
      : space_(space),
        index_(space.index),
        objective_(objective),
        stop_(stop),
        plan_(plan),
        evaluation_(evaluation) {}

  int Run() {
    for (Scope scope : {Scope::kClassInStage, Scope::kClass}) {
      std::vector<bool> done(index_.nodes_of_block.size(), false);
      for (int b = 0; b < static_cast<int>(done.size()); ++b) {
        if (Stopped()) return evaluations_;
        if (done[static_cast<size_t>(b)] ||
            index_.nodes_of_block[static_cast<size_t>(b)].empty()) {
          continue;
        }
        const auto blocks = BlocksIn(space_, plan_, b, scope);
        if (!blocks.has_value()) continue;
        for (int member : *blocks) done[static_cast<size_t>(member)] = true;
        MakeAlike(*blocks);
      }
    }
    for (int stage : {1, 0}) {
      Plan candidate = plan_;
      for (WeightPlacement& weight : candidate.weights) {
        weight.zero_stage = stage;
      }
      Offer(std::move(candidate));
    }
    // What the walk changed for nothing.
    Plan candidate = plan_;
    candidate.bucket_bytes = Plan().bucket_bytes;
    candidate.prefetch = Plan().prefetch;
    candidate.zigzag = Plan().zigzag;
    Offer(std::move(candidate));
    candidate = plan_;
    for (OpPlacement& op : candidate.ops) op.tiles = 1;
    Offer(std::move(candidate));
    return evaluations_;
  }

 private:
  // The weights of two blocks one by one, or none: a tied weight has its home
  // in one of the blocks only.
  std::vector<std::pair<size_t, size_t>> WeightPairs(int from, int to) const {
    const auto& of_from = space_.weights_of_block[static_cast<size_t>(from)];
    const auto& of_to = space_.weights_of_block[static_cast<size_t>(to)];
    std::vector<std::pair<size_t, size_t>> pairs;
    if (of_from.size() != of_to.size()) return pairs;
    for (size_t i = 0; i < of_from.size(); ++i) {
      pairs.emplace_back(of_from[i], of_to[i]);
    }
    return pairs;
  }

  // Gives `to` the splits, recomputation, tiles, ZeRO cuts and tiers that
  // `from` has in plan_.
  void Copy(int from, int to, Plan& candidate) const {
    const auto& of_from = index_.nodes_of_block[static_cast<size_t>(from)];
    const auto& of_to = index_.nodes_of_block[static_cast<size_t>(to)];
    for (size_t i = 0; i < of_from.size(); ++i) {
      TiedOp(candidate.ops[of_to[i].index()]) =
          TiedOp(plan_.ops[of_from[i].index()]);
    }
    for (const auto& [source, target] : WeightPairs(from, to)) {
      TiedWeight(candidate.weights[target]) = TiedWeight(plan_.weights[source]);
    }
  }

  // Whether Copy changes nothing.
  bool Alike(int from, int to) const {
    return std::ranges::equal(index_.nodes_of_block[static_cast<size_t>(from)],
                              index_.nodes_of_block[static_cast<size_t>(to)],
                              [&](NodeId a, NodeId b) {
                                return TiedOp(plan_.ops[a.index()]) ==
                                       TiedOp(plan_.ops[b.index()]);
                              }) &&
           std::ranges::all_of(WeightPairs(from, to), [&](const auto& pair) {
             return TiedWeight(plan_.weights[pair.first]) ==
                    TiedWeight(plan_.weights[pair.second]);
           });
  }

  void MakeAlike(const std::vector<int>& blocks) {
    // How many blocks there are of each kind, and one of them.
    std::vector<std::pair<int, int>> kinds;
    for (int block : blocks) {
      const auto known = std::find_if(
          kinds.begin(), kinds.end(),
          [&](const auto& kind) { return Alike(kind.second, block); });
      if (known == kinds.end()) {
        kinds.emplace_back(1, block);
      } else {
        ++known->first;
      }
    }
    if (kinds.size() < 2) return;
    std::ranges::stable_sort(kinds, std::greater(),
                             &std::pair<int, int>::first);
    for (const auto& [count, kind] : kinds) {
      if (Stopped()) return;
      Plan candidate = plan_;
      for (int block : blocks) Copy(kind, block, candidate);
      if (Offer(std::move(candidate))) return;
    }
  }

  // Asks no more once it was told.
  bool Stopped() {
    stopped_ = stopped_ || (stop_ && stop_());
    return stopped_;
  }

  // Takes `candidate` where it is valid, another plan and no worse.
  bool Offer(Plan candidate) {
    if (Stopped() || !MakeCanonical(space_, candidate) ||
        !Allowed(space_, candidate) || SameUpToNames(candidate, plan_)) {
      return false;
    }
    ++evaluations_;
    Evaluation evaluation = objective_.Evaluate(candidate);
    if (Better(evaluation_, evaluation)) return false;
    plan_ = std::move(candidate);
    evaluation_ = std::move(evaluation);
    return true;
  }

  const SearchSpace& space_;
  const GraphIndex& index_;
  const Objective& objective_;
  const std::function<bool()>& stop_;
  Plan& plan_;
  Evaluation& evaluation_;
  bool stopped_ = false;
  int evaluations_ = 0;
};

}  // namespace

int Tidy(const SearchSpace& space, const Objective& objective,
         const std::function<bool()>& stop, Plan& plan,
         Evaluation& evaluation) {
  return Tidier(space, objective, stop, plan, evaluation).Run();
}

}  // namespace tessera
