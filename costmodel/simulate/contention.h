#pragma once
// Contention: which communication of a step can slow which.
//
// A flow is one way of loading the links. Streams run one task at a time, so a
// link can be short only where
//
//   sum over streams of max over the stream's flows of utilisation > 1.
//
// All other links are left out, and of links that the same flows load only
// those that no other one among them covers: whichever is full, the other is
// full first. So links in the same place of symmetric groups are one link, and
// the cost follows from the number of different flows, not of devices. Rates
// are those of all links, bit for bit.

#include <span>
#include <unordered_map>
#include <vector>

#include "costmodel/link/fair_share.h"
#include "costmodel/price.h"

namespace tessera {

struct Contention {
  // By flow, the links that can be short, renumbered; empty: it always runs at
  // full speed.
  std::vector<std::vector<LinkUse>> uses;
  size_t links = 0;  // so many

  bool possible() const;
};

// `uses` by flow; `streams_of_flow` by flow, the numbers of the streams with
// tasks of it, each once.
Contention FindContention(std::span<const std::vector<LinkUse>> uses,
                          std::span<const std::vector<int>> streams_of_flow);

// Max-min fair rates of the flows that run, by connected component: flows that
// share no link, directly or through others, do not slow each other. Every set
// that was met is remembered. Not thread-safe.
class FairRates {
 public:
  explicit FairRates(const Contention& contention) : contention_(contention) {}

  // The rate of each flow of one component: `flows` are its running flows in
  // ascending order, one entry for each task that runs.
  const std::vector<double>& Of(const IntKey& flows);

 private:
  const Contention& contention_;
  std::unordered_map<IntKey, std::vector<double>, IntKeyHash> known_;
};

}  // namespace tessera
