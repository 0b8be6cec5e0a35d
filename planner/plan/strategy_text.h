#pragma once
// How parts of a strategy are written.

#include <array>
#include <string>
#include <string_view>

#include "planner/plan/strategy.h"

namespace tessera {

struct DimensionRow {
  std::string_view name;
  MeshDimension dimension;
  int Strategy::*degree;
};

// In the order of MeshDimension.
inline constexpr std::array kDimensions = {
    DimensionRow{"tp", MeshDimension::kTensor, &Strategy::tp},
    DimensionRow{"cp", MeshDimension::kContext, &Strategy::cp},
    DimensionRow{"ep", MeshDimension::kExpert, &Strategy::ep},
    DimensionRow{"dp", MeshDimension::kData, &Strategy::dp},
    DimensionRow{"pp", MeshDimension::kPipeline, &Strategy::pp},
};

inline const DimensionRow& RowOf(MeshDimension dimension) {
  return kDimensions[static_cast<size_t>(dimension)];
}

std::string RecomputeText(const Strategy& strategy);  // "full:8"
// " within nodes", " within 16 ranks", or "".
std::string ZeroGroupWords(const Strategy& strategy);

}  // namespace tessera
