#include "costmodel/link/fair_share.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "planner/base/rng.h"

namespace tessera {
namespace {

const LinkId kA(0), kB(1), kC(2);

TEST(MaxMinRates, AloneIsFullSpeed) {
  EXPECT_EQ(MaxMinRates({}), std::vector<double>());
  const std::vector<std::vector<LinkUse>> flows = {{{kA, 1.0}}, {}};
  EXPECT_EQ(MaxMinRates(flows), (std::vector<double>{1, 1}));
}

TEST(MaxMinRates, EqualFlowsHalveALink) {
  const std::vector<std::vector<LinkUse>> flows = {{{kA, 1.0}}, {{kA, 1.0}}};
  EXPECT_EQ(MaxMinRates(flows), (std::vector<double>{0.5, 0.5}));
}

TEST(MaxMinRates, LightFlowsAreNotSlowed) {
  // 0.5 + 0.4 < 1: both run at full speed.
  const std::vector<std::vector<LinkUse>> flows = {{{kA, 0.5}}, {{kA, 0.4}}};
  EXPECT_EQ(MaxMinRates(flows), (std::vector<double>{1, 1}));
}

// Flow 0 crosses A and B, flow 1 A, flow 2 B, flow 3 B, all able to fill them.
// B is full first: 3 x = 1, so flows 0, 2 and 3 stop at 1/3. Flow 1 then takes
// what is left of A: 1 - 1/3 = 2/3.
TEST(MaxMinRates, WorkedExample) {
  const std::vector<std::vector<LinkUse>> flows = {
      {{kA, 1.0}, {kB, 1.0}}, {{kA, 1.0}}, {{kB, 1.0}}, {{kB, 1.0}}};
  const std::vector<double> rates = MaxMinRates(flows);
  EXPECT_DOUBLE_EQ(rates[0], 1.0 / 3);
  EXPECT_DOUBLE_EQ(rates[1], 2.0 / 3);
  EXPECT_DOUBLE_EQ(rates[2], 1.0 / 3);
  EXPECT_DOUBLE_EQ(rates[3], 1.0 / 3);
}

// Unequal demands: on C flow 0 takes 0.5 and flow 1 takes 1.0 at full speed.
// Rates grow together until 1.5 x = 1: both at 2/3, loads 1/3 and 2/3.
TEST(MaxMinRates, RatesAreEqualNotLoads) {
  const std::vector<std::vector<LinkUse>> flows = {{{kC, 0.5}}, {{kC, 1.0}}};
  const std::vector<double> rates = MaxMinRates(flows);
  EXPECT_DOUBLE_EQ(rates[0], 2.0 / 3);
  EXPECT_DOUBLE_EQ(rates[1], 2.0 / 3);
}

// On random flows: no link above capacity, and every flow below full speed
// crosses a full link on which no other flow is faster (which characterises
// max-min fairness).
TEST(MaxMinRates, IsMaxMinFairOnRandomFlows) {
  Rng rng(7);
  for (int trial = 0; trial < 200; ++trial) {
    constexpr int kLinks = 6;
    std::vector<std::vector<LinkUse>> flows(1 + rng.Below(8));
    for (auto& flow : flows) {
      for (int l = 0; l < kLinks; ++l) {
        if (rng.Below(2) == 0) {
          flow.push_back({LinkId(l), 0.05 + 0.95 * rng.Uniform01()});
        }
      }
    }
    const std::vector<double> rates = MaxMinRates(flows);
    std::vector<double> load(kLinks, 0);
    std::vector<double> fastest(kLinks, 0);
    for (size_t i = 0; i < flows.size(); ++i) {
      for (const LinkUse& use : flows[i]) {
        load[use.link.index()] += rates[i] * use.utilisation;
        fastest[use.link.index()] =
            std::max(fastest[use.link.index()], rates[i]);
      }
    }
    for (double l : load) EXPECT_LE(l, 1 + 1e-9);
    for (size_t i = 0; i < flows.size(); ++i) {
      EXPECT_GT(rates[i], 0);
      if (rates[i] == 1) continue;
      bool bottleneck = false;
      for (const LinkUse& use : flows[i]) {
        bottleneck |= load[use.link.index()] > 1 - 1e-9 &&
                      fastest[use.link.index()] <= rates[i] * (1 + 1e-9);
      }
      EXPECT_TRUE(bottleneck) << "trial " << trial << " flow " << i;
    }
  }
}

// Water filling in small steps, which knows nothing of when links become full:
// every flow grows by one step as long as no link on its way overflows.
std::vector<double> PouredRates(const std::vector<std::vector<LinkUse>>& flows,
                                size_t links, int steps) {
  std::vector<double> load(links, 0);
  std::vector<double> rates(flows.size(), 0);
  const double step = 1.0 / steps;
  for (int s = 0; s < steps; ++s) {
    for (size_t i = 0; i < flows.size(); ++i) {
      const bool fits = std::ranges::all_of(flows[i], [&](const LinkUse& use) {
        return load[use.link.index()] + step * use.utilisation <= 1;
      });
      if (!fits) continue;
      rates[i] += step;
      for (const LinkUse& use : flows[i]) {
        load[use.link.index()] += step * use.utilisation;
      }
    }
  }
  return rates;
}

TEST(MaxMinRates, AgreesWithPouringOnRandomNetworks) {
  Rng rng(11);
  for (int trial = 0; trial < 100; ++trial) {
    constexpr int kLinks = 8;
    std::vector<std::vector<LinkUse>> flows(1 + rng.Below(10));
    for (auto& flow : flows) {
      for (int l = 0; l < kLinks; ++l) {
        if (rng.Below(3) == 0) {
          flow.push_back({LinkId(l), 0.2 + 0.8 * rng.Uniform01()});
        }
      }
    }
    constexpr int kSteps = 4000;
    const std::vector<double> rates = MaxMinRates(flows);
    const std::vector<double> poured = PouredRates(flows, kLinks, kSteps);
    for (size_t i = 0; i < flows.size(); ++i) {
      // A step of each flow that shares a link, over the least utilisation,
      // and again for each link that fills before.
      EXPECT_NEAR(rates[i], poured[i], 0.02) << "trial " << trial;
    }
  }
}

}  // namespace
}  // namespace tessera
