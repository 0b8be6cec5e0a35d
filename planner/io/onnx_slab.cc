#include "planner/io/onnx_slab.h"

#include <algorithm>

namespace tessera::onnx {
namespace {

// The number of dimension `d` among those that are wider than 1.
int64_t PlaceAmongWide(const Shape& shape, size_t d) {
  return std::count_if(shape.begin(), shape.begin() + static_cast<int64_t>(d),
                       [](int64_t extent) { return extent != 1; });
}

void Append(const Slab& slab, std::vector<PublishedPiece>& pieces) {
  if (slab.source == nullptr) {
    // Rows of all parts in turn, where dimensions are in front of the joint.
    for (size_t d = 0; d < slab.axis; ++d) {
      if (slab.shape[d] == 1) continue;
      for (int64_t row = 0; row < slab.shape[d]; ++row) {
        Append(CutOf(slab, d, row, 1), pieces);
      }
      return;
    }
    for (const Slab& part : slab.parts) Append(part, pieces);
    return;
  }
  PublishedPiece& piece = pieces.emplace_back();
  piece.tensor = slab.source->name;
  piece.stored_as = slab.source->stored_as;
  piece.shape = slab.source->dims;
  piece.offset = slab.offset;
  piece.count = 1;
  for (size_t d = 0; d < slab.shape.size(); ++d) {
    const int64_t extent = slab.shape[d];
    const int64_t stride = slab.strides[d];
    piece.count *= extent;
    if (extent == 1) continue;
    // Dimensions that follow each other in the file are one.
    auto& block = piece.block;
    if (!block.empty() && block.back().stride == extent * stride) {
      block.back() = {block.back().extent * extent, stride};
    } else {
      block.push_back({extent, stride});
    }
  }
  if (piece.block.size() == 1 && piece.block[0].stride == 1) {
    piece.block.clear();
  }
}

}  // namespace

Slab SlabOf(const OnnxTensor& tensor, std::span<const size_t> order) {
  Slab slab;
  slab.shape = tensor.dims;
  slab.source = &tensor;
  slab.strides.assign(tensor.dims.size(), 1);
  for (size_t d = tensor.dims.size(); d-- > 1;) {
    slab.strides[d - 1] = slab.strides[d] * tensor.dims[d];
  }
  return TurnedOf(slab, order);
}

Slab CutOf(const Slab& slab, size_t d, int64_t begin, int64_t count) {
  Slab cut = slab;
  cut.shape[d] = count;
  if (slab.source != nullptr) {
    cut.offset += begin * slab.strides[d];
    return cut;
  }
  cut.parts.clear();
  for (const Slab& part : slab.parts) {
    if (d != slab.axis) {
      cut.parts.push_back(CutOf(part, d, begin, count));
      continue;
    }
    const int64_t extent = part.shape[d];
    const int64_t first = std::max<int64_t>(0, begin);
    const int64_t last = std::min(extent, begin + count);
    if (first < last) cut.parts.push_back(CutOf(part, d, first, last - first));
    begin -= extent;
  }
  return cut.parts.size() == 1 ? cut.parts[0] : cut;
}

std::optional<Slab> JointOf(std::vector<Slab> parts, size_t axis) {
  if (parts.empty() || axis >= parts[0].shape.size()) return std::nullopt;
  Slab joint;
  joint.shape = parts[0].shape;
  joint.shape[axis] = 0;
  joint.axis = axis;
  for (const Slab& part : parts) {
    Shape same = part.shape;
    if (same.size() != joint.shape.size()) return std::nullopt;
    same[axis] = joint.shape[axis];
    if (same != joint.shape) return std::nullopt;
    joint.shape[axis] += part.shape[axis];
  }
  if (parts.size() == 1) return std::move(parts[0]);
  joint.parts = std::move(parts);
  return joint;
}

Slab TurnedOf(const Slab& slab, std::span<const size_t> order) {
  Slab turned = slab;
  for (size_t d = 0; d < order.size(); ++d) {
    turned.shape[d] = slab.shape[order[d]];
    if (slab.source != nullptr) turned.strides[d] = slab.strides[order[d]];
    if (slab.axis == order[d]) turned.axis = d;
  }
  for (Slab& part : turned.parts) part = TurnedOf(part, order);
  return turned;
}

std::optional<Slab> RelabelledOf(const Slab& slab, const Shape& shape) {
  const auto wide = [](const Shape& of) {
    Shape extents = of;
    std::erase(extents, 1);
    return extents;
  };
  if (wide(slab.shape) != wide(shape)) return std::nullopt;
  Slab other = slab;
  other.shape = shape;
  if (slab.source != nullptr) {
    other.strides.assign(shape.size(), 1);
    for (size_t d = 0, from = 0; d < shape.size(); ++d) {
      if (shape[d] == 1) continue;
      while (slab.shape[from] == 1) ++from;
      other.strides[d] = slab.strides[from++];
    }
    return other;
  }
  // The joint dimension is wider than 1: it is the same one among those.
  const int64_t place = PlaceAmongWide(slab.shape, slab.axis);
  other.axis = 0;
  while (shape[other.axis] == 1 || PlaceAmongWide(shape, other.axis) != place) {
    ++other.axis;
  }
  for (Slab& part : other.parts) {
    const int64_t extent = part.shape[slab.axis];
    Shape of_part = shape;
    of_part[other.axis] = extent;
    // A part of one place has as few wide dimensions as its shape.
    const auto relabelled = RelabelledOf(part, of_part);
    if (!relabelled) return std::nullopt;
    part = *relabelled;
  }
  return other;
}

std::vector<PublishedPiece> PiecesOf(const Slab& slab) {
  std::vector<PublishedPiece> pieces;
  Append(slab, pieces);
  int64_t begin = 0;
  for (PublishedPiece& piece : pieces) {
    piece.begin = begin;
    begin += piece.count;
  }
  return pieces;
}

}  // namespace tessera::onnx
