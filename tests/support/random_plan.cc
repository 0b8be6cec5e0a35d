#include "tests/support/random_plan.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <numeric>
#include <sstream>
#include <string_view>

#include "planner/base/fnv1a.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/recompute.h"
#include "planner/plan/sequence_order.h"
#include "planner/plan/tiles.h"
#include "planner/schedule/pipeline_schedule.h"
#include "tests/support/weight_home.h"

namespace tessera {
namespace {

int Pick(Rng& rng, std::initializer_list<int> choices) {
  return choices.begin()[rng.Below(static_cast<uint32_t>(choices.size()))];
}

// Whether some rank would hold nothing.
bool HasEmptyShard(const Layout& layout, const DeviceGroup& group,
                   const Shape& shape) {
  for (size_t d = 0; d < shape.size(); ++d) {
    const bool tiled =
        layout.tile.count > 1 && static_cast<size_t>(layout.tile.dim) == d;
    const int64_t smallest = SmallestShard(group, layout.dims[d], shape[d]);
    if (smallest < (tiled ? layout.tile.count : 1)) return true;
  }
  return false;
}

std::vector<int> Digits(int mesh) {
  std::vector<int> digits;
  for (; mesh > 0; mesh /= 10) digits.push_back(mesh % 10);
  std::reverse(digits.begin(), digits.end());
  return digits;
}

int Product(const std::vector<int>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), 1, std::multiplies<>());
}

// A mesh of `ranks`: its prime factors in any order, or one axis, or two.
int RandomMesh(int ranks, Rng& rng) {
  if (ranks == 1) return 1;
  std::vector<int> sizes = PrimeFactors(ranks);
  while (sizes.size() > 1 && rng.Below(4) == 0) {
    const int last = sizes.back();
    sizes.pop_back();
    sizes[rng.Below(static_cast<uint32_t>(sizes.size()))] *= last;
  }
  int mesh = 0;
  while (!sizes.empty()) {
    const size_t i = rng.Below(static_cast<uint32_t>(sizes.size()));
    mesh = mesh * 10 + sizes[i];
    sizes.erase(sizes.begin() + static_cast<int64_t>(i));
  }
  return mesh;
}

class PlanMaker {
 public:
  PlanMaker(const GraphIndex& index, const PlanSpec& spec)
      : index_(index), graph_(*index.graph), spec_(spec) {}

  std::optional<Plan> Run() {
    const int ranks = RanksOf(spec_);
    if (ranks < 1 || ranks > kMostRanks) return {};
    MakeGroups();
    const size_t blocks = graph_.blocks.size();
    if (plan_.groups.empty() || spec_.chunks < 1 || positions() > blocks) {
      return {};
    }
    plan_.graph_fingerprint = index_.fingerprint;
    plan_.cluster_name = "local-cpu:" + std::to_string(RanksOf(spec_));
    const auto schedules =
        SchedulesFor({static_cast<int>(plan_.groups.size()), spec_.chunks});
    const size_t row =
        static_cast<size_t>(spec_.schedule) % (schedules.size() + 1);
    plan_.schedule = row < schedules.size() ? schedules[row]->name : "table";
    if (row == schedules.size()) MakeTable();
    plan_.microbatches = spec_.microbatches;
    plan_.bucket_bytes = {spec_.bucket};
    plan_.prefetch = spec_.prefetch;
    plan_.ops.resize(index_.forward_nodes);
    ChooseStages();
    for (size_t b = 0; b < blocks; ++b) PlaceBlockOf(static_cast<int>(b));
    if (spec_.halves == 1) PlaceOnHalves();
    PlaceWeights();
    if (spec_.ring > 0) PlaceRings();
    if (spec_.zigzag == 1) OrderSequences();
    PlaceOnTiers();
    if (spec_.shares == 1) PlaceShares();
    return std::move(plan_);
  }

 private:
  size_t positions() const {
    return plan_.groups.size() * static_cast<size_t>(spec_.chunks);
  }

  // A number in [0, n) that is a function of the key and of what it is for.
  uint32_t Draw(std::string_view what, uint64_t which, uint32_t n) const {
    const uint64_t bits = Mix64(static_cast<uint64_t>(spec_.key) ^
                                Mix64(Fnv1a().Add(what).value() + which));
    return static_cast<uint32_t>((bits >> 32) % n);
  }

  void MakeGroups() {
    std::vector<DeviceId> devices;
    for (int i = 0; i < RanksOf(spec_); ++i) devices.push_back(DeviceId(i));
    if (spec_.shuffled == 1) {
      std::sort(devices.begin(), devices.end(), [&](DeviceId a, DeviceId b) {
        return Mix64(a.index() ^ static_cast<uint64_t>(spec_.key)) <
               Mix64(b.index() ^ static_cast<uint64_t>(spec_.key));
      });
    }
    auto next = devices.begin();
    for (int mesh : spec_.mesh) {
      if (mesh == 0) continue;
      DeviceGroup group;
      group.name = "stage" + std::to_string(plan_.groups.size());
      for (int size : Digits(mesh)) {
        if (size <= 1) continue;
        group.axes.push_back({"a" + std::to_string(group.axes.size()), size});
      }
      const auto end = next + group.Size(group.all_axes());
      group.devices.assign(next, end);
      next = end;
      plan_.groups.push_back(std::move(group));
    }
  }

  // A table: whatever a stage could do next, by draws, until all is done. With
  // whole or split backwards, by microbatch and position.
  void MakeTable() {
    const auto stages = static_cast<int>(plan_.groups.size());
    const int last = stages * spec_.chunks - 1;
    plan_.actions.resize(plan_.groups.size());
    // By position and microbatch: 0 to 3 as much of it as is done.
    std::map<std::pair<int, int>, int> done;
    for (uint64_t round = 0;; ++round) {
      std::vector<std::pair<int, Action>> ready;
      for (int p = 0; p <= last; ++p) {
        for (int m = 0; m < spec_.microbatches; ++m) {
          const int so_far = done[{p, m}];
          const bool splits =
              Draw("split",
                   static_cast<uint64_t>(p) * 64 + static_cast<uint64_t>(m),
                   2) == 0;
          Action action = {ActionKind::kForward, p / stages, m};
          if (so_far == 3) continue;
          if (so_far == 0) {
            if (p > 0 && done[{p - 1, m}] == 0) continue;
          } else if (so_far == 1) {
            if (p < last && done[{p + 1, m}] < 2) continue;
            action.kind =
                splits ? ActionKind::kBackwardInput : ActionKind::kBackward;
          } else {
            action.kind = ActionKind::kBackwardWeight;
          }
          ready.emplace_back(p, action);
        }
      }
      if (ready.empty()) return;
      const auto& [p, action] =
          ready[Draw("next", round, static_cast<uint32_t>(ready.size()))];
      plan_.actions[static_cast<size_t>(p % stages)].push_back(action);
      int& so_far = done[{p, action.microbatch}];
      so_far = action.kind == ActionKind::kBackward ? 3 : so_far + 1;
    }
  }

  // Each position of the pipeline takes some consecutive blocks: the places
  // between blocks at which one ends are those with the smallest draws.
  void ChooseStages() {
    const size_t blocks = graph_.blocks.size();
    std::vector<size_t> places(blocks - 1);
    std::iota(places.begin(), places.end(), size_t{0});
    std::stable_sort(places.begin(), places.end(), [&](size_t a, size_t b) {
      return Draw("cut", a, 1000) < Draw("cut", b, 1000);
    });
    places.resize(positions() - 1);
    position_of_block_.assign(blocks, 0);
    for (size_t place : places) {
      for (size_t b = place + 1; b < blocks; ++b) ++position_of_block_[b];
    }
  }

  void PlaceBlockOf(int block) {
    const auto stages = static_cast<int>(plan_.groups.size());
    const int position = position_of_block_[static_cast<size_t>(block)];
    const int stage = position % stages;
    const DeviceGroup& group = plan_.groups[static_cast<size_t>(stage)];
    if (spec_.placement > 0) {
      SetBlock(index_, block,
               PlaceBlock(index_, block, group, GroupId(stage),
                          RolesOfStage(stage, group)),
               plan_);
    }
    for (NodeId id : index_.nodes_of_block[static_cast<size_t>(block)]) {
      plan_.ops[id.index()].group = GroupId(stage);
      plan_.ops[id.index()].chunk = position / stages;
      const std::string& name = graph_.node(id).name;
      if (spec_.placement == 0 ||
          (spec_.placement == 2 && Draw(name + ".own", 0, 4) == 0)) {
        PlaceAlone(id, group);
      }
      plan_.ops[id.index()].recompute =
          CanRecompute(graph_, id) && Draw(name + ".again", 0, 2) == 0;
      if (spec_.tiles > 1 && CanTile(index_, id)) {
        const int tiles =
            1 + static_cast<int>(Draw(name + ".tiles", 0,
                                      static_cast<uint32_t>(spec_.tiles)));
        plan_.ops[id.index()].tiles =
            std::min(tiles, MostTiles(index_, plan_, id));
      }
    }
    if (spec_.recompute < 3) {
      SetRecompute(index_, block, static_cast<RecomputeLevel>(spec_.recompute),
                   plan_);
    }
  }

  AxisRoles RolesOfStage(int stage, const DeviceGroup& group) const {
    AxisRoles roles;
    const auto draw = [&](size_t axis, uint32_t n) {
      return Draw("role", static_cast<uint64_t>(stage) * 16 + axis, n);
    };
    const int64_t batch = graph_.global_batch / std::max(1, spec_.microbatches);
    for (size_t a = 0; a < group.axes.size(); ++a) {
      const AxisSet axis = AxisSet{1} << a;
      // Outside of experts their axes split samples.
      const bool has_room =
          group.Size(roles.data | roles.expert | axis) <= batch;
      switch (draw(a, 10)) {
        case 0:
        case 1:
        case 2:
          if (has_room) roles.data |= axis;
          break;
        case 8:
        case 9:
          if (has_room)
            (index_.has_experts ? roles.expert : roles.data) |= axis;
          break;
        case 3:
        case 4:
          if (group.Size(roles.context | axis) <= graph_.seq_len) {
            roles.context |= axis;
          }
          break;
        case 5:
        case 6:
          roles.tensor |= axis;
          break;
        default:
          break;  // repeats the work
      }
    }
    roles.sequence = draw(15, 2) == 0 &&
                     group.Size(roles.context | roles.tensor) <= graph_.seq_len;
    roles.heads = roles.context != 0 && draw(14, 2) == 0;
    return roles;
  }

  // Each axis on some factor that has room for it, or on none.
  void PlaceAlone(NodeId id, const DeviceGroup& group) {
    const Node& node = graph_.node(id);
    OpPlacement& placement = plan_.ops[id.index()];
    placement.axes = {};
    const auto factors = static_cast<uint32_t>(node.rule.factors.size());
    for (size_t a = 0; a < group.axes.size(); ++a) {
      const size_t f = Draw(node.name, a, factors + 1);
      if (f == factors || !node.rule.factors[f].splittable) continue;
      const AxisSet axes = placement.axes[f] | AxisSet{1} << a;
      const int64_t extent = index_.Extent(
          id, f, graph_.global_batch / std::max(1, spec_.microbatches));
      if (extent >= group.Size(axes)) placement.axes[f] = axes;
    }
  }

  // A quarter of a stage's operators on each half of its devices; of a single
  // device both halves are all.
  void PlaceOnHalves() {
    const size_t stages = plan_.groups.size();
    for (size_t stage = 0; stage < stages; ++stage) {
      const std::vector<DeviceId> devices = plan_.groups[stage].devices;
      const auto middle = static_cast<int64_t>(devices.size() + 1) / 2;
      for (uint32_t half : {0u, 1u}) {
        DeviceGroup group;
        group.name = plan_.groups[stage].name + (half == 0 ? ".a" : ".b");
        group.devices.assign(
            half == 0 || devices.size() == 1 ? devices.begin()
                                             : devices.begin() + middle,
            half == 0 ? devices.begin() + middle : devices.end());
        for (int size :
             PrimeFactors(static_cast<int64_t>(group.devices.size()))) {
          group.axes.push_back({"a" + std::to_string(group.axes.size()), size});
        }
        bool used = false;
        for (size_t i = 0; i < plan_.ops.size(); ++i) {
          const NodeId id(static_cast<int64_t>(i));
          if (plan_.ops[i].group.index() != stage ||
              Draw(graph_.node(id).name + ".half", 0, 4) != half) {
            continue;
          }
          used = true;
          plan_.ops[i].group = GroupId(std::ssize(plan_.groups));
          PlaceAlone(id, group);
        }
        if (used) plan_.groups.push_back(std::move(group));
      }
    }
  }

  void PlaceWeights() {
    plan_.weights.resize(index_.weights.size());
    for (size_t w = 0; w < plan_.weights.size(); ++w) {
      const std::string& name = graph_.tensor(index_.weights[w].tensor).name;
      const bool alone = spec_.zero >= 4;
      auto stage = static_cast<int>(Draw(name + ".zero", 0, 4));
      if (spec_.zero == 5 && Draw(name + ".kept", 0, 2) == 0) stage = 0;
      plan_.weights[w].zero_stage =
          HighestZeroStage(index_, plan_, w, alone ? stage : spec_.zero);
    }
    if (spec_.zero == 5) PlaceAtRoots();
    SetZeroAxes(index_, plan_);
    for (size_t w = 0; w < plan_.weights.size() && spec_.zero >= 4; ++w) {
      PlaceWeightAlone(w);
    }
  }

  // Each weight that is not cut at the root of some axes, and some operators
  // without weights.
  void PlaceAtRoots() {
    for (size_t w = 0; w < plan_.weights.size(); ++w) {
      if (plan_.weights[w].zero_stage > 0) continue;
      const TensorId weight = index_.weights[w].tensor;
      const WeightHome home = HomeOf(index_, plan_, w);
      plan_.weights[w].rooted =
          home.layout.replicated(plan_.groups[home.group.index()]) &
          static_cast<AxisSet>(
              Draw(graph_.tensor(weight).name + ".root", 0, 256));
    }
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      const Node& node = graph_.nodes[i];
      const bool reads_weight = std::any_of(
          node.operands.begin(), node.operands.end(), [&](TensorId id) {
            return graph_.tensor(id).kind == TensorKind::kWeight;
          });
      if (reads_weight || Draw(node.name + ".rooted", 0, 4) != 0) continue;
      OpPlacement& placement = plan_.ops[i];
      placement.rooted =
          plan_.groups[placement.group.index()].all_axes() &
          static_cast<AxisSet>(Draw(node.name + ".root", 0, 256));
      for (AxisSet& axes : placement.axes) axes &= ~placement.rooted;
    }
  }

  void PlaceRings() {
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      const Node& node = graph_.nodes[i];
      if (node.op->streamed == 0) continue;
      const int sequence = index_.SequenceFactor(NodeId(i));
      OpPlacement& placement = plan_.ops[i];
      placement.streamed = placement.axes[static_cast<size_t>(sequence)];
      if (spec_.ring == 2) {
        placement.streamed &=
            static_cast<AxisSet>(Draw(node.name + ".ring", 0, 256));
      }
    }
  }

  void OrderSequences() {
    plan_.zigzag = static_cast<int>(SequenceDegree(index_, plan_));
    if (plan_.zigzag == 1 || !ZigzagProblem(index_, plan_).empty()) {
      plan_.zigzag = 0;
    }
  }

  void PlaceOnTiers() {
    const auto tier = [&](const std::string& what, int mode) {
      if (spec_.offload == 4) return MemoryTier::kFile;
      if (spec_.offload == mode) return MemoryTier::kHost;
      if (spec_.offload == 6 && mode == 1) return MemoryTier::kHost;
      return spec_.offload == 5
                 ? static_cast<MemoryTier>(Draw(what, 0, kMemoryTiers))
                 : MemoryTier::kDevice;
    };
    for (size_t w = 0; w < plan_.weights.size(); ++w) {
      const std::string& name = graph_.tensor(index_.weights[w].tensor).name;
      plan_.weights[w].optimizer_tier = tier(name + ".optimizer_tier", 1);
      if (IsTiedAcrossGroups(index_, plan_, w)) continue;
      plan_.weights[w].parameter_tier = tier(name + ".parameter_tier", 2);
      if (spec_.offload == 6 ||
          (spec_.offload == 5 &&
           plan_.weights[w].optimizer_tier != MemoryTier::kDevice &&
           Draw(name + ".gradient_tier", 0, 2) == 1)) {
        plan_.weights[w].gradient_tier = MemoryTier::kHost;
      }
    }
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      if (!KeepsResults(index_, plan_, NodeId(i))) continue;
      plan_.ops[i].activation_tier =
          tier(graph_.nodes[i].name + ".activation_tier", 3);
    }
  }

  // Up to three parts of the samples for each rank of an axis, where they leave
  // all of them some.
  void PlaceShares() {
    for (size_t g = 0; g < plan_.groups.size(); ++g) {
      DeviceGroup& group = plan_.groups[g];
      for (size_t a = 0; a < group.axes.size(); ++a) {
        std::vector<int> shares;
        for (int c = 0; c < group.axes[a].size; ++c) {
          shares.push_back(
              1 +
              static_cast<int>(Draw(
                  "share", (g * 16 + a) * 16 + static_cast<uint64_t>(c), 3)));
        }
        group.axes[a].shares = std::move(shares);
        if (!MayHaveShares(GroupId(g), AxisSet{1} << a)) {
          group.axes[a].shares.clear();
        }
      }
    }
  }

  bool MayHaveShares(GroupId g, AxisSet axis) const {
    const int64_t batch = graph_.global_batch / std::max(1, spec_.microbatches);
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      const OpPlacement& op = plan_.ops[i];
      const Node& node = graph_.nodes[i];
      if (op.group != g) continue;
      for (size_t f = 0; f < node.rule.factors.size(); ++f) {
        if ((op.axes[f] & axis) == 0) continue;
        if (node.rule.factors[f].role != Role::kSample ||
            !node.op->coupling.groups.empty() ||
            SmallestShard(plan_.groups[g.index()], op.axes[f],
                          index_.Extent(NodeId(i), f, batch)) == 0) {
          return false;
        }
      }
    }
    return true;
  }

  // Any of the axes on which the weight is replicated at home, with an element
  // left for every rank.
  void PlaceWeightAlone(size_t w) {
    WeightPlacement& placement = plan_.weights[w];
    if (placement.zero_stage == 0) return;
    const TensorId weight = index_.weights[w].tensor;
    const std::string& name = graph_.tensor(weight).name;
    const WeightHome home = HomeOf(index_, plan_, w);
    const DeviceGroup& group = plan_.groups[home.group.index()];
    placement.zero_axes = home.layout.replicated(group) &
                          static_cast<AxisSet>(Draw(name + ".axes", 0, 256));
    Layout cut = home.layout;
    cut.flat = placement.zero_axes;
    if (HasEmptyShard(cut, group, graph_.tensor(weight).shape)) {
      placement.zero_axes = 0;
    }
  }

  const GraphIndex& index_;
  const Graph& graph_;
  const PlanSpec& spec_;
  Plan plan_;
  std::vector<int> position_of_block_;
};

std::string ToText(const std::vector<Field>& fields) {
  std::string text;
  for (const Field& field : fields) {
    if (*field.value == field.least) continue;
    if (!text.empty()) text += " ";
    text += field.name + "=" + std::to_string(*field.value);
  }
  return text;
}

}  // namespace

std::vector<Field> FieldsOf(GraphSpec& graph) {
  return {{"layers", &graph.layers, 0},
          {"residual", &graph.residual, 0},
          {"rms", &graph.rms, 0},
          {"gated", &graph.gated, 0},
          {"experts", &graph.experts, 0},
          {"top_k", &graph.top_k, 1},
          {"drops", &graph.drops, 0},
          {"balance", &graph.balance, 0},
          {"sigmoid", &graph.sigmoid, 0},
          {"routing_groups", &graph.routing_groups, 1},
          {"shared", &graph.shared, 0},
          {"latent", &graph.latent, 0},
          {"rotary", &graph.rotary, 0},
          {"tied", &graph.tied, 0},
          {"bias", &graph.bias, 0},
          {"dropout", &graph.dropout, 0},
          {"window", &graph.window, 0},
          {"alibi", &graph.alibi, 0},
          {"bidirectional", &graph.bidirectional, 0},
          {"relative", &graph.relative, 0},
          {"encoder", &graph.encoder, 0},
          {"groups", &graph.groups, 1},
          {"per_group", &graph.per_group, 1},
          {"head_size", &graph.head_size, 2},
          {"hidden", &graph.hidden, 2},
          {"inner", &graph.inner, 2},
          {"vocabulary", &graph.vocabulary, 2},
          {"sequence", &graph.sequence, 1},
          {"batch", &graph.batch, 1},
          {"image", &graph.image, 0},
          {"recurrent", &graph.recurrent, 0},
          {"signals", &graph.signals, 0}};
}

std::vector<Field> FieldsOf(Case& c) {
  std::vector<Field> fields = FieldsOf(c.graph);
  for (size_t i = 0; i < c.plan.mesh.size(); ++i) {
    fields.push_back(
        {"mesh" + std::to_string(i), &c.plan.mesh[i], i == 0 ? 1 : 0});
  }
  const Field rest[] = {{"chunks", &c.plan.chunks, 1},
                        {"schedule", &c.plan.schedule, 0},
                        {"microbatches", &c.plan.microbatches, 1},
                        {"placement", &c.plan.placement, 0},
                        {"zero", &c.plan.zero, 0},
                        {"bucket", &c.plan.bucket, 0},
                        {"prefetch", &c.plan.prefetch, 0},
                        {"recompute", &c.plan.recompute, 0},
                        {"halves", &c.plan.halves, 0},
                        {"tiles", &c.plan.tiles, 1},
                        {"ring", &c.plan.ring, 0},
                        {"zigzag", &c.plan.zigzag, 0},
                        {"offload", &c.plan.offload, 0},
                        {"shuffled", &c.plan.shuffled, 0},
                        {"shares", &c.plan.shares, 0},
                        {"optimizer", &c.plan.optimizer, 0},
                        {"key", &c.plan.key, 0}};
  fields.insert(fields.end(), std::begin(rest), std::end(rest));
  return fields;
}

std::string ToText(const GraphSpec& graph) {
  GraphSpec copy = graph;
  return ToText(FieldsOf(copy));
}

std::string ToText(const Case& c) {
  Case copy = c;
  return ToText(FieldsOf(copy));
}

Result<Case> ParseCase(const std::string& text) {
  Case c;
  const std::vector<Field> fields = FieldsOf(c);
  for (const Field& field : fields) *field.value = field.least;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const auto field =
        std::find_if(fields.begin(), fields.end(),
                     [&](const Field& f) { return f.name == name; });
    if (field == fields.end() || equals == std::string::npos) {
      return InvalidInput("expected NAME=NUMBER of a case", word);
    }
    std::istringstream number(word.substr(equals + 1));
    if (!(number >> *field->value) || !number.eof()) {
      return InvalidInput("expected a whole number", word);
    }
  }
  return c;
}

int RanksOf(const PlanSpec& plan) {
  int ranks = 0;
  for (int mesh : plan.mesh) {
    if (mesh != 0) ranks += Product(Digits(mesh));
  }
  return ranks;
}

PlanSpec RandomPlanSpec(const GraphSpec& graph, Rng& rng) {
  PlanSpec spec;
  spec.mesh = {};
  const int most = std::min(kMostStages, graph.layers + 2);
  int stages = Pick(rng, {1, 1, 2, 2, 3, 4, 6});
  stages = std::min(stages, most);
  int left = kMostRanks - stages;
  const bool alike = rng.Below(3) == 0;
  for (int i = 0; i < stages; ++i) {
    const bool repeat =
        alike && i > 0 && Product(Digits(spec.mesh[0])) - 1 <= left;
    int ranks = 1;
    if (repeat) {
      ranks = Product(Digits(spec.mesh[0]));
    } else if (left > 0) {
      const int limit = stages == 1 ? left : std::min(left, 5);
      ranks += static_cast<int>(rng.Below(static_cast<uint32_t>(limit + 1)));
    }
    spec.mesh[static_cast<size_t>(i)] =
        repeat ? spec.mesh[0] : RandomMesh(ranks, rng);
    left -= ranks - 1;
  }
  spec.chunks =
      std::min(Pick(rng, {1, 1, 1, 2, 2, 3}), (graph.layers + 2) / stages);
  spec.schedule =
      static_cast<int>(rng.Below(static_cast<uint32_t>(Schedules().size())));
  std::vector<int> divisors;
  for (int m = 1; m <= graph.batch; ++m) {
    if (graph.batch % (m * BatchNormGroups(graph)) == 0) divisors.push_back(m);
  }
  // Few samples leave nothing to split.
  spec.microbatches =
      divisors[rng.Below(static_cast<uint32_t>(divisors.size()))];
  if (rng.Below(2) == 0) {
    spec.microbatches = divisors[rng.Below(
        static_cast<uint32_t>(std::min<size_t>(divisors.size(), 3)))];
  }
  spec.placement = Pick(rng, {0, 1, 2});
  spec.zero = Pick(rng, {0, 0, 1, 2, 3, 4, 4, 5});
  // In fp64 the weights of these models have some 50 to 2000 bytes.
  spec.bucket = Pick(rng, {0, 0, 1, 300, 1500, 6000});
  spec.prefetch = Pick(rng, {0, 1, 1, 2, 3});
  spec.recompute = Pick(rng, {0, 0, 0, 1, 2, 3});
  spec.halves = Pick(rng, {0, 0, 0, 1});
  spec.tiles = Pick(rng, {1, 1, 2, 3, 5});
  spec.ring = Pick(rng, {0, 0, 1, 2});
  spec.zigzag = Pick(rng, {0, 1, 1, 1});
  spec.offload = Pick(rng, {0, 0, 0, 0, 1, 2, 3, 4, 5, 6});
  spec.shuffled = Pick(rng, {0, 0, 1});
  spec.key = static_cast<int>(rng.Below(1u << 30));
  spec.optimizer = spec.key % 5 == 0 ? 1 : 0;
  spec.shares = spec.key % 3 == 0 ? 1 : 0;
  return spec;
}

std::optional<Plan> MakePlan(const GraphIndex& index, const PlanSpec& spec) {
  return PlanMaker(index, spec).Run();
}

}  // namespace tessera
