#include "planner/plan/windows.h"

#include <algorithm>

#include "planner/base/divide.h"
#include "planner/plan/layout.h"
#include "planner/plan/whole_extents.h"

namespace tessera {
namespace {

// Of the places whose windows touch [begin, end) of the image.
Range PlacesTouching(const Windows& w, Range image) {
  // o stride - pad + span > begin and o stride - pad < end.
  const int64_t least = image.begin + w.pad - w.span + 1;
  const int64_t most = image.end - 1 + w.pad;
  return {std::min(w.out, least <= 0 ? 0 : DivideUp(least, w.stride)),
          std::clamp<int64_t>(most / w.stride + 1, 0, w.out)};
}

// What the windows at [begin, end) cover of the image.
Range ImageUnder(const Windows& w, Range places) {
  return {std::max<int64_t>(0, places.begin * w.stride - w.pad),
          std::min(w.in, (places.end - 1) * w.stride - w.pad + w.span)};
}

// The most by which f(i) exceeds shard i of `extent`, on either side.
template <typename F>
Reach ReachOf(int64_t extent, int64_t parts, F f) {
  Reach reach;
  for (int64_t i = 0; i < parts; ++i) {
    const Range own = ShardRange(extent, parts, i);
    const Range wanted = f(i);
    if (wanted.size() <= 0) continue;
    reach.before = std::max(reach.before, own.begin - wanted.begin);
    reach.after = std::max(reach.after, wanted.end - own.end);
  }
  return reach;
}

}  // namespace

std::optional<Windows> WindowsOf(const Graph& graph, const Node& node,
                                 Direction direction) {
  if (!node.op->windows) return std::nullopt;
  const bool tall = direction == Direction::kHeight;
  Windows w;
  w.image = tall ? 'h' : 'w';
  w.place = tall ? 'y' : 'x';
  const auto extents = WholeExtents(graph, node);
  const auto extent_of = [&](char letter) {
    const int factor = node.rule.FactorOf(letter);
    return factor < 0 ? 0 : extents[static_cast<size_t>(factor)];
  };
  w.in = extent_of(w.image);
  w.out = extent_of(w.place);
  if (w.in == 0 || w.out == 0) return std::nullopt;
  const WindowSteps steps = StepsOf(node.attributes, direction);
  w.stride = steps.stride;
  w.pad = steps.pad;
  const int64_t weights = extent_of(tall ? 'k' : 'l');
  w.span =
      steps.Span(weights != 0 ? weights
                              : static_cast<int64_t>(node.attribute(
                                    tall ? "window_height" : "window_width")));
  return w;
}

Reach ImageReach(const Windows& w, int64_t parts) {
  return ReachOf(w.in, parts, [&](int64_t i) {
    return ImageUnder(w, ShardRange(w.out, parts, i));
  });
}

Reach PlaceReach(const Windows& w, int64_t parts) {
  return ReachOf(w.out, parts, [&](int64_t i) {
    return PlacesTouching(w, ShardRange(w.in, parts, i));
  });
}

Reach TouchedReach(const Windows& w, int64_t parts) {
  return ReachOf(w.in, parts, [&](int64_t i) {
    const Range places = PlacesTouching(w, ShardRange(w.in, parts, i));
    return places.size() > 0 ? ImageUnder(w, places) : Range{};
  });
}

}  // namespace tessera
