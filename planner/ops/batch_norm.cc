// Batch norm (Ioffe and Szegedy 2015) over samples and image of each channel:
// y = (x - mean) rstd scale + shift. Its unit is the microbatch: samples,
// height and width may be split, and then the shards exchange what they know of
// a channel, forward (count, mean, sum of squared deviations), merged as by
// Chan et al. (1983), and backward the two sums that the input's gradient
// needs, which are the gradients of shift and scale. Statistics for inference
// are not kept.

#include "planner/ir/op.h"

namespace tessera {
namespace {

// Whether x and y are (b, channels, h, w), the others (channels) of g and c.
bool IsBatchNorm(const IndexRule& rule) {
  if (rule.operands.size() != 3 || rule.results.size() != 3) return false;
  const Indices& x = rule.operands[0];
  if (x.size() < 4 || rule.results[0] != x ||
      rule.factors[x[x.size() - 2]].letter != 'h' ||
      rule.factors[x.back()].letter != 'w') {
    return false;
  }
  const Indices channels(x.begin() + 1, x.end() - 2);
  for (uint8_t f : channels) {
    const char letter = rule.factors[f].letter;
    if (letter != 'g' && letter != 'c') return false;
  }
  return rule.factors[x[0]].letter == 'b' && rule.operands[1] == channels &&
         rule.operands[2] == channels && rule.results[1] == channels &&
         rule.results[2] == channels;
}

}  // namespace

std::vector<OpDef> BatchNormOps() {
  return {
      // Results: y, mean, reciprocal standard deviation.
      {.name = "batch_norm",
       .summary = "norm of each channel over a microbatch, scale and shift",
       .form = {"x, scale, shift -> y, mean, rstd, as in "
                "'bchw,c,c->bchw,c,c', or with channels 'gc'",
                IsBatchNorm},
       .adjoints = {{"batch_norm_dx", "dy0,x0,x1,y1,y2->dx0,dx1,dx2"}},
       .flops = FlopsPerPoint<8>,
       .attributes = {{.name = "epsilon", .least = 0}},
       .coupling = {"bhw", "gc", 3}},
      // The state: sums of dy (x - mean) rstd and of dy, and the count.
      {.name = "batch_norm_dx",
       .summary = "gradients of batch norm's input, scale and shift",
       .flops = FlopsPerPoint<11>,
       .coupling = {"bhw", "gc", 3}},
  };
}

}  // namespace tessera
