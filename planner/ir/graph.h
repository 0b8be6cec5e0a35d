#pragma once
// Graph: operator instances over tensors, in topological order; shapes are
// global (the whole batch, unsplit). A plain value.
//
// A model importer builds the forward graph with GraphBuilder; Differentiate
// appends the backward nodes, each derived from its operator's adjoints.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/ids.h"
#include "planner/base/result.h"
#include "planner/ir/op.h"

namespace tessera {

using Shape = std::vector<int64_t>;

enum class TensorKind : uint8_t {
  kInput,           // read from the data: "tokens", "labels", "positions";
                    // or a constant, whose numbers the graph has
  kWeight,          // trained
  kActivation,      // produced by a forward node
  kGradient,        // gradient of an activation
  kWeightGradient,  // one contribution to a weight's gradient
};

// How a weight starts: normal with `stddev` (keyed by seed, name and global
// index, so that no split changes it), or a constant.
struct Initializer {
  double stddev = 0;  // > 0: normal with mean 0
  double constant = 0;
  bool operator==(const Initializer&) const = default;
};

struct Tensor {
  std::string name;
  Shape shape;
  DType dtype = DType::kFloat32;
  TensorKind kind = TensorKind::kActivation;
  int sample_dim = -1;        // dimension that the microbatches cut, or -1
  TensorId gradient_of;       // gradients only: the tensor they belong to
  Initializer init;           // weights only
  bool weight_decay = false;  // weights only: AdamW decays it
  // Inputs without samples only, which are constants: their numbers, row by
  // row. Not trained, and in no checkpoint: each rank that reads one fills its
  // part from here.
  std::vector<double> values;
  bool operator==(const Tensor&) const = default;
};

enum class Pass : uint8_t { kForward, kBackward };

struct Node {
  std::string name;  // "h.3.attn.q_proj"; an adjoint's ends in ".d…"
  const OpDef* op = nullptr;
  IndexRule rule;
  std::vector<Attribute> attributes;  // sorted by name; lists in order
  std::vector<TensorId> operands;
  std::vector<TensorId> results;
  int block = 0;  // index into Graph::blocks
  Pass pass = Pass::kForward;
  NodeId forward;  // the node that this one is an adjoint of; else invalid

  // REQUIRES: the attribute exists.
  double attribute(std::string_view attribute_name) const;
  bool operator==(const Node&) const = default;
};

// One term of a weight's gradient: tied weights have several.
struct GradientTerm {
  TensorId weight;
  TensorId gradient;
  bool operator==(const GradientTerm&) const = default;
};

struct Graph {
  std::string name;
  std::vector<Tensor> tensors;
  std::vector<Node> nodes;              // topological: forward, then backward
  std::vector<std::string> blocks;      // "embed", "h.0", …, "head", in order
  TensorId loss;                        // scalar
  std::vector<GradientTerm> gradients;  // after Differentiate
  int64_t global_batch = 0;
  int64_t seq_len = 0;
  DType dtype = DType::kFloat32;  // of parameters and activations

  const Tensor& tensor(TensorId id) const { return tensors[id.index()]; }
  const Node& node(NodeId id) const { return nodes[id.index()]; }
  bool operator==(const Graph&) const = default;
};

// The most numbers that the constants of a graph have together: 32 MB.
inline constexpr int64_t kMostConstants = int64_t{1} << 22;

// Number of trained scalars.
int64_t ParameterCount(const Graph& graph);

// Model FLOPs of one training step: 6 per matrix-product parameter and token
// (active experts only, however many slots of theirs are computed),
// plus 6*heads*(d_qk + d_v)*seq per token and attention; with `halve_causal`
// only what masks leave of it: half, and less of windows. Narayanan et al.
// (SC'21), appendix, without recomputation.
Flops ModelFlops(const Graph& graph, bool halve_causal = false);

// What throughput counts of a model: "tokens", or "images", "patches" or
// "samples", of which each is a sequence of one token.
std::string_view UnitOf(const Graph& graph);

// Builds a forward graph node by node. Problems (shapes that disagree, a
// missing attribute) are collected and returned by Finish.
class GraphBuilder {
 public:
  GraphBuilder(std::string name, int64_t global_batch, int64_t seq_len,
               DType dtype);

  // Nodes added from here on belong to a new block.
  void BeginBlock(std::string name);

  // `sample_dim` 0 for data with one row a sample.
  TensorId Input(std::string name, Shape shape, DType dtype);
  TensorId Weight(std::string name, Shape shape, Initializer init,
                  bool weight_decay);
  // Of the graph's type. REQUIRES: as many `values` as the shape has.
  TensorId Constant(std::string name, Shape shape, std::vector<double> values);

  // Adds a node and returns its results. `rule` is empty for the operator's
  // default rule. Result shapes follow from the rule; result dtypes are the
  // graph's, fp32 for a result that lacks the last dimension of operand 0
  // (statistics) or is a scalar.
  std::vector<TensorId> Add(std::string_view op, std::string name,
                            std::vector<TensorId> operands,
                            std::string_view rule = "",
                            std::vector<Attribute> attributes = {});
  // The same for an operator whose first result is the one of interest.
  TensorId Add1(std::string_view op, std::string name,
                std::vector<TensorId> operands, std::string_view rule = "",
                std::vector<Attribute> attributes = {});

  // REQUIRES: the tensor could be built.
  const Shape& shape(TensorId tensor) const {
    return graph_.tensor(tensor).shape;
  }

  Result<Graph> Finish(TensorId loss);

 private:
  Graph graph_;
  std::vector<Error> errors_;
};

// `forward` with its backward nodes. Gradients that meet are added by "sum"
// nodes; a weight's are listed as GradientTerms, one for each use.
Result<Graph> Differentiate(Graph forward);

// All that is wrong: rules that do not fit shapes or have another form than the
// operator's, element types and sample dimensions that do not follow from the
// graph's type and the rules, operands that are used before they are produced
// (a cycle), unknown attributes, an empty extent.
std::vector<Error> Validate(const Graph& graph);

// 16 hex digits of everything that a plan depends on. Element types but the
// graph's own follow from it (Validate).
std::string Fingerprint(const Graph& graph);

// For each block the number of the first block that is equal to it up to
// names: same operators, rules, attributes, shapes and wiring, compared
// exactly. The search and the evaluator treat equal blocks alike.
std::vector<int> BlockClasses(const Graph& graph);

}  // namespace tessera
