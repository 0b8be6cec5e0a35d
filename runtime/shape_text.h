#pragma once
// Shapes in messages and files.

#include <string>

#include "planner/base/append.h"
#include "planner/ir/graph.h"

namespace tessera {

// "[2, 3]"; of a scalar "[]".
inline std::string ShapeText(const Shape& shape) {
  std::string text;
  for (int64_t extent : shape) AppendTo(text, ", ", std::to_string(extent));
  return "[" + text + "]";
}

}  // namespace tessera
