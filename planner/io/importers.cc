#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "planner/io/graph_io.h"
#include "planner/io/huggingface.h"
#include "planner/io/importer.h"
#include "planner/io/onnx.h"
#include "planner/io/zoo.h"

namespace tessera {

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

Result<Graph> ImportModel(const std::string& path,
                          const ImportOptions& options) {
  struct stat status;
  if (!IsZoo(path) && ::stat(path.c_str(), &status) != 0) {
    return Error{ErrorCode::kNotFound,
                 std::string("cannot open: ") + std::strerror(errno), path};
  }
  std::string known;
  for (const Importer& importer : Importers()) {
    if (importer.recognises(path)) return importer.import(path, options);
    known += (known.empty() ? "" : "; ") + std::string(importer.summary);
  }
  return InvalidInput("not a model; known: " + known, path);
}

}  // namespace tessera
