#pragma once
// CheckOrder: static validation of a task graph, before anything runs.

#include <vector>

#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "planner/lower/task_graph.h"

namespace tessera {

// Everything that would hang a step or give it wrong data, at most a few of
// each kind; errors name the tasks, and ranks where it matters.
//  - Transfers: every send has one receive and the other way round, between the
//    two groups, of the same tensor, sample range, shape and type.
//  - Lifetimes: what is read was written before, or persists; a buffer that an
//    alias took over is not read under its old name.
//  - Races: two tasks of a rank that touch a buffer, one of which writes, are
//    ordered by their streams and dependencies.
//  - Deadlock: the order is run, without a clock. Every rank runs each stream
//    of its groups in issue order, or all of them as one. A task blocks its
//    stream until its dependencies have ended and all ranks of its group are at
//    it, as if each were a collective, and a receive until its message has been
//    sent. A send does not wait for its receiver: it hands its message over
//    (Communicator::Send). Where all stand still, the tasks that they stand at
//    are named.
std::vector<Error> CheckOrder(const TaskGraph& tasks, const Graph& graph);

}  // namespace tessera
