#include "planner/ir/op.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "planner/base/element_count.h"
#include "planner/base/table.h"

namespace tessera {

double OpCall::Points() const {
  return LargeElementCount(extents);
}

int64_t OpCall::Extent(char letter) const {
  const int f = rule->FactorOf(letter);
  TESSERA_CHECK(f >= 0) << "no factor '" << letter << "' in "
                        << rule->ToString();
  return extents[static_cast<size_t>(f)];
}

double OpCall::attribute(std::string_view name) const {
  for (const Attribute& a : attributes) {
    if (a.name == name) return a.value;
  }
  TESSERA_CHECK(false) << "no attribute " << name;
  return 0;
}

std::string AttributeProblem(const OpDef& op, const Attribute& attribute) {
  for (const AttributeDef& def : op.attributes) {
    if (def.name != attribute.name) continue;
    const double value = attribute.value;
    // Written so that a NaN is out of range.
    if (value >= def.least && value <= def.most &&
        (!def.whole || value == std::floor(value))) {
      return "";
    }
    std::ostringstream text;
    text << "'" << def.name << "' is " << value << ": expected a "
         << (def.whole ? "whole" : "finite") << " number";
    if (def.least > std::numeric_limits<double>::lowest()) {
      text << " of at least " << def.least;
    }
    if (def.most < std::numeric_limits<double>::max()) {
      text << (def.least > std::numeric_limits<double>::lowest() ? " and"
                                                                 : " of")
           << " at most " << def.most;
    }
    return text.str();
  }
  return UnknownName("attribute", attribute.name,
                     Names(std::span(op.attributes)))
      .message;
}

bool AddsToResult(const OpDef& op, size_t k) {
  switch (op.accumulation) {
    case Accumulation::kNone:
      return false;
    case Accumulation::kAll:
      return true;
    case Accumulation::kFirst:
      return k == 0;
    case Accumulation::kBehindFirst:
      return k > 0;
  }
  return false;
}

bool AddsPartialSums(const OpDef& op, size_t operands) {
  return operands > 1 && std::any_of(op.linear.begin(), op.linear.end(),
                                     [&](const std::vector<size_t>& set) {
                                       return set.size() == operands;
                                     });
}

Flops CallFlops(const OpDef& op, const OpCall& call) {
  return op.flops != nullptr ? op.flops(call)
                             : Flops{op.flops_per_point * call.Points()};
}

Bytes OperandBytes(const OpCall& call) {
  Bytes total;
  const auto add = [&](const std::vector<Indices>& sides,
                       std::span<const DType> dtypes) {
    for (size_t i = 0; i < sides.size(); ++i) {
      int64_t elements = 1;
      for (uint8_t f : sides[i]) elements *= call.extents[f];
      total += Bytes{elements * SizeOf(dtypes[i])};
    }
  };
  add(call.rule->operands, call.operand_dtypes);
  add(call.rule->results, call.result_dtypes);
  return total;
}

Bytes CallBytes(const OpDef& op, const OpCall& call) {
  return op.bytes != nullptr ? op.bytes(call) : OperandBytes(call);
}

}  // namespace tessera
