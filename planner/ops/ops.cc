#include <cmath>
#include <deque>
#include <mutex>

#include "planner/base/table.h"
#include "planner/ir/op.h"

namespace tessera {

#define TESSERA_OPS(family) std::vector<OpDef> family##Ops();
#include "planner/ops/ops.def"
#undef TESSERA_OPS

std::span<const OpDef> Ops() {
  static const std::vector<OpDef>* const table = [] {
    auto* ops = new std::vector<OpDef>();
#define TESSERA_OPS(family) \
  for (OpDef & op : family##Ops()) ops->push_back(std::move(op));
#include "planner/ops/ops.def"
#undef TESSERA_OPS
    return ops;
  }();
  return *table;
}

namespace {

// What DefineOp keeps: the texts that the operators' fields refer to stand
// beside them, and nothing moves or goes.
struct Definition {
  OwnOp own;
  std::deque<std::string> texts;
  std::deque<OpDef> ops;  // forward, then the operands' gradients

  const OpDef& forward() const { return ops.front(); }
};

struct Definitions {
  std::mutex mutex;
  std::deque<Definition> rows;

  const OpDef* Find(std::string_view name) {
    for (const Definition& row : rows) {
      for (const OpDef& op : row.ops) {
        if (op.name == name) return &op;
      }
    }
    return nullptr;
  }
};

Definitions& Defined() {
  static auto* const definitions = new Definitions();
  return *definitions;
}

bool IsName(std::string_view name) {
  return !name.empty() &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") ==
             std::string_view::npos;
}

Result<void> CheckFlops(double flops, std::string_view field) {
  if (flops >= 0 && flops <= 1e15) return {};
  return InvalidInput("expected a number from 0 to 1e15", std::string(field));
}

Result<void> CheckOwn(const OwnOp& own) {
  if (!IsName(own.name)) {
    return InvalidInput(
        "is '" + own.name + "': expected small letters, digits and '_'",
        "name");
  }
  const auto rule = IndexRule::Parse(own.rule);
  if (!rule) return InvalidInput(rule.error().message, "rule");
  for (size_t f = 0; f < rule->factors.size(); ++f) {
    const auto holds = [&](const Indices& indices) {
      return Holds(indices, static_cast<int>(f));
    };
    const std::string letter(1, rule->factors[f].letter);
    if (rule->factors[f].splittable &&
        std::ranges::none_of(rule->operands, holds)) {
      return InvalidInput("is '" + own.rule +
                              "', of whose operands none has '" + letter +
                              "': expected one that has it, or '" + letter +
                              "!' in the result, which is not split",
                          "rule");
    }
  }
  for (const char letter : own.exchanged) {
    const int f = rule->FactorOf(letter);
    if (f >= 0 && rule->factors[static_cast<size_t>(f)].splittable) continue;
    return InvalidInput("names '" + std::string(1, letter) +
                            "': expected factors of the rule that can be split",
                        "exchanged");
  }
  TESSERA_RETURN_IF_ERROR(CheckFlops(own.flops_per_point, "flops_per_point"));
  TESSERA_RETURN_IF_ERROR(
      CheckFlops(own.backward_flops_per_point, "backward_flops_per_point"));
  const auto check = [&](const std::vector<size_t>& operands,
                         std::string_view field) -> Result<void> {
    for (const size_t operand : operands) {
      if (operand < rule->operands.size()) continue;
      return InvalidInput("names operand " + std::to_string(operand) +
                              ": the rule has " +
                              std::to_string(rule->operands.size()),
                          std::string(field));
    }
    return {};
  };
  TESSERA_RETURN_IF_ERROR(check(own.integer_operands, "integer_operands"));
  return check(own.forward_operands, "forward_operands");
}

}  // namespace

Result<const OpDef*> DefineOp(const OwnOp& own) {
  TESSERA_RETURN_IF_ERROR(CheckOwn(own));
  Definitions& defined = Defined();
  const std::lock_guard lock(defined.mutex);
  for (const Definition& row : defined.rows) {
    if (row.own == own) return &row.forward();
  }
  Definition row;
  row.own = own;
  const auto keep = [&](std::string text) -> std::string_view {
    return row.texts.emplace_back(std::move(text));
  };
  const auto rule = IndexRule::Parse(own.rule);
  const size_t operands = rule->operands.size();
  const std::string_view exchanged = keep(own.exchanged);
  std::string reads;
  const auto read = [&](std::string_view symbol, size_t number) {
    if (!reads.empty()) reads += ",";
    reads += std::string(symbol) + std::to_string(number);
  };
  // A scalar is a loss: its gradient is one.
  if (!rule->results[0].empty()) read("dy", 0);
  for (size_t i = 0; i < operands; ++i) {
    if (std::ranges::count(own.forward_operands, i) == 0) read("x", i);
  }
  if (own.backward_reads_result) read("y", 0);
  for (size_t k = 1; k < rule->results.size(); ++k) read("y", k);
  OpDef forward = {.name = keep(own.name),
                   .summary = keep(own.summary),
                   .rule = keep(own.rule),
                   .op_class = OpClass::kRoofline,
                   .flops_per_point = own.flops_per_point,
                   .integer_operands = own.integer_operands,
                   .exchanged = exchanged};
  std::vector<OpDef> backward;
  const auto add_backward = [&](const std::string& name,
                                const std::string& writes, double gradients) {
    forward.adjoints.push_back({keep(name), keep(reads + "->" + writes)});
    backward.push_back(
        {.name = forward.adjoints.back().op,
         .summary = "gradients of an operator's operands",
         .op_class = OpClass::kRoofline,
         .flops_per_point = gradients * own.backward_flops_per_point,
         .exchanged = exchanged});
  };
  std::string all;
  double gradients = 0;
  for (size_t i = 0; i < operands; ++i) {
    if (std::ranges::count(own.integer_operands, i) > 0) continue;
    const std::string number = std::to_string(i);
    if (own.one_backward) {
      all += (all.empty() ? "dx" : ",dx") + number;
      ++gradients;
    } else {
      add_backward(own.name + "_d" + number, "dx" + number, 1);
    }
  }
  if (!all.empty()) add_backward(own.name + "_d", all, gradients);
  row.ops.push_back(std::move(forward));
  for (OpDef& op : backward) row.ops.push_back(std::move(op));
  for (const OpDef& op : row.ops) {
    if (tessera::Find("operator", Ops(), op.name) ||
        defined.Find(op.name) != nullptr) {
      return InvalidInput(
          "'" + std::string(op.name) + "' is an operator already", "name");
    }
  }
  return &defined.rows.emplace_back(std::move(row)).forward();
}

const OwnOp* OwnOpOf(const OpDef& op) {
  Definitions& defined = Defined();
  const std::lock_guard lock(defined.mutex);
  for (const Definition& row : defined.rows) {
    for (const OpDef& made : row.ops) {
      if (&made == &op) return &row.own;
    }
  }
  return nullptr;
}

Result<const OpDef*> FindOp(std::string_view name) {
  for (const OpDef& op : Ops()) {
    if (op.name == name) return &op;
  }
  Definitions& defined = Defined();
  const std::lock_guard lock(defined.mutex);
  if (const OpDef* op = defined.Find(name)) return op;
  return UnknownName("operator", name, Names(Ops()));
}

}  // namespace tessera
