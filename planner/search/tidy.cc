#include "planner/search/tidy.h"

#include <algorithm>
#include <array>
#include <compare>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>
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

// So many operators or kinds of blocks are offered one by one: in a graph of
// thousands of unlike blocks each takes as long as a price.
constexpr int kMostOffers = 128;

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

  int Run(const std::function<bool(const Plan&)>& keeps) {
    // Those that may take many evaluations come last.
    constexpr void (Tidier::*kSteps[])() = {
        &Tidier::MakeBlocksAlike, &Tidier::MakeCutsAlike,
        &Tidier::DropWhole,       &Tidier::DropRecomputation,
        &Tidier::MakeCutsUsual,   &Tidier::MakeOperatorsUsual};
    for (const auto step : kSteps) {
      if (Stopped()) break;
      const Plan plan = plan_;
      const Evaluation evaluation = evaluation_;
      (this->*step)();
      if (!keeps || plan_ == plan || keeps(plan_)) continue;
      plan_ = plan;
      evaluation_ = evaluation;
    }
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

  // Equal blocks, stage by stage and then over the plan.
  void MakeBlocksAlike() {
    for (Scope scope : {Scope::kClassInStage, Scope::kClass}) {
      ForEachClass(scope,
                   [&](const std::vector<int>& blocks) { MakeAlike(blocks); });
    }
  }

  // Calls `with` for the blocks in `scope` of one another.
  template <typename Function>
  void ForEachClass(Scope scope, const Function& with) {
    std::vector<bool> done(index_.nodes_of_block.size(), false);
    for (int b = 0; b < static_cast<int>(done.size()); ++b) {
      if (Stopped()) return;
      if (done[static_cast<size_t>(b)] ||
          index_.nodes_of_block[static_cast<size_t>(b)].empty()) {
        continue;
      }
      const auto blocks = BlocksIn(space_, plan_, b, scope);
      if (!blocks.has_value()) continue;
      for (int member : *blocks) done[static_cast<size_t>(member)] = true;
      with(*blocks);
    }
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

  // Operators that are split otherwise than by the roles that most blocks of
  // their group give the axes; of equal blocks those that are split alike.
  void MakeOperatorsUsual() {
    if (Stopped()) return;
    using Splits = std::pair<std::array<AxisSet, kMaxFactors>, AxisSet>;
    const auto splits_of = [](const OpPlacement& op) {
      return Splits(op.axes, op.streamed);
    };
    std::vector<std::optional<AxisRoles>> roles;  // by block
    for (int b = 0; b < static_cast<int>(index_.nodes_of_block.size()); ++b) {
      roles.push_back(RolesOf(index_, plan_, b));
    }
    const auto usual = UsualRoles(roles);
    struct Odd {
      int block_class = 0;
      GroupId group;
      size_t position = 0;  // in the block
      Splits is;
      Splits would_be;
      auto operator<=>(const Odd&) const = default;
    };
    std::map<Odd, std::vector<NodeId>> odd;
    for (int b = 0; b < static_cast<int>(index_.nodes_of_block.size()); ++b) {
      const auto& nodes = index_.nodes_of_block[static_cast<size_t>(b)];
      if (nodes.empty()) continue;
      const GroupId group = GroupOfBlock(space_, plan_, b);
      if (!usual[group.index()] || roles[static_cast<size_t>(b)]) continue;
      // Not where branches are on groups of their own.
      if (std::ranges::any_of(nodes, [&](NodeId node) {
            return plan_.ops[node.index()].group != group;
          })) {
        continue;
      }
      const auto placements =
          PlacementsOf(space_, plan_, b, *usual[group.index()]);
      for (size_t i = 0; i < nodes.size(); ++i) {
        const Odd of = {index_.block_class[static_cast<size_t>(b)], group, i,
                        splits_of(plan_.ops[nodes[i].index()]),
                        splits_of(placements[i])};
        if (of.is != of.would_be) odd[of].push_back(nodes[i]);
      }
    }
    int offers = 0;
    for (const auto& [of, nodes] : odd) {
      if (++offers > kMostOffers || Stopped()) return;
      Plan candidate = plan_;
      for (NodeId node : nodes) {
        OpPlacement& op = candidate.ops[node.index()];
        std::tie(op.axes, op.streamed) = of.would_be;
      }
      Offer(std::move(candidate));
    }
  }

  // By group those of most of its blocks that have `roles`, if any has.
  std::vector<std::optional<AxisRoles>> UsualRoles(
      const std::vector<std::optional<AxisRoles>>& roles) const {
    std::vector<std::vector<std::pair<int, AxisRoles>>> counted(
        plan_.groups.size());
    for (int b = 0; b < static_cast<int>(roles.size()); ++b) {
      const std::optional<AxisRoles>& own = roles[static_cast<size_t>(b)];
      const GroupId group = GroupOfBlock(space_, plan_, b);
      if (!own || !group.valid()) continue;
      auto& known = counted[group.index()];
      const auto at =
          std::ranges::find(known, *own, &std::pair<int, AxisRoles>::second);
      if (at == known.end()) {
        known.emplace_back(1, *own);
      } else {
        ++at->first;
      }
    }
    std::vector<std::optional<AxisRoles>> usual;
    for (const auto& known : counted) {
      const auto most = std::ranges::max_element(
          known, {}, &std::pair<int, AxisRoles>::first);
      usual.push_back(most == known.end() ? std::nullopt
                                          : std::optional(most->second));
    }
    return usual;
  }

  // Of all operators, of those of as many equal blocks as may be, and then of
  // some in the others.
  void DropRecomputation() {
    if (Stopped()) return;
    const auto without = [&](const std::vector<NodeId>& nodes) {
      Plan candidate = plan_;
      for (NodeId node : nodes) candidate.ops[node.index()].recompute = false;
      return candidate;
    };
    std::vector<NodeId> all;
    for (const auto& nodes : index_.nodes_of_block) {
      std::ranges::copy(nodes, std::back_inserter(all));
    }
    if (Offer(without(all))) return;
    const auto nodes_of = [&](int block) -> const std::vector<NodeId>& {
      return index_.nodes_of_block[static_cast<size_t>(block)];
    };
    int offers = 0;
    ForEachClass(Scope::kClassInStage, [&](std::vector<int> blocks) {
      std::erase_if(blocks, [&](int block) {
        return std::ranges::none_of(nodes_of(block), [&](NodeId node) {
          return plan_.ops[node.index()].recompute;
        });
      });
      // As many of the last as there is memory for: all, or half, and so on.
      for (size_t some = blocks.size(); some > 0; some /= 2) {
        if (some > blocks.size()) continue;
        if (++offers > kMostOffers || Stopped()) return;
        std::vector<NodeId> nodes;
        for (int b : std::span(blocks).last(some)) {
          std::ranges::copy(nodes_of(b), std::back_inserter(nodes));
        }
        if (Offer(without(nodes))) blocks.resize(blocks.size() - some);
      }
      // In those that are left an operator may run again for nothing.
      for (size_t i = 0; !blocks.empty() && i < nodes_of(blocks[0]).size();
           ++i) {
        std::vector<NodeId> like;
        for (int b : blocks) {
          const NodeId node = nodes_of(b)[i];
          if (plan_.ops[node.index()].recompute) like.push_back(node);
        }
        if (like.empty()) continue;
        if (++offers > kMostOffers || Stopped()) return;
        Offer(without(like));
      }
    });
  }

  // Of all weights ZeRO-1, or none.
  void MakeCutsAlike() {
    for (int stage : {1, 0}) {
      if (Stopped()) return;
      Plan candidate = plan_;
      for (WeightPlacement& weight : candidate.weights) {
        weight.zero_stage = stage;
      }
      Offer(std::move(candidate));
    }
  }

  using Cut = std::pair<int, bool>;  // ZeRO's stage, whether within nodes only

  // ZeRO's cuts as most parameters have them, or none.
  void MakeCutsUsual() {
    const auto cuts_now = [&] {
      const std::vector<bool> within = CutWithinNode(space_, plan_);
      std::vector<Cut> cuts;
      for (size_t w = 0; w < within.size(); ++w) {
        cuts.emplace_back(plan_.weights[w].zero_stage, within[w]);
      }
      return cuts;
    };
    if (plan_.weights.empty() || Stopped()) return;
    std::map<Cut, int64_t> parameters;
    const std::vector<Cut> cuts = cuts_now();
    for (size_t w = 0; w < cuts.size(); ++w) {
      parameters[cuts[w]] += index_.weights[w].elements;
    }
    const Cut usual =
        std::ranges::max_element(parameters, {}, [](const auto& c) {
          return c.second;
        })->first;
    for (const auto& [cut, count] : parameters) {
      if (cut == usual) continue;
      for (const Cut& other :
           std::set<Cut, std::greater<>>{usual, {0, false}}) {
        if (other == cut || OfferCut(cuts_now(), cut, other)) break;
      }
    }
  }
  // Gives the weights that have one cut another, as far as they may have it.
  bool OfferCut(const std::vector<Cut>& cuts, const Cut& from, const Cut& to) {
    if (Stopped()) return false;
    Plan candidate = plan_;
    std::vector<bool> within;
    for (size_t w = 0; w < cuts.size(); ++w) {
      const Cut& cut = cuts[w] == from ? to : cuts[w];
      within.push_back(cut.second);
      candidate.weights[w].zero_stage =
          HighestZeroStage(index_, plan_, w, cut.first);
    }
    return SetCuts(space_, within, candidate) && Offer(std::move(candidate));
  }

  // What the walk changed of the whole plan.
  void DropWhole() {
    const auto offer = [&](const auto& change) {
      if (Stopped()) return;
      Plan candidate = plan_;
      change(candidate);
      Offer(std::move(candidate));
    };
    offer([](Plan& plan) { plan.bucket_bytes = Plan().bucket_bytes; });
    offer([](Plan& plan) { plan.prefetch = Plan().prefetch; });
    offer([](Plan& plan) { plan.zigzag = Plan().zigzag; });
    offer([](Plan& plan) {
      for (OpPlacement& op : plan.ops) op.tiles = 1;
    });
    // The plainest schedules first; those that are not plainer are left out.
    for (const char* schedule : {"1f1b", "zb-h1"}) {
      if (plan_.schedule == schedule) break;
      offer([&](Plan& plan) {
        plan.schedule = schedule;
        plan.actions.clear();
      });
      if (plan_.schedule == schedule) break;
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
         const std::function<bool()>& stop, Plan& plan, Evaluation& evaluation,
         const std::function<bool(const Plan&)>& keeps) {
  return Tidier(space, objective, stop, plan, evaluation).Run(keeps);
}

}  // namespace tessera
