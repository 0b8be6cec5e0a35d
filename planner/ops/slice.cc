// Some of a dimension's places, and a dimension with more of them: in both, one
// dimension m of the operand becomes d of the result, where it stands, and
// neither is split: "bm!h->bd!h".
//   slice: y[.., i, ..] = x[.., start + i step, ..], 0 <= i < places
//   pad:   y[.., i, ..] = x[.., i - before, ..], or `value` beyond its ends

#include "planner/ops/places.h"

namespace tessera {
bool IsPlaces(const IndexRule& rule) {
  if (rule.operands.size() != 1 || rule.results.size() != 1) return false;
  const int m = rule.FactorOf('m');
  const int d = rule.FactorOf('d');
  if (m < 0 || d < 0 || rule.factors[static_cast<size_t>(m)].splittable ||
      rule.factors[static_cast<size_t>(d)].splittable) {
    return false;
  }
  Indices renamed = rule.operands[0];
  for (uint8_t& f : renamed) {
    if (f == m) f = static_cast<uint8_t>(d);
  }
  return renamed == rule.results[0] && renamed != rule.operands[0];
}

namespace {

Bytes SliceBytes(const OpCall& call) {
  double written = call.Points() / static_cast<double>(call.Extent('m'));
  return {2 * static_cast<int64_t>(written) * SizeOf(call.result_dtypes[0])};
}

std::string SliceProblem(const OpCall& call) {
  const auto m = static_cast<double>(call.Extent('m'));
  const double last =
      call.attribute("start") +
      static_cast<double>(call.Extent('d') - 1) * call.attribute("step");
  if (call.attribute("step") == 0) return "'step' is 0";
  if (call.attribute("start") < m && last >= 0 && last < m) return "";
  return "takes places beyond the " + std::to_string(call.Extent('m')) +
         " of its operand";
}

std::string PadProblem(const OpCall& call) {
  const double room = static_cast<double>(call.Extent('d') - call.Extent('m'));
  if (call.attribute("before") <= room) return "";
  return "has no room for " + std::to_string(call.Extent('m')) + " places";
}

}  // namespace

std::vector<OpDef> SliceOps() {
  const AttributeDef places = {.name = "places", .least = 1, .whole = true};
  const std::vector<FactorSize> sizes = {{'d', "places"}};
  return {
      {.name = "slice",
       .summary = "some places of a dimension",
       .form = kPlacesForm,
       .adjoints = {{"slice_dx", "dy0->dx0"}},
       .bytes = SliceBytes,
       .attributes = {places,
                      {.name = "start", .least = 0, .whole = true},
                      {.name = "step", .whole = true}},
       .problem = SliceProblem,
       .sizes = sizes,
       .linear = {{0}}},
      {.name = "slice_dx", .summary = "gradient of slice", .linear = {{0}}},
      {.name = "pad",
       .summary = "a dimension with a constant in front and behind",
       .form = kPlacesForm,
       .adjoints = {{"pad_dx", "dy0->dx0"}},
       .attributes = {{.name = "before", .least = 0, .whole = true},
                      places,
                      {.name = "value"}},
       .problem = PadProblem,
       .sizes = sizes},
      {.name = "pad_dx", .summary = "gradient of pad", .linear = {{0}}},
  };
}

}  // namespace tessera
