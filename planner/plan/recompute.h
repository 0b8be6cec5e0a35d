#pragma once
// Recompute: how much of a layer the backward pass computes anew from what was
// kept, instead of keeping it. Less memory for more arithmetic.
//
// Functions without state; thread-safe.

#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "planner/base/result.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"

namespace tessera {

enum class RecomputeLevel : uint8_t {
  kNone,       // all that backward reads is kept
  kSelective,  // but for the attention core: scores, softmax and the product
               // with the values (Korthikanti et al. 2022, section 5)
  kFull,       // only what other layers read is kept: the residual stream
               // (Chen et al. 2016)
};

struct RecomputeRow {
  std::string_view name;
  std::string_view summary;
  RecomputeLevel level;
};

// In the order of RecomputeLevel.
std::span<const RecomputeRow> RecomputeLevels();
Result<RecomputeLevel> FindRecomputeLevel(std::string_view name);
std::string_view NameOf(RecomputeLevel level);

// The blocks [first, last) that are layers: all but the first and the last
// where there are others.
std::pair<int, int> Layers(const GraphIndex& index);

// Gives the nodes of a block the level's flags.
void SetRecompute(const GraphIndex& index, int block, RecomputeLevel level,
                  Plan& plan);

// Whether they have them.
bool HasLevel(const GraphIndex& index, const Plan& plan, int block,
              RecomputeLevel level);

// The lowest level whose flags the nodes of `block` have, or nothing where they
// have others.
std::optional<RecomputeLevel> RecomputeOf(const GraphIndex& index,
                                          const Plan& plan, int block);

// Whether results of a node wait for backward, if that reads them: not what is
// computed once a step, nor the loss, nor what runs again and only its own
// block and group read.
bool KeepsResults(const GraphIndex& index, const Plan& plan, NodeId node);

}  // namespace tessera
