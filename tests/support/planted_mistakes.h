#pragma once
// Mistakes that a lowering could make, each done to a task graph that is right:
// a check that does not see them all proves nothing.

#include <span>
#include <string_view>

#include "planner/ir/graph.h"
#include "planner/lower/task_graph.h"

namespace tessera {

struct PlantedMistake {
  std::string_view name;
  // Makes the mistake in one place; false where the task graph has no place in
  // which it would change the result.
  bool (*plant)(const Graph& graph, TaskGraph& tasks);
};

std::span<const PlantedMistake> PlantedMistakes();

}  // namespace tessera
