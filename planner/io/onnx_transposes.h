#pragma once
// Exporters compute the transpose of a parameter that a layer reads, and write
// it beside the parameter where another node reads that, such as the lookup of
// a tied embedding. Thread-safe: functions without state.

#include <string>

#include "planner/io/onnx_file.h"

namespace tessera {

// Says of the file's matrices whose transposes they are (transpose_of): where
// the file says that one was computed from the other, or has an exporter's name
// for it, and the elements are those of the other. `path`: of the file.
void FindTransposes(OnnxModel& model, const std::string& path);

}  // namespace tessera
