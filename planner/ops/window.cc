#include "planner/ops/window.h"

#include <algorithm>

namespace tessera {

namespace {

int64_t AttributeOr(std::span<const Attribute> attributes,
                    std::string_view name, int64_t absent) {
  const auto it = std::ranges::find(attributes, name, &Attribute::name);
  return it == attributes.end() ? absent : static_cast<int64_t>(it->value);
}

}  // namespace

WindowSteps StepsOf(std::span<const Attribute> attributes,
                    Direction direction) {
  const bool tall = direction == Direction::kHeight;
  const auto of = [&](std::string_view high, std::string_view wide,
                      int64_t absent) {
    return AttributeOr(attributes, tall ? high : wide, absent);
  };
  return {.stride = of("stride_height", "stride_width", 1),
          .pad = of("pad_top", "pad_left", 0),
          .dilation = of("dilation_height", "dilation_width", 1)};
}

std::string WindowProblem(const OpCall& call, Direction direction,
                          int64_t size) {
  const bool tall = direction == Direction::kHeight;
  const WindowSteps steps = StepsOf(call.attributes, direction);
  if (call.rule->FactorOf(tall ? 'y' : 'x') < 0) {
    const bool one = size == 1 && steps.stride == 1 && steps.pad == 0 &&
                     steps.dilation == 1 &&
                     AttributeOr(call.attributes, "out_height", 1) == 1;
    return one ? "" : "has a window over the height, which its rule lacks";
  }
  const std::string side = tall ? "height" : "width";
  const int64_t image = call.Extent(tall ? 'h' : 'w');
  const int64_t places = call.Extent(tall ? 'y' : 'x');
  const int64_t span = steps.Span(size);
  const int64_t last = (places - 1) * steps.stride - steps.pad;
  if (steps.pad >= span) {
    return "pads the " + side + " by " + std::to_string(steps.pad) +
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
