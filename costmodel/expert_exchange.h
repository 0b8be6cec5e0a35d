#pragma once
// What mixtures of experts exchange between ranks: tokens on their way to the
// slots of experts, and back (planner/ops/moe.cc).

#include <vector>

#include "planner/ir/graph.h"

namespace tessera {

// How the routers of a graph choose. One for all: that of the first.
struct Routing {
  int64_t top_k = 1;
  int64_t groups = 1;
  int64_t top_groups = 1;
  int64_t experts = 1;
};

Routing RoutingOf(const Graph& graph);

// By tensor: whether it holds slots that a token's rank and its experts' rank
// exchange, or their gradients.
std::vector<bool> ExchangedSlots(const Graph& graph);

// The mean number of hosts on which a token's experts are, over that of its
// choices, where experts are spread evenly over `hosts` in their order and
// distinct ones chosen at random: what is left of an exchange between hosts
// that sends a token once to each of them (DeepEP; DeepSeek-V3, arXiv
// 2412.19437, section 3.2.2). In (0, 1].
double HostsPerChoice(const Routing& routing, int hosts);

}  // namespace tessera
