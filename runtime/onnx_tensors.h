#pragma once
// The initializers of an ONNX file, in it or in files beside it: raw bytes, or
// typed numbers of protobuf's fields. Files are mapped, and but for typed
// numbers in 16 bits only what is read is loaded.
// https://github.com/onnx/onnx: onnx.proto, TensorProto, and
// docs/ExternalData.md.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "runtime/mapped_file.h"
#include "runtime/safetensors.h"

namespace tessera {

// Immutable once open; const functions may be called from several threads.
class OnnxTensors {
 public:
  // Errors: kNotFound for a missing file, or a missing file of data, which
  // names the tensor; kInvalidInput for what is no ONNX file.
  static Result<OnnxTensors> Open(const std::string& path);

  bool Has(std::string_view name) const;
  // kInvalidInput, with the tensor as `where`, when it is missing, is no float,
  // or has not as many bytes as its shape says. Valid as long as this.
  Result<TensorView> View(std::string_view name) const;

 private:
  struct Stored {
    int type = 0;  // TensorProto.DataType
    Shape shape;
    const std::byte* data = nullptr;
    int64_t bytes = 0;
    std::vector<std::byte> decoded;  // what `data` points to, if not a file
    size_t file = 0;                 // else: of files_, the first is path_
    // Of data in another file.
    bool elsewhere = false;
    std::string location;
    int64_t offset = 0;
    int64_t length = -1;  // not said: as its shape says
  };

  explicit OnnxTensors(std::string path) : path_(std::move(path)) {}
  Result<void> ReadTensor(std::span<const std::byte> message);
  Result<void> FindElsewhere();

  std::string path_;
  std::vector<MappedFile> files_;
  std::map<std::string, Stored, std::less<>> tensors_;
};

}  // namespace tessera
