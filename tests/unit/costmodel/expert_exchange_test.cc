#include "costmodel/expert_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace tessera {
namespace {

TEST(HostsPerChoice, WorkedByHand) {
  // One choice is on one host.
  EXPECT_DOUBLE_EQ(HostsPerChoice({.top_k = 1, .experts = 16}, 8), 1);
  // Two of eight experts on two hosts: the second is one of the three others
  // there in 3 of 7 cases, so 11/7 hosts.
  EXPECT_NEAR(HostsPerChoice({.top_k = 2, .experts = 8}, 2), 11.0 / 14, 1e-12);
  // An expert on each host: two are on two hosts.
  EXPECT_NEAR(HostsPerChoice({.top_k = 2, .experts = 8}, 8), 1, 1e-12);
  // All on one host.
  EXPECT_NEAR(HostsPerChoice({.top_k = 4, .experts = 8}, 1), 0.25, 1e-12);
  // DeepSeek-V3 on eight hosts, a group on each: the eight choices are among
  // 128 experts, and a chosen host has none of them in C(96, 8) / C(128, 8) of
  // the cases: 4 (1 - that) / 8 hosts a choice.
  double none = 1;
  for (int i = 0; i < 8; ++i) none *= (96.0 - i) / (128 - i);
  EXPECT_NEAR(
      HostsPerChoice({.top_k = 8, .groups = 8, .top_groups = 4, .experts = 256},
                     8),
      0.5 * (1 - none), 1e-12);
}

// Against routers that choose at random: groups first, then experts of them.
TEST(HostsPerChoice, IsTheMeanOfRandomChoices) {
  std::mt19937 random(1);
  constexpr int kDraws = 20000;
  for (const auto& [routing, hosts] :
       {std::pair{Routing{8, 1, 1, 256}, 4},
        std::pair{Routing{8, 8, 4, 256}, 2},
        std::pair{Routing{8, 8, 4, 256}, 4},
        std::pair{Routing{8, 8, 4, 256}, 8},
        std::pair{Routing{8, 8, 4, 256}, 32},
        std::pair{Routing{6, 8, 3, 256}, 16},
        // Hosts that neither hold whole groups nor equal parts of one:
        // DeepSeek-V2's router, among others.
        std::pair{Routing{6, 8, 3, 160}, 5},
        std::pair{Routing{6, 8, 3, 160}, 10},
        std::pair{Routing{6, 8, 3, 160}, 20},
        std::pair{Routing{4, 6, 2, 60}, 4}, std::pair{Routing{4, 3, 2, 24}, 2},
        std::pair{Routing{4, 3, 1, 60}, 5}, std::pair{Routing{2, 1, 1, 8}, 4},
        std::pair{Routing{2, 1, 1, 8}, 8}}) {
    const int experts_in_all = static_cast<int>(routing.experts);
    const int group_size = experts_in_all / static_cast<int>(routing.groups);
    std::vector<int> groups(static_cast<size_t>(routing.groups));
    std::iota(groups.begin(), groups.end(), 0);
    int64_t reached = 0;
    for (int draw = 0; draw < kDraws; ++draw) {
      std::ranges::shuffle(groups, random);
      std::vector<int> experts;
      for (int64_t g = 0; g < routing.top_groups; ++g) {
        for (int e = 0; e < group_size; ++e) {
          experts.push_back(groups[static_cast<size_t>(g)] * group_size + e);
        }
      }
      std::ranges::shuffle(experts, random);
      std::set<int> on;
      for (int64_t k = 0; k < routing.top_k; ++k) {
        on.insert(experts[static_cast<size_t>(k)] * hosts / experts_in_all);
      }
      reached += static_cast<int64_t>(on.size());
    }
    const double mean = static_cast<double>(reached) / kDraws;
    // Four standard errors of a mean of hosts, of which a token has at most 8.
    EXPECT_NEAR(HostsPerChoice(routing, hosts),
                mean / static_cast<double>(routing.top_k), 0.005)
        << routing.groups << " groups on " << hosts << " hosts";
  }
}

}  // namespace
}  // namespace tessera
