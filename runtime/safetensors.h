#pragma once
// Files in the safetensors format of Hugging Face: the length of a header (8
// bytes, little-endian), the header (JSON: for each tensor "dtype", "shape" and
// "data_offsets", and text under "__metadata__"), then the tensors, row-major
// and little-endian, without gaps.
// https://github.com/huggingface/safetensors, README, "Format".

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/base/file.h"
#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "runtime/mapped_file.h"

namespace tessera {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kFloat32;
  Shape shape;
};

// A tensor of a file: valid while the file is open, at any alignment.
struct TensorView {
  DType dtype = DType::kFloat32;
  Shape shape;
  const std::byte* data = nullptr;
};

// "F32[3, 1]".
std::string SafetensorsText(DType dtype, const Shape& shape);

// A file mapped into memory: only what is read is loaded. Immutable once open;
// const functions may be called from several threads.
class SafetensorsFile {
 public:
  // Errors: kNotFound for a missing file; kInvalidInput for one that is
  // truncated or breaks the format, naming the tensor where there is one.
  static Result<SafetensorsFile> Open(const std::string& path);

  bool Has(std::string_view name) const;
  // The elements of a tensor, at any alignment. kInvalidInput, with the tensor
  // as `where`, when it is missing or of another type or shape.
  Result<const std::byte*> Find(const SafetensorsEntry& expected) const;
  // The same of whatever shape and known type it is.
  Result<TensorView> View(std::string_view name) const;
  std::vector<std::string> names() const;
  const std::map<std::string, std::string, std::less<>>& metadata() const {
    return metadata_;
  }

 private:
  struct Stored {
    std::string dtype;  // as the file has it: "F32"
    Shape shape;
    int64_t offset = 0;  // of the file
  };

  SafetensorsFile(std::string path, MappedFile file)
      : path_(std::move(path)), file_(std::move(file)) {}
  Result<void> ReadHeader();

  std::string path_;
  MappedFile file_;
  std::map<std::string, Stored, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

// Writes a file, tensor by tensor, as an AtomicFile: it is there once all are.
class SafetensorsWriter {
 public:
  static Result<SafetensorsWriter> Create(
      const std::string& path, const std::vector<SafetensorsEntry>& entries,
      const std::map<std::string, std::string, std::less<>>& metadata);

  // Elements that follow, of one entry or several, in the order of `entries`.
  // REQUIRES: no more than these have.
  Result<void> Write(std::span<const std::byte> elements);
  // REQUIRES: every entry has been written.
  Result<void> Commit();

 private:
  SafetensorsWriter(AtomicFile file, int64_t bytes)
      : file_(std::move(file)), left_(bytes) {}

  AtomicFile file_;
  int64_t left_ = 0;  // bytes of elements to come
};

}  // namespace tessera
