#include "planner/search/tidy.h"

#include <algorithm>
#include <map>

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

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
  // Gives `to` the splits, recomputation, tiles, ZeRO stages and tiers that
  // `from` has in plan_.
  void Copy(int from, int to, Plan& candidate) const {
    const auto f = static_cast<size_t>(from);
    const auto t = static_cast<size_t>(to);
    for (size_t i = 0; i < index_.nodes_of_block[f].size(); ++i) {
      const OpPlacement& source =
          plan_.ops[index_.nodes_of_block[f][i].index()];
      OpPlacement& target = candidate.ops[index_.nodes_of_block[t][i].index()];
      target.axes = source.axes;
      target.streamed = source.streamed;
      target.recompute = source.recompute;
      target.tiles = source.tiles;
      target.activation_tier = source.activation_tier;
    }
    // A tied weight has its home in one of the blocks only.
    const auto& of_from = space_.weights_of_block[f];
    const auto& of_to = space_.weights_of_block[t];
    if (of_from.size() != of_to.size()) return;
    for (size_t i = 0; i < of_from.size(); ++i) {
      const WeightPlacement& source = plan_.weights[of_from[i]];
      WeightPlacement& target = candidate.weights[of_to[i]];
      target.zero_stage = source.zero_stage;
      target.parameter_tier = source.parameter_tier;
      target.optimizer_tier = source.optimizer_tier;
      target.gradient_tier = source.gradient_tier;
    }
  }

  // Whether Copy changes nothing.
  bool Alike(int from, int to) const {
    const auto f = static_cast<size_t>(from);
    const auto t = static_cast<size_t>(to);
    const bool same_ops = std::ranges::equal(
        index_.nodes_of_block[f], index_.nodes_of_block[t],
        [&](NodeId a, NodeId b) {
          const OpPlacement& x = plan_.ops[a.index()];
          const OpPlacement& y = plan_.ops[b.index()];
          return x.axes == y.axes && x.streamed == y.streamed &&
                 x.recompute == y.recompute && x.tiles == y.tiles &&
                 x.activation_tier == y.activation_tier;
        });
    if (!same_ops) return false;
    const auto& of_from = space_.weights_of_block[f];
    const auto& of_to = space_.weights_of_block[t];
    return of_from.size() != of_to.size() ||
           std::ranges::equal(of_from, of_to, [&](size_t a, size_t b) {
             const WeightPlacement& x = plan_.weights[a];
             const WeightPlacement& y = plan_.weights[b];
             return x.zero_stage == y.zero_stage &&
                    x.parameter_tier == y.parameter_tier &&
                    x.optimizer_tier == y.optimizer_tier &&
                    x.gradient_tier == y.gradient_tier;
           });
  }

  void MakeAlike(const std::vector<int>& blocks) {
    // One block of each kind, and how many there are of it.
    std::vector<std::pair<int, int>> kinds;
    for (int block : blocks) {
      const auto known = std::find_if(
          kinds.begin(), kinds.end(),
          [&](const auto& kind) { return Alike(kind.second, block); });
      if (known == kinds.end()) {
        kinds.emplace_back(-1, block);
      } else {
        --known->first;
      }
    }
    if (kinds.size() < 2) return;
    std::stable_sort(
        kinds.begin(), kinds.end(),
        [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [count, kind] : kinds) {
      Plan candidate = plan_;
      for (int block : blocks) Copy(kind, block, candidate);
      if (Offer(std::move(candidate))) return;
    }
  }

  // Takes `candidate` where it is valid, another plan and no worse.
  bool Offer(Plan candidate) {
    if (!MakeCanonical(space_, candidate) || !Allowed(space_, candidate) ||
        SameUpToNames(candidate, plan_) || (stop_ && stop_())) {
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
  int evaluations_ = 0;
};

}  // namespace

int Tidy(const SearchSpace& space, const Objective& objective,
         const std::function<bool()>& stop, Plan& plan,
         Evaluation& evaluation) {
  return Tidier(space, objective, stop, plan, evaluation).Run();
}

}  // namespace tessera
