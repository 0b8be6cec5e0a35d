#pragma once
// GraphIndex: what validation, strategies and the search ask of a graph again
// and again, looked up once. Immutable after construction, so thread-safe;
// the graph must outlive it.

#include <array>
#include <string>
#include <vector>

#include "planner/base/ids.h"
#include "planner/ir/graph.h"

namespace tessera {

// The letter that rules give the sequence, by convention; context and sequence
// parallelism split it. Of images they split the height: y where a rule makes
// another than it reads, else h.
inline constexpr char kSequenceFactor = 's';
// The letter that attention's rules give the sequence of its keys.
inline constexpr char kKeyFactor = 't';

struct GraphIndex {
  explicit GraphIndex(const Graph& graph);

  // Operand `operand` of a node.
  struct Use {
    NodeId node;
    size_t operand = 0;
  };
  // A weight and its first forward reader, where it is at home.
  struct WeightUse {
    TensorId tensor;
    Use home;
    int64_t elements = 0;
  };
  // A forward node that reads a result of another, in different blocks.
  struct BlockEdge {
    NodeId producer;
    NodeId consumer;
  };

  // A factor's extent in one microbatch of `batch` samples; operators that run
  // once a step see the whole batch.
  int64_t Extent(NodeId node, size_t factor, int64_t batch) const;
  // The factor of a node that indexes samples, or the sequence, or -1.
  int SampleFactor(NodeId node) const { return sample_factor[node.index()]; }
  int SequenceFactor(NodeId node) const {
    return sequence_factor[node.index()];
  }
  // The factor that numbers the experts inside of them, or -1: one that the
  // input, the weight and the result of a matrix product share, and what is
  // computed from that result with that factor.
  int ExpertFactor(NodeId node) const { return expert_factor[node.index()]; }
  // The factor that numbers the experts of an operator in front of them, which
  // hands them their tokens, or -1.
  int DispatchFactor(NodeId node) const {
    return dispatch_factor[node.index()];
  }

  const Graph* graph;
  std::string fingerprint;
  size_t forward_nodes = 0;  // the first nodes of the graph

  // By forward node.
  std::vector<std::array<int64_t, kMaxFactors>> extents;
  std::vector<int> sample_factor;
  std::vector<int> sequence_factor;
  std::vector<int> expert_factor;
  std::vector<int> dispatch_factor;
  std::vector<size_t> position;    // in nodes_of_block
  std::vector<double> node_flops;  // matrix products, whole batch

  // By tensor.
  std::vector<NodeId> producer;           // invalid: input or weight
  std::vector<std::vector<Use>> readers;  // forward
  // Whether a split of each dimension survives, through all that read the
  // tensor, up to the next dense layers or the loss: where a dense layer's
  // output may be split without a reshard behind it.
  std::vector<std::array<bool, kMaxDims>> carried;

  // By block.
  std::vector<std::vector<NodeId>> nodes_of_block;  // forward
  std::vector<int> block_class;                     // BlockClasses
  std::vector<double> block_flops;                  // sums of node_flops
  std::vector<BlockEdge> block_edges;

  std::vector<WeightUse> weights;  // in tensor order, as Plan::weights
  // By tensor: tables that are looked up by bags, or have a row for each class
  // of the loss. Where a dense layer reads one of them (a tied head), only
  // such: a table of positions may have as many rows.
  std::vector<bool> vocabulary;
  bool has_experts = false;
  bool has_sequence = false;  // some node has a sequence factor
  bool has_attention = false;
};

}  // namespace tessera
