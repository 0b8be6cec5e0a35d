#pragma once
// What the moves share: which blocks a change covers, and how a candidate is
// finished.

#include <optional>
#include <vector>

#include "planner/search/move.h"

namespace tessera {

// How far a change reaches from the block that it starts at.
enum class Scope : uint8_t {
  kBlock,
  kClassInStage,  // equal blocks of the same group
  kClass,         // equal blocks
  kStage,         // all blocks of the group
  kPlan,
};
inline constexpr uint32_t kScopes = 5;

GroupId GroupOfBlock(const SearchSpace& space, const Plan& plan, int block);

// The blocks in `scope` of `block`, ascending, or nothing where their groups'
// meshes differ. A change of placements alters no scope.
std::optional<std::vector<int>> BlocksIn(const SearchSpace& space,
                                         const Plan& plan, int block,
                                         Scope scope);

// The candidate as a proposal: its zero axes set, within nodes where they were
// so, if it is valid and differs from `old`. Nothing where a weight can no
// longer be cut within nodes only: there would be no way back.
std::optional<Proposal> Finish(const SearchSpace& space, const Plan& old,
                               Plan candidate, double log_ratio);
// The same with the cuts given.
std::optional<Proposal> Finish(const SearchSpace& space, const Plan& old,
                               Plan candidate, double log_ratio,
                               const std::vector<bool>& within_node);

// A block that has nodes. Symmetric: it depends on the graph only.
int DrawBlock(const SearchSpace& space, Rng& rng);

}  // namespace tessera
