#pragma once
// Memory-centric tiling: a large linear runs as n tiles, one after another
// (Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.1.3; DeepSpeed's
// TiledLinear). Each rank's shard of the weight is cut along its rows, and a
// tile's parameter, gradient and optimizer state are stored, gathered, reduced
// and updated on their own, so that of a weight that is stored cut one tile (or
// two, with one gathered ahead) is whole at a time.
//
// Rows are what is cut, never the reduced dimension: each tile then makes whole
// columns of the result, and only the gradient of the input is a sum over
// tiles. Since it is the rank's shard that is cut, layouts of activations are
// what they are without tiles, and mesh axes may split any factor besides.
//
// Functions without state; thread-safe.

#include <optional>

#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"

namespace tessera {

// A linear of more tiles is refused: each is several tasks.
inline constexpr int kMostTiles = 1024;

// The dimension of a weight that is cut into tiles: its first of an extent
// above 1, so that a tile is one piece of memory.
int TiledDim(const Graph& graph, TensorId weight);

// The factor of a node's rule that indexes the tiled dimension, where the node
// runs in tiles: a linear of a placement with several, its input's gradient or
// its weight's. Else -1.
int TiledFactor(const Graph& graph, const OpPlacement& placement, NodeId node);

// Whether a forward node may run in tiles: a linear of several rows whose
// weight nothing else reads.
bool CanTile(const GraphIndex& index, NodeId node);

// The most tiles that leave each a row on every rank. REQUIRES: CanTile.
int MostTiles(const GraphIndex& index, const Plan& plan, NodeId node);

// Gives every linear of a block that can so many tiles, or as many as it has
// room for.
void SetTiles(const GraphIndex& index, int block, int tiles, Plan& plan);

// The least number for which SetTiles gives a block's linears what they have,
// or nothing where there is none.
std::optional<int> TilesOf(const GraphIndex& index, const Plan& plan,
                           int block);

}  // namespace tessera
