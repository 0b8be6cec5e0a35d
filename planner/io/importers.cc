#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "planner/base/append.h"
#include "planner/base/system_error.h"
#include "planner/base/table.h"
#include "planner/io/graph_io.h"
#include "planner/io/huggingface.h"
#include "planner/io/importer.h"
#include "planner/io/model_config.h"
#include "planner/io/onnx.h"
#include "planner/io/zoo.h"

namespace tessera {
namespace {

// Whether a row of the data may be, or end in, less than a whole document:
// attention keeps documents apart, or what reads a "source" (RowKind) is padded
// behind its end.
bool HasDocuments(const Graph& graph) {
  return std::ranges::any_of(graph.tensors, [](const Tensor& tensor) {
    return tensor.kind == TensorKind::kInput &&
           (tensor.name == "mask_positions" || tensor.name == "source");
  });
}

bool HasBatchNorm(const Graph& graph) {
  return std::ranges::any_of(graph.nodes, [](const Node& node) {
    return node.op->name.ends_with("batch_norm");
  });
}

}  // namespace

std::span<const Importer> Importers() {
  static constexpr std::array kImporters = {
      Importer{"graph", "Tessera's own graph file (.txtpb, .json or .pb)",
               IsGraphFile, ImportGraph},
      Importer{"onnx", "ONNX model (.onnx), operators of version 13 to 21",
               IsOnnx, ImportOnnx},
      Importer{"huggingface",
               "config.json of a Hugging Face model, its folder, or zoo:NAME",
               IsHuggingFace, ImportHuggingFace},
  };
  return kImporters;
}

Result<DType> ParseParameterType(std::string_view name) {
  constexpr std::array kTypes = {DType::kFloat64, DType::kFloat32,
                                 DType::kBFloat16, DType::kFloat16};
  std::vector<std::string_view> names;
  for (DType type : kTypes) {
    if (NameOf(type) == name) return type;
    names.push_back(NameOf(type));
  }
  return UnknownName("dtype", name, names);
}

Result<Graph> ImportModel(const std::string& path,
                          const ImportOptions& options) {
  struct stat status;
  if (!IsZoo(path)) {
    if (::stat(path.c_str(), &status) != 0) {
      return SystemError("cannot open", path, errno);
    }
    if (!S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode)) {
      return NotRegular(path);
    }
  }
  std::string known;
  for (const Importer& importer : Importers()) {
    if (!importer.recognises(path)) {
      AppendTo(known, "; ", importer.summary);
      continue;
    }
    TESSERA_TRY(Graph graph, importer.import(path, options));
    if (options.documents && !HasDocuments(graph)) {
      return InvalidInput(
          "the end of a document (--end-of-text) has no effect: the graph has "
          "no input 'mask_positions'",
          path);
    }
    constexpr const char* kGroups = "batch_norm_groups";
    if (options.overrides.contains(kGroups) && !HasBatchNorm(graph)) {
      return InvalidInput("has no effect: the model has no batch norm",
                          path + ": " + kGroups);
    }
    return graph;
  }
  return InvalidInput("not a model; known: " + known, path);
}

}  // namespace tessera
