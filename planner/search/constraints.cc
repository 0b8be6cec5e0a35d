#include "planner/search/constraints.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "planner/base/table.h"
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

// Whether `pattern`, with '*' for any characters, is `text`.
bool MatchesWord(std::string_view pattern, std::string_view text) {
  if (pattern.empty()) return text.empty();
  if (pattern[0] == '*') {
    return MatchesWord(pattern.substr(1), text) ||
           (!text.empty() && MatchesWord(pattern, text.substr(1)));
  }
  return !text.empty() && pattern[0] == text[0] &&
         MatchesWord(pattern.substr(1), text.substr(1));
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

// The axes of a node on its factor `factor`; none where that is -1.
AxisSet AxesOn(const Plan& plan, NodeId node, int factor) {
  return factor < 0 ? AxisSet{0}
                    : plan.ops[node.index()].axes[static_cast<size_t>(factor)];
}

// Those that split neither samples, nor the sequence, nor experts.
AxisSet TensorAxes(const GraphIndex& index, const Plan& plan, NodeId node) {
  AxisSet axes = 0;
  for (int f = 0; f < kMaxFactors; ++f) {
    if (f == index.SampleFactor(node) || f == index.SequenceFactor(node) ||
        f == index.ExpertFactor(node)) {
      continue;
    }
    axes |= AxesOn(plan, node, f);
  }
  return axes;
}

// The keys of a fixed operator: whether the matching nodes of one block have
// the value.
struct KeyRow {
  FixKey key;
  bool (*holds)(const GraphIndex& index, const Plan& plan,
                const std::vector<NodeId>& nodes, int value);
};

// The ways that the nodes split a factor between them. Where none of them has
// it, anything will do.
template <typename FactorOf>
bool SplitsFactor(const Plan& plan, const std::vector<NodeId>& nodes, int value,
                  FactorOf factor_of) {
  AxisSet axes = 0;
  bool any = false;
  for (NodeId node : nodes) {
    const int factor = factor_of(node);
    any |= factor >= 0;
    axes |= AxesOn(plan, node, factor);
  }
  const GroupId group = plan.ops[nodes[0].index()].group;
  return !any || plan.groups[group.index()].Size(axes) == value;
}

bool SplitsTensor(const GraphIndex& index, const Plan& plan,
                  const std::vector<NodeId>& nodes, int value) {
  AxisSet axes = 0;
  bool any = false;
  for (NodeId node : nodes) {
    if (!IsDense(index.graph->node(node))) continue;
    any = true;
    axes |= TensorAxes(index, plan, node);
  }
  const GroupId group = plan.ops[nodes[0].index()].group;
  return !any || plan.groups[group.index()].Size(axes) == value;
}

bool HasZero(const GraphIndex& index, const Plan& plan,
             const std::vector<NodeId>& nodes, int value) {
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    if (std::ranges::find(nodes, index.weights[w].home.node) != nodes.end() &&
        plan.weights[w].zero_stage != value) {
      return false;
    }
  }
  return true;
}

bool Recomputes(const GraphIndex& index, const Plan& plan,
                const std::vector<NodeId>& nodes, int value) {
  const int block = index.graph->node(nodes[0]).block;
  const auto [first, last] = Layers(index);
  if (block < first || block >= last) return true;
  return RecomputeOf(index, plan, block) == static_cast<RecomputeLevel>(value);
}

constexpr std::array kKeys = {
    KeyRow{{"dp", "ways that samples are split"},
           [](const GraphIndex& index, const Plan& plan,
              const std::vector<NodeId>& nodes, int value) {
             return SplitsFactor(plan, nodes, value, [&](NodeId n) {
               return index.SampleFactor(n);
             });
           }},
    KeyRow{{"tp", "ways that dense layers and attention are split otherwise"},
           SplitsTensor},
    KeyRow{{"cp", "ways that the sequence is split"},
           [](const GraphIndex& index, const Plan& plan,
              const std::vector<NodeId>& nodes, int value) {
             return SplitsFactor(plan, nodes, value, [&](NodeId n) {
               return index.SequenceFactor(n);
             });
           }},
    KeyRow{{"ep", "ways that experts are split"},
           [](const GraphIndex& index, const Plan& plan,
              const std::vector<NodeId>& nodes, int value) {
             return SplitsFactor(plan, nodes, value, [&](NodeId n) {
               return index.ExpertFactor(n);
             });
           }},
    KeyRow{{"zero", "ZeRO stage of the weights"}, HasZero},
    KeyRow{{"recompute", "recomputation of the layer"}, Recomputes},
};

template <int kStage>
bool HasZeroStage(const GraphIndex&, const Plan& plan) {
  return std::ranges::any_of(plan.weights, [](const WeightPlacement& w) {
    return w.zero_axes != 0 && w.zero_stage == kStage;
  });
}

template <typename Has>
bool AnyNode(const GraphIndex& index, Has has) {
  for (size_t i = 0; i < index.forward_nodes; ++i) {
    if (has(NodeId(i))) return true;
  }
  return false;
}

bool HasTensor(const GraphIndex& index, const Plan& plan) {
  return AnyNode(index, [&](NodeId node) {
    return IsDense(index.graph->node(node)) &&
           TensorAxes(index, plan, node) != 0;
  });
}

bool HasContext(const GraphIndex& index, const Plan& plan) {
  return AnyNode(index, [&](NodeId node) {
    return index.graph->node(node).op->op_class == OpClass::kAttention &&
           AxesOn(plan, node, index.SequenceFactor(node)) != 0;
  });
}

bool HasExperts(const GraphIndex& index, const Plan& plan) {
  return AnyNode(index, [&](NodeId node) {
    return AxesOn(plan, node, index.ExpertFactor(node)) != 0;
  });
}

bool HasRecompute(const GraphIndex&, const Plan& plan) {
  return std::ranges::any_of(plan.ops, &OpPlacement::recompute);
}

bool HasTiles(const GraphIndex&, const Plan& plan) {
  return std::ranges::any_of(
      plan.ops, [](const OpPlacement& op) { return op.tiles > 1; });
}

bool IsDataParallel(const GraphIndex& index, const Cluster&, const Plan& plan) {
  return StagesOf(*index.graph, plan).count() == 1 && plan.groups.size() == 1 &&
         !AnyNode(index, [&](NodeId node) {
           for (int f = 0; f < kMaxFactors; ++f) {
             if (f != index.SampleFactor(node) && AxesOn(plan, node, f) != 0) {
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
         !Offloads(plan);
}

bool IsSoap(const GraphIndex& index, const Cluster&, const Plan& plan) {
  const bool stores_whole = std::ranges::all_of(
      plan.weights, [](const WeightPlacement& w) { return w.zero_axes == 0; });
  return stores_whole && plan.microbatches == 1 && !HasRecompute(index, plan) &&
         !HasTiles(index, plan) && !Offloads(plan) && !UsesRoot(plan);
}

Result<int> ReadInteger(std::string_view text, int least) {
  int value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() ||
      value < least) {
    return InvalidInput("'" + std::string(text) +
                        "' is not a whole number from " +
                        std::to_string(least));
  }
  return value;
}

}  // namespace

bool Offloads(const Plan& plan) {
  return Uses(plan, MemoryTier::kHost) || Uses(plan, MemoryTier::kFile);
}

Result<void> ParseConstraints(std::string_view text, const std::string& path,
                              ConstraintTexts& texts) {
  int number = 0;
  for (const std::string& whole : SplitAt(text, '\n')) {
    ++number;
    const std::string line = whole.substr(0, whole.find('#'));
    std::vector<std::string> words;
    for (const std::string& word : SplitAt(line, ' ')) {
      if (!word.empty()) words.push_back(word);
    }
    if (words.empty()) continue;
    const std::string where = path + ":" + std::to_string(number);
    if (words.size() != 2) {
      return InvalidInput("expected a key and a value, such as 'forbid zero3'",
                          where);
    }
    if (words[0] == "fix") {
      texts.fix.push_back(words[1]);
    } else if (words[0] == "forbid") {
      texts.forbid.push_back(words[1]);
    } else if (words[0] == "space") {
      texts.space = words[1];
    } else if (words[0] == "max-microbatch") {
      auto value = ReadInteger(words[1], 1);
      if (!value) return value.error().At(where);
      texts.max_microbatch = *value;
    } else {
      static constexpr std::array<std::string_view, 4> kKnown = {
          "fix", "forbid", "max-microbatch", "space"};
      return UnknownName("constraint", words[0], kKnown).At(where);
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
      ForbiddenRow{"pp", "pipelines",
                   [](const GraphIndex& index, const Plan& plan) {
                     return StagesOf(*index.graph, plan).count() > 1;
                   }},
      ForbiddenRow{"cp", "attention with a split sequence", HasContext},
      ForbiddenRow{"ep", "split experts", HasExperts},
      ForbiddenRow{"zero1", "ZeRO stage 1", HasZeroStage<1>},
      ForbiddenRow{"zero2", "ZeRO stage 2", HasZeroStage<2>},
      ForbiddenRow{"zero3", "ZeRO stage 3", HasZeroStage<3>},
      ForbiddenRow{"recompute", "recomputation", HasRecompute},
      ForbiddenRow{"tiles", "linears in tiles", HasTiles},
      ForbiddenRow{
          "offload", "anything in the host's memory or in files",
          [](const GraphIndex&, const Plan& plan) { return Offloads(plan); }},
      ForbiddenRow{
          "rooted", "a root that steps for all",
          [](const GraphIndex&, const Plan& plan) { return UsesRoot(plan); }},
      ForbiddenRow{"branches", "branches on groups of their own",
                   [](const GraphIndex& index, const Plan& plan) {
                     const Stages stages = StagesOf(*index.graph, plan);
                     return static_cast<size_t>(stages.count()) <
                            plan.groups.size();
                   }},
  };
  return kTable;
}

std::span<const Subspace> Subspaces() {
  static constexpr std::array kTable = {
      Subspace{"megatron",
               "uniform plans of tp, pp, dp, cp and ep, with ZeRO-1 at most",
               IsMegatron},
      Subspace{"dp", "splits of samples only, with any ZeRO", IsDataParallel},
      Subspace{"soap",
               "splits and placements of operators in one microbatch: no ZeRO, "
               "recomputation, tiles or offloading (Jia et al. 2019)",
               IsSoap},
      Subspace{
          "full", "everything",
          [](const GraphIndex&, const Cluster&, const Plan&) { return true; }},
  };
  return kTable;
}

Result<Constraints> Constraints::Make(const GraphIndex& index,
                                      const ConstraintTexts& texts) {
  Constraints made;
  for (const std::string& text : texts.fix) {
    const std::string where = "--fix " + text;
    const size_t equals = text.find('=');
    const size_t colon = text.find(':', equals);
    if (equals == std::string::npos || colon == std::string::npos) {
      return InvalidInput("expected PATTERN=KEY:VALUE, such as h.*.attn=tp:8",
                          where);
    }
    const std::vector<std::string> pattern =
        SplitAt(text.substr(0, equals), '.');
    const std::string name = text.substr(equals + 1, colon - equals - 1);
    const std::string value = text.substr(colon + 1);
    const auto key = std::ranges::find(FixKeys(), name, &FixKey::name);
    if (key == FixKeys().end()) {
      return UnknownName("key", name, Names(FixKeys())).At(where);
    }
    Fixed fixed;
    fixed.key = static_cast<size_t>(key - FixKeys().begin());
    if (name == "recompute") {
      auto level = FindRecomputeLevel(value);
      if (!level) return level.error().At(where);
      fixed.value = static_cast<int>(*level);
    } else {
      auto number = ReadInteger(value, name == "zero" ? 0 : 1);
      if (!number) return number.error().At(where);
      fixed.value = *number;
    }
    for (const auto& block : index.nodes_of_block) {
      std::vector<NodeId> nodes;
      for (NodeId node : block) {
        if (MatchesName(pattern, index.graph->node(node).name)) {
          nodes.push_back(node);
        }
      }
      if (!nodes.empty()) fixed.nodes.push_back(std::move(nodes));
    }
    if (fixed.nodes.empty()) {
      const size_t middle = index.forward_nodes / 2;
      return InvalidInput("no operator matches; one is called '" +
                              index.graph->nodes[middle].name + "'",
                          where);
    }
    made.fixed_.push_back(std::move(fixed));
  }
  for (const std::string& text : texts.forbid) {
    const auto row = std::ranges::find(Forbidden(), text, &ForbiddenRow::name);
    if (row != Forbidden().end()) {
      made.forbidden_.push_back(&*row);
    } else if (FindSchedule(text)) {
      made.schedules_.push_back(text);
    } else {
      std::vector<std::string_view> known = Names(Forbidden());
      for (const PipelineSchedule& schedule : Schedules()) {
        known.push_back(schedule.name);
      }
      return UnknownName("constraint", text, known).At("--forbid");
    }
  }
  made.max_microbatch_ = texts.max_microbatch;
  if (!texts.space.empty() && texts.space != "full") {
    const auto row = Find("space", Subspaces(), texts.space);
    if (!row) return row.error().At("--space");
    made.subspace_ = *row;
  }
  return made;
}

bool Constraints::empty() const {
  return fixed_.empty() && forbidden_.empty() && schedules_.empty() &&
         max_microbatch_ == 0 && subspace_ == nullptr;
}

int Constraints::Violations(const GraphIndex& index, const Cluster& cluster,
                            const Plan& plan) const {
  int violations = 0;
  for (const Fixed& fixed : fixed_) {
    for (const std::vector<NodeId>& nodes : fixed.nodes) {
      violations +=
          kKeys[fixed.key].holds(index, plan, nodes, fixed.value) ? 0 : 1;
    }
  }
  for (const ForbiddenRow* row : forbidden_) {
    violations += row->has(index, plan) ? 1 : 0;
  }
  if (plan.groups.size() > 1) {
    violations +=
        std::ranges::find(schedules_, plan.schedule) != schedules_.end() ? 1
                                                                         : 0;
  }
  if (max_microbatch_ > 0) {
    // Of the replica that has most: the loss's operators see the whole batch,
    // the first one a microbatch.
    const int sample = index.SampleFactor(NodeId(0));
    const DeviceGroup& group = plan.groups[plan.ops[0].group.index()];
    const int64_t replicas = group.Size(AxesOn(plan, NodeId(0), sample));
    violations += index.graph->global_batch > int64_t{max_microbatch_} *
                                                  replicas * plan.microbatches
                      ? 1
                      : 0;
  }
  if (subspace_ != nullptr) {
    violations += subspace_->holds(index, cluster, plan) ? 0 : 1;
  }
  return violations;
}

}  // namespace tessera
