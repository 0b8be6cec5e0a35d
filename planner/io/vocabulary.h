#pragma once
// The vocabulary of a model of text by its config.

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/io/model_config.h"
#include "planner/ir/op.h"

namespace tessera {

struct Vocabulary {
  int64_t tokens = 1;
  // Of the table of tokens and of the head: `tokens`, and those that pad them
  // (planner/ir/vocabulary.h).
  int64_t rows = 1;

  // Of the operators that read the table, and of the loss.
  std::vector<Attribute> attributes() const;
};

// "vocab_size", which must be there unless it has a default, and Tessera's own
// key "vocab_multiple" (1): rows are the least multiple of it that holds all
// tokens.
Vocabulary ReadVocabulary(ModelConfig& config,
                          std::optional<int64_t> fallback = {});

}  // namespace tessera
