#pragma once
// Explicit indices: a NodeId indexes Graph::nodes and nothing else.

#include <compare>
#include <cstdint>
#include <functional>
#include <ostream>

namespace tessera {

template <typename Tag>
struct Id {
  int32_t value = -1;

  constexpr Id() = default;
  constexpr explicit Id(int64_t v) : value(static_cast<int32_t>(v)) {}
  constexpr bool valid() const { return value >= 0; }
  // REQUIRES: valid().
  constexpr size_t index() const { return static_cast<size_t>(value); }
  auto operator<=>(const Id&) const = default;
  friend std::ostream& operator<<(std::ostream& out, Id id) {
    return out << id.value;
  }
};

using NodeId = Id<struct NodeTag>;      // Graph::nodes
using TensorId = Id<struct TensorTag>;  // Graph::tensors
using DeviceId = Id<struct DeviceTag>;  // Cluster::devices
using VertexId = Id<struct VertexTag>;  // Cluster::vertices
using LinkId = Id<struct LinkTag>;      // Cluster::links
using GroupId = Id<struct GroupTag>;    // Plan::groups, TaskGraph::groups
using TaskId = Id<struct TaskTag>;      // TaskGraph::tasks
using ValueId = Id<struct ValueTag>;    // TaskGraph::values

}  // namespace tessera

template <typename Tag>
struct std::hash<tessera::Id<Tag>> {
  size_t operator()(tessera::Id<Tag> id) const noexcept {
    return std::hash<int32_t>()(id.value);
  }
};
