#include "planner/ops/window.h"

#include <algorithm>

namespace tessera {

std::string WindowProblem(const OpCall& call, Direction direction,
                          int64_t size) {
  const bool tall = direction == Direction::kHeight;
  const auto attribute = [&](std::string_view name) {
    const auto it = std::ranges::find(call.attributes, name, &Attribute::name);
    return it == call.attributes.end() ? int64_t{1}
                                       : static_cast<int64_t>(it->value);
  };
  const std::string side = tall ? "height" : "width";
  if (call.rule->FactorOf(tall ? 'y' : 'x') < 0) {
    const bool one = size == 1 && attribute("out_" + side) == 1 &&
                     attribute("stride_" + side) == 1 &&
                     attribute("dilation_" + side) == 1 &&
                     attribute("pad_top") == 0;
    return one ? "" : "has a window over the height, which its rule lacks";
  }
  const int64_t image = call.Extent(tall ? 'h' : 'w');
  const int64_t places = call.Extent(tall ? 'y' : 'x');
  const int64_t pad = attribute(tall ? "pad_top" : "pad_left");
  const int64_t span = attribute("dilation_" + side) * (size - 1) + 1;
  const int64_t last = (places - 1) * attribute("stride_" + side) - pad;
  if (pad >= span) {
    return "pads the " + side + " by " + std::to_string(pad) +
           ": a window spans " + std::to_string(span);
  }
  if (last >= image) {
    return "has " + std::to_string(places) + " places along the " + side +
           ": the last of them begins at " + std::to_string(last) + " of " +
           std::to_string(image);
  }
  return "";
}

bool EndsIn(const IndexRule& rule, const Indices& indices, char height,
            char width) {
  const size_t behind = height == 0 ? 1 : 2;
  return indices.size() > behind &&
         rule.factors[indices.back()].letter == width &&
         (height == 0 ||
          rule.factors[indices[indices.size() - 2]].letter == height);
}

}  // namespace tessera
