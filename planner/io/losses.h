#pragma once
// Losses that can be attached to the last tensor of a model: "loss" of a config
// or of --set model.loss=NAME.

#include <span>
#include <string_view>

#include "planner/ir/graph.h"

namespace tessera {

struct LossRow {
  std::string_view name;  // of the operator, too
  std::string_view summary;
  // Of each element, which the input "targets" has a number for; otherwise of
  // a label for each sample or token, the input "labels".
  bool of_elements = false;
};

// The first one is meant where none is named.
std::span<const LossRow> Losses();

// A loss of elements, over predictions with the rule's indices `indices`, such
// as "bsv", times `weight`.
TensorId AddElementLoss(GraphBuilder& builder, const LossRow& loss,
                        std::string name, TensorId predictions,
                        TensorId targets, const std::string& indices,
                        double weight);

}  // namespace tessera
