#include "planner/search/idle_in_plan.h"

#include "planner/search/adapt.h"

namespace tessera {

std::optional<IdleKey> FirstIdleIn(const GraphIndex& index,
                                   const Cluster& cluster,
                                   const Strategy& strategy, const Plan& plan) {
  const struct {
    bool is_set;
    IdleKey key;
  } checks[] = {
      {strategy.sp,
       {"sp", "1",
        "beside its dense layers " + index.graph->name +
            " has no sequence to split",
        [](Strategy& s) { s.sp = false; }}},
      {strategy.by_speed,
       {"balance", "speed",
        "samples and layers are too few to be shared unequally; a larger mbs "
        "has more samples to share",
        [](Strategy& s) { s.by_speed = false; }}},
  };
  for (const auto& [is_set, key] : checks) {
    if (!is_set) continue;
    Strategy without = strategy;
    key.drop(without);
    const auto other = PlanFromStrategy(index, cluster, without);
    if (other && SameUpToNames(plan, *other)) return key;
  }
  return std::nullopt;
}

Strategy WithoutIdle(const SearchSpace& space, Strategy strategy) {
  strategy = WithoutIdleKeys(space, strategy);
  const Plan plan =
      PlanFromStrategy(space.index, *space.cluster, strategy).value();
  while (const auto idle =
             FirstIdleIn(space.index, *space.cluster, strategy, plan)) {
    idle->drop(strategy);
  }
  return strategy;
}

}  // namespace tessera
