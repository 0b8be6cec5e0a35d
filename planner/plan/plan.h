#pragma once
// Plan: the whole decision of how a graph runs on a cluster. Complete (nothing
// is left to be guessed by the lowering), comparable, serializable; it holds no
// clock and no path.
//
// Groups are the pipeline's stages, in order; a plan without a pipeline has
// one. Groups that share devices or blocks are of one stage (stages.h): so
// operators of one layer run on different devices. A stage may have several
// chunks of the model (virtual stages): chunk c of stage s is at position
// c * stages + s of the pipeline. Every forward node is placed: on a group,
// with the mesh axes that split each of its factors.
// Adjoints take the placement of their forward node; layouts, gradients'
// reductions and all communication follow from that.

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/ids.h"
#include "planner/base/units.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/layout.h"
#include "planner/plan/memory_tier.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {

struct OpPlacement {
  GroupId group{0};
  // By factor of the node's rule. An axis serves at most one factor; on an
  // axis that none takes, the node's work is repeated.
  std::array<AxisSet, kMaxFactors> axes = {};
  int chunk = 0;  // of the group
  // The backward pass computes the node's results anew from its operands
  // instead of keeping them (Chen et al. 2016). Results that other blocks or
  // groups read are kept all the same: they are the checkpoints.
  bool recompute = false;
  // The axes along which only the ranks at coordinate 0 do the work, on whole
  // operands: of a node that reads no weight.
  AxisSet rooted = 0;
  // Memory-centric tiling (planner/plan/tiles.h): a linear runs as so many
  // tiles, one after another.
  int tiles = 1;
  // Of a node with a streamed factor (OpDef::streamed): the axes, among those
  // that split its sequence, along which the operands with that factor stay
  // sharded and travel from rank to rank (Liu et al. 2023, "Ring Attention").
  AxisSet streamed = 0;
  // Where the node's results wait for backward: off the device they are copied
  // out when their block's forward has ended, and copied in one block ahead of
  // their first use in backward.
  MemoryTier activation_tier = MemoryTier::kDevice;
  bool operator==(const OpPlacement&) const = default;
};

// How a weight is stored along the axes of its group on which it is
// replicated (Rajbhandari et al. 2020). Stage 0 cuts nothing; stage 1 cuts the
// optimizer's state over `zero_axes`, stage 2 the gradient too (each
// microbatch's is reduced), stage 3 the parameter too (gathered
// Plan::prefetch blocks ahead of its use, in each pass). On the axes on which
// the weight is replicated but not cut, shards are replicated: a gradient is
// reduce-scattered over `zero_axes` and its shard all-reduced over the others
// (hybrid sharding, Zhao et al. 2023, "PyTorch FSDP").
struct WeightPlacement {
  int zero_stage = 0;
  AxisSet zero_axes = 0;
  // The axes along which only the ranks at coordinate 0 keep the optimizer's
  // state: gradients are reduced to them, and they broadcast what they update
  // (rooted data parallelism). Inputs that are read with such a weight come
  // from there too. Of a weight that is not cut.
  AxisSet rooted = 0;
  // Where the stored parameter lives (Rajbhandari et al. 2021,
  // "ZeRO-Infinity"). Off the device it is copied in Plan::prefetch blocks
  // ahead of its use, in each pass, and what is cut is then gathered. On the
  // device where several groups read the weight.
  MemoryTier parameter_tier = MemoryTier::kDevice;
  // Where the optimizer's state lives. Off the device it has the parameter in
  // the precision of the state besides, unless the parameter is stored just so
  // and there too, and the host does the step: the reduced gradient is copied
  // out, and the new parameter in (Ren et al. 2021, "ZeRO-Offload"). State in a
  // file is read one block, or of weights in tiles one tile, ahead of its step
  // and written behind it.
  MemoryTier optimizer_tier = MemoryTier::kDevice;
  // Where the gradient waits for a step that the host does: on the device, or
  // on the host, to which each microbatch's goes as soon as it is reduced and
  // where they are added (Ren et al. 2021, section 4.1), so that no gradient
  // stays on the device. On the device where several groups read the weight.
  MemoryTier gradient_tier = MemoryTier::kDevice;
  bool operator==(const WeightPlacement&) const = default;
};

// A step of more microbatches is refused: its tasks would fill the memory of
// the machine that plans.
inline constexpr int kMostMicrobatches = 32768;

struct Plan {
  std::string graph_fingerprint;
  std::string cluster_name;
  std::vector<DeviceGroup> groups;
  std::string schedule = "1f1b";  // a row of planner/schedule
  int microbatches = 1;
  std::vector<OpPlacement> ops;          // by forward node of the graph
  std::vector<WeightPlacement> weights;  // by weight tensor, in tensor order
  // Of schedule "table": what each stage does, in order. Else empty.
  StageOrders actions;
  // Gradients are reduced in buckets, in the order in which backward completes
  // them: a bucket as soon as it has so many bytes, and what is left of a block
  // with its end (Li et al. 2020, "PyTorch Distributed"; there a bucket may
  // span layers). 0: one bucket for each block.
  Bytes bucket_bytes;
  // How many blocks ahead of their use a stage gathers the parameters of ZeRO
  // stage 3, in each pass; 0: with the block that reads them. Each costs the
  // memory of a block's whole parameters.
  int prefetch = 1;
  // n > 1: positions of the sequence are in the zigzag order of n ranks
  // (sequence_order.h). 0: in their own.
  int zigzag = 0;
  bool operator==(const Plan&) const = default;
};

// Whether anything of the plan lives on the tier.
bool Uses(const Plan& plan, MemoryTier tier);
// Whether anything lies in the host's memory or in files.
bool Offloads(const Plan& plan);

// An optimizer, and how many numbers it keeps of each trained one: its kernel,
// of the same name, updates the parameter and these moments in place. One that
// is factored keeps besides these a number for each row, each column and each
// matrix, and one for each element of what is no matrix
// (planner/plan/matrix_form.h); its kernels are those of
// planner/lower/factored_update.h.
struct OptimizerRow {
  std::string_view name;
  std::string_view summary;
  int moments = 0;
  bool factored = false;
  bool decays = true;              // may have weight decay
  bool decays_by_default = false;  // has TrainingOptions::weight_decay
};
std::span<const OptimizerRow> Optimizers();
// REQUIRES: there is one of that name.
const OptimizerRow& OptimizerNamed(std::string_view name);
// Nothing where no optimizer is called so.
std::optional<int> MomentsOf(std::string_view optimizer);

// The optimizer and precision that a run uses: the state that memory must
// hold, and the work of the step.
struct TrainingOptions {
  std::string optimizer = "adamw";  // of Optimizers()
  double learning_rate = 3e-4;
  double clip = 1.0;   // global gradient norm; 0 for no clipping
  double beta1 = 0.9;  // of momentum, too
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
  // Of Adafactor, named and valued as torch.optim.Adafactor has them; without
  // `epsilon1` it is the machine epsilon of the type that the state is in.
  double beta2_decay = -0.8;
  std::optional<double> epsilon1 = {};
  double epsilon2 = 1e-3;
  double d = 1.0;
  // bf16 parameters are rounded up or down at random from their fp32 masters,
  // so that in the mean over steps they are these.
  bool stochastic_rounding = false;
  bool operator==(const TrainingOptions&) const = default;
};

// Whether a node may be computed twice in a step: not what runs once a step,
// and not the loss, which adds to a sum.
bool CanRecompute(const Graph& graph, NodeId node);

// The placement that a node of the (differentiated) graph runs under, by the
// factors of its own rule. An adjoint's comes from its forward node's, by
// letter; a gradient sum has only a group: its layout follows from its
// operands.
OpPlacement PlacementOf(const Graph& graph, const Plan& plan, NodeId node);

// The weights of a graph in tensor order: Plan::weights is parallel to it.
std::vector<TensorId> Weights(const Graph& graph);

// The axes along which the shards of a coupled node merge their states: those
// of its coupled factors, but for samples that are merged in groups
// (Coupling::groups) as many as a multiple of the shards, which cut none. And
// those of factors whose shards exchange what they must within the operator
// (OpDef::exchanged). Of other nodes none.
AxisSet MergedAxes(const Node& node, const OpPlacement& placement,
                   const DeviceGroup& group);

// Layouts that a placement on `group` gives to a node's operands and results: a
// dimension is sharded by the axes of its factor; a result is partial over the
// axes of the reduction factors it lacks (but for MergedAxes). An image is
// sharded as the places of the windows
// over it, with a halo where it is read (planner/plan/windows.h), if it has an
// index for every shard; otherwise it is whole.
Layout OperandLayout(const Graph& graph, const Node& node,
                     const OpPlacement& placement, const DeviceGroup& group,
                     size_t operand);
Layout ResultLayout(const Graph& graph, const Node& node,
                    const OpPlacement& placement, const DeviceGroup& group,
                    size_t result);

// Everything wrong with `plan` for `graph` on `cluster`, all problems at once:
// another model's plan, unknown devices or schedule, an axis that serves two
// factors, a split of what cannot be split, an empty shard, a batch that does
// not divide, an order of positions that sends data backwards, a schedule that
// does not run so many chunks.
std::vector<Error> Validate(const Graph& graph, const Cluster& cluster,
                            const Plan& plan);

}  // namespace tessera
