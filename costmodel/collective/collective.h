#pragma once
// The time of a collective over a cluster, by every algorithm that can do it.
//
// An algorithm is rounds of sends (rounds.h). Replaying them over the cluster's
// routes gives an affine time in the payload B,
//
//   time(B) = latency_s + B * seconds_per_byte
//   latency_s = start + sum over rounds of the longest chain of sends in it,
//               each taking its route's latency
//   seconds_per_byte = max over links of (bytes over the link per payload
//                      byte) / (the link's bandwidth)
//
// (the alpha-beta model of Hockney, 1994, with links in place of one beta).
// The bandwidth term takes all rounds at once: the payload is cut into many
// pieces that follow each other through the rounds, as NCCL's do, so that in
// the steady state the busiest link sets the pace. Rounds within a host and
// across hosts therefore overlap; in a ring all rounds load alike and nothing
// changes.
//
// Without repetitions a chain is one send. In a ring it is as many sends in a
// row as there are steps: each chunk crosses the slow links of the ring once,
// and nobody waits for the others' slow links.
//
// start is 8 us: the intercept of NCCL's times for 512 B against the number of
// steps on A100 (8.1) and B200 (7.7; NVIDIA aiconfigurator's NCCL table, on
// H100 and H200 4.2); the slopes are in the links' latencies. So eight A100
// take 8 + 14 * 0.94 = 21.2 us at least (measured: 21.3).
//
// Over that table's 2 to 8 GPUs of A100, H100, H200, B200 and GB200 and its
// four collectives the mean error is +11 % up to 16 KiB, -5 % up to 512 KiB,
// -28 % up to 16 MiB and -21 % above. What is not in the model: NCCL's
// protocols, whose bandwidth grows with the size up to 512 MiB; that two GPUs
// reach two thirds of a link outside all-reduce; and sums in the switch (NVLS),
// with which eight H100 take 0.8 times as long.
//
// Payloads, per rank: all-reduce: the buffer; all-gather: the gathered result;
// reduce-scatter: the whole input; all-to-all and redistribute: what each rank
// holds, of which it sends 1/n to every other; send-recv: what the pair moves;
// shift: what a rank sends on;
// scatter, broadcast, gather and reduce: what the root has before or after.

#include <memory>
#include <shared_mutex>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "costmodel/link/router.h"
#include "planner/base/units.h"
#include "planner/ir/cluster.h"
#include "planner/lower/comm_kind.h"

namespace tessera {

struct LinkLoad {
  LinkId link;
  double bytes_per_payload_byte = 0;  // of all subgroups together
};

struct CollectiveOption {
  std::string_view algorithm;  // a row of the table in algorithms.h, or "none"
  double latency_s = 0;
  double seconds_per_byte = 0;
  std::vector<LinkLoad> loads;  // in link order

  double Seconds(Bytes payload) const {
    return latency_s + static_cast<double>(payload.value) * seconds_per_byte;
  }
};

class CollectiveModel {
 public:
  // `cluster` must be valid, and outlive this unchanged.
  explicit CollectiveModel(const Cluster& cluster);
  ~CollectiveModel();
  CollectiveModel(const CollectiveModel&) = delete;
  CollectiveModel& operator=(const CollectiveModel&) = delete;

  // The ways to run `kind` in all of `subgroups` at the same time, sharing
  // links; at least one, in table order. A subgroup of one rank moves nothing;
  // if all are such, the only option is "none" and takes no time.
  // REQUIRES: subgroups are not empty and disjoint; for kSendRecv each is
  // {source, destination}. Kept by the exact arguments; the reference holds
  // for the life of this. Thread-safe.
  const std::vector<CollectiveOption>& Options(
      CommKind kind, std::span<const std::vector<DeviceId>> subgroups) const;

  // The option that takes the least time; of equal ones the first.
  static const CollectiveOption& Best(std::span<const CollectiveOption> options,
                                      Bytes payload);

  const Router& router() const { return router_; }

 private:
  struct KeyHash {
    size_t operator()(const std::vector<int32_t>& key) const;
  };

  std::vector<CollectiveOption> Compute(
      CommKind kind, std::span<const std::vector<DeviceId>> subgroups) const;

  const Cluster& cluster_;
  Router router_;
  std::vector<LinkId> direct_links_;  // device to device

  mutable std::shared_mutex mutex_;
  mutable std::unordered_map<
      std::vector<int32_t>,
      std::unique_ptr<const std::vector<CollectiveOption>>, KeyHash>
      options_;  // by kind and, for each subgroup, its size and devices
};

}  // namespace tessera
