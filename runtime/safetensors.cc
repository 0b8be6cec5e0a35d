#include "runtime/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "planner/base/divide.h"
#include "planner/base/json_string.h"
#include "planner/io/json_value.h"
#include "runtime/shape_text.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr int64_t kLengthBytes = 8;
// What the reference implementation accepts: MAX_HEADER_SIZE.
constexpr int64_t kMaxHeaderBytes = 100'000'000;

struct DTypeName {
  DType dtype;
  std::string_view name;
};
constexpr DTypeName kDTypeNames[] = {{DType::kFloat64, "F64"},
                                     {DType::kFloat32, "F32"},
                                     {DType::kBFloat16, "BF16"},
                                     {DType::kFloat16, "F16"},
                                     {DType::kInt32, "I32"}};

std::string_view FileNameOf(DType dtype) {
  for (const DTypeName& row : kDTypeNames) {
    if (row.dtype == dtype) return row.name;
  }
  TESSERA_CHECK(false) << NameOf(dtype);
  return "";
}

std::optional<DType> ParseFileName(std::string_view name) {
  for (const DTypeName& row : kDTypeNames) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

// Nothing where there are more bytes than an int64 counts.
std::optional<int64_t> BytesOf(DType dtype, const Shape& shape) {
  int64_t bytes = SizeOf(dtype);
  for (int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes;
}

// "0009d2c4".
std::string ChecksumText(uint32_t checksum) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", checksum);
  return text;
}

// "damaged: …".
Error Damaged(const std::string& what, uint32_t found, uint32_t expected,
              const std::string& where) {
  return InvalidInput("damaged: " + what + " has the checksum " +
                          ChecksumText(found) + ": expected " +
                          ChecksumText(expected),
                      where);
}

// Those of the header and of so many bytes of tensors.
int64_t ChecksumsOf(int64_t bytes) {
  return 1 + DivideUp(bytes, kChecksumBlock);
}

// A whole number of at least 0, exact in a double.
std::optional<int64_t> Count(const JsonValue& value) {
  if (value.kind != JsonValue::Kind::kNumber || value.number < 0 ||
      value.number > 0x1p53 ||
      value.number != static_cast<double>(static_cast<int64_t>(value.number))) {
    return std::nullopt;
  }
  return static_cast<int64_t>(value.number);
}

}  // namespace

std::string SafetensorsText(DType dtype, const Shape& shape) {
  return std::string(FileNameOf(dtype)) + ShapeText(shape);
}

// ---- Reading

Result<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  TESSERA_TRY(MappedFile mapped, MappedFile::Open(path));
  SafetensorsFile opened(path, std::move(mapped));
  TESSERA_RETURN_IF_ERROR(opened.ReadHeader());
  TESSERA_RETURN_IF_ERROR(opened.CheckHeader());
  return opened;
}

Result<void> SafetensorsFile::ReadHeader() {
  const std::byte* const mapping = file_.bytes().data();
  const int64_t size = std::ssize(file_.bytes());
  if (size < kLengthBytes) {
    return InvalidInput("truncated: " + std::to_string(size) +
                            " bytes, expected a safetensors file",
                        path_);
  }
  uint64_t length = 0;
  std::memcpy(&length, mapping, kLengthBytes);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return InvalidInput("is no safetensors file", path_);
  }
  const int64_t data_start = kLengthBytes + static_cast<int64_t>(length);
  if (data_start > size) {
    return InvalidInput("truncated: " + std::to_string(size) +
                            " bytes, expected a header up to byte " +
                            std::to_string(data_start),
                        path_);
  }
  const std::string_view text(
      reinterpret_cast<const char*>(mapping + kLengthBytes), length);
  auto header = ParseJson(text);
  if (!header) return header.error().At(path_ + ": header");
  struct Extent {
    int64_t begin = 0;
    int64_t end = 0;
    std::string_view name;
  };
  std::vector<Extent> extents;
  for (const auto& [name, entry] : header->fields) {
    if (name == "__metadata__") {
      TESSERA_RETURN_IF_ERROR(ReadMetadata(entry));
      continue;
    }
    const auto wrong = [&](const std::string& what) {
      return InvalidInput(what, path_ + ": tensor '" + name + "'");
    };
    Stored stored;
    stored.dtype = entry.Field("dtype").text;
    for (const JsonValue& extent : entry.Field("shape").items) {
      const auto count = Count(extent);
      if (!count) return wrong("a shape of " + extent.ToString());
      stored.shape.push_back(*count);
    }
    const std::vector<JsonValue>& offsets = entry.Field("data_offsets").items;
    const auto begin = offsets.size() == 2 ? Count(offsets[0]) : std::nullopt;
    const auto end = offsets.size() == 2 ? Count(offsets[1]) : std::nullopt;
    if (!begin || !end || *begin > *end) {
      return wrong("data_offsets " + entry.Field("data_offsets").ToString());
    }
    if (*end > size - data_start) {
      return wrong("truncated: ends at byte " +
                   std::to_string(data_start + *end) + " of a file of " +
                   std::to_string(size));
    }
    const auto dtype = ParseFileName(stored.dtype);
    if (dtype && *end - *begin != BytesOf(*dtype, stored.shape)) {
      return wrong(std::to_string(*end - *begin) + " bytes for " +
                   stored.dtype + ShapeText(stored.shape));
    }
    stored.offset = data_start + *begin;
    extents.push_back({stored.offset, data_start + *end, name});
    tensors_.emplace(name, std::move(stored));
  }
  // One behind the other, as the format wants them.
  std::ranges::sort(extents, {},
                    [](const Extent& e) { return std::pair(e.begin, e.end); });
  int64_t next = data_start;
  for (const Extent& extent : extents) {
    if (extent.begin != next) {
      return InvalidInput(
          "begins at byte " + std::to_string(extent.begin) + ": expected " +
              std::to_string(next) + ", where the tensor before it ends",
          path_ + ": tensor '" + std::string(extent.name) + "'");
    }
    next = extent.end;
  }
  if (next != size) {
    return InvalidInput("the tensors end at byte " + std::to_string(next) +
                            " of a file of " + std::to_string(size),
                        path_);
  }
  data_start_ = data_start;
  return {};
}

Result<void> SafetensorsFile::ReadMetadata(const JsonValue& entry) {
  const std::string where = path_ + ": __metadata__";
  if (entry.kind != JsonValue::Kind::kObject) {
    return InvalidInput(
        "is " + entry.ToString() + ": expected an object of texts", where);
  }
  for (const auto& [key, value] : entry.fields) {
    if (value.kind != JsonValue::Kind::kString) {
      return InvalidInput(
          "'" + key + "' is " + value.ToString() + ": expected a text", where);
    }
    metadata_.emplace(key, value.text);
  }
  return {};
}

Result<void> SafetensorsFile::CheckHeader() {
  const auto found = tensors_.find(kChecksums);
  if (found == tensors_.end()) return {};
  const Stored& stored = found->second;
  const Shape expected = {ChecksumsOf(stored.offset - data_start_)};
  const int64_t end = stored.offset + expected[0] * SizeOf(DType::kInt32);
  if (end != std::ssize(file_.bytes()) ||
      stored.dtype != FileNameOf(DType::kInt32) || stored.shape != expected) {
    return InvalidInput(
        "is " + stored.dtype + ShapeText(stored.shape) + ": expected " +
            SafetensorsText(DType::kInt32, expected) + ", behind all others",
        path_ + ": tensor '" + found->first + "'");
  }
  checksums_ = &stored;
  const uint32_t header =
      Crc32(file_.bytes().first(static_cast<size_t>(data_start_)));
  if (header == ChecksumAt(0)) return {};
  return Damaged("the header", header, ChecksumAt(0), path_);
}

uint32_t SafetensorsFile::ChecksumAt(int64_t index) const {
  uint32_t checksum = 0;
  std::memcpy(&checksum,
              file_.bytes().data() + checksums_->offset +
                  index * int64_t{sizeof(checksum)},
              sizeof(checksum));
  return checksum;
}

Result<void> SafetensorsFile::Check(std::string_view name, int64_t begin,
                                    int64_t end) const {
  if (checksums_ == nullptr || begin >= end) return {};
  const auto found = tensors_.find(name);
  TESSERA_CHECK(found != tensors_.end()) << name;
  const int64_t first = found->second.offset - data_start_;
  for (int64_t block = (first + begin) / kChecksumBlock;
       block * kChecksumBlock < first + end; ++block) {
    const int64_t at = data_start_ + block * kChecksumBlock;
    const int64_t size = std::min(kChecksumBlock, checksums_->offset - at);
    const uint32_t checksum = Crc32(file_.bytes().subspan(
        static_cast<size_t>(at), static_cast<size_t>(size)));
    const uint32_t expected = ChecksumAt(1 + block);
    if (checksum == expected) continue;
    return Damaged("what is from byte " + std::to_string(at) + " to " +
                       std::to_string(at + size) + " of the file",
                   checksum, expected,
                   path_ + ": tensor '" + std::string(name) + "'");
  }
  return {};
}

bool SafetensorsFile::Has(std::string_view name) const {
  return tensors_.find(name) != tensors_.end();
}

Result<const std::byte*> SafetensorsFile::Find(
    const SafetensorsEntry& expected) const {
  const std::string where = path_ + ": tensor '" + expected.name + "'";
  const auto found = tensors_.find(expected.name);
  if (found == tensors_.end()) return InvalidInput("is missing", where);
  const Stored& stored = found->second;
  if (stored.dtype != FileNameOf(expected.dtype) ||
      stored.shape != expected.shape) {
    return InvalidInput("is " + stored.dtype + ShapeText(stored.shape) +
                            ": expected " +
                            SafetensorsText(expected.dtype, expected.shape),
                        where);
  }
  TESSERA_RETURN_IF_ERROR(file_.CheckWhole());
  return file_.bytes().data() + stored.offset;
}

Result<TensorView> SafetensorsFile::View(std::string_view name) const {
  const std::string where = path_ + ": tensor '" + std::string(name) + "'";
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return InvalidInput("is missing", where);
  const Stored& stored = found->second;
  const auto dtype = ParseFileName(stored.dtype);
  if (!dtype) {
    return InvalidInput(
        "is " + stored.dtype + ": expected F64, F32, BF16, F16 or I32", where);
  }
  TESSERA_RETURN_IF_ERROR(file_.CheckWhole());
  return TensorView{*dtype, stored.shape, file_.bytes().data() + stored.offset};
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, stored] : tensors_) names.push_back(name);
  return names;
}

// ---- Writing

Result<SafetensorsWriter> SafetensorsWriter::Create(
    const std::string& path, std::vector<SafetensorsEntry> entries,
    const std::map<std::string, std::string, std::less<>>& metadata,
    bool checksums) {
  int64_t bytes = 0;
  for (const SafetensorsEntry& entry : entries) {
    bytes += BytesOf(entry.dtype, entry.shape).value();
  }
  if (checksums) {
    entries.push_back(
        {std::string(kChecksums), DType::kInt32, {ChecksumsOf(bytes)}});
  }
  std::string header = "{\"__metadata__\":{";
  for (const auto& [key, value] : metadata) {
    header += (header.back() == '{' ? "" : ",") + JsonString(key) + ":" +
              JsonString(value);
  }
  header += "}";
  int64_t offset = 0;
  for (const SafetensorsEntry& entry : entries) {
    const int64_t end = offset + BytesOf(entry.dtype, entry.shape).value();
    header += "," + JsonString(entry.name) + ":{\"dtype\":\"" +
              std::string(FileNameOf(entry.dtype)) +
              "\",\"shape\":" + ShapeText(entry.shape) + ",\"data_offsets\":[" +
              std::to_string(offset) + "," + std::to_string(end) + "]}";
    offset = end;
  }
  header += "}";
  // Spaces, so that the tensors begin at a multiple of 8 bytes.
  header.resize(RoundUp(header.size(), 8), ' ');

  std::error_code code;
  const auto status = std::filesystem::status(path, code);
  if (std::filesystem::exists(status) &&
      !std::filesystem::is_regular_file(status)) {
    return InvalidInput("is not a regular file", path);
  }
  TESSERA_TRY(AtomicFile file, AtomicFile::Create(path));
  const uint64_t count = header.size();
  const auto length = std::as_bytes(std::span(&count, 1));
  const auto text = std::as_bytes(std::span(header));
  TESSERA_RETURN_IF_ERROR(file.Write(length));
  TESSERA_RETURN_IF_ERROR(file.Write(text));
  SafetensorsWriter writer(std::move(file), bytes);
  if (checksums) writer.checksums_ = {Crc32(text, Crc32(length)), {}};
  return writer;
}

Result<void> SafetensorsWriter::Write(std::span<const std::byte> elements) {
  left_ -= std::ssize(elements);
  TESSERA_CHECK(left_ >= 0) << -left_ << " bytes too many";
  if (checksums_) checksums_->blocks.Add(elements);
  return file_.Write(elements);
}

Result<void> SafetensorsWriter::Flush() {
  TESSERA_CHECK(left_ == 0) << left_ << " bytes too few";
  if (std::exchange(flushed_, true)) return {};
  if (checksums_) {
    std::vector<uint32_t> all = checksums_->blocks.Take();
    all.insert(all.begin(), checksums_->header);
    TESSERA_RETURN_IF_ERROR(file_.Write(std::as_bytes(std::span(all))));
  }
  return file_.Flush();
}

Result<void> SafetensorsWriter::Commit() {
  TESSERA_RETURN_IF_ERROR(Flush());
  return file_.Commit();
}

Result<void> SafetensorsWriter::CommitNew() {
  TESSERA_RETURN_IF_ERROR(Flush());
  return file_.CommitNew();
}

}  // namespace tessera
