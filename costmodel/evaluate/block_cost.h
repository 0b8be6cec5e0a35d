#pragma once
// BlockCost: what one block adds to the bound of a uniform strategy
// (uniform_bound.h): lengths of paths through its programs, and bytes.

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "costmodel/evaluate/block_template.h"
#include "costmodel/price.h"
#include "planner/ir/cluster.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/strategy.h"

namespace tessera {

// The length where there is no path. Sums of a few hundred do not wrap.
inline constexpr int64_t kNoPath = std::numeric_limits<int64_t>::min() / 1024;

// Max-plus: the later of two times, in picoseconds, as a function of both.
struct Passage {
  int64_t stream_to_stream = 0;
  int64_t stream_to_output = 0;
  int64_t input_to_stream = 0;
  int64_t input_to_output = 0;

  Passage Then(const Passage& next) const;
};

// One block's share of the bound.
struct BlockCost {
  Passage forward;
  Passage backward;  // whole, or its gradients of activations
  // The same where another stage has the next block: the output is what the
  // last exchange begins with. And its bytes, each once.
  Passage forward_out;
  Passage backward_out;
  int64_t forward_bytes = 0;
  int64_t backward_bytes = 0;
  int64_t weight = 0;  // of split backwards: the gradients of weights
  int64_t update = 0;  // the optimizer's compute, nothing cut
  int64_t kept = 0;    // bytes, for each microbatch in flight
  int64_t backward_peak = 0;
  // Bytes that ZeRO of at least stage 3, 2 and 1 cuts (parameters, gradients,
  // optimizer state): whole, and over the copies within the replica.
  std::array<int64_t, 3> stored = {};
  std::array<double, 3> cut = {};
  // Of those stored parameters and gradients what the replicas exchange over
  // one stream: each rank of tp has a part of its own.
  std::array<int64_t, 2> exchanged = {};
  // Bytes of parameters that forward reads and those that backward does: what
  // ZeRO-3 gathers of them for a microbatch.
  int64_t gathered = 0;
};

// A plan of one replica of a layer, in which blocks are lowered and priced.
struct ReplicaSetting {
  const GraphIndex* index = nullptr;  // of `pricer`'s graph
  std::span<const BlockShape> shapes;
  const Pricer* pricer = nullptr;
  const LoweringFacts* facts = nullptr;  // of the same graph
  // Replicas lie in their hosts, and on devices, as those so many devices
  // before.
  int period = 0;
  bool unlike_devices = false;
  // Only replicas on devices of just these types count, by the bits of
  // Device::type; 0: all. REQUIRES: there are some.
  uint64_t types = 0;
  // By block the one whose costs it gets: a block stands for itself, or for
  // others. Empty: each for itself.
  std::span<const int> stands;
};

// The types of a group's devices, of less than 64.
uint64_t TypesOf(const Cluster& cluster, const DeviceGroup& group);

// By block of the index's graph; empty where the strategy has no plan. Of
// `strategy` only what splits a layer counts. `comm`: with collectives within
// the replica; `splits`: backwards are split.
std::vector<BlockCost> CostsOfBlocks(const ReplicaSetting& setting,
                                     const Strategy& strategy, bool comm,
                                     bool splits);

}  // namespace tessera
