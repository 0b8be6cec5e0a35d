#include "planner/plan/layers_again.h"

namespace tessera {

std::optional<LayersAgain> LayersAgainOf(const GraphIndex& index,
                                         const Plan& plan) {
  const auto blocks = static_cast<int>(index.nodes_of_block.size());
  const auto [first, last] = Layers(index);
  // The first block from `begin` on, before `end`, that is not of the level.
  const auto behind = [&](int begin, int end, RecomputeLevel level) {
    while (begin < end && HasLevel(index, plan, begin, level)) ++begin;
    return begin;
  };
  if (behind(0, first, RecomputeLevel::kNone) < first ||
      behind(last, blocks, RecomputeLevel::kNone) < blocks) {
    return std::nullopt;
  }
  for (const RecomputeRow& row : RecomputeLevels()) {
    const int covered = behind(first, last, row.level);
    if (behind(covered, last, RecomputeLevel::kNone) < last) continue;
    return LayersAgain{row.level, covered < last ? covered - first : 0};
  }
  return std::nullopt;
}

void SetLayersAgain(const GraphIndex& index, const LayersAgain& again,
                    Plan& plan) {
  const auto [first, last] = Layers(index);
  const int end = again.layers > 0 ? first + again.layers : last;
  for (int b = 0; b < static_cast<int>(index.nodes_of_block.size()); ++b) {
    const bool is_again = b >= first && b < end;
    SetRecompute(index, b, is_again ? again.level : RecomputeLevel::kNone,
                 plan);
  }
}

}  // namespace tessera
