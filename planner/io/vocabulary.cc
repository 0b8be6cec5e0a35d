#include "planner/io/vocabulary.h"

#include <string>

#include "planner/base/divide.h"
#include "planner/ir/vocabulary.h"

namespace tessera {

std::vector<Attribute> Vocabulary::attributes() const {
  if (rows == tokens) return {};
  return {{std::string(kVocabulary), static_cast<double>(tokens)}};
}

Vocabulary ReadVocabulary(ModelConfig& config,
                          std::optional<int64_t> fallback) {
  const int64_t tokens = fallback ? config.Size("vocab_size", *fallback)
                                  : config.Size("vocab_size");
  const int64_t multiple = config.Size("vocab_multiple", 1);
  return {tokens, RoundUp(tokens, multiple)};
}

}  // namespace tessera
