#pragma once
// Keys of a strategy that change nothing. Of a strategy for one cluster they
// are errors (ParseStrategy, Complete); one that is for many may do without
// them where they have no effect.
//
// Functions without state; thread-safe.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/strategy.h"

namespace tessera {

struct IdleKey {
  std::string key;    // "sp"
  std::string value;  // "1"
  std::string why;    // "needs tp of at least 2"
  // Makes the strategy what it is without the key; null where that is another
  // strategy, as without cp=2.
  void (*drop)(Strategy& strategy) = nullptr;
};

// "sp=1 has no effect: needs tp of at least 2".
Error IdleError(const IdleKey& idle);
// "without sp=1, which has no effect: needs tp of at least 2".
std::string IdleNote(const IdleKey& idle);

// Reads as ParseStrategy does, idle keys too.
Result<Strategy> ReadStrategy(std::string_view text);

// The first key that says nothing beside the others, on any cluster.
std::optional<IdleKey> FirstIdleKey(const Strategy& strategy);

// `strategy` without the keys that say nothing beside its others, on this
// cluster or of this model, as far as they can be dropped; `notes` has each,
// and why.
Strategy WithoutIdleKeys(const GraphIndex& index, const Cluster& cluster,
                         Strategy strategy, std::vector<std::string>& notes);

}  // namespace tessera
