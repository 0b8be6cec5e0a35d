#pragma once
// Which nodes of a graph a device runs as one kernel: the FusedKernels
// (fused_kernels.h) that it has, as runtime/fuse_calls.cc
// takes them where the tensors between are where they are made.

#include <functional>
#include <string_view>
#include <vector>

#include "planner/ir/graph.h"
#include "planner/lower/fused_kernels.h"

namespace tessera {

struct FusedNode {
  struct Part {
    const FusedKernel* kernel = nullptr;  // of all nodes up to this one
    NodeId node;
  };
  // Nodes behind this one that its kernel does, too.
  std::vector<Part> parts;
  // It is done by the kernel of an earlier node.
  bool elsewhere = false;

  // Null: its own.
  const FusedKernel* kernel() const {
    return parts.empty() ? nullptr : parts.back().kernel;
  }
};

// By node of a differentiated graph. `has` says which kernels there are; empty
// where there is none.
std::vector<FusedNode> FuseNodes(
    const Graph& graph, const std::function<bool(std::string_view)>& has);

}  // namespace tessera
