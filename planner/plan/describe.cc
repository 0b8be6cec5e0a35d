#include "planner/plan/describe.h"

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>

#include "planner/base/append.h"
#include "planner/base/format.h"
#include "planner/base/sort_unique.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/plan/tiles.h"

namespace tessera {
namespace {

std::string Count(int64_t n, std::string_view one, std::string_view plural) {
  return std::to_string(n) + " " + std::string(n == 1 ? one : plural);
}

// "device 3", "devices 0-7", "devices 0, 4, 8", "devices 0, 4, 8, … (16)".
// `numbers` are ascending, each once.
std::string NumbersText(std::string_view what,
                        const std::vector<int>& numbers) {
  constexpr size_t kShown = 3;
  std::string text(what);
  if (numbers.size() == 1) return text + " " + std::to_string(numbers[0]);
  if (numbers.back() - numbers.front() + 1 == std::ssize(numbers)) {
    return text + "s " + std::to_string(numbers.front()) + "-" +
           std::to_string(numbers.back());
  }
  for (size_t i = 0; i < std::min(numbers.size(), kShown); ++i) {
    text += (i == 0 ? "s " : ", ") + std::to_string(numbers[i]);
  }
  return numbers.size() <= kShown
             ? text
             : text + ", … (" + std::to_string(numbers.size()) + ")";
}

// With their hosts.
std::string DevicesText(const Cluster& cluster, const DeviceGroup& group) {
  std::vector<int> ranks;
  for (DeviceId device : group.devices) ranks.push_back(device.value);
  std::ranges::sort(ranks);
  std::string text = NumbersText("device", ranks);
  if (cluster.num_nodes() == 1) return text;
  std::vector<int> nodes;
  for (int rank : ranks) {
    nodes.push_back(cluster.devices[static_cast<size_t>(rank)].node);
  }
  SortUnique(nodes);
  return text + " of " + NumbersText("node", nodes);
}

// "b/4 f/8" for the split factors of a placement, "whole" for none.
std::string SplitText(const Node& node, const OpPlacement& placement,
                      const DeviceGroup& group) {
  std::string text;
  for (size_t f = 0; f < node.rule.factors.size(); ++f) {
    if (placement.axes[f] == 0) continue;
    AppendTo(text, " ",
             std::string(1, node.rule.factors[f].letter) + "/" +
                 std::to_string(group.Size(placement.axes[f])));
  }
  if (placement.streamed != 0) {
    text += " " + std::string(1, node.op->streamed) + " round " +
            std::to_string(group.Size(placement.streamed));
  }
  return text.empty() ? "whole" : text;
}

class Describer {
 public:
  Describer(const GraphIndex& index, const Cluster& cluster, const Plan& plan)
      : index_(index),
        graph_(*index.graph),
        cluster_(cluster),
        plan_(plan),
        stages_(StagesOf(*index.graph, plan)) {}

  // What a block's groups do, one after the other.
  std::string Block(size_t block) const {
    std::string text;
    const int stage = stages_.of_block[block];
    if (stage < 0) return text;
    const auto& groups = stages_.groups[static_cast<size_t>(stage)];
    for (GroupId group : groups) {
      const std::string own = BlockText(block, group);
      if (own.empty()) continue;
      if (!text.empty()) text += " | ";
      if (groups.size() > 1) text += NameOf(group) + ": ";
      text += own;
    }
    return text;
  }

  int stages() const { return stages_.count(); }
  int StageOf(size_t block) const { return stages_.of_block[block]; }
  bool SameClass(size_t a, size_t b) const {
    return index_.block_class[a] == index_.block_class[b];
  }

  // "devices 0-7 of node 0, dp 2 x tp 4": axes with the outermost first,
  // neighbours of one kind as one.
  std::string Mesh(int stage) const {
    std::string text;
    for (GroupId id : stages_.groups[static_cast<size_t>(stage)]) {
      const DeviceGroup& group = plan_.groups[id.index()];
      AppendTo(text, "; ", DevicesText(cluster_, group));
      std::vector<std::pair<std::string, int64_t>> kinds;
      for (const MeshAxis& axis : group.axes) {
        std::string name =
            axis.name.substr(0, axis.name.find_first_of("0123456789"));
        if (kinds.empty() || kinds.back().first != name) {
          kinds.emplace_back(std::move(name), 1);
        }
        kinds.back().second *= axis.size;
      }
      for (size_t k = 0; k < kinds.size(); ++k) {
        text += (k == 0 ? ", " : " x ") + kinds[k].first + " " +
                std::to_string(kinds[k].second);
      }
      for (const MeshAxis& axis : group.axes) {
        if (axis.shares.empty()) continue;
        text += ", samples ";
        for (size_t c = 0; c < axis.shares.size(); ++c) {
          text += (c == 0 ? "" : ":") + std::to_string(axis.shares[c]);
        }
        text += " along " + axis.name;
      }
    }
    return text;
  }

  // How weights are stored, and what leaves the devices.
  std::string Storage() {
    text_.clear();
    Zero();
    Offload();
    if (text_.ends_with('\n')) text_.pop_back();
    for (size_t at; (at = text_.find('\n')) != std::string::npos;) {
      text_.replace(at, 1, "; ");
    }
    return std::move(text_);
  }

  std::string Run() {
    text_ = StrategyText(index_, cluster_, plan_) + "\n";
    for (int stage = 0; stage < stages_.count();) {
      int last = stage;
      if (stages_.count() > kMostStages) {
        const std::string shape = Shape(stage);
        while (last + 1 < stages_.count() && Shape(last + 1) == shape) ++last;
      }
      last == stage ? Stage(stage) : AlikeStages(stage, last);
      stage = last + 1;
    }
    Zero();
    Offload();
    Batch();
    return std::move(text_);
  }

 private:
  // Of more stages those with equal blocks are told together.
  static constexpr int kMostStages = 8;

  // Equal blocks with equal placements, in one line.
  bool Alike(size_t a, size_t b) const {
    if (index_.block_class[a] != index_.block_class[b]) return false;
    const auto& left = index_.nodes_of_block[a];
    const auto& right = index_.nodes_of_block[b];
    for (size_t i = 0; i < left.size(); ++i) {
      if (!(plan_.ops[left[i].index()] == plan_.ops[right[i].index()])) {
        return false;
      }
    }
    return true;
  }

  void Stage(int stage) {
    const auto& groups = stages_.groups[static_cast<size_t>(stage)];
    if (groups.size() > 1) {
      text_ += stages_.count() == 1 ? "on" : "stage " + std::to_string(stage);
      for (GroupId group : groups) {
        text_ += (group == groups[0] ? " " : ", ") + NameOf(group) + " (" +
                 DevicesText(cluster_, plan_.groups[group.index()]) + ")";
      }
      text_ += ":\n";
    } else {
      const DeviceGroup& group = plan_.groups[groups[0].index()];
      text_ += stages_.count() == 1
                   ? "on " + DevicesText(cluster_, group) + ":\n"
                   : "stage " + std::to_string(stage) + " on " +
                         DevicesText(cluster_, group) + ":\n";
    }
    for (const auto& [first, last] : RunsOf(stage)) {
      text_ += "  " + ChunkText(first) + graph_.blocks[first];
      if (last > first) {
        text_ += " … " + graph_.blocks[last] + " (" +
                 std::to_string(last - first + 1) + ")";
      }
      text_ += ": " + Block(first) + "\n";
    }
  }

  // The first and the last of blocks of a stage that are alike.
  std::vector<std::pair<size_t, size_t>> RunsOf(int stage) const {
    std::vector<std::pair<size_t, size_t>> runs;
    for (size_t b = 0; b < graph_.blocks.size(); ++b) {
      if (stages_.of_block[b] != stage) continue;
      // Blocks that are alike are in one chunk too.
      size_t last = b;
      while (last + 1 < graph_.blocks.size() &&
             stages_.of_block[last + 1] == stage && Alike(b, last + 1)) {
        ++last;
      }
      runs.emplace_back(b, last);
      b = last;
    }
    return runs;
  }

  // "chunk 2, ", where stages have several.
  std::string ChunkText(size_t block) const {
    if (ShapeOf(graph_, plan_).chunks == 1) return "";
    const NodeId first = index_.nodes_of_block[block][0];
    return "chunk " + std::to_string(plan_.ops[first.index()].chunk) + ", ";
  }

  // Equal for stages that differ in their devices and the names of their blocks
  // only.
  std::string Shape(int stage) const {
    std::string shape;
    for (GroupId group : stages_.groups[static_cast<size_t>(stage)]) {
      shape += std::to_string(plan_.groups[group.index()].devices.size()) + " ";
    }
    for (const auto& [first, last] : RunsOf(stage)) {
      shape += std::to_string(index_.block_class[first]) + " x " +
               std::to_string(last - first + 1) + " " + ChunkText(first) +
               Block(first) + ";";
    }
    return shape;
  }

  // Stages of one shape: "stages 1 … 14, 8 devices each (devices 8-15 of node 1
  // … devices 112-119 of node 14)", and of each run of blocks the first and the
  // last ones.
  void AlikeStages(int from, int to) {
    const auto devices = [&](int stage) {
      std::string text;
      for (GroupId group : stages_.groups[static_cast<size_t>(stage)]) {
        AppendTo(text, ", ",
                 DevicesText(cluster_, plan_.groups[group.index()]));
      }
      return text;
    };
    text_ += "stages " + std::to_string(from) + " … " + std::to_string(to) +
             " alike (" + devices(from) + " … " + devices(to) + "):\n";
    const auto first = RunsOf(from);
    const auto last = RunsOf(to);
    for (size_t r = 0; r < first.size(); ++r) {
      const size_t count = first[r].second - first[r].first + 1;
      text_ += "  " + ChunkText(first[r].first) +
               Count(static_cast<int64_t>(count), "block", "blocks") +
               " each, " + graph_.blocks[first[r].first] + " … " +
               graph_.blocks[last[r].second] + ": " + Block(first[r].first) +
               "\n";
    }
  }

  std::string NameOf(GroupId group) const {
    return plan_.groups[group.index()].name;
  }

  // Of the block's nodes on `id`; empty where it has none.
  std::string BlockText(size_t block, GroupId id) const {
    const DeviceGroup& group = plan_.groups[id.index()];
    const bool here = std::any_of(
        index_.nodes_of_block[block].begin(),
        index_.nodes_of_block[block].end(),
        [&](NodeId node) { return plan_.ops[node.index()].group == id; });
    if (!here) return "";
    const auto roles = RolesOf(index_, plan_, static_cast<int>(block));
    return (roles.has_value() ? RolesText(block, *roles, group)
                              : OwnText(block, id)) +
           TilesText(block) + RecomputeText(block);
  }

  std::string TilesText(size_t block) const {
    const auto tiles = TilesOf(index_, plan_, static_cast<int>(block));
    if (tiles == 1) return "";
    if (tiles.has_value()) {
      return ", linears in " + Count(*tiles, "tile", "tiles");
    }
    const auto& nodes = index_.nodes_of_block[block];
    const auto tiled = std::count_if(
        nodes.begin(), nodes.end(),
        [&](NodeId node) { return plan_.ops[node.index()].tiles > 1; });
    return ", " + Count(tiled, "linear", "linears") + " in tiles";
  }

  std::string RecomputeText(size_t block) const {
    const auto level = RecomputeOf(index_, plan_, static_cast<int>(block));
    if (level == RecomputeLevel::kNone) return "";
    if (level.has_value()) {
      return ", recompute " + std::string(tessera::NameOf(*level));
    }
    const auto& nodes = index_.nodes_of_block[block];
    const auto again = std::count_if(
        nodes.begin(), nodes.end(),
        [&](NodeId node) { return plan_.ops[node.index()].recompute; });
    return ", " + Count(again, "operator", "operators") + " recomputed";
  }

  std::string RolesText(size_t block, const AxisRoles& roles,
                        const DeviceGroup& group) const {
    if (group.devices.size() == 1) return "not split";
    std::string text = "data-parallel " +
                       std::to_string(group.Size(roles.data | roles.expert));
    if (const AxisSet experts = roles.expert | roles.folded; experts != 0) {
      text +=
          " (experts split " + std::to_string(group.Size(experts)) + " ways)";
    }
    if (roles.context != 0) {
      text += (HasWindows(block) ? ", height split " : ", sequence split ") +
              std::to_string(group.Size(roles.context)) +
              (roles.heads  ? " (context parallel, attention by heads)"
               : roles.ring ? " (context parallel, keys and values in a ring)"
                            : " (context parallel)");
    }
    const AxisSet idle = group.all_axes() & ~(roles.data | roles.expert |
                                              roles.context | roles.tensor);
    if (roles.tensor != 0) {
      text += ", tensor-parallel " + std::to_string(group.Size(roles.tensor)) +
              " (" + TensorText(block, roles) + ")";
      if (roles.sequence) text += ", the rest split by sequence";
    }
    if (idle != 0) {
      text += ", repeated on " + std::to_string(group.Size(idle)) + " ranks";
    }
    return text;
  }

  // Whether a block convolves or pools images.
  bool HasWindows(size_t block) const {
    return std::ranges::any_of(index_.nodes_of_block[block], [&](NodeId node) {
      return graph_.node(node).op->windows;
    });
  }

  // How the dense layers and convolutions of a block are split.
  std::string TensorText(size_t block, const AxisRoles& roles) const {
    bool channels = false;
    bool heads = false;
    bool column = false;
    bool row = false;
    bool vocabulary = false;
    for (NodeId id : index_.nodes_of_block[block]) {
      const Node& node = graph_.node(id);
      for (size_t f = 0; f < node.rule.factors.size(); ++f) {
        if ((plan_.ops[id.index()].axes[f] & roles.tensor) == 0) continue;
        const bool in_result = Holds(node.rule.results[0], static_cast<int>(f));
        if (node.op->op_class == OpClass::kAttention) {
          heads = true;
        } else if (node.op->windows) {
          channels = true;
        } else if (node.op->op_class == OpClass::kMatmul) {
          (in_result ? column : row) = true;
        }
        vocabulary |= !node.op->integer_operands.empty() &&
                      node.op->coupling.factors.size() == 1 &&
                      node.op->coupling.Merges(node.rule.factors[f].letter);
        for (TensorId operand : node.operands) {
          vocabulary |= index_.vocabulary[operand.index()] && !in_result;
        }
      }
    }
    std::string text;
    const auto add = [&](bool is, std::string_view word) {
      if (is) AppendTo(text, ", ", word);
    };
    add(channels, "convolutions by channels");
    add(heads, "attention by heads");
    add(column && row, "dense layers by columns, then rows");
    add(vocabulary, UnitOf(graph_) == "tokens" ? "vocabulary" : "classes");
    add(text.empty(), "some dense layers");
    return text;
  }

  // Placements that follow no roles: factor by factor, folded where equal.
  std::string OwnText(size_t block, GroupId group_id) const {
    const DeviceGroup& group = plan_.groups[group_id.index()];
    std::vector<std::pair<std::string, std::string>> runs;  // split, names
    const std::string prefix = graph_.blocks[block] + ".";
    for (NodeId id : index_.nodes_of_block[block]) {
      if (plan_.ops[id.index()].group != group_id) continue;
      const Node& node = graph_.node(id);
      const std::string split = SplitText(node, plan_.ops[id.index()], group);
      const size_t at = node.name.find(prefix);
      const std::string name = at == std::string::npos
                                   ? node.name
                                   : node.name.substr(at + prefix.size());
      const auto known =
          std::find_if(runs.begin(), runs.end(),
                       [&](const auto& run) { return run.first == split; });
      if (known == runs.end()) {
        runs.emplace_back(split, name);
      } else {
        known->second += ", " + name;
      }
    }
    std::string text;
    for (const auto& [split, names] : runs) {
      AppendTo(text, "; ", split + ": " + names);
    }
    return text;
  }

  void Zero() {
    // By stage, shards and replicas of a shard.
    std::map<std::tuple<int, int64_t, int64_t>, int64_t> elements;
    bool gathers = false;
    int64_t rooted = 0;
    int64_t total = 0;
    bool replicated = false;
    for (size_t w = 0; w < plan_.weights.size(); ++w) {
      const GraphIndex::WeightUse& use = index_.weights[w];
      total += use.elements;
      const DeviceGroup& group =
          plan_.groups[plan_.ops[use.home.node.index()].group.index()];
      const WeightPlacement& placement = plan_.weights[w];
      rooted = std::max(rooted, group.Size(placement.rooted));
      replicated = replicated || group.devices.size() > 1;
      const AxisSet whole =
          placement.zero_axes == 0 ? 0 : ZeroAxes(index_, plan_, w);
      elements[{placement.zero_stage, group.Size(placement.zero_axes),
                group.Size(whole & ~placement.zero_axes)}] += use.elements;
      gathers =
          gathers || (placement.zero_stage == 3 && placement.zero_axes != 0);
    }
    bool any = false;
    for (const auto& [cut, count] : elements) {
      const auto& [stage, shards, replicas] = cut;
      if (shards == 1) continue;
      any = true;
      static constexpr std::string_view kWhat[] = {
          "", "optimizer state", "optimizer state and gradients",
          "optimizer state, gradients and parameters"};
      text_ +=
          "ZeRO-" + std::to_string(stage) + ": " + std::string(kWhat[stage]) +
          " cut over " + std::to_string(shards) +
          (replicas == 1
               ? ""
               : ", each shard on " + std::to_string(replicas) + " ranks") +
          ShareText(count, total, "parameters") + "\n";
    }
    if (rooted > 1) {
      text_ += "one rank of " + std::to_string(rooted) +
               " keeps the optimizer state and updates for all\n";
    } else if (!any && replicated) {
      text_ += "optimizer state whole on every replica\n";
    }
    if (gathers) {
      text_ += "parameters gathered " +
               (plan_.prefetch == 0
                    ? "just before their use"
                    : Count(plan_.prefetch, "block", "blocks") + " ahead") +
               "\n";
    }
    if (plan_.bucket_bytes.value > 0) {
      text_ += "gradients reduced in buckets of " +
               FormatExactBytes(plan_.bucket_bytes) + "\n";
    }
  }

  // What leaves the devices, and how much of it.
  void Offload() {
    std::map<MemoryTier, int64_t> parameters;
    std::map<MemoryTier, int64_t> optimizer;
    std::map<MemoryTier, int64_t> gradients;
    std::map<MemoryTier, int64_t> activations;
    for (size_t w = 0; w < plan_.weights.size(); ++w) {
      const int64_t elements = index_.weights[w].elements;
      parameters[plan_.weights[w].parameter_tier] += elements;
      optimizer[plan_.weights[w].optimizer_tier] += elements;
      gradients[plan_.weights[w].gradient_tier] += elements;
    }
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      if (!KeepsResults(index_, plan_, NodeId(i))) continue;
      ++activations[plan_.ops[i].activation_tier];
    }
    const auto line = [&](std::string_view what, std::string_view of,
                          const std::map<MemoryTier, int64_t>& shares) {
      int64_t total = 0;
      for (const auto& [tier, share] : shares) total += share;
      for (const auto& [tier, share] : shares) {
        if (tier == MemoryTier::kDevice) continue;
        text_ += std::string(what) + " on the " +
                 (tier == MemoryTier::kHost ? "host" : "file tier") +
                 ShareText(share, total, of) + "\n";
      }
    };
    line("optimizer state and its step", "parameters", optimizer);
    line("stored parameters", "parameters", parameters);
    line("gradients added up", "parameters", gradients);
    line("kept activations", "operators", activations);
  }

  void Batch() {
    if (stages_.count() > 1) text_ += plan_.schedule + ", ";
    text_ +=
        Count(plan_.microbatches, "microbatch", "microbatches") + " of " +
        Count(graph_.global_batch / plan_.microbatches, "sample", "samples");
    const int b = index_.SampleFactor(NodeId(0));
    if (b >= 0) {
      const OpPlacement& first = plan_.ops[0];
      const DeviceGroup& group = plan_.groups[first.group.index()];
      const AxisSet axes = first.axes[static_cast<size_t>(b)];
      const int64_t degree = group.Size(axes);
      const int64_t samples = graph_.global_batch / plan_.microbatches;
      if (degree > 1 && samples % degree == 0 && !group.IsUneven(axes)) {
        text_ += " (" + std::to_string(samples / degree) + " per replica)";
      }
    }
    if (plan_.zigzag > 1) {
      text_ += ", sequences in the zigzag order of " +
               std::to_string(plan_.zigzag) + " ranks";
    }
    text_ += "\n";
    for (size_t g = 0; g < plan_.groups.size(); ++g) Shares(GroupId(g));
  }

  // Where devices of a group have unequal numbers of samples.
  void Shares(GroupId id) {
    const DeviceGroup& group = plan_.groups[id.index()];
    AxisSet axes = 0;
    for (size_t i = 0; i < plan_.ops.size() && axes == 0; ++i) {
      const int b = index_.SampleFactor(NodeId(i));
      if (b < 0 || plan_.ops[i].group != id) continue;
      axes = plan_.ops[i].axes[static_cast<size_t>(b)];
    }
    if (!group.IsUneven(axes)) return;
    const int64_t samples = graph_.global_batch / plan_.microbatches;
    std::map<int64_t, DeviceGroup, std::greater<>> devices;
    for (int i = 0; i < std::ssize(group.devices); ++i) {
      const Range own =
          ShardRange(group, axes, samples, group.Coordinate(i, axes));
      devices[own.size()].devices.push_back(
          group.devices[static_cast<size_t>(i)]);
    }
    std::string text;
    for (const auto& [own, alike] : devices) {
      AppendTo(text, ", ",
               Count(own, "sample", "samples") +
                   (alike.devices.size() > 1 ? " on each of " : " on ") +
                   DevicesText(cluster_, alike));
    }
    text_ += "of each microbatch " + text + "\n";
  }

  const GraphIndex& index_;
  const Graph& graph_;
  const Cluster& cluster_;
  const Plan& plan_;
  const Stages stages_;
  std::string text_;
};

}  // namespace

std::string ShareText(int64_t count, int64_t total, std::string_view what) {
  if (count == total) return "";
  const int64_t percent = (100 * count + total / 2) / total;
  const std::string share = percent == 0     ? "less than 1"
                            : percent == 100 ? "more than 99"
                                             : std::to_string(percent);
  return " for " + share + "% of the " + std::string(what);
}

std::string Describe(const Graph& graph, const Cluster& cluster,
                     const Plan& plan) {
  const GraphIndex index(graph);
  return Describer(index, cluster, plan).Run();
}

std::vector<PlanDifference> ChangesBetween(const GraphIndex& index,
                                           const Cluster& cluster,
                                           const Plan& from, const Plan& to) {
  // Axes are told by what they do.
  Plan a = from;
  Plan b = to;
  NameAxes(index, a);
  NameAxes(index, b);
  Describer before(index, cluster, a);
  Describer after(index, cluster, b);
  std::vector<PlanDifference> changes;
  const auto add = [&](std::string what, std::string x, std::string y) {
    if (x == y) return;
    changes.push_back({std::move(what), std::move(x), std::move(y)});
  };
  // A row for each run of `count` things that differ alike.
  const auto add_runs = [&](size_t count, const auto& name, const auto& texts,
                            const auto& joins) {
    for (size_t i = 0; i < count;) {
      const std::pair<std::string, std::string> texts_of_i = texts(i);
      size_t last = i;
      while (last + 1 < count && joins(last, last + 1) &&
             texts(last + 1) == texts_of_i) {
        ++last;
      }
      std::string what = name(i);
      if (last > i) {
        what += " … " + name(last) + " (" + std::to_string(last - i + 1) + ")";
      }
      add(std::move(what), texts_of_i.first, texts_of_i.second);
      i = last + 1;
    }
  };
  const auto any = [](size_t, size_t) { return true; };
  const bool same_stages = before.stages() == after.stages();
  add("stages", std::to_string(before.stages()),
      std::to_string(after.stages()));
  if (same_stages) {
    add_runs(
        static_cast<size_t>(before.stages()),
        [](size_t s) { return "stage " + std::to_string(s); },
        [&](size_t s) {
          const int stage = static_cast<int>(s);
          return std::pair(before.Mesh(stage), after.Mesh(stage));
        },
        any);
  }
  if (before.stages() > 1 || after.stages() > 1) {
    add("schedule", a.schedule, b.schedule);
    const auto chunks = [&](const Plan& plan) {
      return std::to_string(ShapeOf(*index.graph, plan).chunks);
    };
    add("chunks of a stage", chunks(a), chunks(b));
  }
  add("microbatches", std::to_string(a.microbatches),
      std::to_string(b.microbatches));
  add_runs(
      index.graph->blocks.size(),
      [&](size_t block) { return index.graph->blocks[block]; },
      [&](size_t block) {
        const auto text = [&](const Describer& of) {
          return (same_stages && before.stages() > 1
                      ? "stage " + std::to_string(of.StageOf(block)) + ", "
                      : "") +
                 of.Block(block);
        };
        std::pair<std::string, std::string> texts(text(before), text(after));
        // All runs of equal blocks are told alike.
        if (texts.first == texts.second) texts = {};
        return texts;
      },
      [&](size_t x, size_t y) { return before.SameClass(x, y); });
  add("weights", before.Storage(), after.Storage());
  const auto buckets = [](const Plan& plan) {
    return plan.bucket_bytes == Bytes{} ? "one for each block"
                                        : FormatExactBytes(plan.bucket_bytes);
  };
  add("gradient buckets", buckets(a), buckets(b));
  add("prefetch", Count(a.prefetch, "block", "blocks"),
      Count(b.prefetch, "block", "blocks"));
  add("zigzag order of sequences", Count(a.zigzag, "rank", "ranks"),
      Count(b.zigzag, "rank", "ranks"));
  // What words do not tell.
  if (changes.empty() &&
      (a.ops != b.ops || a.weights != b.weights || a.actions != b.actions)) {
    changes.push_back({"details", "of the one plan", "of the other"});
  }
  return changes;
}

}  // namespace tessera
