// A dimension read at places that are equally far from each other, `step` > 0
// apart, as images are resized by, direction by direction. Dimension m of the
// operand becomes d of the result, where it stands, and neither is split:
// "bcm!w->bcd!w". Of place i, c = start + i step is looked at:
//   y[.., i, ..] = x[.., floor(c), ..], or where `linear` is 1
//                = (1 - t) x[.., floor(c), ..] + t x[.., floor(c) + 1, ..] with
//                  t = c - floor(c),
// where what is beyond an end is the end. PyTorch and ONNX (Resize) place the
// centres of pixels at half a pixel: with s = in / out start is (s - 1) / 2 and
// step s; nearest pixels are those with start 0, and with corners aligned start
// is 0 and step (in - 1) / (out - 1).

#include "planner/ops/places.h"

namespace tessera {
namespace {

std::string StepProblem(const OpCall& call) {
  return call.attribute("step") > 0 ? "" : "'step' is not above 0";
}

// Two products and a sum of each element, where they are there.
Flops ResampleFlops(const OpCall& call) {
  const double elements = call.Points() / static_cast<double>(call.Extent('m'));
  return {call.attribute("linear") != 0 ? 3 * elements : 0};
}

}  // namespace

std::vector<OpDef> ResampleOps() {
  return {
      {.name = "resample",
       .summary =
           "a dimension read at equally spaced places, the nearest below "
           "or linearly between two",
       .form = kPlacesForm,
       .adjoints = {{"resample_dx", "dy0->dx0"}},
       .flops = ResampleFlops,
       .attributes = {{.name = "linear", .least = 0, .most = 1, .whole = true},
                      {.name = "places", .least = 1, .whole = true},
                      {.name = "start"},
                      {.name = "step"}},
       .problem = StepProblem,
       .sizes = {{'d', "places"}},
       .linear = {{0}}},
      {.name = "resample_dx",
       .summary = "gradient of resample",
       .flops = ResampleFlops,
       .linear = {{0}}},
  };
}

}  // namespace tessera
