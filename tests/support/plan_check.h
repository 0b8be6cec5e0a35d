#pragma once
// Whether a random plan does what every plan must: it trains as one rank does,
// is priced as it is simulated, takes the memory that is predicted, and
// survives its file. And the generator that chooses plans worth checking.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "tests/support/placement_rows.h"
#include "tests/support/random_plan.h"
#include "tests/support/train_in_memory.h"

namespace tessera {

// The options of every run here, with PlanSpec::optimizer. Clipping is always
// at work, and epsilon is large, so that updates depend on the size of
// gradients and not only on their sign (optimizers divide by it).
TrainInMemoryOptions CheckedRun(int optimizer = 0);

// Not for several threads.
class PlanChecker {
 public:
  struct Model {
    explicit Model(const GraphSpec& spec)
        : graph(MakeGraph(spec)), index(graph) {}
    Graph graph;
    GraphIndex index;
    // On one rank, by microbatches and optimizer.
    std::map<std::pair<int, int>, std::optional<Trained>> serial;
  };

  // Made once for each spec; lives as long as this.
  Model& ModelOf(const GraphSpec& spec);
  // What the model does on one rank.
  const Trained& SerialOf(const GraphSpec& spec, int microbatches = 1,
                          int optimizer = 0);

  // The plan of a case, or nothing where it is none or not valid.
  std::optional<Plan> ValidPlan(const Case& c);

  // "" where the case holds (or has no valid plan), else what is wrong.
  // `change`, where given, is done to the task graph before it runs; where it
  // returns false nothing runs.
  using Change = std::function<bool(TaskGraph&)>;
  std::string Check(const Case& c);
  std::string CheckTraining(const Case& c, const Change& change = nullptr);
  // The same of a plan that is valid on `cluster`, whose devices are the ranks;
  // `optimizer` is of PlanSpec, `key` chooses the streams that it runs on.
  std::string Check(const GraphSpec& spec, const Cluster& cluster,
                    const Plan& plan, int optimizer, int key);

 private:
  std::string CheckTraining(const GraphSpec& spec, const Cluster& cluster,
                            const Plan& plan, int optimizer, int key,
                            const Change& change);

  std::map<std::string, std::unique_ptr<Model>> models_;
};

// Draws cases: models from a pool of `models` (each has one serial run), and
// plans on them that exercise what few plans before them did.
class CaseGenerator {
 public:
  // `checker` outlives this.
  CaseGenerator(uint64_t seed, int models, PlanChecker& checker);

  // A case with a valid plan; counted in coverage(). Where `wanted` is not
  // empty, the plan exercises one of these rows.
  Case Next(RowSet wanted = 0);
  const Coverage& coverage() const { return coverage_; }

 private:
  Rng rng_;
  std::vector<GraphSpec> models_;
  PlanChecker& checker_;
  Coverage coverage_;
};

// The smallest case found that fails too, by making one number of the case
// smaller at a time. REQUIRES: `fails(c)`.
Case Shrink(const Case& c, const std::function<bool(const Case&)>& fails);

}  // namespace tessera
