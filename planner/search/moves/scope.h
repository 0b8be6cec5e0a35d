#pragma once
// What the moves share: which blocks a change covers, and which of them are
// placed alike.

#include <optional>
#include <vector>

#include "planner/plan/axis_roles.h"
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

// How far a change reaches, of `count` reaches of which the first is one block
// or weight alone. Symmetric: uniform, without the first where the walk is
// folded. Only which layers run again ("recompute") is drawn without this, so
// that a folded walk too finds stages whose memory suffices but for some
// layers.
uint32_t DrawReach(const Draft& draft, uint32_t count, Rng& rng);

// That, of the first `count` scopes.
Scope DrawScope(const Draft& draft, uint32_t count, Rng& rng);

// The blocks in `scope` of `block`, ascending, or nothing where their groups'
// meshes differ. A change of placements alters no scope.
std::optional<std::vector<int>> BlocksIn(const SearchSpace& space,
                                         const Plan& plan, int block,
                                         Scope scope);

// Blocks that have equal roles and get equal placements of equal roles, but for
// their groups, have equal placements: one of them, with its roles.
struct PlacedKind {
  int block = 0;
  AxisRoles roles;
};
struct PlacedKinds {
  std::vector<PlacedKind> kinds;
  std::vector<int> blocks;  // ascending
  std::vector<size_t> of;   // by `blocks`, into `kinds`

  // That of one of the blocks.
  const PlacedKind& Of(int block) const;
};

// A node and its like: those in its place in the blocks of `scope`, or nothing
// where these have no scope. REQUIRES: of equal blocks, so up to kClass.
std::optional<std::vector<NodeId>> NodesLike(const SearchSpace& space,
                                             const Plan& plan, NodeId node,
                                             Scope scope);

// The kinds of some blocks, ascending and of groups of one mesh; nothing where
// one of them has no roles. REQUIRES: nothing is edited.
std::optional<PlacedKinds> PlacedKindsOf(Draft& draft, std::vector<int> blocks);

// The placements that roles give to a block on its group.
std::vector<OpPlacement> PlacementsOf(const SearchSpace& space,
                                      const Plan& plan, int block,
                                      const AxisRoles& roles);

// Gives `block` the axes of `placements`, on the group that it is on.
void SetAxes(int block, const std::vector<OpPlacement>& placements,
             Draft& draft);

// Turns `flag`, which is `now`, in the roles of those blocks that have `axes`.
// False where one of them does not agree on what is now; a block without a node
// to show it agrees with either.
bool Switch(const PlacedKinds& kinds, bool AxisRoles::*flag, bool now,
            AxisSet AxisRoles::*axes, Draft& draft);

// A block that has nodes. Symmetric: it depends on the graph only.
int DrawBlock(const SearchSpace& space, Rng& rng);

}  // namespace tessera
