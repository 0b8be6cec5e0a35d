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
#include "planner/ir/graph.h"

namespace tessera {

// The importer's row: a file whose name ends in ".onnx".
bool IsOnnx(const std::string& path);

// Operators that nodes may have, besides elementwise ones (docs/models.md) and
// those that only compute constants.
struct OnnxOperator {
  std::string_view name;
  std::string_view summary;  // what becomes of it
};
std::vector<OnnxOperator> OnnxOperators();

// The graph of the file at `path`, with the mean cross-entropy of its output
// over integer labels. Overrides are "output" (its name; default: the last one)
// and sizes by the symbols of the inputs' dimensions. An error names all nodes
// that cannot be mapped.
Result<Graph> ImportOnnx(const std::string& path, const ImportOptions& options);

}  // namespace tessera
