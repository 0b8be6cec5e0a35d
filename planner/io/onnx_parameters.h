#pragma once
// Which initializers of an ONNX file are one parameter, and which are several.
// Exporters write equal tensors once, as those of fresh norms are, and what
// they compute of a parameter once for each node that reads it. Thread-safe.

#include <string>

#include "planner/io/onnx_file.h"

namespace tessera {

// Makes of a model one whose initializers are its parameters:
//
// - PyTorch's newer exporter notes what each call reads. Where nodes read one
//   initializer for several parameters, these become initializers of their own,
//   under their own names (`stored_as`). A parameter that was read through
//   others that only move it, such as an Unsqueeze, which are folded away, is
//   found by the module that reads it.
// - PyTorch's older exporter has an Identity for each equal one.
// - Copies of what was computed of one parameter are read as the first of them
//   (`copy_of`).
//
// Says of the others whether their readers read one parameter (`is_one`), and
// which the file leaves open. `path` is the file's: elements may be
// beside it.
void TellParametersApart(OnnxModel& model, const std::string& path);

// Whether all elements are one number, as those of several parameters may be
// before training; false where they are nowhere.
bool IsUniform(const OnnxTensor& tensor);

// Whether PyTorch's older exporter wrote the file: it calls nodes by paths.
bool IsOfOlderTorch(const OnnxModel& model);

}  // namespace tessera
