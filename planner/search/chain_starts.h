#pragma once
// Where each chain of a search begins, and with which moves it walks.

#include <cstdint>
#include <span>
#include <vector>

#include "planner/base/rng.h"
#include "planner/search/move.h"
#include "planner/search/starts.h"

namespace tessera {

// Moves(), those with weight 0 that lack what they need.
std::vector<Move> MovesFrom(const SearchSpace& space, const Starts& starts);

// Whether chain `chain` changes equal layers of a stage together. Most do:
// layers that drift apart are all to be priced, and few draws apply to them.
// The coldest chain of every second ladder looks at each by itself. All do
// where state leaves the devices: how many layers' stays is to be found, and
// plans are simulated whole.
bool IsFolded(const Starts& starts, int chain);

// The first chains start from the caller's plans. Of the others every second
// does from the ranked plans in turn; the rest from the last baseline,
// the other plan, that of unlike stages, a random one and the other baselines,
// since walks that are cold find no way from pipelines to plans without, or
// back.
Plan StartOf(const SearchSpace& space, std::span<const Move> moves,
             const Starts& starts, int chain, uint64_t seed);

// A random plan: random moves, each taken as it comes, from one of the ranked
// plans or the baselines.
Plan RandomStart(const SearchSpace& space, std::span<const Move> moves,
                 const Starts& starts, bool folded, Rng& rng);

}  // namespace tessera
