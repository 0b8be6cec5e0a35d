#pragma once
// Weights that nodes cut, join and turn before a recurrent layer reads them:
// exporters keep PyTorch's tensors, whose gates have another order.
// Thread-safe: functions without state.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "planner/io/onnx_file.h"
#include "planner/io/published_weights.h"
#include "planner/ir/graph.h"

namespace tessera::onnx {

// Elements of one tensor of the file, or of several slabs beside each other.
struct Slab {
  Shape shape;
  // Of one tensor: the place of the first element, and the dimensions' strides.
  const OnnxTensor* source = nullptr;
  int64_t offset = 0;
  Shape strides;
  // Of several: their dimension `axis`, in which alone they differ.
  size_t axis = 0;
  std::vector<Slab> parts;
};

// The tensor with its dimensions in the order `order`.
Slab SlabOf(const OnnxTensor& tensor, std::span<const size_t> order);

// `count` places of dimension `d` from `begin` on. REQUIRES: they are there.
Slab CutOf(const Slab& slab, size_t d, int64_t begin, int64_t count);

// Nothing where the shapes differ in other dimensions, or there is no slab.
std::optional<Slab> JointOf(std::vector<Slab> parts, size_t axis);

Slab TurnedOf(const Slab& slab, std::span<const size_t> order);

// With extents of 1 more or fewer; nothing for other shapes.
std::optional<Slab> RelabelledOf(const Slab& slab, const Shape& shape);

// The runs of all its elements, row by row.
std::vector<PublishedPiece> PiecesOf(const Slab& slab);

}  // namespace tessera::onnx
