// Pooling over images, on the layout [..., h, w]: the largest element or the
// mean of windows, of the sizes that attributes give, and the mean of the whole
// image. In front of h and w an operand has the dimensions of its result. Where
// y or x is split, so is the image, with halos. A signal has no h and y
// (planner/ops/window.h).

#include <algorithm>
#include <string>

#include "planner/ir/op.h"
#include "planner/ops/window.h"

namespace tessera {
namespace {

// Whether both sides have the same dimensions, and behind them h and w, that
// cannot be split, and y and x.
bool IsPooling(const IndexRule& rule) {
  if (rule.operands.size() != 1 || rule.results.size() != 1) return false;
  const Indices& x = rule.operands[0];
  const Indices& y = rule.results[0];
  const bool tall = rule.FactorOf('h') >= 0;
  if (x.size() != y.size() || !EndsIn(rule, x, tall ? 'h' : 0, 'w') ||
      !EndsIn(rule, y, tall ? 'y' : 0, 'x')) {
    return false;
  }
  const size_t n = x.size() - (tall ? 2 : 1);
  return std::equal(x.begin(), x.begin() + static_cast<int64_t>(n),
                    y.begin()) &&
         std::all_of(x.begin() + static_cast<int64_t>(n), x.end(),
                     [&](uint8_t f) { return !rule.factors[f].splittable; });
}

constexpr RuleForm kPoolingForm = {
    "dimensions and h!w! -> the same dimensions and yx, as in "
    "'bch!w!->bcyx', of signals 'bcw!->bcx'",
    IsPooling};

std::string PoolingProblem(const OpCall& call) {
  std::string problem =
      WindowProblem(call, Direction::kHeight,
                    static_cast<int64_t>(call.attribute("window_height")));
  return problem.empty()
             ? WindowProblem(
                   call, Direction::kWidth,
                   static_cast<int64_t>(call.attribute("window_width")))
             : problem;
}

// One for each element of each window.
Flops PoolingFlops(const OpCall& call) {
  double places = 1;
  for (size_t f = 0; f < call.extents.size(); ++f) {
    const char letter = call.rule->factors[f].letter;
    if (letter != 'h' && letter != 'w') {
      places *= static_cast<double>(call.extents[f]);
    }
  }
  return {places * call.attribute("window_height") *
          call.attribute("window_width")};
}

bool IsImageMean(const IndexRule& rule) {
  if (rule.operands.size() != 1 || rule.results.size() != 1) return false;
  const Indices& x = rule.operands[0];
  const Indices& y = rule.results[0];
  const size_t n = y.size();
  return x.size() == n + 2 && std::equal(y.begin(), y.end(), x.begin()) &&
         rule.factors[x[n]].letter == 'h' &&
         rule.factors[x[n + 1]].letter == 'w';
}

// `more`: behind those that all have.
std::vector<AttributeDef> PoolingAttributes(
    std::vector<AttributeDef> more = {}) {
  std::vector<AttributeDef> attributes = {
      {.name = "out_height", .least = 1, .whole = true},
      {.name = "out_width", .least = 1, .whole = true},
      {.name = "pad_left", .least = 0, .whole = true},
      {.name = "pad_top", .least = 0, .whole = true},
      {.name = "stride_height", .least = 1, .whole = true},
      {.name = "stride_width", .least = 1, .whole = true},
      {.name = "window_height", .least = 1, .whole = true},
      {.name = "window_width", .least = 1, .whole = true}};
  attributes.insert(attributes.end(), more.begin(), more.end());
  return attributes;
}

}  // namespace

std::vector<OpDef> PoolingOps() {
  const std::vector<FactorSize> sizes = {{'y', "out_height"},
                                         {'x', "out_width"}};
  return {
      {.name = "max_pool",
       .summary = "largest element of each window",
       .form = kPoolingForm,
       .adjoints = {{"max_pool_dx", "dy0,x0->dx0"}},
       .flops = PoolingFlops,
       .attributes = PoolingAttributes(),
       .problem = PoolingProblem,
       .sizes = sizes,
       .windows = true},
      {.name = "max_pool_dx",
       .summary = "gradient of max_pool: to the first of the largest",
       .flops = PoolingFlops,
       .windows = true,
       .linear = {{0}}},
      // Padding counts as elements that are zero where `count_pad` is 1.
      {.name = "average_pool",
       .summary = "mean of each window",
       .form = kPoolingForm,
       .adjoints = {{"average_pool_dx", "dy0->dx0"}},
       .flops = PoolingFlops,
       .attributes = PoolingAttributes(
           {{.name = "count_pad", .least = 0, .most = 1, .whole = true}}),
       .problem = PoolingProblem,
       .sizes = sizes,
       .windows = true,
       .linear = {{0}}},
      {.name = "average_pool_dx",
       .summary = "gradient of average_pool",
       .flops = PoolingFlops,
       .windows = true,
       .linear = {{0}}},
      {.name = "image_mean",
       .summary = "mean of the whole image (global average pooling)",
       .rule = "bchw->bc",
       .form = {"dimensions and hw -> the same dimensions, as in 'bchw->bc'",
                IsImageMean},
       .adjoints = {{"image_mean_dx", "dy0->dx0"}},
       .flops = FlopsPerPoint<1>,
       .linear = {{0}}},
      {.name = "image_mean_dx",
       .summary = "gradient of image_mean",
       .flops = FlopsPerPoint<1>,
       .linear = {{0}}},
  };
}

}  // namespace tessera
