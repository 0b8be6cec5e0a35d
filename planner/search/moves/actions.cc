// Puts an action of a stage some places earlier or later: the plan gets a table
// of actions of its own, or one that is a named schedule again. Symmetric:
// stage, action and distance are uniform. A table that says what a named
// schedule does, or a schedule that says what one before it does, has no way
// back, and is left alone.

#include <algorithm>

#include "planner/plan/stages.h"
#include "planner/search/action_orders.h"
#include "planner/search/move.h"

namespace tessera {
namespace {

constexpr uint32_t kMostPlaces = 4;
// A table is copied and checked as a whole.
constexpr size_t kMostActions = 4096;

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  if (plan.groups.size() < 2) return std::nullopt;
  const PipelineShape shape = ShapeOf(*space.index.graph, plan);
  const uint32_t s = rng.Below(static_cast<uint32_t>(shape.stages));
  const bool later = rng.Below(2) == 1;
  const uint32_t places = 1 + rng.Below(kMostPlaces);
  const auto count = static_cast<size_t>(shape.stages) *
                     static_cast<size_t>(shape.microbatches);
  // A table of several chunks has to be simulated, which takes long.
  if (shape.stages < 2 || shape.chunks > 1 || count > kMostActions / 3) {
    return std::nullopt;
  }
  StageOrders orders = OrdersOf(*space.index.graph, plan);
  if (ScheduleOf(orders, shape) != plan.schedule) return std::nullopt;
  std::vector<Action>& order = orders[s];
  const uint32_t from = rng.Below(static_cast<uint32_t>(order.size()));
  if (later ? from + places >= order.size() : from < places) {
    return std::nullopt;
  }
  const auto first = order.begin() + (later ? from : from - places);
  const auto last = order.begin() + (later ? from + places : from);
  std::rotate(first, later ? first + 1 : last, last + 1);
  Plan candidate = plan;
  SetOrders(orders, shape, candidate);
  draft.Replace(std::move(candidate));
  return 0;
}

}  // namespace

extern const Move kActions;
const Move kActions = {
    "actions", "an action of a stage, earlier or later in its order", 1, Edit};

}  // namespace tessera
