#include "planner/search/constraints.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "planner/base/divide.h"
#include "planner/base/table.h"
#include "planner/base/whole_number.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/recompute.h"
#include "planner/plan/rooted.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

std::vector<std::string> SplitAt(std::string_view text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// Whether `pattern`, with '*' for any characters, is `text`: where it is not,
// the last '*' takes one more of them.
bool MatchesWord(std::string_view pattern, std::string_view text) {
  size_t p = 0;
  size_t t = 0;
  std::optional<size_t> star;  // the last one
  size_t taken = 0;            // where its characters end
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star) {
      p = *star + 1;
      t = ++taken;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

bool MatchesName(const std::vector<std::string>& pattern,
                 const std::string& name) {
  const std::vector<std::string> words = SplitAt(name, '.');
  return !std::ranges::search(words, pattern,
                              [](const auto& word, const auto& part) {
                                return MatchesWord(part, word);
                              })
              .empty();
}

bool IsDense(const Node& node) {
  return node.op->op_class == OpClass::kMatmul ||
         node.op->op_class == OpClass::kAttention;
}

// Whether its table of rows can be split, by rows or by features.
bool IsLookup(const Node& node) {
  return node.op->name == "embedding" || node.op->name == "embedding_bag";
}

// The axes of a node on its factor `factor`; none where that is -1.
AxisSet AxesOn(const OpPlacement& op, int factor) {
  return factor < 0 ? AxisSet{0} : op.axes[static_cast<size_t>(factor)];
}

// Those that split samples. A rank with some of the experts has theirs of the
// samples that the expert axes split elsewhere.
AxisSet DataAxes(const GraphIndex& index, const OpPlacement& op, NodeId node) {
  if (index.SampleFactor(node) < 0) return 0;
  return AxesOn(op, index.SampleFactor(node)) |
         AxesOn(op, index.ExpertFactor(node));
}

// Of a dense node, or of a lookup, those that split neither samples, nor the
// sequence, nor experts.
AxisSet TensorAxes(const GraphIndex& index, const OpPlacement& op,
                   NodeId node) {
  if (!IsDense(index.graph->node(node)) && !IsLookup(index.graph->node(node))) {
    return 0;
  }
  AxisSet axes = 0;
  for (int f = 0; f < kMaxFactors; ++f) {
    if (f == index.SampleFactor(node) || f == index.SequenceFactor(node) ||
        f == index.ExpertFactor(node)) {
      continue;
    }
    axes |= AxesOn(op, f);
  }
  return axes;
}

AxisSet ContextAxes(const GraphIndex& index, const OpPlacement& op,
                    NodeId node) {
  return AxesOn(op, index.SequenceFactor(node));
}

AxisSet ExpertAxes(const GraphIndex& index, const OpPlacement& op,
                   NodeId node) {
  return AxesOn(op, index.ExpertFactor(node));
}

// Kinds of split: the axes of a node that are of it, whether a node can have
// such axes at all, and a uniform plan in which axis 0 splits so and axis 1
// otherwise.
struct SplitKind {
  AxisSet (*axes)(const GraphIndex& index, const OpPlacement& op, NodeId node);
  bool (*can)(const GraphIndex& index, NodeId node);
  AxisRoles example;
  // Whether it counts too what splits the heads of attention: context axes may
  // do so in place of the sequence, on top of tensor axes.
  bool by_heads = false;
};

constexpr SplitKind kData = {DataAxes,
                             [](const GraphIndex& index, NodeId node) {
                               return index.SampleFactor(node) >= 0;
                             },
                             {.data = 1}};
constexpr SplitKind kTensor = {TensorAxes,
                               [](const GraphIndex& index, NodeId node) {
                                 return IsDense(index.graph->node(node));
                               },
                               {.tensor = 1},
                               true};
// What is meant where no dense node is.
constexpr SplitKind kTable = {TensorAxes,
                              [](const GraphIndex& index, NodeId node) {
                                return IsLookup(index.graph->node(node));
                              },
                              {.tensor = 1}};
// Tensor axes may split the sequence besides.
constexpr SplitKind kContext = {ContextAxes,
                                [](const GraphIndex& index, NodeId node) {
                                  return index.SequenceFactor(node) >= 0;
                                },
                                {.context = 1, .tensor = 2, .sequence = true},
                                true};
constexpr SplitKind kExpert = {ExpertAxes,
                               [](const GraphIndex& index, NodeId node) {
                                 return index.ExpertFactor(node) >= 0;
                               },
                               {.expert = 1}};

// The keys of a fixed operator.
struct KeyRow {
  FixKey key;
  std::string_view lacking;  // what operators must be or have, for an error
  // Of the matching nodes of a block those that are to have the value: with
  // `usual` those that uniform plans of that value give it.
  std::vector<NodeId> (*held)(const GraphIndex& index,
                              const std::vector<NodeId>& nodes, int value,
                              bool usual);
  // Whether all of `nodes` have it.
  bool (*holds)(const GraphIndex& index, const Plan& plan,
                const std::vector<NodeId>& nodes, int value);
  // The row of Forbidden() that a plan with it has; empty: none.
  std::string (*needs)(int value);
  // A number of ways, of which a node has as many as their product.
  bool is_ways = false;
  // `held` where it has none; null: there is no other.
  std::vector<NodeId> (*held_else)(const GraphIndex& index,
                                   const std::vector<NodeId>& nodes, int value,
                                   bool usual) = nullptr;
};

template <const SplitKind& kKind>
std::vector<NodeId> Split(const GraphIndex& index,
                          const std::vector<NodeId>& nodes, int value,
                          bool usual) {
  std::vector<NodeId> held;
  std::ranges::copy_if(nodes, std::back_inserter(held),
                       [&](NodeId node) { return kKind.can(index, node); });
  if (!usual) return held;
  const int block = index.graph->node(nodes[0]).block;
  DeviceGroup group;
  group.axes = {{"", value}, {"", 2}};
  const auto placed =
      PlaceBlock(index, block, group, GroupId(0), kKind.example);
  std::erase_if(held, [&](NodeId node) {
    return kKind.axes(index, placed[index.position[node.index()]], node) != 1;
  });
  return held;
}

template <const SplitKind& kKind>
bool IsSplit(const GraphIndex& index, const Plan& plan,
             const std::vector<NodeId>& nodes, int value) {
  return std::ranges::all_of(nodes, [&](NodeId node) {
    const OpPlacement& op = plan.ops[node.index()];
    const DeviceGroup& group = plan.groups[op.group.index()];
    if (group.Size(kKind.axes(index, op, node)) == value) return true;
    return kKind.by_heads && ContextAxes(index, op, node) == 0 &&
           index.graph->node(node).op->op_class == OpClass::kAttention &&
           group.Size(TensorAxes(index, op, node)) % value == 0;
  });
}

// Calls `visit(weight)` for the weights at home in a node, into
// GraphIndex::weights.
template <typename Visit>
void ForEachWeightAt(const GraphIndex& index, NodeId node, const Visit& visit) {
  for (TensorId operand : index.graph->node(node).operands) {
    if (index.graph->tensor(operand).kind != TensorKind::kWeight) continue;
    const auto at = std::ranges::lower_bound(index.weights, operand, {},
                                             &GraphIndex::WeightUse::tensor);
    if (at->home.node == node) {
      visit(static_cast<size_t>(at - index.weights.begin()));
    }
  }
}

std::vector<NodeId> HomesOfWeights(const GraphIndex& index,
                                   const std::vector<NodeId>& nodes, int,
                                   bool) {
  std::vector<NodeId> homes;
  for (NodeId node : nodes) {
    bool is_home = false;
    ForEachWeightAt(index, node, [&](size_t) { is_home = true; });
    if (is_home) homes.push_back(node);
  }
  return homes;
}

bool HasZero(const GraphIndex& index, const Plan& plan,
             const std::vector<NodeId>& nodes, int value) {
  bool all = true;
  for (NodeId node : nodes) {
    ForEachWeightAt(index, node, [&](size_t weight) {
      all &= plan.weights[weight].zero_stage == value;
    });
  }
  return all;
}

// One node stands for its layer.
std::vector<NodeId> NodeOfLayer(const GraphIndex& index,
                                const std::vector<NodeId>& nodes, int, bool) {
  const int block = index.graph->node(nodes[0]).block;
  const auto [first, last] = Layers(index);
  if (block < first || block >= last) return {};
  return {index.nodes_of_block[static_cast<size_t>(block)][0]};
}

bool Recomputes(const GraphIndex& index, const Plan& plan,
                const std::vector<NodeId>& nodes, int value) {
  const int block = index.graph->node(nodes[0]).block;
  return RecomputeOf(index, plan, block) == static_cast<RecomputeLevel>(value);
}

std::string Nothing(int) {
  return "";
}

constexpr std::array kKeys = {
    KeyRow{{"dp", "ways that samples are split"},
           "has samples",
           Split<kData>,
           IsSplit<kData>,
           Nothing,
           true},
    KeyRow{{"tp",
            "ways that dense layers and attention, or a table of rows that is "
            "named alone, are split otherwise"},
           "is dense, nor looks rows up",
           Split<kTensor>,
           IsSplit<kTensor>,
           [](int value) { return std::string(value > 1 ? "tp" : ""); },
           true,
           Split<kTable>},
    // What splits the heads of attention is not forbidden by "cp".
    KeyRow{{"cp", "ways that the sequence is split"},
           "has a sequence",
           Split<kContext>,
           IsSplit<kContext>,
           Nothing,
           true},
    KeyRow{{"ep", "ways that experts are split"},
           "has experts",
           Split<kExpert>,
           IsSplit<kExpert>,
           [](int value) { return std::string(value > 1 ? "ep" : ""); },
           true},
    KeyRow{{"zero", "ZeRO stage of the weights"},
           "has weights",
           HomesOfWeights,
           HasZero,
           [](int value) {
             return value > 0 ? "zero" + std::to_string(value) : "";
           }},
    KeyRow{{"recompute", "recomputation of the layer"},
           "is in a layer",
           NodeOfLayer,
           Recomputes,
           [](int value) {
             return std::string(static_cast<RecomputeLevel>(value) ==
                                        RecomputeLevel::kNone
                                    ? ""
                                    : "recompute");
           }},
};

template <int kStage>
bool HasZeroStage(const WeightPlacement& weight) {
  return weight.zero_axes != 0 && weight.zero_stage == kStage;
}

bool HasTensor(const GraphIndex& index, const Plan& plan, NodeId node) {
  return IsDense(index.graph->node(node)) &&
         TensorAxes(index, plan.ops[node.index()], node) != 0;
}

bool HasContext(const GraphIndex& index, const Plan& plan, NodeId node) {
  return index.graph->node(node).op->op_class == OpClass::kAttention &&
         ContextAxes(index, plan.ops[node.index()], node) != 0;
}

bool HasExperts(const GraphIndex& index, const Plan& plan, NodeId node) {
  return ExpertAxes(index, plan.ops[node.index()], node) != 0;
}

bool HasRecompute(const GraphIndex&, const Plan& plan, NodeId node) {
  return plan.ops[node.index()].recompute;
}

bool HasTiles(const GraphIndex&, const Plan& plan, NodeId node) {
  return plan.ops[node.index()].tiles > 1;
}

bool Offloaded(const GraphIndex&, const Plan& plan, NodeId node) {
  return plan.ops[node.index()].activation_tier != MemoryTier::kDevice;
}

bool WeightOffloaded(const WeightPlacement& weight) {
  return weight.parameter_tier != MemoryTier::kDevice ||
         weight.optimizer_tier != MemoryTier::kDevice;
}

bool Rooted(const GraphIndex&, const Plan& plan, NodeId node) {
  return plan.ops[node.index()].rooted != 0;
}

template <typename Has>
bool AnyNode(const GraphIndex& index, Has has) {
  for (size_t i = 0; i < index.forward_nodes; ++i) {
    if (has(NodeId(i))) return true;
  }
  return false;
}

bool Has(const ForbiddenRow& row, const GraphIndex& index, const Plan& plan) {
  return (row.node != nullptr &&
          AnyNode(index,
                  [&](NodeId node) { return row.node(index, plan, node); })) ||
         (row.weight != nullptr &&
          std::ranges::any_of(plan.weights, row.weight)) ||
         (row.stages != nullptr && row.stages(index, plan));
}

bool IsDataParallel(const GraphIndex& index, const Cluster&, const Plan& plan) {
  return StagesOf(*index.graph, plan).count() == 1 && plan.groups.size() == 1 &&
         !AnyNode(index, [&](NodeId node) {
           for (int f = 0; f < kMaxFactors; ++f) {
             if (f != index.SampleFactor(node) &&
                 AxesOn(plan.ops[node.index()], f) != 0) {
               return true;
             }
           }
           return false;
         });
}

bool IsMegatron(const GraphIndex& index, const Cluster& cluster,
                const Plan& plan) {
  const auto s = UniformStrategy(index, cluster, plan);
  return s.has_value() && s->zero <= 1 && s->zero_group == 0 && s->tiles == 1 &&
         s->dp_kind == DataParallelKind::kDdp && !s->split_branches &&
         !s->by_speed && s->actions.empty() && !Offloads(plan);
}

bool IsSoap(const GraphIndex& index, const Cluster&, const Plan& plan) {
  const bool stores_whole = std::ranges::all_of(
      plan.weights, [](const WeightPlacement& w) { return w.zero_axes == 0; });
  return stores_whole && plan.microbatches == 1 && !Offloads(plan) &&
         !UsesRoot(plan) && !AnyNode(index, [&](NodeId node) {
           return HasRecompute(index, plan, node) ||
                  HasTiles(index, plan, node);
         });
}

// The words of a line, apart from its comment.
std::vector<std::string> WordsOf(const std::string& line) {
  std::istringstream words(line.substr(0, line.find('#')));
  return {std::istream_iterator<std::string>(words), {}};
}

// Where a constraint was given, and what.
std::string WhereOf(std::string_view flag, const ConstraintText& given) {
  if (given.line.empty()) return "--" + std::string(flag) + " " + given.text;
  return given.line + ": " + std::string(flag) + " " + given.text;
}

// Samples of a microbatch that one rank has of a node.
int64_t SamplesOf(const GraphIndex& index, const Plan& plan, NodeId node) {
  if (index.SampleFactor(node) < 0 ||
      index.graph->node(node).op->once_per_step) {
    return 0;
  }
  const OpPlacement& op = plan.ops[node.index()];
  return DivideUp(
      DivideUp(index.graph->global_batch, plan.microbatches),
      plan.groups[op.group.index()].Size(DataAxes(index, op, node)));
}

// The names of the dense operators, of one block of each kind.
std::string SomeNames(const GraphIndex& index) {
  std::string text;
  std::set<int> known;
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    if (!known.insert(index.block_class[b]).second) continue;
    for (NodeId node : index.nodes_of_block[b]) {
      if (!IsDense(index.graph->node(node))) continue;
      text += (text.empty() ? "'" : ", '") + index.graph->node(node).name + "'";
    }
  }
  return text;
}

Result<int> ReadInteger(std::string_view text, int least) {
  const auto value = ParseWhole<int>(text);
  if (!value || *value < least) {
    return InvalidInput("'" + std::string(text) +
                        "' is not a whole number from " +
                        std::to_string(least));
  }
  return *value;
}

}  // namespace

Result<void> ParseConstraints(std::string_view text, const std::string& path,
                              ConstraintTexts& texts) {
  // What editors put before a text.
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  bool has_limit = false;
  bool has_space = false;
  int number = 0;
  for (const std::string& line : SplitAt(text, '\n')) {
    ++number;
    const std::vector<std::string> words = WordsOf(line);
    if (words.empty()) continue;
    const std::string where = path + ":" + std::to_string(number);
    if (words.size() != 2) {
      return InvalidInput("expected a key and a value, such as 'forbid zero3'",
                          where);
    }
    const std::string& key = words[0];
    const ConstraintText given = {words[1], where};
    if ((key == "max-microbatch" && std::exchange(has_limit, true)) ||
        (key == "space" && std::exchange(has_space, true))) {
      return InvalidInput("'" + key + "' is given twice", where);
    }
    if (key == "fix") {
      texts.fix.push_back(given);
    } else if (key == "forbid") {
      texts.forbid.push_back(given);
    } else if (key == "space") {
      if (!texts.space.text.empty() && texts.space.text != given.text) {
        return InvalidInput("contradicts " + WhereOf("space", texts.space),
                            WhereOf("space", given));
      }
      texts.space = given;
    } else if (key == "max-microbatch") {
      auto value = ReadInteger(given.text, 1);
      if (!value) return value.error().At(WhereOf(key, given));
      texts.max_microbatch = texts.max_microbatch == 0
                                 ? *value
                                 : std::min(texts.max_microbatch, *value);
    } else {
      static constexpr std::array<std::string_view, 4> kKnown = {
          "fix", "forbid", "max-microbatch", "space"};
      return UnknownName("constraint", key, kKnown).At(where);
    }
  }
  return {};
}

std::span<const FixKey> FixKeys() {
  static const auto table = [] {
    std::array<FixKey, kKeys.size()> keys;
    std::ranges::transform(kKeys, keys.begin(), &KeyRow::key);
    return keys;
  }();
  return table;
}

std::span<const ForbiddenRow> Forbidden() {
  static constexpr std::array kTable = {
      ForbiddenRow{"tp", "tensor parallelism", HasTensor},
      ForbiddenRow{"pp", "pipelines", nullptr, nullptr,
                   [](const GraphIndex& index, const Plan& plan) {
                     return StagesOf(*index.graph, plan).count() > 1;
                   }},
      ForbiddenRow{"cp", "attention with a split sequence", HasContext},
      ForbiddenRow{"ep", "split experts", HasExperts},
      ForbiddenRow{"zero1", "ZeRO stage 1", nullptr, HasZeroStage<1>},
      ForbiddenRow{"zero2", "ZeRO stage 2", nullptr, HasZeroStage<2>},
      ForbiddenRow{"zero3", "ZeRO stage 3", nullptr, HasZeroStage<3>},
      ForbiddenRow{"recompute", "recomputation", HasRecompute},
      ForbiddenRow{"tiles", "linears in tiles", HasTiles},
      ForbiddenRow{"offload", "anything in the host's memory or in files",
                   Offloaded, WeightOffloaded},
      ForbiddenRow{
          "rooted", "a root that steps for all", Rooted,
          [](const WeightPlacement& weight) { return weight.rooted != 0; }},
      ForbiddenRow{
          "branches", "branches on groups of their own", nullptr, nullptr,
          [](const GraphIndex& index, const Plan& plan) {
            const Stages stages = StagesOf(*index.graph, plan);
            return static_cast<size_t>(stages.count()) < plan.groups.size();
          }},
      ForbiddenRow{"shares", "unequal samples of the devices of a group",
                   nullptr, nullptr,
                   [](const GraphIndex&, const Plan& plan) {
                     return std::ranges::any_of(
                         plan.groups, [](const DeviceGroup& group) {
                           return group.IsUneven(group.all_axes());
                         });
                   }},
  };
  return kTable;
}

std::span<const Subspace> Subspaces() {
  static const std::vector<Subspace> kTable = {
      {"megatron",
       "uniform plans of tp, pp, dp, cp and ep, with ZeRO-1 at most",
       IsMegatron,
       {"zero2", "zero3", "tiles", "offload"}},
      {"dp",
       "splits of samples only, with any ZeRO",
       IsDataParallel,
       {"tp", "pp", "cp", "ep"}},
      {"soap",
       "splits and placements of operators in one microbatch: no ZeRO, "
       "recomputation, tiles or offloading (Jia et al. 2019)",
       IsSoap,
       {"zero1", "zero2", "zero3", "recompute", "tiles", "offload", "rooted"}},
      {"full", "everything",
       [](const GraphIndex&, const Cluster&, const Plan&) { return true; }},
  };
  return kTable;
}

Result<Constraints::Fixed> Constraints::MakeFixed(const GraphIndex& index,
                                                  const Cluster& cluster,
                                                  const ConstraintText& given) {
  Fixed fixed;
  fixed.where = WhereOf("fix", given);
  const std::string& text = given.text;
  const size_t equals = text.find('=');
  const size_t colon = text.find(':', equals);
  if (equals == std::string::npos || colon == std::string::npos) {
    return InvalidInput("expected PATTERN=KEY:VALUE, such as h.*.attn=tp:8",
                        fixed.where);
  }
  const std::vector<std::string> pattern = SplitAt(text.substr(0, equals), '.');
  const std::string name = text.substr(equals + 1, colon - equals - 1);
  const std::string value = text.substr(colon + 1);
  const auto key = std::ranges::find(FixKeys(), name, &FixKey::name);
  if (key == FixKeys().end()) {
    return UnknownName("key", name, Names(FixKeys())).At(fixed.where);
  }
  fixed.key = static_cast<size_t>(key - FixKeys().begin());
  const KeyRow& row = kKeys[fixed.key];
  if (name == "recompute") {
    auto level = FindRecomputeLevel(value);
    if (!level) return level.error().At(fixed.where);
    fixed.value = static_cast<int>(*level);
  } else {
    auto number = ReadInteger(value, row.is_ways ? 1 : 0);
    if (!number) return number.error().At(fixed.where);
    fixed.value = *number;
  }
  if (name == "zero" && fixed.value > 3) {
    return InvalidInput("ZeRO's stages are 0 to 3", fixed.where);
  }
  const auto devices = static_cast<int>(cluster.devices.size());
  if (row.is_ways && fixed.value > devices) {
    return InvalidInput("the cluster has " + std::to_string(devices) +
                            " devices: no more ways than these",
                        fixed.where);
  }
  std::vector<std::vector<NodeId>> matching;
  for (const auto& block : index.nodes_of_block) {
    std::vector<NodeId> nodes;
    std::ranges::copy_if(block, std::back_inserter(nodes), [&](NodeId node) {
      return MatchesName(pattern, index.graph->node(node).name);
    });
    if (!nodes.empty()) matching.push_back(std::move(nodes));
  }
  if (matching.empty()) {
    return InvalidInput(
        "no operator matches; the dense ones are called " + SomeNames(index),
        fixed.where);
  }
  // Where uniform plans split none of them so, whoever can be split is meant.
  for (const auto find : {row.held, row.held_else}) {
    for (const bool usual : {true, false}) {
      for (const std::vector<NodeId>& nodes : matching) {
        if (find == nullptr) continue;
        auto held = find(index, nodes, fixed.value, usual);
        if (!held.empty()) fixed.nodes.push_back(std::move(held));
      }
      if (!fixed.nodes.empty()) return fixed;
    }
  }
  return InvalidInput(
      "of the operators that match none " + std::string(row.lacking),
      fixed.where);
}

Result<Constraints> Constraints::Make(const GraphIndex& index,
                                      const Cluster& cluster,
                                      const ConstraintTexts& texts) {
  Constraints made;
  std::set<std::string> seen;  // what is said again leaves no less
  for (const ConstraintText& given : texts.fix) {
    if (!seen.insert(given.text).second) continue;
    TESSERA_TRY(Fixed fixed, MakeFixed(index, cluster, given));
    made.fixed_.push_back(std::move(fixed));
  }
  for (const ConstraintText& given : texts.forbid) {
    Forbid forbid;
    forbid.where = WhereOf("forbid", given);
    const auto row =
        std::ranges::find(Forbidden(), given.text, &ForbiddenRow::name);
    if (row != Forbidden().end()) {
      forbid.row = &*row;
    } else if (FindSchedule(given.text)) {
      forbid.schedule = given.text;
    } else {
      std::vector<std::string_view> known = Names(Forbidden());
      for (const PipelineSchedule& schedule : Schedules()) {
        known.push_back(schedule.name);
      }
      return UnknownName("constraint", given.text, known).At(forbid.where);
    }
    made.forbidden_.push_back(std::move(forbid));
  }
  made.max_microbatch_ = texts.max_microbatch;
  if (!texts.space.text.empty() && texts.space.text != "full") {
    made.space_where_ = WhereOf("space", texts.space);
    const auto row = Find("space", Subspaces(), texts.space.text);
    if (!row) return row.error().At(made.space_where_);
    made.subspace_ = *row;
  }
  TESSERA_RETURN_IF_ERROR(made.CheckConsistent(index, cluster));
  return made;
}

Result<void> Constraints::CheckConsistent(const GraphIndex& index,
                                          const Cluster& cluster) const {
  const auto contradicts = [](const Fixed& fixed, const std::string& other) {
    return InvalidInput("contradicts " + other, fixed.where);
  };
  // By node, who holds each key, and the ways that it is split in all.
  std::map<std::pair<NodeId, size_t>, const Fixed*> held;
  std::map<NodeId, int64_t> ways;
  for (const Fixed& fixed : fixed_) {
    const KeyRow& row = kKeys[fixed.key];
    const std::string needs = row.needs(fixed.value);
    for (const Forbid& forbid : forbidden_) {
      if (forbid.row != nullptr && forbid.row->name == needs) {
        return contradicts(fixed, forbid.where);
      }
    }
    if (subspace_ != nullptr &&
        std::ranges::find(subspace_->lacks, needs) != subspace_->lacks.end()) {
      return contradicts(fixed, space_where_);
    }
    for (const std::vector<NodeId>& nodes : fixed.nodes) {
      for (NodeId node : nodes) {
        const auto [at, first] =
            held.emplace(std::pair(node, fixed.key), &fixed);
        if (!first && at->second->value != fixed.value) {
          return contradicts(fixed, at->second->where);
        }
        // Samples are split by expert axes too.
        if (!first || !row.is_ways || row.key.name == "ep") continue;
        int64_t& all = ways.emplace(node, 1).first->second;
        all *= fixed.value;
        if (all > static_cast<int64_t>(cluster.devices.size())) {
          return InvalidInput(
              "with what else is fixed '" + index.graph->node(node).name +
                  "' is split in " + std::to_string(all) +
                  " ways, but the cluster has " +
                  std::to_string(cluster.devices.size()) + " devices",
              fixed.where);
        }
      }
    }
  }
  return {};
}

std::vector<std::vector<NodeId>> Constraints::FixedNodes() const {
  std::vector<std::vector<NodeId>> nodes;
  for (const Fixed& fixed : fixed_) {
    auto& all = nodes.emplace_back();
    for (const auto& of_block : fixed.nodes) {
      all.insert(all.end(), of_block.begin(), of_block.end());
    }
  }
  return nodes;
}

bool Constraints::empty() const {
  return fixed_.empty() && forbidden_.empty() && max_microbatch_ == 0 &&
         subspace_ == nullptr;
}

int Constraints::MostFixed(std::string_view key) const {
  int most = 1;
  for (const Fixed& fixed : fixed_) {
    if (kKeys[fixed.key].key.name == key) most = std::max(most, fixed.value);
  }
  return most;
}

template <typename Visit>
void Constraints::ForEachBroken(const GraphIndex& index, const Cluster& cluster,
                                const Plan& plan, Visit broken) const {
  for (const Fixed& fixed : fixed_) {
    for (const std::vector<NodeId>& nodes : fixed.nodes) {
      if (!kKeys[fixed.key].holds(index, plan, nodes, fixed.value)) {
        broken(fixed.where);
      }
    }
  }
  for (const Forbid& forbid : forbidden_) {
    if (forbid.row != nullptr
            ? Has(*forbid.row, index, plan)
            : plan.groups.size() > 1 && plan.schedule == forbid.schedule) {
      broken(forbid.where);
    }
  }
  if (max_microbatch_ > 0 && AnyNode(index, [&](NodeId node) {
        return SamplesOf(index, plan, node) > max_microbatch_;
      })) {
    broken("--max-microbatch " + std::to_string(max_microbatch_));
  }
  if (subspace_ != nullptr && !subspace_->holds(index, cluster, plan)) {
    broken(space_where_);
  }
}

int Constraints::Violations(const GraphIndex& index, const Cluster& cluster,
                            const Plan& plan) const {
  int violations = 0;
  ForEachBroken(index, cluster, plan,
                [&](const std::string&) { ++violations; });
  return violations;
}

bool Constraints::StillHold(const GraphIndex& index, const Cluster& cluster,
                            const Plan& plan, std::span<const NodeId> nodes,
                            std::span<const size_t> weights) const {
  const auto block_of = [&](NodeId node) {
    return index.graph->node(node).block;
  };
  std::set<int> blocks;
  for (NodeId node : nodes) blocks.insert(block_of(node));
  for (size_t weight : weights) {
    const NodeId home = index.weights[weight].home.node;
    if (home.valid()) blocks.insert(block_of(home));
  }
  for (const Fixed& fixed : fixed_) {
    for (int block : blocks) {
      // Those of one block, in the order of blocks.
      const auto at = std::ranges::lower_bound(
          fixed.nodes, block, {},
          [&](const std::vector<NodeId>& of) { return block_of(of[0]); });
      if (at != fixed.nodes.end() && block_of((*at)[0]) == block &&
          !kKeys[fixed.key].holds(index, plan, *at, fixed.value)) {
        return false;
      }
    }
  }
  for (const Forbid& forbid : forbidden_) {
    const ForbiddenRow* const row = forbid.row;
    if (row == nullptr) continue;
    const bool has = (row->node != nullptr &&
                      std::ranges::any_of(nodes,
                                          [&](NodeId node) {
                                            return row->node(index, plan, node);
                                          })) ||
                     (row->weight != nullptr &&
                      std::ranges::any_of(weights, [&](size_t weight) {
                        return row->weight(plan.weights[weight]);
                      }));
    if (has) return false;
  }
  if (max_microbatch_ > 0 && std::ranges::any_of(nodes, [&](NodeId node) {
        return SamplesOf(index, plan, node) > max_microbatch_;
      })) {
    return false;
  }
  return subspace_ == nullptr || subspace_->holds(index, cluster, plan);
}

std::vector<std::string> Constraints::Broken(const GraphIndex& index,
                                             const Cluster& cluster,
                                             const Plan& plan) const {
  std::vector<std::string> texts;
  ForEachBroken(index, cluster, plan, [&](const std::string& where) {
    if (texts.empty() || texts.back() != where) texts.push_back(where);
  });
  return texts;
}

}  // namespace tessera
