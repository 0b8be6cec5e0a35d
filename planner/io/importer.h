#pragma once
// Importers: files that describe a model, read into a forward graph with its
// loss. Differentiate (planner/ir/graph.h) adds the backward pass. Thread-safe:
// functions without state.

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/io/json_value.h"
#include "planner/io/published_weights.h"
#include "planner/ir/graph.h"

namespace tessera {

struct ImportOptions {
  // Of the whole step. Zero where not given: a file that fixes its own keeps
  // them, and where it does not the import is an error.
  int64_t global_batch = 0;
  int64_t seq_len = 0;
  // Of parameters and activations; where not given, the file's own, else fp32.
  std::optional<DType> dtype;
  // Rows may hold several documents, which attention keeps apart: it reads
  // "mask_positions" instead of "positions", in a window of at most seq_len
  // (runtime/data/batches.h). A graph file is as it is. An error for a model
  // without such attention that does not read a "source" either.
  bool documents = false;
  // Values in place of those of keys of a config.json, or besides them. One
  // that its family does not have is an error.
  std::map<std::string, JsonValue> overrides = {};
  // Where not null, what the graph leaves out of the file is appended, one
  // line each: "config.json: attn_pdrop=0.1: ...".
  std::vector<std::string>* warnings = nullptr;
  // Where not null, it becomes that of the model's published weights.
  PublishedLayout* layout = nullptr;
};

// Of ImportOptions: "fp64", "fp32", "bf16" or "fp16".
Result<DType> ParseParameterType(std::string_view name);

struct Importer {
  std::string_view name;
  std::string_view summary;
  // Whether the file (or folder) at `path` is for this importer.
  bool (*recognises)(const std::string& path);
  Result<Graph> (*import)(const std::string& path,
                          const ImportOptions& options);
};

std::span<const Importer> Importers();

// The forward graph of the file at `path`, by the first importer that
// recognises it. Errors name the file and the key.
Result<Graph> ImportModel(const std::string& path,
                          const ImportOptions& options);

}  // namespace tessera
