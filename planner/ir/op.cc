#include "planner/ir/op.h"

namespace tessera {

double OpCall::Points() const {
  double points = 1;
  for (int64_t extent : extents) points *= static_cast<double>(extent);
  return points;
}

int64_t OpCall::Extent(char letter) const {
  const int f = rule->FactorOf(letter);
  TESSERA_CHECK(f >= 0) << "no factor '" << letter << "' in "
                        << rule->ToString();
  return extents[static_cast<size_t>(f)];
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
