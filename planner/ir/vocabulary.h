#pragma once
// Padded vocabularies: a token table or an output head may have more rows than
// there are tokens, so that rows of logits are aligned (16-bit matrix products
// are several times slower where they are not) and shards are of equal size.
// The model is the same: no id reads such a row, and the loss leaves its
// logits out, so that it has no gradient; it starts at zero and stays there.
//
// The attribute "vocabulary" of embedding and of cross_entropy says how many
// rows are tokens. Where all are there is none. Thread-safe: functions without
// state.

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "planner/ir/graph.h"

namespace tessera {

inline constexpr std::string_view kVocabulary = "vocabulary";

// How many of `rows` are tokens by a node's attributes.
int64_t TokensOf(std::span<const Attribute> attributes, int64_t rows);

// What is wrong with the attribute of a node with `rows` rows; empty: nothing.
std::string VocabularyProblem(std::span<const Attribute> attributes,
                              int64_t rows);

// The weights that have rows (of their first dimension) behind those of tokens,
// and how many are tokens': tables, and the matrix and bias of the linear layer
// that makes a loss's logits.
std::map<TensorId, int64_t> PaddedWeights(const Graph& graph);

}  // namespace tessera
