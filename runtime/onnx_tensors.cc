#include "runtime/onnx_tensors.h"

#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <utility>

#include "planner/base/whole_number.h"
#include "planner/io/onnx_file.h"

namespace tessera {
namespace {

using ByteSpan = std::span<const std::byte>;

// Fields of protobuf's messages, by their numbers in onnx.proto.
constexpr uint64_t kModelGraph = 7;
constexpr uint64_t kGraphInitializer = 5;
enum TensorField : uint64_t {
  kDims = 1,
  kDataType = 2,
  kFloatData = 4,
  kInt32Data = 5,
  kName = 8,
  kRawData = 9,
  kDoubleData = 10,
  kExternalData = 13,
  kDataLocation = 14,
};

// protobuf.dev/programming-guides/encoding, without groups.
enum class Wire : uint8_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kFixed32 = 5
};

struct Field {
  uint64_t number = 0;
  Wire wire = Wire::kVarint;
  uint64_t varint = 0;
  ByteSpan bytes;  // of all others
};

// Reads a message field by field. Once `broken` it has no more.
class FieldReader {
 public:
  explicit FieldReader(ByteSpan message) : rest_(message) {}

  std::optional<Field> Next() {
    if (rest_.empty() || broken_) return std::nullopt;
    Field field;
    const uint64_t tag = Varint();
    field.number = tag >> 3;
    field.wire = static_cast<Wire>(tag & 7);
    switch (field.wire) {
      case Wire::kVarint:
        field.varint = Varint();
        break;
      case Wire::kFixed64:
        field.bytes = Take(8);
        break;
      case Wire::kBytes:
        field.bytes = Take(Varint());
        break;
      case Wire::kFixed32:
        field.bytes = Take(4);
        break;
      default:
        broken_ = true;
    }
    if (broken_) return std::nullopt;
    return field;
  }
  bool broken() const { return broken_; }
  bool done() const { return rest_.empty(); }
  // REQUIRES: !done().
  uint64_t Varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<uint64_t>(Take(1)[0]);
      value |= (byte & 127) << shift;
      if (byte < 128) return value;
    }
    broken_ = true;
    return 0;
  }

 private:
  ByteSpan Take(uint64_t count) {
    if (count > rest_.size()) {
      broken_ = true;
      return {};
    }
    const ByteSpan taken = rest_.first(static_cast<size_t>(count));
    rest_ = rest_.subspan(static_cast<size_t>(count));
    return taken;
  }

  ByteSpan rest_;
  bool broken_ = false;
};

std::string TextOf(ByteSpan bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::optional<DType> DTypeOf(int type) {
  switch (type) {
    case kOnnxFloat:
      return DType::kFloat32;
    case kOnnxDouble:
      return DType::kFloat64;
    case kOnnxFloat16:
      return DType::kFloat16;
    case kOnnxBFloat16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

// The field whose numbers are a type's elements, besides raw bytes.
uint64_t FieldOf(int type) {
  return type == kOnnxFloat    ? kFloatData
         : type == kOnnxDouble ? kDoubleData
                               : kInt32Data;
}

// Numbers of a field of varints, packed or not, in 16 bits each.
void AppendShorts(const Field& field, std::vector<std::byte>& to) {
  const auto append = [&](uint64_t value) {
    const auto bits = static_cast<uint16_t>(value);
    const auto bytes = std::as_bytes(std::span(&bits, 1));
    to.insert(to.end(), bytes.begin(), bytes.end());
  };
  if (field.wire == Wire::kVarint) return append(field.varint);
  FieldReader packed(field.bytes);
  while (!packed.done() && !packed.broken()) append(packed.Varint());
}

std::optional<int64_t> Count(const std::string& text) {
  const auto value = ParseWhole<int64_t>(text);
  return value && *value >= 0 ? value : std::nullopt;
}

Error NoOnnxFile(const std::string& path) {
  return InvalidInput("not an ONNX file, or cut off", path);
}

}  // namespace

Result<OnnxTensors> OnnxTensors::Open(const std::string& path) {
  TESSERA_TRY(MappedFile file, MappedFile::Open(path));
  OnnxTensors opened(path);
  FieldReader model(file.bytes());
  bool any_graph = false;
  while (const auto in_model = model.Next()) {
    if (in_model->number != kModelGraph || in_model->wire != Wire::kBytes) {
      continue;
    }
    any_graph = true;
    FieldReader graph(in_model->bytes);
    while (const auto in_graph = graph.Next()) {
      if (in_graph->number != kGraphInitializer ||
          in_graph->wire != Wire::kBytes) {
        continue;
      }
      TESSERA_RETURN_IF_ERROR(opened.ReadTensor(in_graph->bytes));
    }
    if (graph.broken()) return NoOnnxFile(path);
  }
  if (model.broken() || !any_graph) return NoOnnxFile(path);
  opened.files_.push_back(std::move(file));
  TESSERA_RETURN_IF_ERROR(opened.FindElsewhere());
  return opened;
}

Result<void> OnnxTensors::ReadTensor(ByteSpan message) {
  Stored stored;
  std::string name;
  FieldReader first(message);
  while (const auto field = first.Next()) {
    const bool bytes = field->wire == Wire::kBytes;
    if (field->number == kDims) {
      FieldReader packed(field->bytes);
      if (!bytes) {
        stored.shape.push_back(static_cast<int64_t>(field->varint));
      }
      while (bytes && !packed.done() && !packed.broken()) {
        stored.shape.push_back(static_cast<int64_t>(packed.Varint()));
      }
    } else if (field->number == kDataType) {
      stored.type = static_cast<int>(field->varint);
    } else if (field->number == kName && bytes) {
      name = TextOf(field->bytes);
    } else if (field->number == kDataLocation) {
      stored.elsewhere = field->varint == 1;
    } else if (field->number == kExternalData && bytes) {
      std::string key;
      std::string value;
      FieldReader entry(field->bytes);
      while (const auto part = entry.Next()) {
        (part->number == 1 ? key : value) = TextOf(part->bytes);
      }
      const std::string where = path_ + ": tensor '" + name + "'";
      const auto count = Count(value);
      if (key == "location") stored.location = value;
      if (key != "offset" && key != "length") continue;
      if (!count) {
        return InvalidInput(key + " '" + value + "': expected a number", where);
      }
      (key == "offset" ? stored.offset : stored.length) = *count;
    }
  }
  if (first.broken()) return NoOnnxFile(path_);
  // Numbers, now that their type is known.
  FieldReader again(message);
  const bool shorts =
      stored.type == kOnnxFloat16 || stored.type == kOnnxBFloat16;
  while (const auto field = again.Next()) {
    const bool raw = field->number == kRawData;
    if (stored.elsewhere || (!raw && field->number != FieldOf(stored.type))) {
      continue;
    }
    // A single run of bytes stays in the file.
    const bool in_file = stored.data == nullptr && (raw || !shorts);
    if (in_file) {
      stored.data = field->bytes.data();
      stored.bytes = std::ssize(field->bytes);
      continue;
    }
    if (stored.decoded.empty() && stored.data != nullptr) {
      stored.decoded.assign(stored.data, stored.data + stored.bytes);
    }
    if (!raw && shorts) {
      AppendShorts(*field, stored.decoded);
    } else {
      stored.decoded.insert(stored.decoded.end(), field->bytes.begin(),
                            field->bytes.end());
    }
    stored.data = stored.decoded.data();
    stored.bytes = std::ssize(stored.decoded);
  }
  tensors_.try_emplace(std::move(name), std::move(stored));
  return {};
}

Result<void> OnnxTensors::FindElsewhere() {
  std::map<std::string, size_t> opened;
  for (auto& [name, stored] : tensors_) {
    if (!stored.elsewhere) continue;
    const std::string where = path_ + ": tensor '" + name + "'";
    const std::filesystem::path location = stored.location;
    // As onnx: beside the file, or below.
    bool inside = !stored.location.empty() && location.is_relative();
    for (const auto& part : location) inside = inside && part != "..";
    if (!inside) {
      return InvalidInput("its data is in '" + stored.location +
                              "': expected a file in the same folder",
                          where);
    }
    const auto [at, is_new] =
        opened.try_emplace(stored.location, files_.size());
    if (is_new) {
      auto file = MappedFile::Open(std::filesystem::path(path_).parent_path() /
                                   location);
      if (!file) return file.error().At(where + ": its data");
      files_.push_back(*std::move(file));
    }
    stored.file = at->second;
    const ByteSpan bytes = files_[stored.file].bytes();
    const int64_t size = std::ssize(bytes);
    if (stored.offset > size) stored.offset = size;
    const int64_t rest = size - stored.offset;
    if (stored.length > rest) {
      return InvalidInput(
          "its data ends at byte " + std::to_string(stored.offset) + " + " +
              std::to_string(stored.length) + " of '" + stored.location +
              "', which has " + std::to_string(size),
          where);
    }
    stored.data = bytes.data() + stored.offset;
    stored.bytes = stored.length < 0 ? rest : stored.length;
  }
  return {};
}

bool OnnxTensors::Has(std::string_view name) const {
  return tensors_.contains(name);
}

Result<TensorView> OnnxTensors::View(std::string_view name) const {
  const std::string where = path_ + ": tensor '" + std::string(name) + "'";
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return InvalidInput("is missing", where);
  const Stored& stored = found->second;
  const auto dtype = DTypeOf(stored.type);
  if (!dtype) {
    return InvalidInput("has elements of ONNX's type " +
                            std::to_string(stored.type) +
                            ": expected FLOAT, DOUBLE, FLOAT16 or BFLOAT16",
                        where);
  }
  int64_t bytes = SizeOf(*dtype);
  bool fits = true;
  for (int64_t extent : stored.shape) {
    fits =
        fits && extent >= 0 && !__builtin_mul_overflow(bytes, extent, &bytes);
  }
  // Data elsewhere of which no length is said goes on to its file's end.
  const bool enough =
      stored.elsewhere && stored.length < 0 && bytes < stored.bytes;
  if (!fits || (bytes != stored.bytes && !enough)) {
    return InvalidInput("has " + std::to_string(stored.bytes) + " bytes for " +
                            SafetensorsText(*dtype, stored.shape),
                        where);
  }
  if (stored.decoded.empty()) {
    TESSERA_RETURN_IF_ERROR(files_[stored.file].CheckWhole());
  }
  return TensorView{*dtype, stored.shape, stored.data};
}

}  // namespace tessera
