#include "costmodel/expert_exchange.h"

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

// Of `draws` without replacement from `total`, that `hits` are among `marked`.
// Numbers need not be whole.
double Hypergeometric(double hits, double total, double marked, double draws) {
  if (hits > marked || draws - hits > total - marked) return 0;
  const auto log_choose = [](double n, double k) {
    return std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1);
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
    const int64_t experts = graph.tensor(node.operands[0]).shape.back();
    return {whole("top_k"), whole("groups"), whole("top_groups"), experts};
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
  const auto groups = static_cast<double>(routing.groups);
  const auto top_groups = static_cast<double>(routing.top_groups);
  const auto choices = static_cast<double>(routing.top_k);
  const double of_group = static_cast<double>(routing.experts) / groups;
  // A host has whole groups, or a share of one.
  const int64_t held = std::max<int64_t>(1, routing.groups / hosts);
  const double share = std::min(1.0, groups / hosts);
  double reached = 0;  // chance that a host has a chosen expert
  for (int64_t chosen = 1; chosen <= std::min(held, routing.top_groups);
       ++chosen) {
    const auto c = static_cast<double>(chosen);
    const double none =
        Hypergeometric(0, top_groups * of_group, c * of_group * share, choices);
    reached +=
        Hypergeometric(c, groups, static_cast<double>(held), top_groups) *
        (1 - none);
  }
  return std::min(1.0, hosts * reached / choices);
}

}  // namespace tessera
