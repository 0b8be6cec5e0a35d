// Batch norm (Ioffe and Szegedy 2015) over samples and image of each channel:
// y = (x - mean) rstd scale + shift. Its unit is the microbatch: samples,
// height and width (of signals the width, of features neither) may be split,
// and then the shards exchange what they know of a channel, forward (count,
// mean, sum of squared deviations), merged as by Chan et al. (1983), and
// backward the two sums that the input's gradient needs, which are the
// gradients of shift and scale.
//
// A tracked one also has running averages of mean and (unbiased) variance, for
// use outside of training (planner/ir/running_average.h): weights, of which the
// adjoint makes, as if they were gradients, how far they are from the
// statistics of the batch, in the mean over its microbatches and groups. A loss
// without training norms by them.
//
// Ghost batch norm (Hoffer et al. 2017): each microbatch is cut into so many
// groups of consecutive samples, each with statistics of its own. With a group
// for each replica it is what data parallelism does without synchronised batch
// norm; a split that cuts no group exchanges nothing. Its statistics are
// results for each sample, so that they are split as the samples are.

#include <algorithm>
#include <cmath>
#include <string>

#include "planner/ir/op.h"

namespace tessera {
namespace {

// Whether x and y are (b, channels, h, w), or of signals (b, channels, w), or
// of features (b, channels), the other operands (channels) of g and c, and the
// statistics these, too, or (b, channels).
bool IsBatchNorm(const IndexRule& rule, size_t operands, bool of_samples) {
  if (rule.operands.size() != operands || rule.results.size() != 3) {
    return false;
  }
  const Indices& x = rule.operands[0];
  const Indices& channels = rule.operands[1];
  if (channels.empty() || x.size() < 1 + channels.size() ||
      rule.results[0] != x) {
    return false;
  }
  std::string letters;
  for (uint8_t f : x) letters += rule.factors[f].letter;
  const auto behind = 1 + static_cast<int64_t>(channels.size());
  const std::string places = letters.substr(static_cast<size_t>(behind));
  if (places != "hw" && places != "w" && !places.empty()) return false;
  for (uint8_t f : channels) {
    const char letter = rule.factors[f].letter;
    if (letter != 'g' && letter != 'c') return false;
  }
  const Indices statistics(x.begin() + (of_samples ? 0 : 1),
                           x.begin() + behind);
  return letters[0] == 'b' &&
         std::equal(channels.begin(), channels.end(), x.begin() + 1) &&
         std::all_of(rule.operands.begin() + 1, rule.operands.end(),
                     [&](const Indices& of) { return of == channels; }) &&
         rule.results[1] == statistics && rule.results[2] == statistics;
}

template <size_t kOperands, bool kOfSamples>
bool HasForm(const IndexRule& rule) {
  return IsBatchNorm(rule, kOperands, kOfSamples);
}

std::string GroupsProblem(const OpCall& call) {
  const auto groups = static_cast<int64_t>(call.attribute("groups"));
  const int64_t samples = call.Extent('b');
  if (samples % groups == 0) return "";
  return std::to_string(groups) + " groups do not divide " +
         std::to_string(samples) + " samples";
}

}  // namespace

std::vector<OpDef> BatchNormOps() {
  return {
      // Results: y, mean, reciprocal standard deviation.
      {.name = "batch_norm",
       .summary = "norm of each channel over a microbatch, scale and shift",
       .form =
           {"x, scale, shift -> y, mean, rstd, as in "
            "'bchw,c,c->bchw,c,c', or with channels 'gc', of signals 'bcw', of "
            "features 'bc'",
            HasForm<3, false>},
       .adjoints = {{"batch_norm_dx", "dy0,x0,x1,y1,y2->dx0,dx1,dx2"}},
       .flops = FlopsPerPoint<8>,
       .attributes = {{.name = "epsilon", .least = 0}},
       .coupling = {"bhw", "gc", 3}},
      // The state: sums of dy (x - mean) rstd and of dy, and the count.
      {.name = "batch_norm_dx",
       .summary = "gradients of batch norm's input, scale and shift",
       .flops = FlopsPerPoint<11>,
       .coupling = {"bhw", "gc", 3},
       .accumulation = Accumulation::kBehindFirst},
      {.name = "ghost_batch_norm",
       .summary = "batch norm over each of some groups of a microbatch",
       .form = {"x, scale, shift -> y, mean, rstd, as in "
                "'bchw,c,c->bchw,bc,bc', or with channels 'gc', of signals "
                "'bcw', of features 'bc'",
                HasForm<3, true>},
       .adjoints = {{"ghost_batch_norm_dx", "dy0,x0,x1,y1,y2->dx0,dx1,dx2"}},
       .flops = FlopsPerPoint<8>,
       .attributes = {{.name = "epsilon", .least = 0},
                      {.name = "groups", .least = 1, .whole = true}},
       .problem = GroupsProblem,
       .coupling = {"bhw", "gc", 3, "groups"}},
      {.name = "ghost_batch_norm_dx",
       .summary = "gradients of ghost batch norm's input, scale and shift",
       .flops = FlopsPerPoint<11>,
       .coupling = {"bhw", "gc", 3, "groups"},
       .accumulation = Accumulation::kBehindFirst},
      {.name = "tracked_batch_norm",
       .summary = "batch norm that keeps running averages",
       .form = {"x, scale, shift, averages of mean and variance -> y, mean, "
                "rstd, as in 'bchw,c,c,c,c->bchw,c,c', or with channels 'gc', "
                "of signals 'bcw', of features 'bc'",
                HasForm<5, false>},
       .adjoints = {{"tracked_batch_norm_dx",
                     "dy0,x0,x1,x3,x4,y1,y2->dx0,dx1,dx2,dx3,dx4"}},
       .flops = FlopsPerPoint<8>,
       .attributes = {{.name = "epsilon", .least = 0},
                      {.name = "momentum", .least = 0, .most = 1}},
       .coupling = {"bhw", "gc", 3}},
      // The state: that of batch_norm_dx, and count times mean and variance.
      {.name = "tracked_batch_norm_dx",
       .summary = "gradients of tracked batch norm's input, scale and shift, "
                  "and distances of its averages",
       .flops = FlopsPerPoint<11>,
       .coupling = {"bhw", "gc", 5},
       .accumulation = Accumulation::kBehindFirst},
      {.name = "tracked_ghost_batch_norm",
       .summary = "ghost batch norm that keeps running averages",
       .form = {"x, scale, shift, averages of mean and variance -> y, mean, "
                "rstd, as in 'bchw,c,c,c,c->bchw,bc,bc', or with channels "
                "'gc', of signals 'bcw', of features 'bc'",
                HasForm<5, true>},
       .adjoints = {{"tracked_ghost_batch_norm_dx",
                     "dy0,x0,x1,x3,x4,y1,y2->dx0,dx1,dx2,dx3,dx4"}},
       .flops = FlopsPerPoint<8>,
       .attributes = {{.name = "epsilon", .least = 0},
                      {.name = "groups", .least = 1, .whole = true},
                      {.name = "momentum", .least = 0, .most = 1}},
       .problem = GroupsProblem,
       .coupling = {"bhw", "gc", 3, "groups"}},
      {.name = "tracked_ghost_batch_norm_dx",
       .summary = "gradients of tracked ghost batch norm's input, scale and "
                  "shift, and distances of its averages",
       .flops = FlopsPerPoint<11>,
       .coupling = {"bhw", "gc", 5, "groups"},
       .accumulation = Accumulation::kBehindFirst},
  };
}

}  // namespace tessera
