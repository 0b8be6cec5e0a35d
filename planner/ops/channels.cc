// Channels of images behind each other, of as many as an inception module has
// branches: z[b, (c d ...), h, w]; or places of another dimension of tensors
// that are alike in the others. The joint dimension is never split.

#include <algorithm>
#include <string>

#include "planner/ir/op.h"

namespace tessera {
namespace {

// More have no letters.
constexpr size_t kMostBranches = 6;

// The joint dimension of the result.
size_t JointDim(const IndexRule& rule) {
  const Indices& z = rule.results[0];
  const auto at = std::ranges::find(z, rule.FactorOf('d'));
  return static_cast<size_t>(at - z.begin());
}

// Whether operands have the dimensions of the result but for one, the channels
// or whatever is joined, which is their own and cannot be split.
bool IsConcatOfChannels(const IndexRule& rule) {
  if (rule.operands.size() < 2 || rule.operands.size() > kMostBranches ||
      rule.results.size() != 1) {
    return false;
  }
  const Indices& z = rule.results[0];
  const size_t joint = JointDim(rule);
  if (joint == z.size()) return false;
  const auto alike = [&](const Indices& x) {
    if (x.size() != z.size() || rule.factors[x[joint]].splittable) return false;
    for (size_t d = 0; d < z.size(); ++d) {
      if (d != joint && x[d] != z[d]) return false;
    }
    return true;
  };
  Indices channels = {z[joint]};
  for (const Indices& x : rule.operands) {
    if (!alike(x) || std::ranges::count(channels, x[joint]) > 0) return false;
    channels.push_back(x[joint]);
  }
  return alike(z);
}

std::string ConcatOfChannelsProblem(const OpCall& call) {
  const size_t joint = JointDim(*call.rule);
  int64_t sum = 0;
  for (const Indices& x : call.rule->operands) sum += call.extents[x[joint]];
  const int64_t z = call.extents[call.rule->results[0][joint]];
  if (sum == z) return "";
  return "makes " + std::to_string(z) + " channels of " + std::to_string(sum);
}

}  // namespace

std::vector<OpDef> ChannelsOps() {
  return {
      {.name = "concat_channels",
       .summary = "channels of images behind each other",
       .form = {"up to 6 operands -> z, each with channels of its own, as in "
                "'bm!hw,bn!hw->bd!hw'",
                IsConcatOfChannels},
       .adjoints = {{"concat_channels_dx", "dy0->dx0,dx1,dx2,dx3,dx4,dx5"}},
       .attributes = {{.name = "channels", .least = 2, .whole = true}},
       .problem = ConcatOfChannelsProblem,
       .sizes = {{'d', "channels"}}},
      {.name = "concat_channels_dx",
       .summary = "gradients of concat_channels' parts",
       .linear = {{0}}},
  };
}

}  // namespace tessera
