#pragma once
// Files in the safetensors format of Hugging Face: the length of a header (8
// bytes, little-endian), the header (JSON: for each tensor "dtype", "shape" and
// "data_offsets", and text under "__metadata__"), then the tensors, row-major
// and little-endian, without gaps.
// https://github.com/huggingface/safetensors, README, "Format".
//
// A file may have checksums (runtime/checksums.h) of all before them: its last
// tensor is then the I32[n] kChecksums, of which the first is of the header and
// its length, and each other of kChecksumBlock bytes of the tensors.

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/base/file.h"
#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "runtime/checksums.h"
#include "runtime/mapped_file.h"

namespace tessera {

struct JsonValue;

// Named as what is no weight is in checkpoints.
inline constexpr std::string_view kChecksums = "optimizer.checksums";

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
  // truncated, breaks the format or has another header than its checksum says,
  // naming the tensor where there is one.
  static Result<SafetensorsFile> Open(const std::string& path);

  bool Has(std::string_view name) const;
  // The elements of a tensor, at any alignment. kInvalidInput, with the tensor
  // as `where`, when it is missing or of another type or shape; kUnavailable
  // where the file has become shorter (MappedFile::CheckWhole).
  Result<const std::byte*> Find(const SafetensorsEntry& expected) const;
  // The same of whatever shape and known type it is.
  Result<TensorView> View(std::string_view name) const;
  // Where the file has checksums, that the bytes from `begin` to `end` of a
  // tensor, and what shares their blocks, are those that were written:
  // kInvalidInput, with the tensor as `where`. REQUIRES: it has these bytes.
  Result<void> Check(std::string_view name, int64_t begin, int64_t end) const;
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
  Result<void> ReadMetadata(const JsonValue& entry);
  Result<void> CheckHeader();
  uint32_t ChecksumAt(int64_t index) const;

  std::string path_;
  MappedFile file_;
  int64_t data_start_ = 0;             // where the header ends
  const Stored* checksums_ = nullptr;  // of tensors_; null: there are none
  std::map<std::string, Stored, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

// Writes a file, tensor by tensor, as an AtomicFile: it is there once all are.
class SafetensorsWriter {
 public:
  // With `checksums` it adds these itself.
  static Result<SafetensorsWriter> Create(
      const std::string& path, std::vector<SafetensorsEntry> entries,
      const std::map<std::string, std::string, std::less<>>& metadata,
      bool checksums = false);

  // Elements that follow, of one entry or several, in the order of `entries`.
  // REQUIRES: no more than these have.
  Result<void> Write(std::span<const std::byte> elements);
  // REQUIRES (these): every entry has been written. As those of an AtomicFile.
  Result<void> Flush();
  Result<void> Commit();
  Result<void> CommitNew();

 private:
  SafetensorsWriter(AtomicFile file, int64_t bytes)
      : file_(std::move(file)), left_(bytes) {}

  struct Checksums {
    uint32_t header = 0;
    BlockChecksums blocks;
  };

  AtomicFile file_;
  int64_t left_ = 0;  // bytes of elements to come
  std::optional<Checksums> checksums_;
  bool flushed_ = false;
};

}  // namespace tessera
