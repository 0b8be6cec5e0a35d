#include "planner/search/constraints.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "planner/base/split.h"
#include "planner/base/table.h"
#include "planner/plan/recompute.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

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

bool MatchesName(const std::vector<std::string_view>& pattern,
                 const std::string& name) {
  const std::vector<std::string_view> words = Split(name, '.');
  return std::search(words.begin(), words.end(), pattern.begin(), pattern.end(),
                     [](std::string_view word, std::string_view part) {
                       return MatchesWord(part, word);
                     }) != words.end();
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

}  // namespace

Result<Constraints::Fixed> Constraints::MakeFixed(const GraphIndex& index,
                                                  const Cluster& cluster,
                                                  const ConstraintText& given) {
  Fixed fixed;
  fixed.where = WhereOf("fix", given);
  const std::string_view text = given.text;
  const size_t equals = text.find('=');
  const size_t colon = text.find(':', equals);
  if (equals == text.npos || colon == text.npos) {
    return InvalidInput("expected PATTERN=KEY:VALUE, such as h.*.attn=tp:8",
                        fixed.where);
  }
  const std::vector<std::string_view> pattern =
      Split(text.substr(0, equals), '.');
  const std::string_view name = text.substr(equals + 1, colon - equals - 1);
  const std::string_view value = text.substr(colon + 1);
  const auto key = std::ranges::find(FixKeys(), name, &FixKey::name);
  if (key == FixKeys().end()) {
    return UnknownName("key", name, Names(FixKeys())).At(fixed.where);
  }
  fixed.key = static_cast<size_t>(key - FixKeys().begin());
  const HeldRow& row = HeldRows()[fixed.key];
  if (name == "recompute") {
    auto level = FindRecomputeLevel(value);
    if (!level) return level.error().At(fixed.where);
    fixed.value = static_cast<int>(*level);
  } else {
    auto number = ReadWholeFrom(row.is_ways ? 1 : 0, value);
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
  for (const HeldRow::Finder find : row.finders) {
    if (find == nullptr) break;
    for (const std::vector<NodeId>& nodes : matching) {
      auto held = find(index, nodes, fixed.value);
      if (!held.empty()) fixed.nodes.push_back(std::move(held));
    }
    if (!fixed.nodes.empty()) return fixed;
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
  made.max_microbatch_where_ = WhereOf(
      "max-microbatch",
      {std::to_string(texts.max_microbatch), texts.max_microbatch_line});
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
    const HeldRow& row = HeldRows()[fixed.key];
    const std::string needs = row.needs(fixed.value);
    const bool is_asked =
        row.asked == nullptr ||
        std::ranges::any_of(fixed.nodes, [&](const std::vector<NodeId>& nodes) {
          return std::ranges::any_of(nodes, [&](NodeId node) {
            return row.asked(index.graph->node(node));
          });
        });
    for (const Forbid& forbid : forbidden_) {
      if (is_asked && forbid.row != nullptr && forbid.row->name == needs) {
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
    if (HeldRows()[fixed.key].key.name == key)
      most = std::max(most, fixed.value);
  }
  return most;
}

std::vector<int> Constraints::FixedDegrees() const {
  std::set<int> degrees;
  for (const Fixed& fixed : fixed_) {
    if (HeldRows()[fixed.key].is_ways) degrees.insert(fixed.value);
  }
  return {degrees.begin(), degrees.end()};
}

bool Constraints::RuleOut(std::string_view name) const {
  return (subspace_ != nullptr && std::ranges::find(subspace_->lacks, name) !=
                                      subspace_->lacks.end()) ||
         std::ranges::any_of(forbidden_, [&](const Forbid& forbid) {
           return forbid.row != nullptr && forbid.row->name == name;
         });
}

template <typename Visit>
void Constraints::ForEachBroken(const GraphIndex& index, const Cluster& cluster,
                                const Plan& plan, Visit broken) const {
  for (const Fixed& fixed : fixed_) {
    for (const std::vector<NodeId>& nodes : fixed.nodes) {
      if (!HeldRows()[fixed.key].holds(index, plan, nodes, fixed.value)) {
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
  if (max_microbatch_ > 0) {
    int64_t most = 0;
    for (size_t i = 0; i < index.forward_nodes; ++i) {
      most = std::max(most, MostSamples(index, plan, NodeId(i)));
    }
    if (most > max_microbatch_) broken(max_microbatch_where_);
  }
  if (subspace_ != nullptr && !subspace_->holds(index, cluster, plan)) {
    broken(space_where_);
  }
}

Constraints Constraints::WithAnyMicrobatch() const {
  Constraints constraints = *this;
  constraints.max_microbatch_ = 0;
  return constraints;
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
    blocks.insert(block_of(index.weights[weight].home.node));
  }
  for (const Fixed& fixed : fixed_) {
    for (int block : blocks) {
      // Those of one block, in the order of blocks.
      const auto at = std::ranges::lower_bound(
          fixed.nodes, block, {},
          [&](const std::vector<NodeId>& of) { return block_of(of[0]); });
      if (at != fixed.nodes.end() && block_of((*at)[0]) == block &&
          !HeldRows()[fixed.key].holds(index, plan, *at, fixed.value)) {
        return false;
      }
    }
  }
  for (const Forbid& forbid : forbidden_) {
    const ForbiddenRow* const row = forbid.row;
    if (row == nullptr) continue;
    const bool has =
        (row->block != nullptr &&
         std::ranges::any_of(
             blocks,
             [&](int block) { return row->block(index, plan, block); })) ||
        (row->node != nullptr &&
         std::ranges::any_of(
             nodes,
             [&](NodeId node) { return row->node(index, plan, node); })) ||
        (row->weight != nullptr &&
         std::ranges::any_of(weights, [&](size_t weight) {
           return row->weight(plan.weights[weight]);
         }));
    if (has) return false;
  }
  if (max_microbatch_ > 0 && std::ranges::any_of(nodes, [&](NodeId node) {
        return MostSamples(index, plan, node) > max_microbatch_;
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
