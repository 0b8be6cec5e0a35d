#include "costmodel/expert_exchange.h"

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

// Of `draws` without replacement from `total`, that `hits` are among `marked`.
double Hypergeometric(int64_t hits, int64_t total, int64_t marked,
                      int64_t draws) {
  if (hits > marked || draws - hits > total - marked) return 0;
  const auto log_choose = [](int64_t n, int64_t k) {
    return std::lgamma(static_cast<double>(n + 1)) -
           std::lgamma(static_cast<double>(k + 1)) -
           std::lgamma(static_cast<double>(n - k + 1));
  };
  return std::exp(log_choose(marked, hits) +
                  log_choose(total - marked, draws - hits) -
                  log_choose(total, draws));
}

}  // namespace

Routing RoutingOf(const Graph& graph) {
  for (const Node& node : graph.nodes) {
    if (node.op->name != "moe_gate") continue;
    const auto whole = [&](const char* name) {
      return static_cast<int64_t>(node.attribute(name));
    };
    return {whole("top_k"), whole("groups"), whole("top_groups")};
  }
  return {};
}

std::vector<bool> ExchangedSlots(const Graph& graph) {
  std::vector<bool> slots(graph.tensors.size());
  for (const Node& node : graph.nodes) {
    const std::string_view op = node.op->name;
    if (op == "moe_dispatch" || op == "moe_collect_dx") {
      slots[node.results[0].index()] = true;
    } else if (op == "moe_collect" || op == "moe_dispatch_dx") {
      slots[node.operands[0].index()] = true;
    }
  }
  return slots;
}

double HostsPerChoice(const Routing& routing, int hosts) {
  const auto choices = static_cast<double>(routing.top_k);
  // A host has whole groups, or a share of one.
  const int64_t held = std::max<int64_t>(1, routing.groups / hosts);
  const double share =
      std::min(1.0, static_cast<double>(routing.groups) / hosts);
  double reached = 0;  // chance that a host has a chosen expert
  for (int64_t chosen = 1; chosen <= std::min(held, routing.top_groups);
       ++chosen) {
    const double of_choices = static_cast<double>(chosen) * share /
                              static_cast<double>(routing.top_groups);
    reached +=
        Hypergeometric(chosen, routing.groups, held, routing.top_groups) *
        (1 - std::pow(1 - of_choices, choices));
  }
  return std::min(1.0, hosts * reached / choices);
}

}  // namespace tessera
