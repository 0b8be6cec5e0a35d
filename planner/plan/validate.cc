#include "planner/plan/validate.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "planner/base/indexed.h"
#include "planner/base/quoted.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/recompute.h"
#include "planner/plan/sequence_order.h"
#include "planner/plan/stages.h"
#include "planner/plan/tiles.h"
#include "planner/schedule/action_table.h"

namespace tessera {
namespace {

// More would be a slip, and shares of several axes are multiplied.
constexpr int kMostShare = 1 << 20;

// Collects the problems of one plan. Nothing is built for a valid plan, so
// that the search can afford a whole check where a move changes the whole plan.
class Validator {
 public:
  // Stops soon after `most` problems.
  Validator(const GraphIndex& index, const Cluster& cluster, const Plan& plan,
            size_t most)
      : index_(index),
        graph_(*index.graph),
        cluster_(cluster),
        plan_(plan),
        most_(most) {}

  std::vector<Error> Run() {
    if (plan_.graph_fingerprint != index_.fingerprint) {
      Fail("graph_fingerprint",
           "the plan is for another model: its graph is " +
               Quoted(plan_.graph_fingerprint) + ", this one (" + graph_.name +
               ", global batch " + std::to_string(graph_.global_batch) +
               ", sequence length " + std::to_string(graph_.seq_len) + ") is " +
               Quoted(index_.fingerprint));
      // The nodes would be compared with those of another model.
      return std::move(errors_);
    }
    CheckGroups();
    CheckBatch();
    CheckStorage();
    // Sizes on a mesh that is none would mean nothing.
    if (meshes_ok_ && !Full()) {
      CheckPlacements();
      CheckWeights();
    }
    return std::move(errors_);
  }

  bool RunOn(std::span<const NodeId> nodes, std::span<const size_t> weights) {
    CheckBatch();
    CheckStorage();
    stages_ok_ = true;
    for (NodeId node : nodes) {
      const OpPlacement& op = plan_.ops[node.index()];
      CheckPlacement(node, op, plan_.groups[op.group.index()]);
      if (Full()) return false;
      CheckActivationTier(node);
    }
    for (size_t weight : weights) CheckWeight(weight);
    return errors_.empty() && StaysZigzag(index_, plan_, nodes);
  }

  bool RunOnFields(const PipelineShape& shape) {
    CheckBatch();
    CheckSchedule(shape);
    for (size_t i = 0; i < plan_.ops.size() && !Full(); ++i) {
      const NodeId node(i);
      CheckSampleGroups(node);
      const int sample = index_.SampleFactor(node);
      if (sample >= 0) CheckShard(node, static_cast<size_t>(sample));
    }
    return errors_.empty() && ZigzagProblem(index_, plan_).empty();
  }

 private:
  void Fail(std::string where, std::string message) {
    errors_.push_back(InvalidInput(std::move(message), std::move(where)));
  }

  bool Full() const { return errors_.size() >= most_; }

  // Plan files name nodes and weights, and give those with equal decisions one
  // entry.
  std::string NodeText(NodeId node) const {
    return "placements: node " + Quoted(graph_.node(node).name);
  }
  std::string WeightText(TensorId weight) const {
    return "weights: " + Quoted(graph_.tensor(weight).name);
  }

  void CheckGroups() {
    if (plan_.groups.empty()) Fail("groups", "expected at least one");
    std::vector<int> group_of_device(cluster_.devices.size(), -1);
    for (size_t g = 0; g < plan_.groups.size(); ++g) {
      const DeviceGroup& group = plan_.groups[g];
      const auto where = [&](std::string_view field) {
        return Indexed("groups", g) + "." + std::string(field);
      };
      for (size_t other = 0; other < g; ++other) {
        if (plan_.groups[other].name == group.name) {
          Fail(where("name"), Quoted(group.name) + " occurs twice");
          break;
        }
      }
      if (group.devices.empty())
        Fail(where("devices"), "expected at least one");
      for (size_t i = 0; i < group.devices.size(); ++i) {
        const DeviceId device = group.devices[i];
        if (!device.valid() || device.index() >= cluster_.devices.size()) {
          Fail(where(Indexed("devices", i)),
               "device " + std::to_string(device.value) +
                   " does not exist: cluster " + Quoted(cluster_.name) +
                   " has " + std::to_string(cluster_.devices.size()) +
                   " devices (the plan was made for " +
                   Quoted(plan_.cluster_name) + ")");
          devices_ok_ = false;
          continue;
        }
        int& last_group = group_of_device[device.index()];
        if (last_group == static_cast<int>(g)) {
          Fail(where(Indexed("devices", i)),
               "device " + std::to_string(device.value) +
                   " is already in group " + Quoted(group.name));
        }
        last_group = static_cast<int>(g);
      }
      CheckAxes(group, where("axes"));
    }
  }

  void CheckAxes(const DeviceGroup& group, const std::string& where) {
    if (group.axes.size() > static_cast<size_t>(kMaxAxes)) {
      Fail(where, "has " + std::to_string(group.axes.size()) +
                      " axes: expected at most " + std::to_string(kMaxAxes));
      meshes_ok_ = false;
      return;
    }
    int64_t product = 1;
    int64_t parts = 1;
    for (size_t a = 0; a < group.axes.size(); ++a) {
      const MeshAxis& axis = group.axes[a];
      if (axis.size < 1) {
        Fail(where + Indexed("", a) + ".size",
             "is " + std::to_string(axis.size) + ": expected at least 1");
        meshes_ok_ = false;
        return;
      }
      if (!CheckShares(axis, where + Indexed("", a) + ".shares")) {
        meshes_ok_ = false;
        return;
      }
      product *= axis.size;
      parts *= PartsOf(axis);
      if (product > INT32_MAX) {
        Fail(where, "the mesh has more than " + std::to_string(INT32_MAX) +
                        " positions");
        meshes_ok_ = false;
        return;
      }
      if (parts > INT32_MAX) {
        Fail(where, "the shares make more than " + std::to_string(INT32_MAX) +
                        " parts");
        meshes_ok_ = false;
        return;
      }
      for (size_t other = 0; other < a; ++other) {
        if (group.axes[other].name == axis.name) {
          Fail(where + Indexed("", a) + ".name",
               Quoted(axis.name) + " occurs twice");
          break;
        }
      }
    }
    if (product != static_cast<int64_t>(group.devices.size())) {
      Fail(where, "the mesh has " + std::to_string(product) +
                      " positions for " + std::to_string(group.devices.size()) +
                      " devices");
    }
  }

  bool CheckShares(const MeshAxis& axis, const std::string& where) {
    if (axis.shares.empty()) return true;
    const size_t before = errors_.size();
    if (std::ssize(axis.shares) != axis.size) {
      Fail(where, "has " + std::to_string(axis.shares.size()) +
                      " shares: expected " + std::to_string(axis.size) +
                      ", one for each coordinate, or none");
    }
    for (int share : axis.shares) {
      if (share > 0 && share <= kMostShare) continue;
      Fail(where, "has " + std::to_string(share) + ": expected 1 to " +
                      std::to_string(kMostShare));
      break;
    }
    return errors_.size() == before;
  }

  void CheckBatch() {
    if (auto found = FindSchedule(plan_.schedule); !found) {
      Fail("schedule", found.error().message);
    }
    if (plan_.microbatches < 1) {
      Fail("microbatches", "is " + std::to_string(plan_.microbatches) +
                               ": expected at least 1");
    } else if (plan_.microbatches > kMostMicrobatches) {
      Fail("microbatches", "is " + std::to_string(plan_.microbatches) +
                               ": expected at most " +
                               std::to_string(kMostMicrobatches) +
                               "; give a microbatch more samples (mbs)");
    } else if (graph_.global_batch % plan_.microbatches != 0) {
      Fail("microbatches", "is " + std::to_string(plan_.microbatches) +
                               ": expected a divisor of the global batch " +
                               std::to_string(graph_.global_batch));
    } else {
      batch_ = graph_.global_batch / plan_.microbatches;
    }
  }

  void CheckStorage() {
    if (plan_.bucket_bytes < Bytes{}) {
      Fail("bucket_bytes", "is " + std::to_string(plan_.bucket_bytes.value) +
                               ": expected at least 0");
    }
    if (plan_.prefetch < 0) {
      Fail("prefetch", "is " + std::to_string(plan_.prefetch) +
                           ": expected at least 0 blocks");
    }
  }

  bool HasStorage(GroupId group) const {
    if (cluster_.hosts.size() == 1) return cluster_.HasStorage();
    return std::ranges::all_of(
        plan_.groups[group.index()].devices, [&](DeviceId device) {
          return cluster_.HostOf(device).storage > Bytes{};
        });
  }

  // The hosts of a group's devices have the tier. `at` says whose it is.
  template <typename Text>
  void CheckTier(MemoryTier tier, GroupId group, const Text& at,
                 std::string_view field) {
    if (tier == MemoryTier::kDevice) return;
    const std::string where = at() + " " + std::string(field);
    if (cluster_.hosts.empty()) {
      Fail(where, "is " + std::string(NameOf(tier)) +
                      ": expected device, since cluster " +
                      Quoted(cluster_.name) + " has no figures of its hosts");
    } else if (tier == MemoryTier::kFile && !HasStorage(group)) {
      const bool some = std::ranges::any_of(
          cluster_.hosts, [](const Host& h) { return h.storage > Bytes{}; });
      Fail(where, "is file: expected device or host, since cluster " +
                      Quoted(cluster_.name) + " has no storage" +
                      (some ? " on all nodes of group " +
                                  Quoted(plan_.groups[group.index()].name)
                            : ""));
    }
  }

  void CheckPlacements() {
    if (plan_.ops.size() != index_.forward_nodes) {
      Fail("placements", "has " + std::to_string(plan_.ops.size()) +
                             " placements: expected " +
                             std::to_string(index_.forward_nodes) +
                             ", one for each forward node");
      return;
    }
    bool positions_exist = true;
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      const NodeId node(static_cast<int64_t>(i));
      const GroupId group = plan_.ops[i].group;
      if (!group.valid() || group.index() >= plan_.groups.size()) {
        Fail(NodeText(node), "group " + std::to_string(group.value) +
                                 " does not exist: the plan has " +
                                 std::to_string(plan_.groups.size()));
        positions_exist = false;
        continue;
      }
      const auto blocks = static_cast<int>(graph_.blocks.size());
      if (plan_.ops[i].chunk < 0 || plan_.ops[i].chunk >= blocks) {
        Fail(NodeText(node), "chunk " + std::to_string(plan_.ops[i].chunk) +
                                 ": expected 0 to " +
                                 std::to_string(blocks - 1) +
                                 ", since each chunk has a block");
        positions_exist = false;
      }
      CheckPlacement(node, plan_.ops[i], plan_.groups[group.index()]);
      if (Full()) return;
    }
    if (positions_exist && devices_ok_) CheckStages();
    if (!positions_exist || !axes_ok_) return;
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      CheckActivationTier(NodeId(i));
    }
    if (const auto problem = ZigzagProblem(index_, plan_); !problem.empty()) {
      Fail("zigzag", "is " + std::to_string(plan_.zigzag) + ": " + problem);
    }
  }

  // A tier off the device is of results that wait for backward.
  void CheckActivationTier(NodeId id) {
    const OpPlacement& op = plan_.ops[id.index()];
    if (op.activation_tier == MemoryTier::kDevice ||
        KeepsResults(index_, plan_, id)) {
      return;
    }
    Fail(NodeText(id) + " activation_tier",
         "is " + std::string(NameOf(op.activation_tier)) +
             ": expected device, since " +
             (op.recompute ? "backward computes the node's results anew"
                           : "the node's results are not kept for backward"));
  }

  void CheckPlacement(NodeId id, const OpPlacement& placement,
                      const DeviceGroup& group) {
    const Node& node = graph_.node(id);
    if (placement.recompute && !CanRecompute(graph_, id)) {
      Fail(NodeText(id) + " recompute",
           Quoted(node.op->name) + " cannot run twice in a step");
    }
    CheckSampleGroups(id);
    CheckTiles(id, placement);
    CheckTier(
        placement.activation_tier, placement.group,
        [&] { return NodeText(id); }, "activation_tier");
    AxisSet used = placement.rooted;
    CheckRooted(id, placement.rooted, group);
    CheckStreamed(id, placement, group);
    for (size_t f = 0; f < static_cast<size_t>(kMaxFactors); ++f) {
      const AxisSet axes = placement.axes[f];
      if (axes == 0) continue;
      if (f >= node.rule.factors.size()) {
        Fail(NodeText(id), "splits factor " + std::to_string(f) +
                               "; its rule '" + node.rule.ToString() +
                               "' has " +
                               std::to_string(node.rule.factors.size()));
        continue;
      }
      const Factor& factor = node.rule.factors[f];
      const auto fail = [&](std::string message) {
        Fail(NodeText(id) + " factor '" + factor.letter + "'",
             std::move(message));
      };
      if (axes & ~group.all_axes()) {
        fail("uses axis " +
             std::to_string(std::countr_zero(axes & ~group.all_axes())) +
             " of a mesh with " + std::to_string(group.axes.size()) +
             " axes (group " + Quoted(group.name) + ")");
        axes_ok_ = false;
        continue;
      }
      if (const AxisSet twice = axes & used; twice != 0) {
        fail(
            "axis " +
            Quoted(
                group.axes[static_cast<size_t>(std::countr_zero(twice))].name) +
            " already serves another factor of the node");
      }
      used |= axes;
      if (!factor.splittable) {
        fail("cannot be split (rule '" + node.rule.ToString() + "')");
        continue;
      }
      CheckUneven(id, f, group);
      CheckShard(id, f);
    }
  }

  // The axes of a factor leave each rank some of it.
  void CheckShard(NodeId id, size_t f) {
    const OpPlacement& op = plan_.ops[id.index()];
    if (op.axes[f] == 0 || batch_ == 0) return;
    const int64_t extent = index_.Extent(id, f, batch_);
    const DeviceGroup& group = plan_.groups[op.group.index()];
    if (SmallestShard(group, op.axes[f], extent) > 0) return;
    const Factor& factor = graph_.node(id).rule.factors[f];
    Fail(
        NodeText(id) + " factor '" + factor.letter + "'",
        "an empty shard: its extent " + std::to_string(extent) +
            (factor.role == Role::kSample ? " (samples of a microbatch)" : "") +
            " is split over " + std::to_string(group.Size(op.axes[f])) +
            " ranks" +
            (group.IsUneven(op.axes[f]) ? " of unequal shares" : ""));
  }

  // Of samples alone, and where no operator norms some of them together.
  void CheckUneven(NodeId id, size_t f, const DeviceGroup& group) {
    const AxisSet axes = plan_.ops[id.index()].axes[f];
    if (!group.IsUneven(axes)) return;
    const Node& node = graph_.node(id);
    const Factor& factor = node.rule.factors[f];
    const auto fail = [&](std::string message) {
      Fail(NodeText(id) + " factor '" + factor.letter + "'",
           "is split by an axis of group " + Quoted(group.name) +
               " with unequal shares: " + std::move(message));
    };
    if (factor.role != Role::kSample) {
      fail("only samples may be");
    } else if (!node.op->coupling.groups.empty()) {
      fail("the groups of samples that " + Quoted(node.op->name) +
           " norms are equal");
    }
  }

  // Each microbatch has so many.
  void CheckSampleGroups(NodeId id) {
    const Node& node = graph_.node(id);
    const std::string_view name = node.op->coupling.groups;
    if (name.empty() || batch_ == 0) return;
    const auto groups = static_cast<int64_t>(node.attribute(name));
    if (batch_ % groups != 0) {
      Fail("microbatches", "is " + std::to_string(plan_.microbatches) +
                               ", which leaves " + std::to_string(batch_) +
                               " samples in each: expected a multiple of the " +
                               std::to_string(groups) + " groups of samples " +
                               "that node " + Quoted(node.name) + " norms");
    }
  }

  void CheckTiles(NodeId id, const OpPlacement& placement) {
    if (placement.tiles == 1) return;
    const Node& node = graph_.node(id);
    const auto fail = [&](const std::string& expected) {
      Fail(NodeText(id) + " tiles",
           "is " + std::to_string(placement.tiles) + ": expected " + expected);
    };
    if (placement.tiles < 1) return fail("at least 1");
    if (node.op->name != "linear") {
      return fail("1, since only a linear runs in tiles, no " +
                  Quoted(node.op->name));
    }
    if (!CanTile(index_, id)) {
      return fail("1, since " + Quoted(graph_.tensor(node.operands[1]).name) +
                  " has one row, or other operators read it, too");
    }
    for (AxisSet axes : placement.axes) {
      // CheckPlacement says so.
      if (axes & ~plan_.groups[placement.group.index()].all_axes()) return;
    }
    const int most = MostTiles(index_, plan_, id);
    if (placement.tiles > most) {
      fail("at most " + std::to_string(most) +
           (most == kMostTiles
                ? ""
                : ", the rows of the smallest shard of " +
                      Quoted(graph_.tensor(node.operands[1]).name)));
    }
  }

  void CheckStreamed(NodeId id, const OpPlacement& placement,
                     const DeviceGroup& group) {
    if (placement.streamed == 0) return;
    const Node& node = graph_.node(id);
    const auto fail = [&](std::string message) {
      Fail(NodeText(id) + " streamed", std::move(message));
    };
    if (node.op->streamed == 0) {
      fail(Quoted(node.op->name) + " has no operands that can be streamed");
      return;
    }
    const int sequence = index_.SequenceFactor(id);
    const AxisSet split =
        sequence < 0 ? 0 : placement.axes[static_cast<size_t>(sequence)];
    if (placement.streamed & ~split & group.all_axes()) {
      fail("expected axes that split factor '" +
           std::string(1, kSequenceFactor) + "' of the node");
      return;
    }
    if (placement.streamed & ~group.all_axes()) {
      fail("uses axes beyond the " + std::to_string(group.axes.size()) +
           " of group " + Quoted(group.name));
      return;
    }
    const int64_t extent = index_.Extent(
        id, static_cast<size_t>(node.rule.FactorOf(node.op->streamed)), 1);
    const int64_t degree = group.Size(placement.streamed);
    if (extent < degree) {
      fail("an empty shard: the extent " + std::to_string(extent) +
           " of factor '" + std::string(1, node.op->streamed) +
           "' is split over " + std::to_string(degree) + " ranks");
    }
  }

  void CheckRooted(NodeId id, AxisSet rooted, const DeviceGroup& group) {
    if (rooted == 0) return;
    if (rooted & ~group.all_axes()) {
      Fail(NodeText(id) + " rooted", "uses axes beyond the " +
                                         std::to_string(group.axes.size()) +
                                         " of group " + Quoted(group.name));
    }
    for (TensorId operand : graph_.node(id).operands) {
      if (graph_.tensor(operand).kind != TensorKind::kWeight) continue;
      Fail(NodeText(id) + " rooted",
           "the node reads weight " + Quoted(graph_.tensor(operand).name) +
               ": expected none, since only nodes without weights run at a "
               "root");
      return;
    }
  }

  // "group 1", or where there are chunks "group 1, chunk 0".
  std::string PositionText(const OpPlacement& op, int chunks) const {
    return "group " + std::to_string(op.group.value) +
           (chunks > 1 ? ", chunk " + std::to_string(op.chunk) : "");
  }

  // Every group works, stages have a block in each chunk and send forward.
  void CheckStages() {
    const Stages stages = StagesOf(graph_, plan_);
    const PipelineShape shape = ShapeOf(graph_, plan_);
    const auto stage = [&](NodeId node) {
      return stages.of_group[plan_.ops[node.index()].group.index()];
    };
    const auto position = [&](NodeId node) {
      return plan_.ops[node.index()].chunk * shape.stages + stage(node);
    };
    const auto text = [&](NodeId node) {
      return PositionText(plan_.ops[node.index()], shape.chunks);
    };
    std::vector<bool> has_node(plan_.groups.size(), false);
    std::vector<bool> has_block(
        static_cast<size_t>(shape.stages * shape.chunks), false);
    for (size_t b = 0; b < index_.nodes_of_block.size(); ++b) {
      const std::vector<NodeId>& nodes = index_.nodes_of_block[b];
      for (NodeId node : nodes) {
        has_node[plan_.ops[node.index()].group.index()] = true;
        has_block[static_cast<size_t>(position(node))] = true;
      }
      for (NodeId node : nodes) {
        if (position(node) == position(nodes[0])) continue;
        Fail(NodeText(node), "is on " + text(node) + ", but its block " +
                                 Quoted(graph_.blocks[b]) + " begins on " +
                                 text(nodes[0]) +
                                 "; a block is lowered in one chunk");
        break;
      }
    }
    for (size_t g = 0; g < plan_.groups.size(); ++g) {
      const auto of_group = static_cast<size_t>(stages.of_group[g]);
      const bool first = stages.groups[of_group][0].index() == g;
      for (int chunk = 0; chunk < shape.chunks; ++chunk) {
        const auto p = static_cast<size_t>(chunk * shape.stages) + of_group;
        if (has_node[g] && (!first || has_block[p])) continue;
        Fail(
            Indexed("groups", g),
            "group " + Quoted(plan_.groups[g].name) + " has no operator" +
                (shape.chunks > 1 ? " in chunk " + std::to_string(chunk) : ""));
      }
    }
    for (const GraphIndex::BlockEdge& edge : index_.block_edges) {
      const Node& producer = graph_.node(edge.producer);
      const auto fail = [&](std::string_view why) {
        Fail(NodeText(edge.consumer),
             "is on " + text(edge.consumer) + ", but reads " +
                 Quoted(producer.name) + " from " + text(edge.producer) + "; " +
                 std::string(why));
      };
      if (position(edge.producer) > position(edge.consumer)) {
        fail(shape.chunks > 1 ? "a pipeline sends to later positions only"
                              : "a pipeline sends to later stages only");
      } else if (producer.op->once_per_step &&
                 stage(edge.producer) != stage(edge.consumer)) {
        fail("what is computed once a step stays in its pipeline stage");
      }
    }
    CheckSchedule(shape);
    stages_ok_ = true;
  }

  void CheckSchedule(const PipelineShape& shape) {
    const auto schedule = FindSchedule(plan_.schedule);
    if (!schedule) return;  // CheckBatch says so
    if (auto accepted = Accepts(**schedule, shape); !accepted) {
      Fail("schedule", accepted.error().message);
    }
    if ((*schedule)->order != nullptr) {
      if (!plan_.actions.empty()) {
        Fail("actions",
             "are for schedule 'table', not " + Quoted(plan_.schedule));
      }
      return;
    }
    if (plan_.actions.size() != static_cast<size_t>(shape.stages)) {
      Fail("actions", "has " + std::to_string(plan_.actions.size()) +
                          " lists: expected " + std::to_string(shape.stages) +
                          ", one for each stage");
      return;
    }
    if (plan_.microbatches < 1 || plan_.microbatches > kMostMicrobatches) {
      return;  // CheckBatch says so
    }
    for (const OrderProblem& problem : CheckOrders(plan_.actions, shape)) {
      const auto stage = static_cast<size_t>(problem.stage);
      std::string where = Indexed("actions", stage);
      if (problem.action >= 0) {
        const auto i = static_cast<size_t>(problem.action);
        where += "." + Indexed("actions", i) + " " +
                 Quoted(ToString(plan_.actions[stage][i], shape.chunks));
      }
      Fail(where, problem.message);
    }
  }

  void CheckWeights() {
    if (plan_.weights.size() != index_.weights.size()) {
      Fail("weights", "has " + std::to_string(plan_.weights.size()) +
                          " placements: expected " +
                          std::to_string(index_.weights.size()) +
                          ", one for each weight");
      return;
    }
    for (size_t w = 0; w < plan_.weights.size(); ++w) CheckWeight(w);
  }

  void CheckWeight(size_t w) {
    const WeightPlacement& placement = plan_.weights[w];
    const GraphIndex::WeightUse& use = index_.weights[w];
    const auto fail = [&](std::string_view field, std::string message) {
      Fail(WeightText(use.tensor) + " " + std::string(field),
           std::move(message));
    };
    if (placement.zero_stage < 0 || placement.zero_stage > 3) {
      fail("zero_stage", "is " + std::to_string(placement.zero_stage) +
                             ": expected 0, 1, 2 or 3");
      return;
    }
    if (placement.zero_stage > 1 && stages_ok_ &&
        IsTiedAcrossGroups(index_, plan_, w)) {
      fail("zero_stage",
           "is " + std::to_string(placement.zero_stage) +
               " of a weight that several groups read: expected 0 or 1");
      return;
    }
    const auto at = [&] { return WeightText(use.tensor); };
    for (const GraphIndex::Use& reader : index_.readers[use.tensor.index()]) {
      const GroupId group = plan_.ops[reader.node.index()].group;
      CheckTier(placement.parameter_tier, group, at, "parameter_tier");
      CheckTier(placement.optimizer_tier, group, at, "optimizer_tier");
      if (!stages_ok_ || cluster_.HasStorage()) break;  // none differs
    }
    if (placement.parameter_tier != MemoryTier::kDevice && stages_ok_ &&
        IsTiedAcrossGroups(index_, plan_, w)) {
      fail("parameter_tier",
           "is " + std::string(NameOf(placement.parameter_tier)) +
               " of a weight that several groups read: expected device");
      return;
    }
    if (const std::string problem = GradientTierProblem(placement, w);
        !problem.empty()) {
      fail("gradient_tier",
           "is " + std::string(NameOf(placement.gradient_tier)) + problem);
      return;
    }
    if (placement.rooted != 0 &&
        (placement.zero_stage > 0 || placement.zero_axes != 0)) {
      fail("rooted",
           "the root keeps the whole state: expected zero_stage 0 and no "
           "zero_axes");
      return;
    }
    if (placement.rooted != 0 && stages_ok_) {
      CheckCopies(placement.rooted, w, "rooted", fail);
    }
    if (placement.zero_axes == 0) return;
    if (placement.zero_stage == 0) {
      fail("zero_axes", "stage 0 cuts nothing: expected none");
      return;
    }
    // Needs a placement of the home node to compare with.
    if (!stages_ok_) return;
    CheckCopies(placement.zero_axes, w, "zero_axes", fail);
  }

  // What speaks against the tier of a weight's gradient, or nothing.
  std::string GradientTierProblem(const WeightPlacement& placement,
                                  size_t weight) const {
    if (placement.gradient_tier == MemoryTier::kDevice) return "";
    if (placement.gradient_tier == MemoryTier::kFile) {
      return ": expected device or host";
    }
    if (placement.optimizer_tier == MemoryTier::kDevice) {
      return ": expected device, since the optimizer's state is there";
    }
    if (stages_ok_ && IsTiedAcrossGroups(index_, plan_, weight)) {
      return " of a weight that several groups read: expected device";
    }
    return "";
  }

  // Axes on which a weight's copies may differ in what they keep.
  template <typename FailFunction>
  void CheckCopies(AxisSet axes, size_t weight, std::string_view field,
                   const FailFunction& fail) {
    const auto& [id, operand] = index_.weights[weight].home;
    const OpPlacement& home = plan_.ops[id.index()];
    const DeviceGroup& group = plan_.groups[home.group.index()];
    if (axes & ~group.all_axes()) {
      fail(field,
           "uses axis " +
               std::to_string(std::countr_zero(axes & ~group.all_axes())) +
               " of a mesh with " + std::to_string(group.axes.size()) +
               " axes");
      return;
    }
    const Node& node = graph_.node(id);
    AxisSet sharded = 0;
    for (uint8_t f : node.rule.operands[operand]) sharded |= home.axes[f];
    if (const AxisSet wrong = axes & sharded; wrong != 0) {
      fail(field,
           "axis " +
               Quoted(group.axes[static_cast<size_t>(std::countr_zero(wrong))]
                          .name) +
               " already shards the weight itself at " + Quoted(node.name));
      return;
    }
    if (field != "zero_axes") return;
    const int64_t shard = SmallestShardOf(index_, plan_, weight);
    if (const int64_t degree = group.Size(axes); shard < degree) {
      fail(field, "an empty shard: " + std::to_string(shard) +
                      " elements are cut over " + std::to_string(degree) +
                      " ranks");
    }
  }

  const GraphIndex& index_;
  const Graph& graph_;
  const Cluster& cluster_;
  const Plan& plan_;
  const size_t most_;
  int64_t batch_ = 0;  // samples of a microbatch; 0 where it is not known
  bool meshes_ok_ = true;
  bool devices_ok_ = true;
  bool axes_ok_ = true;  // of placements
  bool stages_ok_ = false;
  std::vector<Error> errors_;
};

// A stage cuts where it can. The search gives its plans the axes last
// (MakeCanonical), and who writes one by hand may forget them.
std::vector<Error> CutProblems(const GraphIndex& index, const Plan& plan) {
  std::vector<Error> errors;
  const auto lacks_axes = [](const WeightPlacement& weight) {
    return weight.zero_stage > 0 && weight.zero_axes == 0;
  };
  if (std::ranges::none_of(plan.weights, lacks_axes)) return errors;
  const std::vector<AxisSet> axes = AllZeroAxes(index, plan);
  for (size_t w = 0; w < axes.size(); ++w) {
    if (!lacks_axes(plan.weights[w]) || axes[w] == 0) continue;
    const GraphIndex::WeightUse& use = index.weights[w];
    const DeviceGroup& group =
        plan.groups[plan.ops[use.home.node.index()].group.index()];
    const auto axis = static_cast<size_t>(std::countr_zero(axes[w]));
    errors.push_back(InvalidInput(
        "none, though ranks along axis " + Quoted(group.axes[axis].name) +
            " hold the same: expected some, or zero_stage 0",
        "weights: " + Quoted(index.graph->tensor(use.tensor).name) +
            " zero_axes"));
  }
  return errors;
}

}  // namespace

std::vector<Error> Validate(const GraphIndex& index, const Cluster& cluster,
                            const Plan& plan) {
  std::vector<Error> errors = Validator(index, cluster, plan, SIZE_MAX).Run();
  return errors.empty() ? CutProblems(index, plan) : errors;
}

bool IsValid(const GraphIndex& index, const Cluster& cluster,
             const Plan& plan) {
  return Validator(index, cluster, plan, 1).Run().empty();
}

bool StaysValid(const GraphIndex& index, const Cluster& cluster,
                const Plan& plan, std::span<const NodeId> nodes,
                std::span<const size_t> weights) {
  return Validator(index, cluster, plan, 1).RunOn(nodes, weights);
}

bool FieldsAreValid(const GraphIndex& index, const Cluster& cluster,
                    const Plan& plan, const PipelineShape& shape) {
  return Validator(index, cluster, plan, 1).RunOnFields(shape);
}

bool SendsForward(const GraphIndex& index, const Plan& plan,
                  std::span<const GraphIndex::BlockEdge> edges) {
  const auto stages = static_cast<int>(plan.groups.size());
  return std::ranges::all_of(edges, [&](const GraphIndex::BlockEdge& edge) {
    const OpPlacement& from = plan.ops[edge.producer.index()];
    const OpPlacement& to = plan.ops[edge.consumer.index()];
    if (index.graph->node(edge.producer).op->once_per_step &&
        from.group != to.group) {
      return false;
    }
    return from.chunk * stages + from.group.value <=
           to.chunk * stages + to.group.value;
  });
}

std::vector<Error> Validate(const Graph& graph, const Cluster& cluster,
                            const Plan& plan) {
  return Validate(GraphIndex(graph), cluster, plan);
}

}  // namespace tessera
