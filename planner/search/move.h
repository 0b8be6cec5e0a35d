#pragma once
// Moves: how the search steps from one plan to another. A move is a row; the
// contract test covers every row.

#include <optional>
#include <span>
#include <string_view>

#include "planner/base/rng.h"
#include "planner/plan/plan.h"
#include "planner/search/draft.h"
#include "planner/search/search_space.h"

namespace tessera {

struct Proposal {
  Plan plan;
  double log_ratio = 0;  // of Move::edit
};

// What a search needs to try a move.
enum class MoveNeeds : uint8_t {
  kNothing,
  // It starts from a plan with its state off the devices, which it does where
  // nothing else fits.
  kOffloads,
  kUnlikeDevices,  // SearchSpace::unlike_speeds
};

struct Move {
  std::string_view name;
  std::string_view summary;
  // How often the search tries it, relative to the other rows.
  int weight;
  // Edits the draft, which is then to be finished, and gives the log of
  // q(old | new) / q(new | old), q(b | a) being the probability of the draw
  // that led from a to b (Hastings 1970). Several draws may lead there; each
  // has its own way back, and balances with it. Nothing where the draw does not
  // apply. A function of the draft's plan and what is drawn. REQUIRES: the plan
  // is canonical (search_space.h), and nothing is edited yet.
  std::optional<double> (*edit)(Draft& draft, Rng& rng);
  MoveNeeds needs = MoveNeeds::kNothing;

  // One draw: the draft has a candidate, to be kept or undone, and its log
  // ratio is given; or nothing, and the draft is what it was.
  std::optional<double> Propose(Draft& draft, Rng& rng) const;
  // The same of a plan that stays: takes as long as the plan is large.
  std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                  Rng& rng) const;
};

std::span<const Move> Moves();
Result<const Move*> FindMove(std::string_view name);

// One of `moves`, by weight.
const Move& DrawMove(std::span<const Move> moves, Rng& rng);

}  // namespace tessera
