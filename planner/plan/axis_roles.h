#pragma once
// Placements of a whole block from the roles of the mesh's axes, as Megatron-LM
// lays out a transformer (Shoeybi et al. 2019; Korthikanti et al. 2022 for
// sequence parallelism), derived from index rules and never from names.

#include <optional>
#include <span>
#include <vector>

#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"

namespace tessera {

// What the axes of a group do in a block. The sets are disjoint, but for
// `folded`; an axis in none of them repeats the block's work.
struct AxisRoles {
  AxisSet data = 0;       // split the batch
  AxisSet expert = 0;     // split the experts, and the batch outside of them
  AxisSet context = 0;    // split the sequence, everywhere
  AxisSet tensor = 0;     // split the insides of attention and MLP
  AxisSet folded = 0;     // those of `tensor` that split experts, not their
                          // insides
  bool sequence = false;  // where nothing else does, tensor axes split the
                          // sequence
  bool heads = false;     // context axes split the heads inside of attention,
                          // not the sequence (Jacobs et al. 2023, Ulysses)
  bool ring = false;      // attention's keys and values go round the context
                          // axes, where these split its sequence (Liu et al.
                          // 2023, Ring Attention)
  bool operator==(const AxisRoles&) const = default;
};

// How nodes use the axes of their group.
struct AxisUse {
  AxisSet sample = 0;
  AxisSet expert = 0;
  AxisSet sequence = 0;
  AxisSet heads = 0;  // other factors of attention
  AxisSet streamed = 0;
  AxisSet other = 0;
};

// Adds a node's. REQUIRES: all that is added to `use` is on one group.
void AddUse(const GraphIndex& index, NodeId node, const OpPlacement& placement,
            AxisUse& use);

// Those that split the sequence and, in attention alone, heads.
AxisSet HeadContextAxesOf(const AxisUse& use);

// The tensor axes that a dense layer asks for and finds no room for, or the
// context axes of attention that is to split heads by them.
struct UnusedAxes {
  NodeId node;
  int64_t columns = 0;     // what there is to split
  bool attention = false;  // the columns are attention heads
  bool context = false;
};

// The placements of the forward nodes of `block`, in the order of
// GraphIndex::nodes_of_block, on a group.
//  - Sample factors take the data axes, and outside of experts the expert axes
//    too; expert factors the expert axes, sequence factors the context axes,
//    which split attention's heads instead where `heads` says so. Folded axes
//    split experts, already where tokens are handed to them.
//  - Activations are on the residual stream when they come from an earlier
//    block, a lookup, or a dense layer that reduces. A dense layer that reads
//    the stream is column parallel: its output factors that survive up to the
//    next dense layer (or the loss) take the tensor axes, in order, as many as
//    their extents allow. Any other dense layer is row parallel: the factors
//    it reduces keep the axes that they arrive with. A dense layer that reads
//    the stream and has no such output factor, but hands the sequence on (to
//    the latents of an attention), leaves what it makes on the stream.
//  - An operator of the user's own (a graph file's) that reads the stream, and
//    weights, splits what its activations lack: factors of a weight that its
//    result lacks, too, or that survive up to the next dense layer. What it
//    makes is on the stream where nothing of it is split.
//  - A lookup in a table of the vocabulary is split by rows.
//  - All other nodes take the axes that their operands arrive with.
// `unused`, where not null, gets the dense layers that leave tensor axes unused
// which nothing behind them uses either. (With key/value heads fewer than
// ranks, attention does.)
std::vector<OpPlacement> PlaceBlock(const GraphIndex& index, int block,
                                    const DeviceGroup& group, GroupId group_id,
                                    const AxisRoles& roles,
                                    std::vector<UnusedAxes>* unused = nullptr);

// Writes their groups, axes and streamed axes into a plan.
void SetBlock(const GraphIndex& index, int block,
              const std::vector<OpPlacement>& placements, Plan& plan);

// Whether a plan has them, in any chunk.
bool BlockIs(const GraphIndex& index, int block,
             const std::vector<OpPlacement>& placements, const Plan& plan);

// The roles under which PlaceBlock gives `block` the placements that it has in
// `plan`, or nothing where there are none.
std::optional<AxisRoles> RolesOf(const GraphIndex& index, const Plan& plan,
                                 int block);

// The axes of `group` that split the heads of attention in a block, in place of
// the sequence, which they split in its other nodes there (AxisRoles::heads).
AxisSet HeadContextAxes(const GraphIndex& index, const Plan& plan, int block,
                        GroupId group);

// Elements of the smallest shard of a weight at home, or of its smallest tile:
// over as many ranks at most its state may be cut. REQUIRES: it is read.
int64_t SmallestShardOf(const GraphIndex& index, const Plan& plan,
                        size_t weight);

// Where ZeRO may cut a weight's state: those of the axes on which it is
// replicated at home that split only samples or the sequence there, in every
// node of its home block on its home group, and no more than leave every rank
// an element.
AxisSet ZeroAxes(const GraphIndex& index, const Plan& plan, size_t weight);

// The axes of a group whose subgroups lie within one host each, alone or all
// together.
AxisSet AxesWithinNode(const Cluster& cluster, const DeviceGroup& group);
// The innermost axes of `wanted`, as many as lie in `within`.
AxisSet InnermostWithin(AxisSet within, AxisSet wanted);

// Whether several groups read the weight: then its gradient and parameter are
// stored whole, since the groups exchange them.
bool IsTiedAcrossGroups(const GraphIndex& index, const Plan& plan,
                        size_t weight);
// `wanted`, or the highest stage below it that the weight allows.
int HighestZeroStage(const GraphIndex& index, const Plan& plan, size_t weight,
                     int wanted);

// Of each of `weights` the axes of ZeroAxes; none where it has no stage.
std::vector<AxisSet> ZeroAxesOf(const GraphIndex& index, const Plan& plan,
                                std::span<const size_t> weights);
// The same by weight of the plan.
std::vector<AxisSet> AllZeroAxes(const GraphIndex& index, const Plan& plan);
// Gives each weight those axes.
void SetZeroAxes(const GraphIndex& index, Plan& plan);

}  // namespace tessera
