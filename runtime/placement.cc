#include "runtime/placement.h"

#include <algorithm>

namespace tessera {
namespace {

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

Box WholeBox(const Shape& shape) {
  Box box;
  for (int64_t extent : shape) box.push_back({0, extent});
  return box;
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

}  // namespace tessera
