#pragma once
// A window that moves over an image, in one direction: of convolutions and
// pooling. Attributes of a node: stride_height, pad_top, dilation_height (1
// where there is none), out_height, and the same of the width, pad_left.
//
// A signal is an image of one row: its rules have no letter of the height, as
// in "bcw!,ocl!->box", and its attributes of the height are those of nothing:
// 1, no padding 0.

#include <string>
#include <string_view>

#include "planner/ir/op.h"

namespace tessera {

enum class Direction : uint8_t { kHeight, kWidth };

// What is wrong with the window in that direction, `size` long: padding of a
// whole window, a place that lies behind the image; of a signal's height, that
// it has one. Empty for nothing. REQUIRES: the rule has w and x, and both of h
// and y or neither.
std::string WindowProblem(const OpCall& call, Direction direction,
                          int64_t size);

// Whether `indices` ends in the letters `height`, unless that is 0, and
// `width`, and has others in front.
bool EndsIn(const IndexRule& rule, const Indices& indices, char height,
            char width);

}  // namespace tessera
