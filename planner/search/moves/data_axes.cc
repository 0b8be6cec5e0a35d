#include "planner/search/moves/data_axes.h"

#include <algorithm>

#include "planner/search/moves/scope.h"

namespace tessera {

std::optional<int> DataAxes(Draft& draft, const DeviceGroup& group,
                            std::span<const int> blocks) {
  std::optional<AxisSet> data;
  for (int block : blocks) {
    const std::optional<AxisRoles>& roles = draft.roles(block);
    if (!roles.has_value() || roles->expert != 0) return std::nullopt;
    if (data.has_value() && *data != roles->data) return std::nullopt;
    data = roles->data;
  }
  if (!data.has_value()) return std::nullopt;
  int count = 0;
  while ((*data >> count & 1) != 0) ++count;
  if (*data != (AxisSet{1} << count) - 1) return std::nullopt;
  const std::vector<int> primes = PrimeFactors(DegreeOf(group, count));
  if (std::ssize(primes) != count) return std::nullopt;
  for (size_t a = 0; a < primes.size(); ++a) {
    if (group.axes[a].size != primes[a] || !group.axes[a].shares.empty()) {
      return std::nullopt;
    }
  }
  return count;
}

int64_t DegreeOf(const DeviceGroup& group, int count) {
  return group.Size((AxisSet{1} << count) - 1);
}

bool SameBehind(const DeviceGroup& a, int data_a, const DeviceGroup& b,
                int data_b) {
  const auto behind = [](const DeviceGroup& group, int data) {
    DeviceGroup rest;
    rest.axes.assign(group.axes.begin() + data, group.axes.end());
    return rest;
  };
  return SameMesh(behind(a, data_a), behind(b, data_b));
}

AxisRoles WithDataAxes(AxisRoles roles, int from, int to) {
  for (AxisSet* axes :
       {&roles.expert, &roles.context, &roles.tensor, &roles.folded}) {
    *axes = *axes >> from << to;
  }
  roles.data = (AxisSet{1} << to) - 1;
  return roles;
}

bool PlaceByRoles(const SearchSpace& space, int block, const AxisRoles& roles,
                  Plan& plan) {
  SetBlock(space.index, block, PlacementsOf(space, plan, block, roles), plan);
  return RolesOf(space.index, plan, block) == roles;
}

}  // namespace tessera
