#include "costmodel/simulate/contention.h"

#include <gtest/gtest.h>

#include "planner/base/rng.h"

namespace tessera {
namespace {

// Links 0 and 1 lie in the same place of two alike hosts, link 2 is loaded
// less by the same flows, and link 3 only by flow 0: one link is left.
TEST(Contention, LinksThatFillTogetherAreOne) {
  const std::vector<std::vector<LinkUse>> uses = {
      {{LinkId(0), 0.8}, {LinkId(1), 0.8}, {LinkId(2), 0.7}, {LinkId(3), 1.0}},
      {{LinkId(0), 0.5}, {LinkId(1), 0.5}, {LinkId(2), 0.5}}};
  const std::vector<std::vector<int>> streams = {{0}, {1}};
  const Contention contention = FindContention(uses, streams);
  ASSERT_EQ(contention.uses[0].size(), 1);
  ASSERT_EQ(contention.uses[1].size(), 1);
  EXPECT_EQ(contention.uses[0][0].link, contention.uses[1][0].link);
  EXPECT_EQ(contention.uses[0][0].utilisation, 0.8);
  EXPECT_EQ(contention.links, 1);
  EXPECT_TRUE(contention.possible());
}

// Two flows of one stream never meet: 0.8 + 0.2 fills the link, no more. A flow
// with tasks on two streams meets itself.
TEST(Contention, AStreamRunsOneFlowAtATime) {
  const std::vector<std::vector<LinkUse>> uses = {
      {{LinkId(0), 0.8}}, {{LinkId(0), 0.7}}, {{LinkId(0), 0.2}}};
  const std::vector<std::vector<int>> streams = {{0}, {0}, {1}};
  EXPECT_FALSE(FindContention(uses, streams).possible());
  const std::vector<std::vector<int>> twice = {{0}, {0}, {1, 2}};
  EXPECT_TRUE(FindContention(uses, twice).possible());
}

// On random flows: the rates of components over the links that are left are
// those of all flows over all links.
TEST(Contention, RatesAreThoseOfAllLinks) {
  Rng rng(11);
  for (int trial = 0; trial < 200; ++trial) {
    constexpr int kLinks = 12;
    const size_t n = 2 + rng.Below(6);
    std::vector<std::vector<LinkUse>> uses(n);
    std::vector<std::vector<int>> streams(n);
    for (size_t f = 0; f < n; ++f) {
      for (int l = 0; l < kLinks; ++l) {
        if (rng.Below(4) == 0) {
          uses[f].push_back({LinkId(l), 0.1 * (1 + rng.Below(10))});
        }
      }
      streams[f] = {static_cast<int>(f)};
    }
    const std::vector<double> all = MaxMinRates(uses);
    const Contention contention = FindContention(uses, streams);
    std::vector<std::vector<int>> on_link(contention.links);
    for (size_t f = 0; f < n; ++f) {
      for (const LinkUse& use : contention.uses[f]) {
        on_link[use.link.index()].push_back(static_cast<int>(f));
      }
    }
    FairRates rates(contention);
    std::vector<bool> seen(n, false);
    for (size_t f = 0; f < n; ++f) {
      if (seen[f]) continue;
      IntKey component = {static_cast<int64_t>(f)};
      seen[f] = true;
      for (size_t i = 0; i < component.size(); ++i) {
        for (const LinkUse& use :
             contention.uses[static_cast<size_t>(component[i])]) {
          for (int other : on_link[use.link.index()]) {
            if (seen[static_cast<size_t>(other)]) continue;
            seen[static_cast<size_t>(other)] = true;
            component.push_back(other);
          }
        }
      }
      std::sort(component.begin(), component.end());
      const std::vector<double>& own = rates.Of(component);
      for (size_t i = 0; i < component.size(); ++i) {
        EXPECT_NEAR(own[i], all[static_cast<size_t>(component[i])], 1e-9)
            << "trial " << trial;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
