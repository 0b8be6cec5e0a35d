#pragma once
// What a model of Hugging Face's transformers ends in: of one body there are
// several classes, which "architectures" of a config.json tells apart.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/io/importer.h"
#include "planner/io/losses.h"
#include "planner/io/model_config.h"

namespace tessera {

enum class HeadKind : uint8_t {
  kOwn,          // the family's own
  kNone,         // the last hidden states, or what a pooler makes of them
  kLabel,        // a label for each sample
  kTokenLabels,  // a label for each token
};

// A class of a family, of transformers 5.
struct HeadClass {
  std::string name;
  HeadKind kind = HeadKind::kOwn;
  std::string module = "score";  // the layer that makes logits of labels
  bool bias = false;             // of that layer
  // Dropout in front of it, where "classifier_dropout" says no other; nothing:
  // there is none, whatever it says.
  std::optional<double> dropout = {};
};

// Those that a family of decoders has: FAMILY + `own`, and "Model",
// "ForSequenceClassification" and "ForTokenClassification", whose layer is
// `token_module`.
std::vector<HeadClass> DecoderClasses(const std::string& family,
                                      const std::string& own = "ForCausalLM",
                                      const std::string& token_module = "score",
                                      double token_dropout = 0.1);

struct Head : HeadClass {
  int64_t labels = 0;  // of kLabel and kTokenLabels
  // Of kNone the mean squared error, as transformers has no loss for it.
  const LossRow* loss = &Losses()[0];
};

// The number of labels: "num_labels", or as many as "id2label" has; 2 where
// there is neither.
int64_t ReadLabels(ModelConfig& config);

// The class that "architectures" names, with the loss that transformers has for
// it: of kLabel by "problem_type", or, where that is missing, by the number of
// labels. Of a class that is not there, and where none is named, it is the
// first of `classes`. What is built in place of another class, and that a class
// has no loss of its own, are warnings.
// REQUIRES: `classes` is not empty.
Head ReadHead(ModelConfig& config, std::span<const HeadClass> classes,
              const ImportOptions& options);

}  // namespace tessera
