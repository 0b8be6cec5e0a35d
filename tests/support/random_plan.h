#pragma once
// Plans of every kind for small models, drawn at random.
//
// A case is a model and a plan as whole numbers. All that is not among them (on
// which factor an axis works, where stages begin, …) is a function of `key` and
// of names, so that a change of one number changes as little as possible of the
// rest: that is what makes a failing case easy to shrink.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/base/rng.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "tests/support/random_graph.h"

namespace tessera {

inline constexpr int kMostStages = 8;
inline constexpr int kMostRanks = 8;

struct PlanSpec {
  // By stage: the sizes of its mesh's axes as decimal digits, outer first
  // (232 is three axes, 1 a single rank); 0 for no stage.
  std::array<int, kMostStages> mesh = {1};
  int chunks = 1;    // of each stage
  int schedule = 0;  // of those that run the chunks, or behind them a table
  int microbatches = 1;
  // 0: every operator on its own; 1: by the roles that axes have in a stage;
  // 2: so, with some operators on their own.
  int placement = 0;
  // 0 to 3: this ZeRO stage over all axes that may be cut; 4: each weight on
  // its own, over any axes; 5: the same with weights that are not cut at a root
  // of some axes, and some operators without weights too.
  int zero = 0;
  int bucket = 0;    // Plan::bucket_bytes
  int prefetch = 0;  // Plan::prefetch
  // 1: the attention core in every block; 2: all that can be; 3: operators on
  // their own.
  int recompute = 0;
  // 1: some operators on the first or the second half of their stage's devices.
  int halves = 0;
  int tiles = 1;  // of each linear that can, up to so many
  // 1: attention's keys and values go round all axes that split its sequence;
  // 2: round any of them.
  int ring = 0;
  // 1: sequences in the zigzag order of the ranks that split them, where it
  // balances all attentions.
  int zigzag = 0;
  // 1: optimizer states on the host; 2: parameters; 3: activations; 4: all of
  // these in files; 5: each weight and operator on its own; 6: optimizer states
  // and gradients on the host.
  int offload = 0;
  int shuffled = 0;  // 1: devices in any order
  // 1: axes that split only samples give their ranks unequal ones.
  int shares = 0;
  // Of the run, not of the plan: 0 AdamW, 1 Adafactor.
  int optimizer = 0;
  int key = 0;
  bool operator==(const PlanSpec&) const = default;
};

struct Case {
  GraphSpec graph;
  PlanSpec plan;
  bool operator==(const Case&) const = default;
};

// The numbers of a case, with the least value that each may have.
struct Field {
  std::string name;
  int* value;
  int least;
};
std::vector<Field> FieldsOf(GraphSpec& graph);
std::vector<Field> FieldsOf(Case& c);

// "layers=2 groups=3 … key=77": the numbers that are not the least, and back.
// Errors name the key.
std::string ToText(const GraphSpec& graph);
std::string ToText(const Case& c);
Result<Case> ParseCase(const std::string& text);

int RanksOf(const PlanSpec& plan);

// A plan of at most kMostRanks ranks. It need not be valid for the model, but
// often is.
PlanSpec RandomPlanSpec(const GraphSpec& graph, Rng& rng);

// The plan of a spec, or nothing where positions outnumber the blocks. Whether
// it is valid, Validate says.
std::optional<Plan> MakePlan(const GraphIndex& index, const PlanSpec& spec);

}  // namespace tessera
