#pragma once
// Moves: how the search steps from one plan to another. A move is a row; the
// contract test covers every row.

#include <optional>
#include <span>
#include <string_view>

#include "planner/base/rng.h"
#include "planner/plan/plan.h"
#include "planner/search/search_space.h"

namespace tessera {

struct Proposal {
  Plan plan;
  // log of q(old | new) / q(new | old), q(b | a) being the probability of the
  // draw that led from a to b (Hastings 1970). Several draws may lead there;
  // each has its own way back, and balances with it.
  double log_ratio = 0;
};

struct Move {
  std::string_view name;
  std::string_view summary;
  // How often the search tries it, relative to the other rows.
  int weight;
  // A canonical plan (search_space.h) that differs from `plan`, or nothing
  // where the draw does not apply. A function of its arguments only.
  // REQUIRES: `plan` is canonical.
  std::optional<Proposal> (*propose)(const Plan& plan, const SearchSpace& space,
                                     Rng& rng);
  // Tried only in a search that starts from a plan with its state off the
  // devices, which it does where nothing else fits.
  bool where_nothing_fits = false;
};

std::span<const Move> Moves();
Result<const Move*> FindMove(std::string_view name);

// One of `moves`, by weight.
const Move& DrawMove(std::span<const Move> moves, Rng& rng);

}  // namespace tessera
