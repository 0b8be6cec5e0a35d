// Channels of images behind each other, of as many as an inception module has
// branches: z[b, (c d ...), h, w]. The joint dimension is never split.

#include <algorithm>
#include <string>

#include "planner/ir/op.h"

namespace tessera {
namespace {

// More have no letters.
constexpr size_t kMostBranches = 6;

// Whether operands and result have the rows, the height and the width of the
// result, and channels of their own that cannot be split.
bool IsConcatOfChannels(const IndexRule& rule) {
  if (rule.operands.size() < 2 || rule.operands.size() > kMostBranches ||
      rule.results.size() != 1 || rule.results[0].size() != 4) {
    return false;
  }
  const Indices& z = rule.results[0];
  const auto alike = [&](const Indices& x) {
    return x.size() == 4 && x[0] == z[0] && x[2] == z[2] && x[3] == z[3] &&
           !rule.factors[x[1]].splittable;
  };
  Indices channels = {z[1]};
  for (const Indices& x : rule.operands) {
    if (!alike(x) || std::ranges::count(channels, x[1]) > 0) return false;
    channels.push_back(x[1]);
  }
  return alike(z) && z[1] == rule.FactorOf('d');
}

std::string ConcatOfChannelsProblem(const OpCall& call) {
  int64_t sum = 0;
  for (const Indices& x : call.rule->operands) sum += call.extents[x[1]];
  const int64_t z = call.extents[call.rule->results[0][1]];
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
