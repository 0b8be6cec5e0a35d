#pragma once
// Where in a rank's file the offloaded values lie. It follows from the task
// graph, so the file is made in one piece before the first step, and is as long
// as the prediction says.
//
// What persists comes first, in the order of values. The others lie behind it,
// each from the first task in issue order that touches it to the last, both
// included, in the gap that fits best (planner/base/free_list.h). A rank that
// runs tasks beside each other keeps to it by waiting: a value's first task
// starts when all tasks of those that had its place before have ended.
//
// All extents are of whole blocks (kFileBlockBytes).

#include <cstdint>
#include <span>
#include <vector>

#include "planner/base/units.h"
#include "planner/lower/task_graph.h"

namespace tessera {

struct FileLayout {
  std::vector<int64_t> offsets;  // by value; -1: has no place in the file
  Bytes persistent;              // the first bytes, of what persists
  Bytes length;
};

// `bytes` by value: what it takes on the rank, 0 where it is not there. Those
// of values on other tiers and of aliases do not count.
FileLayout LayOutFile(const TaskGraph& tasks, std::span<const Bytes> bytes);

// `bytes` rounded up to whole blocks.
Bytes WholeFileBlocks(Bytes bytes);

}  // namespace tessera
