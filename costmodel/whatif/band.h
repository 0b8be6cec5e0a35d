#pragma once
// How far off predictions are, against what was measured.

#include <string>
#include <string_view>

#include "planner/ir/cluster.h"
#include "planner/plan/evaluation.h"

namespace tessera {

struct ErrorBand {
  double median = 0;  // of |predicted - measured| / measured
  double mean = 0;
  std::string source;
};

// Of step times whose tasks' times are mostly analytical, under a stack
// (Stack::name); of one that no published run had, that of all runs under their
// own.
ErrorBand StepTimeBand(std::string_view stack);

// Of step times on the cluster: as above, or where at least half of the tasks'
// time is a profile's, that of runs with a profile; of a host's cores that of
// runs on cores, with or without one.
ErrorBand StepTimeBand(const Cluster& cluster, const SourceShares& sources);

}  // namespace tessera
