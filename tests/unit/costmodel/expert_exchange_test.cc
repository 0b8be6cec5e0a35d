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
  EXPECT_DOUBLE_EQ(HostsPerChoice({.top_k = 1}, 8), 1);
  // Two choices on two hosts: both on one in half of the cases, 1.5 hosts.
  EXPECT_NEAR(HostsPerChoice({.top_k = 2}, 2), 0.75, 1e-12);
  // All on one host.
  EXPECT_NEAR(HostsPerChoice({.top_k = 4}, 1), 0.25, 1e-12);
  // DeepSeek-V3 on eight hosts, a group on each: a chosen host has none of the
  // eight choices in (3/4)^8 of the cases, 4 (1 - (3/4)^8) / 8 hosts a choice.
  EXPECT_NEAR(HostsPerChoice({.top_k = 8, .groups = 8, .top_groups = 4}, 8),
              0.5 * (1 - std::pow(0.75, 8)), 1e-12);
}

// Against routers that choose at random: groups first, then experts of them.
TEST(HostsPerChoice, IsTheMeanOfRandomChoices) {
  std::mt19937 random(1);
  constexpr int kExperts = 256;
  constexpr int kDraws = 20000;
  for (const auto& [routing, hosts] :
       {std::pair{Routing{8, 1, 1}, 4}, std::pair{Routing{8, 8, 4}, 2},
        std::pair{Routing{8, 8, 4}, 4}, std::pair{Routing{8, 8, 4}, 8},
        std::pair{Routing{8, 8, 4}, 32}, std::pair{Routing{6, 8, 3}, 16}}) {
    const int group_size = kExperts / static_cast<int>(routing.groups);
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
        on.insert(experts[static_cast<size_t>(k)] * hosts / kExperts);
      }
      reached += static_cast<int64_t>(on.size());
    }
    const double mean = static_cast<double>(reached) / kDraws;
    // Choices without replacement among few experts are a little wider spread
    // than independent ones.
    EXPECT_NEAR(HostsPerChoice(routing, hosts),
                mean / static_cast<double>(routing.top_k), 0.02)
        << routing.groups << " groups on " << hosts << " hosts";
  }
}

}  // namespace
}  // namespace tessera
