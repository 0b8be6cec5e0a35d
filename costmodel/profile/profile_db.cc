#include "costmodel/profile/profile_db.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <tuple>

#include "planner/base/table.h"
#include "planner/ir/index_rule.h"
#include "planner/ir/op.h"

namespace tessera {
namespace {

auto FamilyOf(const ProfileKey& key) {
  return std::tie(key.name, key.dtype, key.device, key.ranks, key.nodes);
}

// The rule that names the factors of an operator's cost: its own default, or
// that of the operator whose adjoint it is. Empty when it has none.
// `which`: rule or rule_of_samples.
std::string_view DefaultRule(std::string_view kernel,
                             std::string_view OpDef::*which) {
  const std::string_view name = kernel.substr(0, kernel.find_first_of(".+"));
  for (const OpDef& op : Ops()) {
    if (op.name == name) {
      if (!(op.*which).empty()) return op.*which;
      continue;
    }
    for (const AdjointDef& adjoint : op.adjoints) {
      if (adjoint.op == name && !(op.*which).empty()) return op.*which;
    }
  }
  return {};
}

// A factor that the kernel's cost needs and `rule` lacks, or 0. Statistics and
// the like may be left out by an adjoint that does not read them; a rule with
// all letters of its operator is always enough.
char LackedFactor(std::string_view kernel, const IndexRule& rule) {
  char lacks = 0;
  for (const auto which : {&OpDef::rule, &OpDef::rule_of_samples}) {
    const auto needed = IndexRule::Parse(DefaultRule(kernel, which));
    if (!needed) continue;
    const auto it = std::ranges::find_if(needed->factors, [&](const Factor& f) {
      return rule.FactorOf(f.letter) < 0;
    });
    if (it == needed->factors.end()) return 0;
    if (lacks == 0) lacks = it->letter;
  }
  return lacks;
}

// Elements of the largest operand or result. REQUIRES: an extent a factor.
double LargestTensor(const IndexRule& rule,
                     const std::vector<int64_t>& extents) {
  double largest = 0;
  for (const auto* side : {&rule.operands, &rule.results}) {
    for (const Indices& indices : *side) {
      double elements = 1;
      for (uint8_t f : indices) elements *= static_cast<double>(extents[f]);
      largest = std::max(largest, elements);
    }
  }
  return largest;
}

// Far beyond any device's memory, far below where an int64 of bytes ends.
constexpr double kMostElements = 0x1p50;

// Eleven days for one kernel; sums of a few stay within a Duration.
constexpr double kMostSeconds = 1e6;

// As a file may have it.
std::string NumberText(double value) {
  if (std::isnan(value)) return "nan";  // not "-nan"
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  return {buffer, end};
}

const std::array<std::string_view, kCommKinds> kCollectives = [] {
  std::array<std::string_view, kCommKinds> names;
  for (size_t i = 0; i < names.size(); ++i) {
    names[i] = NameOf(static_cast<CommKind>(i));
  }
  return names;
}();

}  // namespace

const Measurement* ProfileDb::Find(const ProfileKey& key) const {
  const auto found = rows.find(key);
  return found == rows.end() ? nullptr : &found->second;
}

std::pair<ProfileDb::Iterator, ProfileDb::Iterator> ProfileDb::Family(
    const ProfileKey& key) const {
  // The least key of the family: no rule, no extents, the least payload.
  ProfileKey least = key;
  least.rule.clear();
  least.extents.clear();
  least.payload = {0};
  const Iterator begin = rows.lower_bound(least);
  Iterator end = begin;
  while (end != rows.end() && FamilyOf(end->first) == FamilyOf(key)) ++end;
  return {begin, end};
}

std::pair<ProfileDb::Iterator, ProfileDb::Iterator> ProfileDb::CollectiveRows(
    const ProfileKey& key) const {
  const auto [begin, end] = Family(key);
  return {begin, std::find_if(begin, end, [](const auto& row) {
            return !row.first.rule.empty();
          })};
}

ProfileKey CollectiveKey(CommKind kind, std::string_view device, int ranks,
                         int nodes, Bytes payload) {
  ProfileKey key;
  key.name = std::string(NameOf(kind));
  key.device = std::string(device);
  key.ranks = ranks;
  key.nodes = nodes;
  key.payload = payload;
  return key;
}

std::vector<Error> Validate(const ProfileDb& profile) {
  std::vector<Error> errors;
  int row = 0;
  for (const auto& [key, measured] : profile.rows) {
    const auto report = [&](std::string_view field, std::string message) {
      errors.push_back(InvalidInput(
          std::move(message),
          "rows[" + std::to_string(row) + "]." + std::string(field)));
    };
    const auto expect_from = [&](std::string_view field, int64_t value,
                                 int64_t least) {
      if (value >= least) return;
      report(field, "is " + std::to_string(value) +
                        ": expected a number from " + std::to_string(least));
    };
    if (key.name.empty()) report("name", "is empty");
    if (key.device.empty()) report("device", "is empty");
    expect_from("ranks", key.ranks, 1);
    expect_from("nodes", key.nodes, 1);
    expect_from("payload_bytes", key.payload.value, key.rule.empty() ? 1 : 0);
    if (!key.rule.empty()) {
      const auto rule = IndexRule::Parse(key.rule);
      if (!rule) {
        report("rule", rule.error().message);
      } else if (rule->factors.size() != key.extents.size()) {
        report("extents", "there are " + std::to_string(key.extents.size()) +
                              ", the rule has " +
                              std::to_string(rule->factors.size()) +
                              " factors");
      } else if (LargestTensor(*rule, key.extents) > kMostElements) {
        report("extents", "a tensor of more than 2^50 elements");
      } else if (const char lacks = LackedFactor(key.name, *rule)) {
        report("rule", std::string("lacks the factor '") + lacks + "' of '" +
                           key.name + "'");
      }
    } else {
      if (!key.extents.empty()) {
        report("extents", "there is no rule that they could belong to");
      }
      if (std::ranges::find(kCollectives, key.name) == kCollectives.end()) {
        report("name",
               UnknownName("communication", key.name, kCollectives).message);
      }
      if (key.dtype != DType::kFloat32) {
        report("dtype", "is " + std::string(NameOf(key.dtype)) +
                            ": expected fp32, since communication is timed "
                            "by bytes");
      }
    }
    for (size_t i = 0; i < key.extents.size(); ++i) {
      expect_from("extents[" + std::to_string(i) + "]", key.extents[i], 1);
    }
    if (!(measured.median_s > 0) || !(measured.median_s <= kMostSeconds)) {
      report("median_seconds", "is " + NumberText(measured.median_s) +
                                   ": expected a time above 0, at most 1e6");
    }
    if (!(measured.spread >= 0) || !std::isfinite(measured.spread)) {
      report("spread", "is " + NumberText(measured.spread) +
                           ": expected a number from 0");
    }
    expect_from("samples", measured.samples, 1);
    ++row;
  }
  return errors;
}

}  // namespace tessera
