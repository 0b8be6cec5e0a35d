#pragma once
// Graph files (proto/graph.proto): forward graphs with their loss. Thread-safe:
// functions without state.

#include <string>

#include "planner/base/result.h"
#include "planner/io/importer.h"
#include "planner/ir/graph.h"

namespace tessera {

// The graph in the file at `path` (.txtpb, .json or .pb), validated. `where`
// of an error is "path: nodes[3].operands[1]", or "path:line:column" where the
// file cannot be parsed.
Result<Graph> ReadGraph(const std::string& path);

// Writes `graph` by WriteFileAtomically; the same graph gives the same bytes.
// REQUIRES: `graph` is a forward graph, as before Differentiate.
Result<void> WriteGraph(const std::string& path, const Graph& graph);

// The importer's row: a file in text or binary by its ending, or a .json with a
// schema_version.
bool IsGraphFile(const std::string& path);
// ReadGraph; an error where an option is given that the file does not have.
Result<Graph> ImportGraph(const std::string& path,
                          const ImportOptions& options);

}  // namespace tessera
