#pragma once
// ONNX models as forward graphs with a loss (docs/models.md). What an ONNX file
// calls a shape is followed through the graph dimension by dimension, so that a
// reshape or transpose is a relabelling: nothing is computed for it. Shapes of
// results follow from Tessera's own index rules. Thread-safe: functions without
// state.

#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/io/importer.h"
#include "planner/io/published_weights.h"
#include "planner/ir/graph.h"

namespace tessera {

// The importer's row: a file whose name ends in ".onnx".
bool IsOnnx(const std::string& path);

// Operators that nodes may have, besides those that only compute constants.
struct OnnxOperator {
  std::string_view name;
  std::string_view summary;  // what becomes of it
};
std::vector<OnnxOperator> OnnxOperators();

// The graph of the file at `path`, with the mean cross-entropy of its output
// over integer labels. Overrides are "output" (its name; default: the last
// one), "loss", "batch_norm_groups", "frozen" (names of tensors that are
// constants) and sizes by the symbols of the inputs' dimensions. An error names
// all nodes that cannot be mapped.
Result<Graph> ImportOnnx(const std::string& path, const ImportOptions& options);

// What the file at `path` computes, without a loss of its own: what tests hold
// against other programs that run such files.
struct OnnxComputation {
  Graph graph;  // without its backward pass; the loss is the sum of all results
  struct Input {
    std::string name;  // the file's
    TensorId tensor;
  };
  // The graph's tensor with its dimensions in another order, and then in
  // another shape; or its numbers, where they follow from the file alone.
  struct Output {
    std::string name;
    TensorId tensor;
    std::vector<size_t> order;
    Shape shape;
    std::vector<double> values;
  };
  std::vector<Input> inputs;
  PublishedLayout layout;  // of the weights
  std::vector<Output> outputs;
};
// Files may have no inputs. There is no override "output": all are computed.
Result<OnnxComputation> ImportOnnxComputation(const std::string& path,
                                              const ImportOptions& options);

}  // namespace tessera
