#pragma once
// Splits of images that convolutions and pooling read by windows. Where the
// places of the windows are split, so is the image: each shard reads besides
// its own rows those of its neighbours that its windows reach into, a halo.
// Pure functions.

#include <optional>

#include "planner/ir/graph.h"
#include "planner/ops/window.h"

namespace tessera {

// The windows of a node in one direction: place o covers
// [o * stride - pad, o * stride - pad + span) of the image.
struct Windows {
  char image = 'h';  // letters of the image's and the places' factors
  char place = 'y';
  int64_t in = 1;   // extent of the image
  int64_t out = 1;  // and of the places
  int64_t stride = 1;
  int64_t pad = 0;
  int64_t span = 1;
};

// Nothing for a node without windows (OpDef::windows), or one that has not both
// the image and the places, as a bias's gradient.
std::optional<Windows> WindowsOf(const Graph& graph, const Node& node,
                                 Direction direction);

// Where the places are cut into `parts` shards, so is the image (the shards of
// both by ShardRange), and who reads a shard of one reads of the other so much
// before and behind its own shard:
struct Reach {
  int64_t before = 0;
  int64_t after = 0;
};
// of the image, for windows at the places of its shard (forward, and a
// weight's gradient);
Reach ImageReach(const Windows& windows, int64_t parts);
// of the places, for all windows that touch its shard of the image (an image's
// gradient);
Reach PlaceReach(const Windows& windows, int64_t parts);
// and of the image, for all of these windows (the gradient of a maximum).
Reach TouchedReach(const Windows& windows, int64_t parts);

}  // namespace tessera
