// Elements of a tensor by whole numbers:
//   gather       y[.., t, ..] = x[.., ids[t], ..] along x's factor v
//   scatter_add  y[.., v, ..] = sum of x[.., t, ..] over the t with ids[t] = v
//   one_hot      y[.., v, ..] = 1 where ids[..] = first + v, else 0
// The first two are each other's gradient. The node's rule names the factors:
// ids may have some of the other tensors' besides their own, so that
// "vh,bs->bsh" is a lookup of rows, "bvh,bt->bth" one in each sample,
// "bvh,bth->bth" one for each element (ONNX's GatherElements). Ids address v:
// those outside of a shard's range read zero and add nothing, so that a gather
// whose v is split is a partial sum. Factors of the ids alone are summed over
// by scatter_add, in their order.

#include <algorithm>

#include "planner/ir/op.h"

namespace tessera {
namespace {

bool HoldsAll(const Indices& indices, const Indices& of, int but) {
  return std::ranges::all_of(
      of, [&](uint8_t f) { return f == but || Holds(indices, f); });
}

// Whether `table` has v, which the others lack, and its other factors and those
// of the ids are all that the `picked` ones have, each once.
bool Picks(const IndexRule& rule, const Indices& table, const Indices& ids,
           const Indices& picked) {
  const int v = rule.FactorOf('v');
  if (v < 0 || !Holds(table, v) || Holds(ids, v) || Holds(picked, v)) {
    return false;
  }
  return HoldsAll(picked, table, v) && HoldsAll(picked, ids, -1) &&
         picked.size() + 1 == rule.factors.size();
}

bool IsGather(const IndexRule& rule) {
  return rule.operands.size() == 2 && rule.results.size() == 1 &&
         Picks(rule, rule.operands[0], rule.operands[1], rule.results[0]);
}

bool IsScatter(const IndexRule& rule) {
  return rule.operands.size() == 2 && rule.results.size() == 1 &&
         Picks(rule, rule.results[0], rule.operands[1], rule.operands[0]);
}

// Whether the result has the factors of the ids, and v.
bool IsOneHot(const IndexRule& rule) {
  if (rule.operands.size() != 1 || rule.results.size() != 1) return false;
  const int v = rule.FactorOf('v');
  return v >= 0 && !Holds(rule.operands[0], v) && Holds(rule.results[0], v) &&
         rule.results[0].size() == rule.operands[0].size() + 1 &&
         HoldsAll(rule.results[0], rule.operands[0], -1);
}

// What is picked, read and written, and the ids. Neither counts FLOPs: the ids
// decide which shard has the work.
Bytes PickedBytes(const OpCall& call, const Indices& picked) {
  int64_t elements = 1;
  for (uint8_t f : picked) elements *= call.extents[f];
  int64_t ids = 1;
  for (uint8_t f : call.rule->operands[1]) ids *= call.extents[f];
  return {2 * elements * SizeOf(call.result_dtypes[0]) +
          ids * SizeOf(DType::kInt32)};
}
Bytes GatherBytes(const OpCall& call) {
  return PickedBytes(call, call.rule->results[0]);
}

// The result is cleared besides, and read where it is added to.
Bytes ScatterBytes(const OpCall& call) {
  int64_t elements = 1;
  for (uint8_t f : call.rule->results[0]) elements *= call.extents[f];
  return PickedBytes(call, call.rule->operands[0]) +
         Bytes{elements * SizeOf(call.result_dtypes[0])};
}

}  // namespace

std::vector<OpDef> GatherOps() {
  return {
      {.name = "gather",
       .summary = "elements along a dimension, by id",
       .form = {"a tensor with v and ids -> the tensor's other factors and "
                "those of the ids, as in 'vh,bs->bsh'",
                IsGather},
       .adjoints = {{"gather_dx", "dy0,x1->dx0"}},
       .bytes = GatherBytes,
       .integer_operands = {1},
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "gather_dx",
       .summary = "gradient of gather: a scatter_add",
       .bytes = ScatterBytes,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "scatter_add",
       .summary = "sums of elements by id, along a dimension",
       .form = {"a tensor and ids -> the tensor's factors but for some of the "
                "ids' and v, as in 'bsh,bs->vh'",
                IsScatter},
       .adjoints = {{"gather", "dy0,x1->dx0"}},
       .bytes = ScatterBytes,
       .attributes = {{.name = "places", .least = 1, .whole = true}},
       .integer_operands = {1},
       .sizes = {{'v', "places"}},
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "one_hot",
       .summary = "1 in the place of each id, else 0",
       .form = {"ids -> their factors and v, as in 'bs->bsv'", IsOneHot},
       .attributes = {{.name = "first", .whole = true},
                      {.name = "places", .least = 1, .whole = true}},
       .integer_operands = {0},
       .sizes = {{'v', "places"}}},
  };
}

}  // namespace tessera
