#pragma once
// A fingerprint of a task graph, by which ranks that were started apart see
// whether they are about to do the same work.

#include <cstdint>

#include "planner/lower/task_graph.h"

namespace tessera {

// Of all that says what a rank does. Names of groups and axes count for
// nothing, nor does what only prices and checks look at: like, scratch_of,
// scratch_bytes, element_bytes and MeshAxis::counted. Linear in the graph: a
// million tasks take a third of a second.
uint64_t Fingerprint(const TaskGraph& tasks);

}  // namespace tessera
