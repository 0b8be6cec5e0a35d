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

Result<const OpDef*> FindOp(std::string_view name) {
  return Find("operator", Ops(), name);
}

}  // namespace tessera
