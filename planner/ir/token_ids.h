#pragma once
// Which ids of tokens a model can look up. Thread-safe: functions without
// state.

#include <cstdint>

#include "planner/base/result.h"
#include "planner/ir/graph.h"

namespace tessera {

// Rows of the smallest table that tokens are looked up in, without those that
// pad it (planner/ir/vocabulary.h), or as many tokens as a one-hot tells apart
// from 0 on; as many as ids can be where there is neither.
int64_t VocabularyOf(const Graph& graph);

// That `id`, which ends a document, is one of the vocabulary's.
Result<void> CheckEndOfText(const Graph& graph, int64_t id);

}  // namespace tessera
