// One place of a sequence: y[b,o,:] = x[b,place,:] with o = 1, such as the
// first token of an encoder, which stands for all of them. Where s is split,
// the shards without the place give zeros, so that the result is a partial sum.

#include "planner/ir/op.h"

namespace tessera {
namespace {

// What is written, and as much of it read.
Bytes PlaceBytes(const OpCall& call) {
  return {2 * call.Extent('b') * call.Extent('h') *
          SizeOf(call.result_dtypes[0])};
}

std::string PlaceProblem(const OpCall& call) {
  if (call.attribute("place") < static_cast<double>(call.Extent('s'))) {
    return "";
  }
  return "place is beyond a sequence of " + std::to_string(call.Extent('s'));
}

}  // namespace

std::vector<OpDef> SelectOps() {
  return {
      {.name = "select",
       .summary = "one place of a sequence",
       .rule = "bsh->bo!h",
       .adjoints = {{"select_dx", "dy0->dx0"}},
       .bytes = PlaceBytes,
       .attributes = {{.name = "count", .least = 1, .most = 1},
                      {.name = "place", .least = 0, .whole = true}},
       .problem = PlaceProblem,
       .sizes = {{'o', "count"}},
       .linear = {{0}}},
      {.name = "select_dx", .summary = "gradient of select", .linear = {{0}}},
  };
}

}  // namespace tessera
