#include "planner/plan/transfer.h"

#include <algorithm>

#include "planner/base/check.h"

namespace tessera {
namespace {

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

bool Overlap(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.size(); ++d) {
    if (std::max(a[d].begin, b[d].begin) >= std::min(a[d].end, b[d].end)) {
      return false;
    }
  }
  return true;
}

}  // namespace

int64_t ElementsOf(const Box& box) {
  int64_t elements = 1;
  for (const Range& range : box) elements *= range.size();
  return elements;
}

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
  if (!Overlap(a, b)) return std::nullopt;
  Box both(a.size());
  for (size_t d = 0; d < a.size(); ++d) {
    both[d] = {std::max(a[d].begin, b[d].begin), std::min(a[d].end, b[d].end)};
  }
  return both;
}

namespace {

// Sources by where they lie along one dimension, that in which they differ
// most: of many most hold nothing that a target lacks.
class SourcesAlong {
 public:
  // Each source holds some boxes, all of one number of dimensions.
  explicit SourcesAlong(const std::vector<std::vector<Box>>& held) {
    size_t most = 0;
    const size_t dims = held.empty() || held[0].empty() ? 0 : held[0][0].size();
    for (size_t d = 0; d < dims; ++d) {
      std::vector<Spanned> along;
      for (size_t s = 0; s < held.size(); ++s) {
        if (!held[s].empty()) along.push_back({SpanOf(held[s], d), s});
      }
      std::ranges::sort(along, {}, [](const Spanned& x) {
        return std::pair(x.span.begin, x.source);
      });
      size_t distinct = 0;
      for (size_t i = 0; i < along.size(); ++i) {
        distinct += i == 0 || along[i].span.begin != along[i - 1].span.begin;
      }
      if (distinct <= most) continue;
      most = distinct;
      dim_ = d;
      along_ = std::move(along);
    }
    for (const Spanned& x : along_) {
      longest_ = std::max(longest_, x.span.size());
    }
    all_ = held.size();
  }

  // Those that may overlap some of `boxes`, in the order first, first + 1, …
  // with the numbers before `first` last.
  std::vector<size_t> Near(const std::vector<Box>& boxes, size_t first) const {
    std::vector<size_t> near;
    if (boxes.empty()) return near;
    if (along_.empty()) {  // of scalars
      for (size_t i = 0; i < all_; ++i) near.push_back((first + i) % all_);
      return near;
    }
    const Range span = SpanOf(boxes, dim_);
    auto at =
        std::ranges::upper_bound(along_, span.begin - longest_, {},
                                 [](const Spanned& x) { return x.span.begin; });
    for (; at != along_.end() && at->span.begin < span.end; ++at) {
      if (at->span.end > span.begin) near.push_back(at->source);
    }
    std::ranges::sort(near, {}, [&](size_t s) {
      return s >= first ? s - first : s + all_ - first;
    });
    return near;
  }

 private:
  struct Spanned {
    Range span;
    size_t source = 0;
  };
  static Range SpanOf(const std::vector<Box>& boxes, size_t dim) {
    Range span = boxes[0][dim];
    for (const Box& box : boxes) {
      span.begin = std::min(span.begin, box[dim].begin);
      span.end = std::max(span.end, box[dim].end);
    }
    return span;
  }

  size_t dim_ = 0;
  std::vector<Spanned> along_;
  int64_t longest_ = 0;
  size_t all_ = 0;
};

}  // namespace

std::vector<Piece> TransferPieces(const std::vector<Placement>& sources,
                                  const std::vector<Placement>& targets) {
  std::vector<std::vector<Box>> held;
  for (const Placement& source : sources) held.push_back(BoxesOf(source));
  const SourcesAlong near(held);
  std::vector<Piece> pieces;
  for (size_t t = 0; t < targets.size(); ++t) {
    std::vector<Box> missing = BoxesOf(targets[t]);
    const size_t first = t * sources.size() / targets.size();
    for (size_t s : near.Near(missing, first)) {
      if (missing.empty()) break;
      Piece piece{static_cast<int>(s), static_cast<int>(t), {}};
      for (const Box& box : held[s]) {
        if (std::ranges::none_of(missing, [&](const Box& wanted) {
              return Overlap(wanted, box);
            })) {
          continue;
        }
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
