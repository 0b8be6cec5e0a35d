// The same elements in the same order, in other dimensions: what relabelling
// dimensions cannot do, such as one dimension of two. A run of the operand's
// dimensions becomes d, or d and e, or d, e and f, or nothing; none of these is
// split, what is in front and behind may be:
//   "bcm!n!w->bcd!w" joins two, "bc->bcd!e!" adds two of 1, "bm!->bd!e!" takes
//   one apart.
// Attributes give the extents of d, e and f, 1 where the result lacks them.

#include <string>
#include <string_view>

#include "planner/ir/op.h"

namespace tessera {
namespace {

bool IsReshape(const IndexRule& rule) {
  if (rule.operands.size() != 1 || rule.results.size() != 1) return false;
  const Indices& x = rule.operands[0];
  const Indices& y = rule.results[0];
  size_t front = 0;
  while (front < x.size() && front < y.size() && x[front] == y[front]) ++front;
  size_t behind = 0;
  while (front + behind < x.size() && front + behind < y.size() &&
         x[x.size() - 1 - behind] == y[y.size() - 1 - behind]) {
    ++behind;
  }
  std::string made;
  for (size_t d = front; d + behind < y.size(); ++d) {
    if (rule.factors[y[d]].splittable || Holds(x, y[d])) return false;
    made += rule.factors[y[d]].letter;
  }
  for (size_t d = front; d + behind < x.size(); ++d) {
    if (rule.factors[x[d]].splittable || Holds(y, x[d])) return false;
  }
  return std::string_view("def").starts_with(made);
}

std::string ReshapeProblem(const OpCall& call) {
  double from = 1;
  double to = 1;
  for (size_t f = 0; f < call.extents.size(); ++f) {
    const auto extent = static_cast<double>(call.extents[f]);
    if (Holds(call.rule->operands[0], static_cast<int>(f))) from *= extent;
    if (Holds(call.rule->results[0], static_cast<int>(f))) to *= extent;
  }
  return from == to ? ""
                    : "makes " + std::to_string(to) + " elements of " +
                          std::to_string(from);
}

}  // namespace

std::vector<OpDef> ReshapeOps() {
  return {
      {.name = "reshape",
       .summary = "the same elements in other dimensions",
       .form = {"one operand, of whose dimensions a run is d!, d!e!, d!e!f! or "
                "nothing in the result, as in 'bcm!n!w->bcd!w'",
                IsReshape},
       .adjoints = {{"reshape_dx", "dy0->dx0"}},
       .attributes = {{.name = "first", .least = 1, .whole = true},
                      {.name = "second", .least = 1, .whole = true},
                      {.name = "third", .least = 1, .whole = true}},
       .problem = ReshapeProblem,
       .sizes = {{'d', "first"}, {'e', "second"}, {'f', "third"}},
       .linear = {{0}}},
      {.name = "reshape_dx", .summary = "gradient of reshape", .linear = {{0}}},
  };
}

}  // namespace tessera
