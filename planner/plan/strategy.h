#pragma once
// Strategy: a uniform plan in a few degrees, as Megatron-LM and its kin take
// them, and the way from it to a Plan. Also plans in words.
//
// Functions without state; thread-safe.

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/plan/recompute.h"

namespace tessera {

// The dimensions of a strategy's device mesh, by name in `order`.
enum class MeshDimension : uint8_t {
  kTensor,
  kContext,
  kExpert,
  kData,
  kPipeline
};

// How replicas of a weight are kept alike: every rank reduces and updates
// (distributed data parallelism), or one of them for all.
enum class DataParallelKind : uint8_t { kDdp, kRooted };

struct Strategy {
  int dp = 0;  // 0: what the other degrees leave of the cluster
  int tp = 1;
  int pp = 1;
  int vp = 1;  // chunks of a stage
  int cp = 1;
  std::string cp_kind = "gather";  // attention gathers keys and values, or
                                   // "ring": passes them round, or "ulysses":
                                   // splits heads instead
  bool zigzag = false;  // sequences are in the zigzag order of the cp ranks
  int ep = 1;           // splits experts; outside of them these ranks are
               // data-parallel too, beside the dp copies of each expert
  // Tensor ranks that split the inside of each expert, a divisor of tp; the
  // tp / etp ranks beside them have other experts (Megatron-Core's
  // expert-tensor-parallel-size). 0: tp.
  int etp = 0;
  // Samples of a microbatch on each data-parallel replica. 0: 1, or where
  // samples are no sequences all that a replica has.
  int mbs = 0;
  int zero = 0;  // ZeRO stage, 0 to 3; 1 at most where several stages read
                 // a weight
  // kRooted: the root of the data axes scatters the inputs, gathers the logits
  // and computes the loss, scatters its gradient, reduces the weights'
  // gradients, steps alone and broadcasts what it has updated. Not with ZeRO.
  DataParallelKind dp_kind = DataParallelKind::kDdp;
  // How many ranks share one cut (hybrid sharding): a number, kWithinNode, or 0
  // for all ranks that hold the weight alike.
  static constexpr int kWithinNode = -1;
  int zero_group = 0;
  Bytes bucket;      // Plan::bucket_bytes
  int prefetch = 1;  // Plan::prefetch
  int tiles = 1;     // of every linear that can run in tiles, or as many as it
                     // has rows for
  // Where parameters, optimizer states and gradients (of all weights) and kept
  // activations (of all nodes) live. Parameter and gradient of a weight that
  // several groups read stay on their device.
  MemoryTier parameter_tier = MemoryTier::kDevice;
  MemoryTier optimizer_tier = MemoryTier::kDevice;
  MemoryTier gradient_tier = MemoryTier::kDevice;
  MemoryTier activation_tier = MemoryTier::kDevice;
  // Where a run keeps the file tier; the plan does not have it.
  std::string offload_directory = {};
  // Devices of unlike types get work by their speed: replicas samples, stages
  // blocks.
  bool by_speed = false;
  bool sp = false;  // norms, dropout and residuals split the sequence over tp
  // The parallel branches of a block on halves of its group (branches.h).
  bool split_branches = false;
  RecomputeLevel recompute = RecomputeLevel::kNone;
  int recompute_layers = 0;       // the first so many; 0: all
  std::string schedule = "1f1b";  // a row of planner/schedule
  StageOrders actions = {};       // of schedule "table"
  // How ranks are laid on the fabric, innermost first.
  std::vector<MeshDimension> order = {
      MeshDimension::kTensor, MeshDimension::kContext, MeshDimension::kExpert,
      MeshDimension::kData, MeshDimension::kPipeline};
  bool operator==(const Strategy&) const = default;
};

// Reads "tp=8,pp=4,mbs=2,zero=1,sp=1,schedule=1f1b,order=tp-cp-ep-dp-pp" and
// "zero=3,zero-group=node,bucket=25MB,prefetch=2"; the empty text is data
// parallelism. What follows a comma in the value of "offload" without a '='
// belongs to it:
// "offload=optimizer:host,parameters:file:/mnt/nvme,activations:host", where
// the directory may be left out. Errors name the key, and for a value that is
// not lowered what is, for a key without effect what it needs. `where` is the
// key. A schedule that is no row with an order of its own names a file with a
// table of actions (planner/schedule/action_table.h), which is read; with vp
// and none it is "interleaved".
Result<Strategy> ParseStrategy(std::string_view text);

// `strategy` with dp and mbs as they are by default where it gives none,
// checked against the cluster and the batch.
Result<Strategy> Complete(const GraphIndex& index, const Cluster& cluster,
                          Strategy strategy);

// The plan of a strategy. Each degree becomes axes of prime size "dp0", "dp1",
// "tp0", …; each position of the pipeline (stages times chunks) takes an equal
// number of the blocks between the first and the last (the first goes with the
// first position, the last with the last; what does not divide goes where there
// is least to compute, later positions first, since earlier ones keep more
// microbatches: 126 layers on 16 are 7 on the first and the last and 8 between
// them, as Llama 3 405B was trained). With by_speed positions take blocks so
// that their work over the speed of their stage's slowest device is as equal as
// may be, and data axes whose coordinates are of unlike speeds get shares of a
// microbatch's samples likewise. Within a block axes act by role
// (axis_roles.h). Errors: degrees that do not make up the cluster, a batch
// that does not divide, tensor parallelism beyond the heads (an empty shard), a
// zero-group that no data and context axes make up, branches to split without a
// data axis of 2 or without blocks that have some, and what Validate finds.
Result<Plan> PlanFromStrategy(const GraphIndex& index, const Cluster& cluster,
                              const Strategy& strategy);
Result<Plan> PlanFromStrategy(const Graph& graph, const Cluster& cluster,
                              const Strategy& strategy);

// The strategy that gives `plan`, up to names of groups and axes; nothing
// where the plan is not uniform.
std::optional<Strategy> UniformStrategy(const GraphIndex& index,
                                        const Cluster& cluster,
                                        const Plan& plan);

// "dp4 tp8 pp1 cp2 mbs2 zero1 sp1", with a pipeline also "vp2 interleaved";
// keys with their defaults, but for the usual ones, are left out.
std::string ToString(const Strategy& strategy);
// The same of a uniform plan, of any other "custom (3 stages on 24 devices)".
std::string StrategyText(const GraphIndex& index, const Cluster& cluster,
                         const Plan& plan);

// The strategy as --strategy takes it, but for dp, which follows the devices;
// nothing where its schedule is a table of actions.
std::optional<std::string> FlagTextOf(const Strategy& strategy);

// Names each axis by what it does: "dp" splits only the batch, "ep" experts,
// "cp" the sequence, "tp" anything else, "rep" nothing; numbered, outer first.
void NameAxes(const GraphIndex& index, Plan& plan);

}  // namespace tessera
