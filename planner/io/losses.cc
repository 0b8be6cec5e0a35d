#include "planner/io/losses.h"

#include <array>

namespace tessera {

std::span<const LossRow> Losses() {
  static constexpr std::array kRows = {
      LossRow{"cross_entropy", "softmax cross-entropy of labels"},
      LossRow{"mean_squared_error", "mean squared difference from targets",
              /*of_elements=*/true},
      LossRow{"binary_cross_entropy",
              "mean cross-entropy of sigmoids and targets from 0 to 1",
              /*of_elements=*/true},
  };
  return kRows;
}

TensorId AddElementLoss(GraphBuilder& builder, const LossRow& loss,
                        std::string name, TensorId predictions,
                        TensorId targets, const std::string& indices,
                        double weight) {
  return builder.Add1(loss.name, std::move(name), {predictions, targets},
                      indices + "," + indices + "->", {{"weight", weight}});
}

}  // namespace tessera
