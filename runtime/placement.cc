#include "runtime/placement.h"

#include <algorithm>

namespace tessera {
namespace {

int64_t ElementsOf(const Box& box) {
  int64_t elements = 1;
  for (const Range& range : box) elements *= range.size();
  return elements;
}

// Appends the boxes of the run [begin, end) of block[dim, …), where `prefix`
// fixes the dimensions before.
void AppendBoxes(const Box& block, size_t dim, Range run, Box& prefix,
                 std::vector<Box>& boxes) {
  if (run.size() <= 0) return;
  if (dim == block.size()) {
    boxes.push_back(prefix);
    return;
  }
  int64_t stride = 1;
  for (size_t d = dim + 1; d < block.size(); ++d) stride *= block[d].size();
  const auto append_rows = [&](int64_t first, int64_t last) {
    if (first >= last) return;
    Box box = prefix;
    box.push_back({block[dim].begin + first, block[dim].begin + last});
    box.insert(box.end(), block.begin() + static_cast<int64_t>(dim) + 1,
               block.end());
    boxes.push_back(std::move(box));
  };
  const auto append_part = [&](int64_t row, Range part) {
    prefix.push_back({block[dim].begin + row, block[dim].begin + row + 1});
    AppendBoxes(block, dim + 1, part, prefix, boxes);
    prefix.pop_back();
  };
  const int64_t first = run.begin / stride;
  const int64_t last = run.end / stride;
  if (run.begin % stride == 0) {
    append_rows(first, last);
  } else if (first == last) {
    append_part(first, {run.begin % stride, run.end % stride});
    return;
  } else {
    append_part(first, {run.begin % stride, stride});
    append_rows(first + 1, last);
  }
  if (run.end % stride != 0) append_part(last, {0, run.end % stride});
}

// Appends `box` without `hole`, which lies inside it.
void AppendDifference(Box box, const Box& hole, std::vector<Box>& boxes) {
  for (size_t d = 0; d < box.size(); ++d) {
    if (box[d].begin < hole[d].begin) {
      boxes.push_back(box);
      boxes.back()[d].end = hole[d].begin;
    }
    if (hole[d].end < box[d].end) {
      boxes.push_back(box);
      boxes.back()[d].begin = hole[d].end;
    }
    box[d] = hole[d];
  }
}

// The index in the placement's buffer of the first element of `box`.
int64_t IndexOf(const Box& box, const Placement& placement) {
  int64_t index = 0;
  for (size_t d = 0; d < box.size(); ++d) {
    index = index * placement.block[d].size() + box[d].begin -
            placement.block[d].begin;
  }
  return index - placement.run.begin;
}

}  // namespace

Placement WholeBlock(Box block) {
  const int64_t elements = ElementsOf(block);
  return {std::move(block), {0, elements}};
}

Placement PlacementAt(const Layout& layout, const DeviceGroup& group,
                      const Shape& shape, int index) {
  return {BlockAt(layout, group, shape, index),
          FlatRunAt(layout, group, shape, index)};
}

std::vector<Box> BoxesOf(const Placement& placement) {
  std::vector<Box> boxes;
  Box prefix;
  AppendBoxes(placement.block, 0, placement.run, prefix, boxes);
  return boxes;
}

std::optional<Box> Intersection(const Box& a, const Box& b) {
  Box both(a.size());
  for (size_t d = 0; d < a.size(); ++d) {
    both[d] = {std::max(a[d].begin, b[d].begin), std::min(a[d].end, b[d].end)};
    if (both[d].size() <= 0) return std::nullopt;
  }
  return both;
}

std::optional<int64_t> ContiguousIn(const Placement& inner,
                                    const Placement& outer) {
  if (inner.elements() == 0) return 0;
  const std::vector<Box> boxes = BoxesOf(inner);
  const int64_t start = IndexOf(boxes.front(), outer);
  int64_t next = start;
  const std::vector<Box> outer_boxes = BoxesOf(outer);
  for (const Box& box : boxes) {
    int64_t held = 0;
    for (const Box& other : outer_boxes) {
      if (const auto both = Intersection(box, other)) held += ElementsOf(*both);
    }
    if (held != ElementsOf(box) || IndexOf(box, outer) != next) {
      return std::nullopt;
    }
    const BoxCopy copy = CopyOf(box, outer, WholeBlock(box), 1);
    if (copy.strided.dims != 0) return std::nullopt;
    next += ElementsOf(box);
  }
  return start;
}

BoxCopy CopyOf(const Box& box, const Placement& from, const Placement& to,
               int64_t element_bytes) {
  BoxCopy copy;
  copy.from_offset = IndexOf(box, from) * element_bytes;
  copy.to_offset = IndexOf(box, to) * element_bytes;
  StridedCopy& strided = copy.strided;
  strided.run_bytes = element_bytes;
  // Strides of the dimension at hand, innermost first.
  int64_t from_stride = element_bytes;
  int64_t to_stride = element_bytes;
  for (size_t d = box.size(); d-- > 0;) {
    const int64_t extent = box[d].size();
    if (extent != 1) {
      // A dimension that continues the one inside it, on both sides, joins it.
      const auto last = static_cast<size_t>(strided.dims - 1);
      if (strided.dims == 0 && from_stride == strided.run_bytes &&
          to_stride == strided.run_bytes) {
        strided.run_bytes *= extent;
      } else if (strided.dims > 0 &&
                 from_stride ==
                     strided.from_strides[last] * strided.extents[last] &&
                 to_stride ==
                     strided.to_strides[last] * strided.extents[last]) {
        strided.extents[last] *= extent;
      } else {
        const auto next = static_cast<size_t>(strided.dims++);
        strided.extents[next] = extent;
        strided.from_strides[next] = from_stride;
        strided.to_strides[next] = to_stride;
      }
    }
    from_stride *= from.block[d].size();
    to_stride *= to.block[d].size();
  }
  // Collected innermost first; a StridedCopy has the innermost last.
  std::reverse(strided.extents.begin(), strided.extents.begin() + strided.dims);
  std::reverse(strided.from_strides.begin(),
               strided.from_strides.begin() + strided.dims);
  std::reverse(strided.to_strides.begin(),
               strided.to_strides.begin() + strided.dims);
  return copy;
}

std::vector<Piece> TransferPieces(const std::vector<Placement>& sources,
                                  const std::vector<Placement>& targets) {
  std::vector<std::vector<Box>> held;
  for (const Placement& source : sources) held.push_back(BoxesOf(source));
  std::vector<Piece> pieces;
  for (size_t t = 0; t < targets.size(); ++t) {
    std::vector<Box> missing = BoxesOf(targets[t]);
    const size_t first = t * sources.size() / targets.size();
    for (size_t i = 0; i < sources.size() && !missing.empty(); ++i) {
      const size_t s = (first + i) % sources.size();
      Piece piece{static_cast<int>(s), static_cast<int>(t), {}};
      for (const Box& box : held[s]) {
        std::vector<Box> left;
        for (const Box& wanted : missing) {
          const auto both = Intersection(wanted, box);
          if (!both) {
            left.push_back(wanted);
            continue;
          }
          piece.boxes.push_back(*both);
          AppendDifference(wanted, *both, left);
        }
        missing = std::move(left);
      }
      if (!piece.boxes.empty()) pieces.push_back(std::move(piece));
    }
    TESSERA_CHECK(missing.empty())
        << "no source holds " << missing.size() << " boxes of target " << t;
  }
  return pieces;
}

}  // namespace tessera
