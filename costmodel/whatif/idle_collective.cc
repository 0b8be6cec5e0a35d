#include "costmodel/whatif/idle_collective.h"

#include "costmodel/evaluate/evaluator.h"

namespace tessera {

std::string IdleCollectiveNote(const Graph& graph, const Cluster& cluster,
                               const Plan& plan, const ProfileDb* profile,
                               const TrainingOptions& training) {
  if (cluster.collective.empty()) return "";
  const auto step = [&](const Cluster& on) {
    return Evaluator(graph, on, profile, training).Evaluate(plan).step_time;
  };
  Cluster without = cluster;
  without.collective.clear();
  if (step(cluster) != step(without)) return "";
  return "collective " + cluster.collective +
         " has no effect: the step takes as long without it";
}

}  // namespace tessera
