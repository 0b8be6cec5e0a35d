#include "costmodel/expert_exchange.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace tessera {
namespace {

// The logarithm of the ways to choose `chosen` of `total`, which need not be
// whole; minus infinity where there is none.
double LogChoose(double total, double chosen) {
  if (chosen < 0 || chosen > total) {
    return -std::numeric_limits<double>::infinity();
  }
  return std::lgamma(total + 1) - std::lgamma(chosen + 1) -
         std::lgamma(total - chosen + 1);
}

// What a host has of groups that are cut evenly over hosts in their order: all
// of `whole` of them, and of up to two others these shares.
struct HostShare {
  int64_t whole = 0;
  std::vector<double> cut;
};
HostShare HostShareOf(int64_t groups, int64_t hosts, int64_t host) {
  // In parts of which a group has `hosts`, and a host `groups`.
  const int64_t begin = host * groups;
  const int64_t end = begin + groups;
  HostShare share;
  for (int64_t group = begin / hosts; group * hosts < end; ++group) {
    const int64_t held =
        std::min(end, (group + 1) * hosts) - std::max(begin, group * hosts);
    if (held == hosts) {
      ++share.whole;
    } else {
      share.cut.push_back(static_cast<double>(held) /
                          static_cast<double>(hosts));
    }
  }
  return share;
}

// The chance that a host has an expert that is chosen: by how many of its whole
// groups are among the top ones, and which of those it has a share of.
double Reached(const Routing& routing, const HostShare& share) {
  const auto groups = static_cast<double>(routing.groups);
  const auto top_groups = static_cast<double>(routing.top_groups);
  const auto choices = static_cast<double>(routing.top_k);
  const double of_group = static_cast<double>(routing.experts) / groups;
  const auto whole = static_cast<double>(share.whole);
  const auto cut = static_cast<double>(share.cut.size());
  const double among = top_groups * of_group;  // experts, of which are chosen
  double reached = 0;
  for (int64_t all = 0; all <= share.whole; ++all) {
    for (size_t some = 0; some < size_t{1} << share.cut.size(); ++some) {
      auto chosen = static_cast<double>(all);
      double held = chosen;
      for (size_t i = 0; i < share.cut.size(); ++i) {
        if ((some >> i & 1) == 0) continue;
        held += share.cut[i];
        ++chosen;
      }
      const double chance =
          std::exp(LogChoose(whole, static_cast<double>(all)) +
                   LogChoose(groups - whole - cut, top_groups - chosen) -
                   LogChoose(groups, top_groups));
      const double none = std::exp(LogChoose(among - held * of_group, choices) -
                                   LogChoose(among, choices));
      reached += chance * (1 - none);
    }
  }
  return reached;
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
  // What hosts have of groups comes again after so many of them.
  const int64_t times = std::gcd(routing.groups, int64_t{hosts});
  double reached = 0;
  for (int64_t host = 0; host < hosts / times; ++host) {
    reached += Reached(routing, HostShareOf(routing.groups, hosts, host));
  }
  return std::min(1.0, static_cast<double>(times) * reached /
                           static_cast<double>(routing.top_k));
}

}  // namespace tessera
