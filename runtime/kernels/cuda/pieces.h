#pragma once
// Calls in pieces that fit into the workspace and into a grid. On the host.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "planner/base/divide.h"
#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

// The most blocks along y or z of a grid (CUDA C++ Programming Guide 13.0,
// "Compute Capabilities").
inline constexpr int64_t kMostBlocksAcross = 65535;

// How large pieces of `count` are: of at most `most`, for which bytes_of(size)
// are in the workspace, or of one. Pieces but for the last are of one size.
template <typename BytesOf>
int64_t PieceOf(int64_t count, int64_t most, const CudaQueue& queue,
                BytesOf bytes_of) {
  int64_t size = std::max<int64_t>(std::min(count, most), 1);
  while (size > 1 && bytes_of(size) > queue.workspace_bytes) {
    size = DivideUp(size, 2);
  }
  return DivideUp(std::max<int64_t>(count, 1),
                  DivideUp(std::max<int64_t>(count, 1), size));
}

// Calls f(range) for the pieces of [0, count); of nothing once.
template <typename F>
void ForEachPiece(int64_t count, int64_t piece, F f) {
  for (int64_t begin = 0; begin == 0 || begin < count; begin += piece) {
    f(Range{begin, std::min(begin + piece, count)});
  }
}

// These samples of a tensor, whose first dimension they are.
inline LocalTensor SamplesOf(const LocalTensor& tensor, Range samples) {
  LocalTensor some = tensor;
  const int64_t of_one =
      tensor.elements() / std::max<int64_t>(tensor.shape[0], 1);
  int64_t before = samples.begin * of_one;
  // A sample is whole rows.
  if (tensor.row_stride > 0) before = before / tensor.row * tensor.row_stride;
  if (tensor.data != nullptr) {
    some.data = tensor.as<std::byte>() + before * SizeOf(tensor.dtype);
  }
  some.shape[0] = samples.size();
  if (!some.offset.empty()) some.offset[0] += samples.begin;
  return some;
}

// Calls f(part) with the parts of a call that have `piece` of its samples each.
// `of_all` are operands and results without that dimension: to such results all
// parts but the first add.
template <typename F>
void ForEachPieceOfSamples(const KernelCall& call, int64_t samples,
                           int64_t piece,
                           std::initializer_list<const LocalTensor*> of_all,
                           F f) {
  if (piece >= samples) return f(call);
  const auto is_of_all = [&](const LocalTensor& tensor) {
    return std::ranges::find(of_all, &tensor) != of_all.end();
  };
  ForEachPiece(samples, piece, [&](Range range) {
    const auto parts_of = [&](std::span<const LocalTensor> tensors) {
      std::vector<LocalTensor> parts;
      for (const LocalTensor& tensor : tensors) {
        parts.push_back(is_of_all(tensor) ? tensor : SamplesOf(tensor, range));
      }
      return parts;
    };
    const std::vector<LocalTensor> operands = parts_of(call.operands);
    const std::vector<LocalTensor> results = parts_of(call.results);
    KernelCall part = call;
    part.operands = operands;
    part.results = results;
    part.accumulate =
        call.accumulate ||
        (range.begin > 0 && std::ranges::any_of(call.results, is_of_all));
    f(part);
  });
}

}  // namespace tessera
