#pragma once
// The textbook: the decision table by which people choose a strategy without a
// search (Hugging Face, "Parallelism methods", the Transformers documentation;
// Rajbhandari et al. 2021 for offloading), and each of its answers as a family
// of uniform strategies.
//
// Thread-safe.

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/search/found_plan.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"
#include "planner/search/sweep.h"

namespace tessera {

// One answer. Its strategies are all that the name stands for, in any degrees,
// microbatches and levels of recomputation; those that offload with whole
// sequences, the plainest schedule, and all of a layer or nothing run again.
struct Approach {
  std::string_view name;  // "ZeRO"
  std::string_view summary;
  bool offloads = false;  // plans that take a simulation each
  std::vector<Strategy> (*strategies)(const SearchSpace& space) = nullptr;
  // Of those above the degrees alone, for why none of them is possible.
  std::vector<Strategy> (*plainest)(const SearchSpace& space) = nullptr;
};
std::span<const Approach> Approaches();
Result<const Approach*> FindApproach(std::string_view name);

// The best of its strategies, or of the best of these that run whole layers
// again one that does so in as few as fit; nothing where none is valid.
std::optional<Candidate> BestOf(const Approach& approach,
                                const SearchSpace& space,
                                const Objective& objective, int threads,
                                const std::function<bool()>& stop);

// Where the approach is data parallelism and the devices do not divide the
// batch the best plan by which some have a sample more (ragged.h), which is no
// strategy; else nothing.
std::optional<FoundPlan> RaggedOf(const Approach& approach,
                                  const SearchSpace& space,
                                  const Objective& objective,
                                  const std::function<bool()>& stop);

// What to call the approach where its plan is that of `strategy`: of those that
// split a replica the degrees that there are, "PP+TP" where there is one
// replica. Expert parallelism counts as data parallelism.
std::string NameOf(const Approach& approach, const Strategy& strategy);

// Why none of its strategies is possible: "mbs=1 * dp=21 = 21: expected a
// divisor of the global batch 70". REQUIRES: BestOf and RaggedOf found none,
// unstopped.
std::string WhyNone(const Approach& approach, const SearchSpace& space);

// What the table asks.
struct Situation {
  int devices = 1;
  int nodes = 1;
  bool fits = false;          // a whole replica on each device
  bool layer_fits = false;    // parameters and gradients of the largest layer
  bool host_fits = false;     // what is offloaded, in the hosts' memory
  bool fast_within = false;   // NVLink between the devices of a node
  bool fast_between = false;  // the network between nodes
};

// `fast_within` and `fast_between` are the caller's: the planner has no figures
// of links. `host_fits` is asked of one device that does not have room only.
Situation SituationOf(const SearchSpace& space, const Objective& objective,
                      bool fast_within, bool fast_between, int threads,
                      const std::function<bool()>& stop);

struct Advice {
  std::string_view situation;  // "one node, fits"
  std::vector<std::string_view> approaches;
  bool (*applies)(const Situation& situation) = nullptr;
};
// Of each situation the first row that applies; there is one for all.
std::span<const Advice> Advices();
const Advice& AdviceFor(const Situation& situation);

}  // namespace tessera
