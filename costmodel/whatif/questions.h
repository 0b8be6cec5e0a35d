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
  int too_many = 0;   // the fewest at which it runs and is less so; 0: none
  bool most = false;  // it is efficient up to the most that are tried
};
// Doubles the nodes of the scenario's preset until efficiency falls under the
// question's, or it does not run, then looks between at eighths of the gap that
// run. What does not run beyond the first point says nothing of efficiency.
// Begins with the scenario, however large, and goes to at most kMostNodes.
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
// (0: however long) for the least money. REQUIRES: there are some, and
// each can be loaded.
Result<Cheapest> CheapestOf(const Scenario& scenario,
                            const std::vector<std::string>& clusters,
                            double days, const GridOptions& options,
                            ModelCache& models);

// ---- does it fit ----------------------------------------------------------

struct FitChange {
  std::string change;    // "recompute=full, zero=1"
  int keys = 1;          // of the strategy that it changes
  std::string strategy;  // as --strategy takes it
  Duration step_time;
  Bytes memory;  // of the fullest device
};
struct Fit {
  bool fits = false;
  std::string plan;  // in words
  // As --strategy takes it, but for dp; nothing where it is not uniform.
  std::optional<std::string> strategy;
  std::string problem;  // why it does not fit
  Bytes memory;         // of the device that has least left
  Bytes capacity;
  Duration step_time;
  // Where it does not fit: changes of one key of the strategy that make it fit,
  // and of two that are faster than any of one; fastest first, a few. Such as
  // have to be simulated (evaluator.h) and are large only where no other does.
  std::vector<FitChange> changes;
  bool interrupted = false;  // there may be more changes
  // Of each device, with which the plan fits as it is.
  Bytes memory_needed;
  SourceShares sources;  // of the step as it is
  ErrorBand band;        // of its time
};
// Of the plan that the options give the case. Step times are those of the
// simulator, or with options.predict.fast of the evaluator; which changes there
// are the evaluator decides.
Result<Fit> FitOf(Case of, const GridOptions& options);

}  // namespace tessera
