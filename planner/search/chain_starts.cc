#include "planner/search/chain_starts.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "planner/search/draft.h"
#include "planner/search/mcmc.h"

namespace tessera {
namespace {

// Random moves that lead from a uniform plan to a random one.
constexpr int kRandomMoves = 64;

bool AnyOffloads(const Starts& starts) {
  return std::ranges::any_of(starts.given, Offloads) ||
         std::ranges::any_of(starts.ranked, Offloads, &FoundPlan::plan);
}

// `plan` after random moves, each taken as it comes.
Plan Randomized(const SearchSpace& space, std::span<const Move> moves,
                Plan plan, bool folded, Rng& rng) {
  Draft draft(space, std::move(plan));
  draft.Fold(folded);
  for (int i = 0; i < kRandomMoves; ++i) {
    if (DrawMove(moves, rng).Propose(draft, rng)) draft.Keep();
  }
  return draft.plan();
}

}  // namespace

std::vector<Move> MovesFrom(const SearchSpace& space, const Starts& starts) {
  std::vector<Move> moves(Moves().begin(), Moves().end());
  const bool offloads = AnyOffloads(starts);
  for (Move& move : moves) {
    if ((move.needs == MoveNeeds::kOffloads && !offloads) ||
        (move.needs == MoveNeeds::kUnlikeDevices && !space.unlike_speeds)) {
      move.weight = 0;
    }
  }
  return moves;
}

bool IsFolded(const Starts& starts, int chain) {
  return chain % (2 * kRungs) != kRungs && !AnyOffloads(starts);
}

Plan StartOf(const SearchSpace& space, std::span<const Move> moves,
             const Starts& starts, int chain, uint64_t seed) {
  if (chain < std::ssize(starts.given)) {
    return starts.given[static_cast<size_t>(chain)];
  }
  const auto turn = static_cast<size_t>(chain) - starts.given.size();
  if (turn % 2 == 0) {
    return starts.ranked[turn / 2 % starts.ranked.size()].plan;
  }
  std::vector<const Plan*> rest;
  for (const Plan& plan : starts.baselines) rest.insert(rest.begin(), &plan);
  const auto second = rest.begin() + (rest.empty() ? 0 : 1);
  rest.insert(second, nullptr);  // the random one
  for (const std::optional<Plan>* plan : {&starts.other, &starts.unlike}) {
    if (*plan) rest.insert(std::ranges::find(rest, nullptr), &**plan);
  }
  const Plan* const plan = rest[turn / 2 % rest.size()];
  if (plan != nullptr) return *plan;
  // A stream of its own, apart from the chain's.
  Rng rng(seed, (uint64_t{1} << 32) + static_cast<uint64_t>(chain));
  return Randomized(space, moves, starts.ranked[0].plan,
                    IsFolded(starts, chain), rng);
}

Plan RandomStart(const SearchSpace& space, std::span<const Move> moves,
                 const Starts& starts, bool folded, Rng& rng) {
  const size_t draw = rng.Below(
      static_cast<uint32_t>(starts.ranked.size() + starts.baselines.size()));
  const Plan& from = draw < starts.ranked.size()
                         ? starts.ranked[draw].plan
                         : starts.baselines[draw - starts.ranked.size()];
  return Randomized(space, moves, from, folded, rng);
}

}  // namespace tessera
