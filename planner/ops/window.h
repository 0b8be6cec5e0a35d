#pragma once
// A window that moves over an image, in one direction: of convolutions and
// pooling. Attributes of a node: stride_height, pad_top, dilation_height (1
// where there is none), out_height, and the same of the width, pad_left.

#include <string>
#include <string_view>

#include "planner/ir/op.h"

namespace tessera {

enum class Direction : uint8_t { kHeight, kWidth };

// What is wrong with the window in that direction, `size` long: padding of a
// whole window, a place that lies behind the image. Empty for nothing.
// REQUIRES: the rule has h and w, y and x.
std::string WindowProblem(const OpCall& call, Direction direction,
                          int64_t size);

}  // namespace tessera
