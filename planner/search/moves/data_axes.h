#pragma once
// Pipeline stages whose meshes differ in how many ways they split samples:
// the outermost axes of such a stage are those of its data parallelism, the
// others are any.

#include <optional>
#include <span>
#include <vector>

#include "planner/plan/axis_roles.h"
#include "planner/search/draft.h"

namespace tessera {

// How many of the outermost axes of `group` are of data parallelism in all of
// `blocks` (of that group, some with nodes): those of PrimeFactors of their
// product, without shares. Nothing where a block has no roles, or other axes
// split samples. REQUIRES: nothing is edited.
std::optional<int> DataAxes(Draft& draft, const DeviceGroup& group,
                            std::span<const int> blocks);

// The product of the sizes of the outermost `count` axes.
int64_t DegreeOf(const DeviceGroup& group, int count);

// Whether two meshes are equal but for their outermost axes, `data_a` and
// `data_b` of them.
bool SameBehind(const DeviceGroup& a, int data_a, const DeviceGroup& b,
                int data_b);

// Roles on a mesh with `from` data axes as they are on one with `to` of them.
AxisRoles WithDataAxes(AxisRoles roles, int from, int to);

// Gives a block the placements of `roles` on the group that it is on. False
// where it does not show them then.
bool PlaceByRoles(const SearchSpace& space, int block, const AxisRoles& roles,
                  Plan& plan);

}  // namespace tessera
