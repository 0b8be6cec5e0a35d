#include "planner/io/plan_io.h"

#include <cmath>
#include <map>
#include <sstream>
#include <unordered_map>
#include <vector>

#include "planner/base/indexed.h"
#include "planner/base/table.h"
#include "planner/io/proto_file_io.h"
#include "planner/plan/stages.h"
#include "planner/schedule/action_table.h"
#include "proto/plan.pb.h"

namespace tessera {
namespace {

size_t ForwardNodes(const Graph& graph) {
  size_t count = 0;
  while (count < graph.nodes.size() &&
         graph.nodes[count].pass == Pass::kForward) {
    ++count;
  }
  return count;
}

// ---- to the file ----------------------------------------------------------

std::vector<std::string> AxisNames(AxisSet set, const DeviceGroup& group) {
  std::vector<std::string> names;
  for (size_t a = 0; a < group.axes.size(); ++a) {
    if (set >> a & 1) names.push_back(group.axes[a].name);
  }
  return names;
}

// Entries that are equal but for the names they are about.
template <typename Message>
Message* EntryFor(google::protobuf::RepeatedPtrField<Message>& entries,
                  std::map<std::string, Message*>& known,
                  const Message& entry) {
  const auto [found, is_new] =
      known.emplace(entry.SerializeAsString(), nullptr);
  if (is_new) {
    found->second = entries.Add();
    *found->second = entry;
  }
  return found->second;
}

// The tiers have the file's numbers.
static_assert(static_cast<int>(MemoryTier::kDevice) == proto::DEVICE);
static_assert(static_cast<int>(MemoryTier::kHost) == proto::HOST);
static_assert(static_cast<int>(MemoryTier::kFile) == proto::FILE);
static_assert(kMemoryTiers == proto::MemoryTier_ARRAYSIZE);

proto::MemoryTier ToProto(MemoryTier tier) {
  return static_cast<proto::MemoryTier>(tier);
}

Result<MemoryTier> FromProto(proto::MemoryTier tier, const std::string& where) {
  if (tier < 0 || tier >= kMemoryTiers) {
    return InvalidInput("must be DEVICE, HOST or FILE", where);
  }
  return static_cast<MemoryTier>(tier);
}

void AddPlacements(const Graph& graph, const Plan& plan, proto::Plan& out) {
  std::map<std::string, proto::Placement*> known;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const Node& node = graph.nodes[i];
    const OpPlacement& placement = plan.ops[i];
    const DeviceGroup& group = plan.groups[placement.group.index()];
    proto::Placement entry;
    entry.set_group(group.name);
    entry.set_chunk(placement.chunk);
    for (size_t f = 0; f < node.rule.factors.size(); ++f) {
      if (placement.axes[f] == 0) continue;
      proto::Split& split = *entry.add_splits();
      split.set_factor(std::string(1, node.rule.factors[f].letter));
      for (const std::string& name : AxisNames(placement.axes[f], group)) {
        split.add_axes(name);
      }
    }
    entry.set_recompute(placement.recompute);
    if (placement.tiles != 1) entry.set_tiles(placement.tiles);
    for (const std::string& name : AxisNames(placement.rooted, group)) {
      entry.add_rooted(name);
    }
    for (const std::string& name : AxisNames(placement.streamed, group)) {
      entry.add_streamed(name);
    }
    entry.set_activation_tier(ToProto(placement.activation_tier));
    EntryFor(*out.mutable_placements(), known, entry)->add_nodes(node.name);
  }
}

// By tensor; a weight is at home with its own.
std::vector<NodeId> FirstReaders(const Graph& graph) {
  std::vector<NodeId> readers(graph.tensors.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (TensorId operand : graph.nodes[i].operands) {
      NodeId& reader = readers[operand.index()];
      if (!reader.valid()) reader = NodeId(i);
    }
  }
  return readers;
}

void AddWeights(const Graph& graph, const Plan& plan, proto::Plan& out) {
  std::map<std::string, proto::WeightStorage*> known;
  const std::vector<TensorId> weights = Weights(graph);
  const std::vector<NodeId> readers = FirstReaders(graph);
  for (size_t w = 0; w < weights.size(); ++w) {
    const WeightPlacement& placement = plan.weights[w];
    proto::WeightStorage entry;
    entry.set_zero_stage(placement.zero_stage);
    const GroupId home = plan.ops[readers[weights[w].index()].index()].group;
    for (const std::string& name :
         AxisNames(placement.zero_axes, plan.groups[home.index()])) {
      entry.add_zero_axes(name);
    }
    for (const std::string& name :
         AxisNames(placement.rooted, plan.groups[home.index()])) {
      entry.add_rooted(name);
    }
    entry.set_parameter_tier(ToProto(placement.parameter_tier));
    entry.set_optimizer_tier(ToProto(placement.optimizer_tier));
    entry.set_gradient_tier(ToProto(placement.gradient_tier));
    EntryFor(*out.mutable_weights(), known, entry)
        ->add_weights(graph.tensor(weights[w]).name);
  }
}

proto::PlannedGraph PlannedGraphOf(const Graph& graph) {
  proto::PlannedGraph out;
  out.set_model(graph.name);
  out.set_global_batch(graph.global_batch);
  out.set_seq_len(graph.seq_len);
  out.set_dtype(std::string(NameOf(graph.dtype)));
  return out;
}

std::string InWords(const proto::PlannedGraph& graph) {
  std::string text =
      graph.model() + " (global batch " + std::to_string(graph.global_batch());
  if (graph.seq_len() > 1) {
    text += ", sequence length " + std::to_string(graph.seq_len());
  }
  return text + ", " + graph.dtype() + ")";
}

proto::Plan ToProto(const Graph& graph, const Plan& plan) {
  proto::Plan out;
  out.set_schema_version(kSchemaVersion);
  out.set_graph_fingerprint(plan.graph_fingerprint);
  out.set_cluster(plan.cluster_name);
  out.set_schedule(plan.schedule);
  out.set_microbatches(plan.microbatches);
  for (const DeviceGroup& group : plan.groups) {
    proto::DeviceGroup& row = *out.add_groups();
    row.set_name(group.name);
    for (DeviceId device : group.devices) row.add_devices(device.value);
    for (const MeshAxis& axis : group.axes) {
      proto::MeshAxis& entry = *row.add_axes();
      entry.set_name(axis.name);
      entry.set_size(axis.size);
      for (int share : axis.shares) entry.add_shares(share);
    }
  }
  const int chunks = ShapeOf(graph, plan).chunks;
  for (const std::vector<Action>& order : plan.actions) {
    proto::ActionList& list = *out.add_actions();
    for (const Action& action : order) {
      list.add_actions(ToString(action, chunks));
    }
  }
  AddPlacements(graph, plan, out);
  AddWeights(graph, plan, out);
  out.set_bucket_bytes(plan.bucket_bytes.value);
  if (plan.prefetch != Plan().prefetch) out.set_prefetch(plan.prefetch);
  out.set_zigzag(plan.zigzag);
  *out.mutable_graph() = PlannedGraphOf(graph);
  return out;
}

// ---- from the file --------------------------------------------------------

// For people though it is, what cannot be is a mistake of who wrote it.
Result<void> CheckPrediction(const proto::Prediction& said) {
  const auto check = [](double value, const char* field) -> Result<void> {
    if (std::isfinite(value) && value >= 0) return {};
    std::ostringstream text;
    text << "is " << value << ": expected a finite number, 0 or more";
    return InvalidInput(text.str(), std::string("prediction.") + field);
  };
  TESSERA_RETURN_IF_ERROR(check(said.step_time_s(), "step_time_s"));
  TESSERA_RETURN_IF_ERROR(
      check(said.baseline_step_time_s(), "baseline_step_time_s"));
  return check(said.error_band(), "error_band");
}

class Reader {
 public:
  Reader(const proto::Plan& message, const Graph& graph)
      : message_(message), graph_(graph) {}

  Result<Plan> Run() {
    TESSERA_RETURN_IF_ERROR(CheckFingerprint());
    return RunForAnySize();
  }

  Result<Plan> RunForAnySize() {
    plan_.graph_fingerprint = Fingerprint(graph_);
    plan_.cluster_name = message_.cluster();
    plan_.schedule = message_.schedule();
    if (message_.microbatches() < 1) {
      return InvalidInput("is " + std::to_string(message_.microbatches()) +
                              ": expected at least 1",
                          "microbatches");
    }
    plan_.microbatches = message_.microbatches();
    plan_.bucket_bytes = {message_.bucket_bytes()};
    if (message_.has_prefetch()) plan_.prefetch = message_.prefetch();
    plan_.zigzag = message_.zigzag();
    TESSERA_RETURN_IF_ERROR(ReadActions());
    TESSERA_RETURN_IF_ERROR(ReadGroups());
    TESSERA_RETURN_IF_ERROR(ReadPlacements());
    TESSERA_RETURN_IF_ERROR(ReadWeights());
    TESSERA_RETURN_IF_ERROR(CheckPrediction(message_.prediction()));
    return std::move(plan_);
  }

 private:
  Result<void> CheckFingerprint() {
    const std::string& found = message_.graph_fingerprint();
    const std::string expected = Fingerprint(graph_);
    if (found == expected) return {};
    const std::string own = InWords(PlannedGraphOf(graph_));
    std::string text = "is '" + found + "': the plan is for ";
    if (!message_.has_graph()) {
      text += "another model, batch, sequence length or dtype than " + own;
    } else if (const std::string other = InWords(message_.graph());
               other != own) {
      text += other + ", not for " + own;
    } else {
      text += "another model of the same name, " + own;
    }
    return InvalidInput(text + ", whose fingerprint is '" + expected + "'",
                        "graph_fingerprint");
  }

  Result<void> ReadActions() {
    for (int g = 0; g < message_.actions_size(); ++g) {
      const proto::ActionList& list = message_.actions(g);
      std::vector<Action> order;
      for (int i = 0; i < list.actions_size(); ++i) {
        auto action = ParseAction(list.actions(i));
        if (!action) {
          return action.error().At(
              Indexed("actions", g, Indexed("actions", i)));
        }
        order.push_back(*action);
      }
      plan_.actions.push_back(std::move(order));
    }
    return {};
  }

  Result<void> ReadGroups() {
    for (int g = 0; g < message_.groups_size(); ++g) {
      const proto::DeviceGroup& row = message_.groups(g);
      DeviceGroup group;
      group.name = row.name();
      for (int d = 0; d < row.devices_size(); ++d) {
        const int device = row.devices(d);
        if (device < 0 || device >= kMostPlannedDevices) {
          return InvalidInput("is " + std::to_string(device) +
                                  ": expected 0 to " +
                                  std::to_string(kMostPlannedDevices - 1),
                              Indexed("groups", g, Indexed("devices", d)));
        }
        group.devices.push_back(DeviceId(device));
      }
      if (row.axes_size() > kMaxAxes) {
        return InvalidInput("has " + std::to_string(row.axes_size()) +
                                " axes: expected at most " +
                                std::to_string(kMaxAxes),
                            Indexed("groups", g, "axes"));
      }
      for (int a = 0; a < row.axes_size(); ++a) {
        const proto::MeshAxis& axis = row.axes(a);
        if (axis.size() < 1 || axis.size() > kMostPlannedDevices) {
          return InvalidInput("is " + std::to_string(axis.size()) +
                                  ": expected 1 to " +
                                  std::to_string(kMostPlannedDevices),
                              Indexed("groups", g, Indexed("axes", a, "size")));
        }
        group.axes.push_back({axis.name(),
                              axis.size(),
                              {axis.shares().begin(), axis.shares().end()}});
      }
      plan_.groups.push_back(std::move(group));
    }
    return {};
  }

  Result<AxisSet> ReadAxes(
      const google::protobuf::RepeatedPtrField<std::string>& names,
      const DeviceGroup& group, const std::string& where) {
    AxisSet set = 0;
    for (const std::string& name : names) {
      const auto axis = Find("mesh axis", std::span<const MeshAxis>(group.axes),
                             std::string_view(name));
      if (!axis) {
        return InvalidInput(
            axis.error().message + " (group '" + group.name + "')", where);
      }
      const AxisSet bit = AxisSet{1} << (*axis - group.axes.data());
      if (set & bit) return InvalidInput("'" + name + "' occurs twice", where);
      set |= bit;
    }
    return set;
  }

  Result<void> ReadPlacements() {
    const size_t count = ForwardNodes(graph_);
    plan_.ops.resize(count);
    std::unordered_map<std::string_view, size_t> index;
    for (size_t i = 0; i < count; ++i) index[graph_.nodes[i].name] = i;
    std::vector<bool> placed(count, false);
    for (int p = 0; p < message_.placements_size(); ++p) {
      const proto::Placement& row = message_.placements(p);
      const auto group =
          Find("group", std::span<const DeviceGroup>(plan_.groups),
               std::string_view(row.group()));
      if (!group) {
        return InvalidInput(group.error().message,
                            Indexed("placements", p, "group"));
      }
      for (int n = 0; n < row.nodes_size(); ++n) {
        const std::string where = Indexed("placements", p, Indexed("nodes", n));
        const auto found = index.find(row.nodes(n));
        if (found == index.end()) {
          return InvalidInput("unknown node '" + row.nodes(n) + "'", where);
        }
        if (placed[found->second]) {
          return InvalidInput("'" + row.nodes(n) + "' is placed twice", where);
        }
        placed[found->second] = true;
        OpPlacement& placement = plan_.ops[found->second];
        placement.group = GroupId(*group - plan_.groups.data());
        placement.chunk = row.chunk();
        placement.recompute = row.recompute();
        if (row.has_tiles()) placement.tiles = row.tiles();
        TESSERA_TRY(placement.rooted,
                    ReadAxes(row.rooted(), **group,
                             Indexed("placements", p, "rooted")));
        TESSERA_TRY(placement.streamed,
                    ReadAxes(row.streamed(), **group,
                             Indexed("placements", p, "streamed")));
        TESSERA_TRY(placement.activation_tier,
                    FromProto(row.activation_tier(),
                              Indexed("placements", p, "activation_tier")));
        TESSERA_RETURN_IF_ERROR(ReadSplits(row, p, graph_.nodes[found->second],
                                           **group, placement));
      }
    }
    for (size_t i = 0; i < count; ++i) {
      if (!placed[i]) {
        return InvalidInput(
            "node '" + graph_.nodes[i].name + "' has no placement",
            "placements");
      }
    }
    return {};
  }

  Result<void> ReadSplits(const proto::Placement& row, int p, const Node& node,
                          const DeviceGroup& group, OpPlacement& placement) {
    for (int s = 0; s < row.splits_size(); ++s) {
      const proto::Split& split = row.splits(s);
      const std::string where = Indexed("placements", p, Indexed("splits", s));
      const int factor = split.factor().size() == 1
                             ? node.rule.FactorOf(split.factor()[0])
                             : -1;
      if (factor < 0) {
        return InvalidInput("node '" + node.name + "' has no factor '" +
                                split.factor() + "'; its rule is '" +
                                node.rule.ToString() + "'",
                            where + ".factor");
      }
      AxisSet& axes = placement.axes[static_cast<size_t>(factor)];
      if (axes != 0) {
        return InvalidInput("factor '" + split.factor() + "' is split twice",
                            where + ".factor");
      }
      TESSERA_TRY(axes, ReadAxes(split.axes(), group, where + ".axes"));
    }
    return {};
  }

  Result<void> ReadWeights() {
    const std::vector<TensorId> weights = Weights(graph_);
    plan_.weights.resize(weights.size());
    std::unordered_map<std::string_view, size_t> index;
    for (size_t w = 0; w < weights.size(); ++w) {
      index[graph_.tensor(weights[w]).name] = w;
    }
    const std::vector<NodeId> readers = FirstReaders(graph_);
    std::vector<bool> stored(weights.size(), false);
    for (int r = 0; r < message_.weights_size(); ++r) {
      const proto::WeightStorage& row = message_.weights(r);
      for (int n = 0; n < row.weights_size(); ++n) {
        const std::string where = Indexed("weights", r, Indexed("weights", n));
        const auto found = index.find(row.weights(n));
        if (found == index.end()) {
          return InvalidInput("unknown weight '" + row.weights(n) + "'", where);
        }
        const size_t w = found->second;
        if (stored[w]) {
          return InvalidInput("'" + row.weights(n) + "' occurs twice", where);
        }
        stored[w] = true;
        const NodeId reader = readers[weights[w].index()];
        const GroupId home = plan_.ops[reader.index()].group;
        plan_.weights[w].zero_stage = row.zero_stage();
        TESSERA_TRY(plan_.weights[w].zero_axes,
                    ReadAxes(row.zero_axes(), plan_.groups[home.index()],
                             Indexed("weights", r, "zero_axes")));
        TESSERA_TRY(plan_.weights[w].rooted,
                    ReadAxes(row.rooted(), plan_.groups[home.index()],
                             Indexed("weights", r, "rooted")));
        TESSERA_TRY(plan_.weights[w].parameter_tier,
                    FromProto(row.parameter_tier(),
                              Indexed("weights", r, "parameter_tier")));
        TESSERA_TRY(plan_.weights[w].optimizer_tier,
                    FromProto(row.optimizer_tier(),
                              Indexed("weights", r, "optimizer_tier")));
        TESSERA_TRY(plan_.weights[w].gradient_tier,
                    FromProto(row.gradient_tier(),
                              Indexed("weights", r, "gradient_tier")));
      }
    }
    for (size_t w = 0; w < weights.size(); ++w) {
      if (!stored[w]) {
        return InvalidInput(
            "weight '" + graph_.tensor(weights[w]).name + "' has no entry",
            "weights");
      }
    }
    return {};
  }

  const proto::Plan& message_;
  const Graph& graph_;
  Plan plan_;
};

}  // namespace

Result<Plan> ReadPlan(const std::string& path, const Graph& graph) {
  proto::Plan message;
  TESSERA_RETURN_IF_ERROR(ReadProtoFile(path, message));
  auto plan = Reader(message, graph).Run();
  if (!plan) return plan.error().At(path);
  return plan;
}

Result<PlanOfAnySize> ReadPlanOfAnySize(const std::string& path,
                                        const Graph& graph) {
  proto::Plan message;
  TESSERA_RETURN_IF_ERROR(ReadProtoFile(path, message));
  auto plan = Reader(message, graph).RunForAnySize();
  if (!plan) {
    Error error = plan.error().At(path);
    if (message.has_graph() && message.graph().model() != graph.name) {
      error.message += " (the plan is for " + InWords(message.graph()) +
                       ", not for " + InWords(PlannedGraphOf(graph)) + ")";
    }
    return error;
  }
  if (message.has_graph() && message.graph().global_batch() < 1) {
    return InvalidInput("is " + std::to_string(message.graph().global_batch()) +
                            ": expected 1 or more",
                        path + ": graph.global_batch");
  }
  return PlanOfAnySize{*std::move(plan), message.has_graph()
                                             ? message.graph().global_batch()
                                             : graph.global_batch};
}

Result<void> WritePlan(const std::string& path, const Graph& graph,
                       const Plan& plan, const PlanPrediction* prediction) {
  TESSERA_CHECK(plan.ops.size() == ForwardNodes(graph)) << plan.ops.size();
  proto::Plan message = ToProto(graph, plan);
  if (prediction != nullptr) {
    proto::Prediction& said = *message.mutable_prediction();
    said.set_step_time_s(prediction->step_time.seconds());
    said.set_measured(prediction->measured);
    if (!prediction->baseline.empty()) {
      said.set_baseline(prediction->baseline);
      said.set_baseline_step_time_s(prediction->baseline_step_time.seconds());
    }
    said.set_error_band(prediction->error_band);
    said.set_confirmed(prediction->confirmed);
  }
  return WriteProtoFile(path, message);
}

Result<std::string> PlanJson(const Graph& graph, const Plan& plan) {
  return JsonOf(ToProto(graph, plan));
}

}  // namespace tessera
