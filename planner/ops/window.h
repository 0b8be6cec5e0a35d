#pragma once
// A window that moves over an image, in one direction: of convolutions and
// pooling. Attributes of a node: stride_height (1 where there is none), pad_top
// (0), dilation_height (1), out_height, and the same of the width, pad_left.
//
// A signal is an image of one row: its rules have no letter of the height, as
// in "bcw!,ocl!->box", and its attributes of the height are those of nothing:
// 1, no padding 0.

#include <cstdint>
#include <span>
#include <string>

#include "planner/ir/op.h"

namespace tessera {

enum class Direction : uint8_t { kHeight, kWidth };

// How a window moves: at place o it begins at o * stride - pad.
struct WindowSteps {
  int64_t stride = 1;
  int64_t pad = 0;
  int64_t dilation = 1;
  // What a window of `size` elements covers.
  int64_t Span(int64_t size) const { return dilation * (size - 1) + 1; }
};
WindowSteps StepsOf(std::span<const Attribute> attributes, Direction direction);

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
