#pragma once
// Advice on a vocabulary whose logits are slow to compute. Thread-safe: a
// function without state.

#include <string>

#include "planner/ir/graph.h"
#include "planner/plan/plan.h"

namespace tessera {

// In a 16-bit type a GPU's fast matrix products want rows of a multiple of 16
// bytes. What to set (--set model.vocab_multiple=N) where a rank's rows of
// logits of tokens are others; empty where all are. For a model whose config
// has that key.
std::string VocabularyAdvice(const Graph& graph, const Plan& plan);

}  // namespace tessera
