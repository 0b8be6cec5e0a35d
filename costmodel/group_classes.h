#pragma once
// GroupClasses: device groups up to a renaming of hosts. Groups that lie in the
// same way in hosts that are alike cost the same, exactly.
//
// Hosts that are alike and hang on the same places of the network (a leaf
// switch, or all of one switch) are a pod: any of them may take another's name.
// So may pods of as many such hosts whose own switches are joined to the rest
// of the network alike: leaves under the same spines.

#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "costmodel/link/router.h"
#include "costmodel/memo.h"
#include "planner/ir/cluster.h"
#include "planner/plan/layout.h"

namespace tessera {

// The canonical members of a class.
struct GroupClass {
  DeviceGroup group;
  DeviceGroup peer;               // of a pair
  std::vector<int> device_types;  // distinct, of `group`
  // Where axes have shares: `group` as the devices of each of these see it.
  std::vector<DeviceGroup> counted;
};

class GroupClasses {
 public:
  // `cluster` outlives this, unchanged; `router` is of it.
  GroupClasses(const Cluster& cluster, const Router& router);

  // Whether any host may take any other's name.
  bool hosts_are_alike() const { return hosts_.size() == 1; }

  // Numbers groups (or pairs of groups) so that equal numbers cost the same.
  // Thread-safe, as is the other.
  int NumberOf(const DeviceGroup& group, const DeviceGroup* peer) const;
  // The class of such a number; it stays where it is.
  const GroupClass& operator[](int number) const;

 private:
  // By host: each gets the first name that is left in its pod, pods in their
  // kind. Collectives go through hosts in their order, so where that would be
  // another all keep their own.
  std::vector<int> NamesOf(const DeviceGroup& group,
                           const DeviceGroup* peer) const;
  GroupClass MakeClass(const DeviceGroup& group, const DeviceGroup* peer,
                       const IntKey& key, size_t group_end) const;

  const Cluster& cluster_;
  const std::vector<int> first_device_;  // by host
  const std::vector<int> pod_of_;        // by host
  std::vector<std::vector<int>> hosts_;  // by pod
  std::vector<int> kind_of_;             // by pod
  std::vector<std::vector<int>> pods_;   // by kind, of as many hosts

  mutable std::shared_mutex mutex_;
  mutable std::unordered_map<IntKey, int, IntKeyHash> numbers_;
  mutable std::vector<std::unique_ptr<const GroupClass>> classes_;
};

}  // namespace tessera
