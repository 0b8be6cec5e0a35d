#pragma once
// The time of a collective over a cluster, by every algorithm and protocol that
// can do it.
//
// An algorithm is rounds of sends (rounds.h); a protocol is what each of them
// costs beside its links (protocols.h). Replaying the rounds over the cluster's
// routes gives an affine time in the payload B for each pair of them,
//
//   time(B) = latency_s + B * seconds_per_byte
//   latency_s = start + sum over rounds of the longest chain of sends in it,
//               each taking its route's latency and the protocol's step (or of
//               the slowest way of a chunk: Rounds::apart)
//   start = that of the slowest link type + that of the protocol
//   seconds_per_byte = (busiest + own copies) / fraction
//   busiest = max over links of (bytes over the link per payload byte) / (the
//             link's bandwidth); a device sends and receives no faster than the
//             NICs do that it uses at once, however many are equally near
//             (NearestNics::at_once)
//
// (the alpha-beta model of Hockney, 1994, with links in place of one beta), and
// the collective takes the least of them, as NCCL chooses (its tuning.cc): a
// concave curve of up to seven lines, whose slope falls as the payload grows.
// That is the ramp of measured bandwidths.
//
// The bandwidth term takes all rounds at once: the payload is cut into many
// pieces that follow each other through the rounds, as NCCL's do, so that in
// the steady state the busiest link sets the pace. Rounds within a host and
// across hosts therefore overlap; in a ring all rounds load alike and nothing
// changes. Only in trees does a host wait for a whole piece (4 MB) from the
// next, which costs its time over the network at every level.
//
// Without repetitions a chain is one send. In a ring it is as many sends in a
// row as there are steps: each chunk crosses the slow links of the ring once,
// and nobody waits for the others' slow links. So a ring over 1,024 GPUs has
// 2,046 steps of some 4 us, and reaches a hundredth of its peak at 16 MB.
//
// NVLink SHARP: the switch reads all n ranks' parts and hands out the sum, so
// that each GPU's link carries (n + 1) / n of the buffer each way in place of
// 2 (n - 1) / n, at a lower rate (LinkType::in_switch_bandwidth).
//
// How near this is to measured collectives: costmodel/validate/collectives.h.
//
// Payloads, per rank: all-reduce: the buffer; all-gather: the gathered result;
// reduce-scatter: the whole input; all-to-all and redistribute: what each rank
// holds, of which it sends 1/n to every other; send-recv: what the pair moves;
// shift: what a rank sends on;
// scatter, broadcast, gather and reduce: what the root has before or after.

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "costmodel/collective/algorithms.h"
#include "costmodel/collective/node_rings.h"
#include "costmodel/collective/protocols.h"
#include "costmodel/link/router.h"
#include "costmodel/memo.h"
#include "planner/base/result.h"
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
  std::string_view protocol;   // a row of those in protocols.h; "" for "none"
  double latency_s = 0;
  double seconds_per_byte = 0;

  double Seconds(Bytes payload) const {
    return latency_s + static_cast<double>(payload.value) * seconds_per_byte;
  }
};

// What to use wherever it can be; where it cannot, and where it is empty, the
// fastest is.
struct CollectiveChoice {
  std::string algorithm;  // a row of the table in algorithms.h
  std::string protocol;   // a row of those in protocols.h
};
// Of "", ALGORITHM, ALGORITHM/PROTOCOL or /PROTOCOL: Cluster::collective. An
// unknown name is an error that names the nearest.
Result<CollectiveChoice> ParseCollectiveChoice(std::string_view text);

class CollectiveModel {
 public:
  // `cluster` must be valid, its choice of collectives too, and outlive this
  // unchanged.
  explicit CollectiveModel(const Cluster& cluster);
  // With this choice in place of the cluster's.
  CollectiveModel(const Cluster& cluster, CollectiveChoice choice);
  ~CollectiveModel();
  CollectiveModel(const CollectiveModel&) = delete;
  CollectiveModel& operator=(const CollectiveModel&) = delete;

  // The ways to run `kind` in all of `subgroups` at the same time, sharing
  // links; at least one, in the order of the tables of algorithms and
  // protocols. A subgroup of one rank moves nothing; if all are such, the only
  // option is "none" and takes no time. REQUIRES: subgroups are not empty and
  // disjoint; for kSendRecv each is {source, destination}. Kept by the exact
  // arguments; the reference holds for the life of this. Thread-safe.
  const std::vector<CollectiveOption>& Options(
      CommKind kind, std::span<const std::vector<DeviceId>> subgroups) const;

  // What the links carry under an option of these, by its algorithm; in link
  // order. Kept, too: it is large, and asked for of few options.
  const std::vector<LinkLoad>& Loads(
      CommKind kind, std::span<const std::vector<DeviceId>> subgroups,
      std::string_view algorithm) const;

  // The option that takes the least time; of equal ones the first.
  static const CollectiveOption& Best(std::span<const CollectiveOption> options,
                                      Bytes payload);

  const Router& router() const { return router_; }

 private:
  // A device's links to and from a switch of its host.
  struct SwitchLinks {
    VertexId at;
    LinkId up;
    LinkId down;
    double bandwidth = 0;  // 0: there is no such switch
  };
  // A subgroup and what the algorithms need to know of it.
  struct Member {
    std::span<const DeviceId> devices;
    CollectiveGroup group;                      // its doors in turn
    std::vector<std::vector<int>> dealt_doors;  // of several hosts
    std::vector<int> nics_at_once;              // by rank, of several hosts
    std::vector<SwitchLinks> on_switch;         // by rank
    double switch_bandwidth = 0;                // of the slowest rank
  };

  // What all rounds of all subgroups together put on the links.
  struct Load {
    std::vector<double> bytes;  // per payload byte, by link
    // Out of a device to other hosts and into it from there: seconds per
    // payload byte, were it by as many of the fastest of its NICs as it uses at
    // once.
    std::vector<std::array<double, 2>> by_own_nics;
    Duration start;  // of the slowest type of link
  };
  // All rounds of all subgroups.
  struct Replayed {
    Load load;
    double busiest = 0;             // seconds per payload byte
    std::vector<Duration> latency;  // by protocol, of the slowest subgroup
    double own_copy = 0;  // seconds per payload byte at the links' bandwidth
  };
  // One round's sends, beside what their protocol costs.
  struct RoundCost {
    std::vector<Duration> hops;       // the latency of each send's route
    std::vector<bool> between_hosts;  // of each send
    // Over the slowest link between hosts, of several NICs the fastest.
    double seconds_per_byte = 0;
  };

  bool IsOutOfNic(LinkId link, int node) const;
  bool IsIntoNic(LinkId link, int node) const;
  Member MemberOf(std::span<const DeviceId> devices) const;
  std::vector<CollectiveOption> Compute(
      CommKind kind, std::span<const std::vector<DeviceId>> subgroups) const;
  // The cost of `round` of `rounds`, whose bytes are added to `load`.
  RoundCost CostOf(const Member& member, const Rounds& rounds,
                   const Round& round, Load& load) const;
  // Subgroups of more than one rank.
  std::vector<Member> MembersOf(
      CommKind kind, std::span<const std::vector<DeviceId>> subgroups) const;
  Replayed Replay(const CollectiveAlgorithm& algorithm, CommKind kind,
                  std::span<const Member> members,
                  std::span<const Protocol> protocols) const;
  // By the members' doors in turn or the dealt ones: as is faster.
  Replayed ReplayByBestDoors(const CollectiveAlgorithm& algorithm,
                             CommKind kind, std::span<const Member> members,
                             std::span<const Protocol> protocols) const;
  // One for each protocol.
  void AddOptions(const CollectiveAlgorithm& algorithm, CommKind kind,
                  std::span<const Member> members,
                  std::vector<CollectiveOption>& options) const;

  const Cluster& cluster_;
  CollectiveChoice choice_;
  Router router_;
  DirectLinks direct_links_;
  std::vector<SwitchLinks> switch_links_;  // by device

  // By kind and, for each subgroup, its size and devices.
  mutable Memo<std::vector<CollectiveOption>> options_;
  // The same, behind the algorithm's row.
  mutable Memo<std::vector<LinkLoad>> loads_;
};

}  // namespace tessera
