#pragma once
// What a convolution is called with, on the CPU and in CUDA.

#include <cstdint>

#include "runtime/kernels/kernel.h"

namespace tessera {

// A plain value, which CUDA kernels are given.
struct ConvolutionExtents {
  int64_t samples = 1;
  int64_t groups = 1;
  int64_t in = 1;   // channels of a group
  int64_t out = 1;  // likewise
};

// A call's image, weight and result, or their gradients.
struct ConvolutionCall {
  const LocalTensor* image = nullptr;
  const LocalTensor* weight = nullptr;
  const LocalTensor* result = nullptr;
  ConvolutionExtents extents;
  bool tall = true;  // of images; else of signals, which have one row
};

// REQUIRES: `call` is of a convolution or one of its adjoints.
ConvolutionCall ConvolutionCallOf(const KernelCall& call);

}  // namespace tessera
