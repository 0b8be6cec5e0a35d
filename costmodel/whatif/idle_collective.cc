#include "costmodel/whatif/idle_collective.h"

#include <optional>

#include "costmodel/evaluate/evaluator.h"

namespace tessera {

std::string IdleCollectiveNote(const Graph& graph, const Cluster& cluster,
                               const Plan& plan, const ProfileDb* profile,
                               const TrainingOptions& training,
                               const Cluster* whole) {
  if (cluster.collective.empty()) return "";
  const auto step = [&](const Cluster& on, const Cluster* before) {
    return Evaluator(graph, on, profile, training, Evaluator::kUnlimited,
                     before)
        .Evaluate(plan)
        .step_time;
  };
  Cluster without = cluster;
  without.collective.clear();
  std::optional<Cluster> whole_without;
  if (whole != nullptr) {
    whole_without = *whole;
    whole_without->collective.clear();
  }
  if (step(cluster, whole) !=
      step(without, whole_without ? &*whole_without : nullptr)) {
    return "";
  }
  return "collective " + cluster.collective +
         " has no effect: the step takes as long without it";
}

}  // namespace tessera
