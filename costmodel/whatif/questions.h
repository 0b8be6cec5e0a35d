#pragma once
// Questions that people ask of a cluster, answered by predictions.

#include <optional>
#include <string>
#include <vector>

#include "costmodel/whatif/grid.h"

namespace tessera {

// ---- how far does it scale ------------------------------------------------

struct ScalingQuestion {
  double efficiency = 0.8;  // the least
  bool weak = false;        // the batch grows with the nodes
  int most_devices = 16384;
};
struct ScalingPoint {
  int nodes = 0;
  int devices = 0;
  Cell cell;
  // Tokens a second and device, over those of the first point.
  double efficiency = 0;
};
struct Scaling {
  std::vector<ScalingPoint> points;  // by nodes; the first is the scenario's
  int devices = 0;                   // the most at which it is efficient enough
  // Where it is less so; 0: up to the last point it is not.
  int too_many = 0;
};
// Doubles the nodes of the scenario's preset until efficiency falls under the
// question's, or nothing runs any more, then halves the gap a few times.
// REQUIRES: the scenario sets no "nodes".
Result<Scaling> ScalingOf(const Scenario& scenario,
                          const ScalingQuestion& question,
                          const GridOptions& options, ModelCache& models);

// ---- which cluster is cheapest --------------------------------------------

struct Offer {
  std::string cluster;
  Cell cell;
  std::string refused;  // why it is no answer; empty if it is one
};
struct Cheapest {
  std::vector<Offer> offers;   // in the given order
  std::optional<size_t> best;  // the least USD of those that are answers
};
// Which of `clusters` trains options.predict.run.tokens in at most `days`
// (0: however long) for the least money.
Result<Cheapest> CheapestOf(const Scenario& scenario,
                            const std::vector<std::string>& clusters,
                            double days, const GridOptions& options,
                            ModelCache& models);

// ---- does it fit ----------------------------------------------------------

struct FitChange {
  std::string change;    // "recompute=full, zero=1"
  std::string strategy;  // as --strategy takes it
  Duration step_time;
  Bytes memory;  // of the fullest device
};
struct Fit {
  bool fits = false;
  Bytes memory;  // of the fullest device
  Bytes capacity;
  Duration step_time;
  // Where it does not fit: the fewest changes of the strategy that make it fit
  // (one; if no one does, two), fastest first.
  std::vector<FitChange> changes;
  // Of each device, with which the plan fits as it is.
  Bytes memory_needed;
};
Result<Fit> FitOf(Case of, const PredictOptions& options);

}  // namespace tessera
