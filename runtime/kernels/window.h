#pragma once
// Windows over images, in one direction (planner/ops/window.h), on the CPU and
// in CUDA.

#include <cstdint>
#include <string_view>

#include "runtime/kernels/kernel.h"

namespace tessera {

// Of the image and of the result there may be a block. A plain value, which
// CUDA kernels are given; constexpr for these.
struct WindowAxis {
  int64_t in = 0;      // extent of the image's block
  int64_t window = 0;  // elements
  int64_t out = 0;     // extent of the result's block
  int64_t stride = 1;
  int64_t dilation = 1;
  int64_t first = 0;  // of window 0, in the block
  int64_t pad = 0;
  // Where the whole image begins and ends, in the block.
  int64_t low = 0;
  int64_t high = 0;

  // The place in the image of element `k` of window `o`; may be outside.
  constexpr int64_t At(int64_t o, int64_t k) const {
    return first + o * stride + k * dilation;
  }
  constexpr bool Inside(int64_t place) const {
    return place >= 0 && place < in;
  }
  // The window whose element `k` is at `place`, or -1.
  constexpr int64_t WindowAt(int64_t place, int64_t k) const {
    const int64_t from = place - first - k * dilation;
    return from >= 0 && from % stride == 0 && from / stride < out
               ? from / stride
               : -1;
  }
  // What of a window without dilation is in the whole image: [begin, end).
  constexpr int64_t Begin(int64_t o) const {
    const int64_t place = At(o, 0);
    return place > low ? place : low;
  }
  constexpr int64_t End(int64_t o) const {
    const int64_t place = At(o, 0) + window;
    return place < high ? place : high;
  }
};

// Of dimension `from_last` (1: the width) of an image and a result, without
// window and dilation. Signals are images of one row.
inline WindowAxis WindowAxisOf(const KernelCall& call, size_t from_last,
                               const LocalTensor& image,
                               const LocalTensor& result) {
  const bool tall = from_last == 2;
  if (tall && call.rule->FactorOf('h') < 0) {
    return {.in = 1, .window = 1, .out = 1, .high = 1};
  }
  const auto whole = [&](std::string_view name) {
    return static_cast<int64_t>(call.attribute(name));
  };
  const auto last = [&](const std::vector<int64_t>& v) {
    return v[v.size() - from_last];
  };
  WindowAxis axis;
  axis.in = last(image.shape);
  axis.out = last(result.shape);
  axis.stride = whole(tall ? "stride_height" : "stride_width");
  axis.pad = whole(tall ? "pad_top" : "pad_left");
  axis.first =
      last(result.offset) * axis.stride - axis.pad - last(image.offset);
  axis.low = -last(image.offset);
  axis.high = last(image.global_shape) + axis.low;
  return axis;
}

}  // namespace tessera
