#pragma once
// Routes between devices: which links a transfer crosses.
//
// The route from s to t is the path that is least by, in this order,
//   1. other devices passed through (a GPU forwards for others only where
//      nothing else joins the two);
//   2. bridges passed through (of PCIe, or a host: not where NVLink joins the
//      two, however the latencies are);
//   3. NICs passed through;
//   4. the number of links (as networks route: ECMP, InfiniBand's min-hop);
//   5. within a node, the sum of the links' latencies.
// Between nodes latencies decide nothing, as bandwidths do not, so that less of
// the one and more of the other move no traffic. (NCCL compares what paths
// pass through and their bandwidth: its graph/topo.cc.)
//
// Paths that are equal in all of these fork, walking back from t, in k links:
//   - on t's node, and where they lead back to different NICs of s's, each
//     carries an equal part. (NCCL deals each GPU one of the NICs that are
//     equally near, in turn: its graph/topo.cc.) So whatever NICs a node has,
//     and whichever of them failed, those that are equally near to its devices
//     carry the same;
//   - elsewhere, and within a node, s takes the one (by id) at (its local index
//     on its node) mod k: so they are shared out over the sources.
//
// Since parts are equal, NICs that are equally near but slower may slow down
// the others. Of a device's nearest NICs, ordered by their slowest link, it
// uses the first k, k times the rate of the last of which is the most; NICs
// that no device of their node uses carry nothing wherever there is another
// way. (NCCL's search for channels finds the number and the one bandwidth of
// all that are the most together: its graph/search.cc. A NIC that another
// device of the node uses counts as equally near to this one, however slow.)
//
// A route stays within the nodes of s and t and the network between them where
// such a path exists: no third host forwards. So routes depend on the cluster
// only.
//
// Routes are computed when first asked for, from one device to all of a node
// at a time, and kept: once for all pairs of nodes that are built alike and
// hang on the same links of the network. Each device of unlike nodes (on a
// torus all are) searches for its own, no farther than the node that is asked
// for; after a few such searches it finds those to all others in one. There is
// no table over all pairs.
//
// Thread-safe: const methods may run concurrently.

#include <array>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "planner/ir/cluster.h"

namespace tessera {

// A link of a route, and what part of a transfer crosses it.
struct RouteLink {
  LinkId link;
  double share = 1;
  bool operator==(const RouteLink&) const = default;
};

// The NICs by which a device's transfers leave its node and enter it where
// their way beyond does not matter.
struct NearestNics {
  std::vector<int> numbers;  // among the NICs of the node, by id
  // Devices, bridges and links on the way.
  std::array<int64_t, 3> distance = {};
  // By how many of them at once: the number of those that are nearest, used or
  // not, by that of the devices which the first of them is nearest to, rounded
  // up. (NCCL's channels take so many in turn: `net += channelId %
  // DIVUP(localNetCount, localGpuCount)` in its graph/topo.cc.)
  int at_once = 1;
};

class Router {
 public:
  // `cluster` must be valid, and outlive this unchanged.
  explicit Router(const Cluster& cluster);
  Router(const Router&) = delete;
  Router& operator=(const Router&) = delete;

  // The links from `from` to `to` in order (of the paths' own, where there are
  // several); empty when they are the same.
  std::vector<RouteLink> Route(DeviceId from, DeviceId to) const;
  // The same into `links`, whose memory is used again.
  void Route(DeviceId from, DeviceId to, std::vector<RouteLink>& links) const;

  // None where nodes are joined otherwise. The reference holds for the life of
  // this.
  const NearestNics& NicsOf(DeviceId device) const;

  // The node whose devices alone reach a vertex without crossing a NIC, NICs
  // included; -1: the network between the nodes.
  int NodeOf(VertexId vertex) const { return owner_[vertex.index()]; }

  // The sum of latencies along `route`: of several paths the mean.
  Duration Latency(std::span<const RouteLink> route) const;

 private:
  // The routes of one device to the devices of one node: those to the node's
  // i-th device are links[begin[i]] to links[begin[i + 1] - 1].
  struct RoutesToNode {
    std::vector<size_t> begin;
    std::vector<RouteLink> links;
  };
  // A link, as a number among those of the source's or the target's node, or
  // else its id.
  struct Step {
    enum Among : uint8_t { kSource, kTarget, kAll };
    Among among = kAll;
    size_t number = 0;
    double share = 1;
  };
  // RoutesToNode for all nodes alike.
  struct Pattern {
    std::vector<size_t> begin;
    std::vector<Step> steps;
  };
  // Of a source and a node of targets what their routes depend on.
  struct AlikeKey {
    uint64_t source = 0;  // KeyOf
    int node = -1;        // its class; -1: the source's own node
    bool operator==(const AlikeKey&) const = default;
  };
  struct HashOfAlike {
    size_t operator()(const AlikeKey& key) const;
  };

  // The links that a search may use.
  struct SearchArea {
    // Those that begin or end on this node; if `network`, those of the network
    // and into the targets, where routes end; if `all`, all.
    int home = 0;
    bool network = true;
    bool all = false;
    int target = -1;
    std::vector<bool> targets = {};  // by node, where there are several
    bool without_left_out = false;
    bool latencies_count = false;
  };
  struct Paths;  // what a search finds
  struct Tails;

  void NumberClasses();
  void LeaveOutSlowNics();
  // Those that join the node to others, by id.
  std::vector<VertexId> NicsOfNode(size_t node) const;
  // The nearest of `nics`, used or not, without at_once.
  NearestNics NearestOf(DeviceId device, std::span<const VertexId> nics) const;
  const Pattern& PatternTo(DeviceId from, int node) const;
  std::shared_ptr<const Pattern> Compute(DeviceId from, int node,
                                         bool& inside) const;
  // Computes and keeps them for a node of each class.
  void ComputeAll(DeviceId from) const;
  std::shared_ptr<const Pattern> MakePattern(RoutesToNode routes, int home,
                                             int node, bool inside) const;
  // A device's local index on its node and the class of that.
  uint64_t KeyOf(DeviceId device) const;
  AlikeKey AlikeKeyOf(DeviceId from, int node) const;
  bool IsIn(const SearchArea& area, LinkId link) const;
  // False where no link leads to the ends from outside of their node.
  bool AddTails(const SearchArea& area, VertexId source,
                std::span<const VertexId> ends, Tails& tails) const;
  // Until the last of `ends`, all devices of area.target, is reached, or all is
  // if there are none.
  Paths Search(DeviceId from, const SearchArea& area,
               std::span<const VertexId> ends) const;
  const std::vector<LinkId>& LastLinks(VertexId vertex, Paths& paths) const;
  const std::vector<VertexId>& WaysTo(VertexId vertex, Paths& paths) const;
  // Fills `out` with routes along `paths`; false when a device of `node` is out
  // of reach.
  bool Walk(DeviceId from, int node, Paths& paths, RoutesToNode& out) const;

  const Cluster& cluster_;
  std::vector<int> first_device_;  // per node, and one past the last
  // The node whose devices alone reach a vertex without crossing a NIC; -1
  // for the network between the nodes.
  std::vector<int> owner_;
  std::vector<std::vector<LinkId>> links_of_node_;
  // By vertex, in the order of ids.
  std::vector<std::vector<LinkId>> links_from_;
  std::vector<std::vector<LinkId>> links_to_;
  // By vertex: NICs that no device of their node uses. Empty where there are
  // none.
  std::vector<bool> left_out_;

  // Nodes of one class have links of the same types in the same order, between
  // like vertices of their own or the same ones of the network.
  std::vector<int> class_of_node_;

  mutable std::shared_mutex mutex_;
  // Null where a third host forwards.
  mutable std::unordered_map<AlikeKey, std::shared_ptr<const Pattern>,
                             HashOfAlike>
      alike_;
  // These: by device and node.
  mutable std::unordered_map<uint64_t, std::shared_ptr<const Pattern>> single_;
  // By KeyOf the source: how many of these were computed one by one.
  mutable std::unordered_map<uint64_t, int> single_searches_;
  // By KeyOf the device.
  mutable std::unordered_map<uint64_t, std::shared_ptr<const NearestNics>>
      nics_;
};

}  // namespace tessera
