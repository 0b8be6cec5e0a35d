#include "planner/search/moves/uniform.h"

#include <optional>
#include <utility>

namespace tessera {

bool ReplaceByStrategy(const Strategy& strategy, Draft& draft) {
  const SearchSpace& space = draft.space();
  auto made = PlanFromStrategy(space.index, *space.cluster, strategy);
  if (!made || UniformStrategy(space.index, *space.cluster, *made) !=
                   std::optional<Strategy>(strategy)) {
    return false;
  }
  NameAxes(space.index, *made);
  draft.Replace(*std::move(made));
  return true;
}

}  // namespace tessera
