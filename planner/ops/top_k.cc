// The largest or smallest elements along a dimension, and their places:
//   top_k   y[.., k, ..] = x[.., id[.., k, ..], ..]
// with ids in the order of the values, best first; of equal values the one in
// front is first, or where `last` is not 0 the one behind. The rule names the
// factors, x's v is the results' k, as in "bsv!->bsk!,bsk!": rows are read
// whole and not split. The gradient goes to the places that were chosen, so it
// is a scatter_add.

#include <algorithm>

#include "planner/ir/op.h"

namespace tessera {
namespace {

bool IsTopK(const IndexRule& rule) {
  const int v = rule.FactorOf('v');
  const int k = rule.FactorOf('k');
  if (rule.operands.size() != 1 || rule.results.size() != 2 || v < 0 || k < 0 ||
      rule.results[0] != rule.results[1] ||
      rule.results[0].size() != rule.operands[0].size() ||
      rule.factors[static_cast<size_t>(v)].splittable ||
      rule.factors[static_cast<size_t>(k)].splittable) {
    return false;
  }
  return Holds(rule.operands[0], v) && Holds(rule.results[0], k) &&
         std::ranges::all_of(rule.operands[0], [&](uint8_t f) {
           return f == v || Holds(rule.results[0], f);
         });
}

std::string TopKProblem(const OpCall& call) {
  const int64_t places = call.Extent('v');
  if (call.Extent('k') <= places) return "";
  return "k is " + std::to_string(call.Extent('k')) + ": expected at most " +
         std::to_string(places) + ", the elements of a row";
}

}  // namespace

std::vector<OpDef> TopKOps() {
  return {
      {.name = "top_k",
       .summary = "the largest or smallest elements along a dimension, and "
                  "their places",
       .form = {"a tensor with v! -> twice its other factors and k!, as in "
                "'bsv!->bsk!,bsk!'",
                IsTopK},
       .adjoints = {{"gather_dx", "dy0,y1->dx0"}},
       // Each choice looks through its row.
       .flops = FlopsPerPoint<1>,
       .attributes = {{.name = "k", .least = 1, .whole = true},
                      {.name = "largest", .least = 0, .most = 1, .whole = true},
                      {.name = "last", .least = 0, .most = 1, .whole = true}},
       .problem = TopKProblem,
       .integer_results = {1},
       .sizes = {{'k', "k"}}},
  };
}

}  // namespace tessera
