#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "planner/base/element_count.h"
#include "planner/base/file.h"
#include "planner/io/onnx_file.h"
#include "proto/onnx.pb.h"

namespace tessera {
namespace {

// TensorProto.DataType.
enum : int {
  kUint8 = 2,
  kInt8 = 3,
  kUint16 = 4,
  kInt16 = 5,
  kUint32 = 12,
  kUint64 = 13,
};

// IEEE 754 binary16.
double FromFloat16(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  const double size = exponent == 31 ? (fraction == 0 ? HUGE_VAL : NAN)
                      : exponent == 0
                          ? std::ldexp(fraction, -24)
                          : std::ldexp(fraction + 1024, exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

double FromBFloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

template <typename T>
std::vector<double> FromRaw(const std::string& raw, double (*convert)(T)) {
  std::vector<double> values(raw.size() / sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    T value;
    std::memcpy(&value, raw.data() + i * sizeof(T), sizeof(T));
    values[i] = convert(value);
  }
  return values;
}

template <typename T>
double Plain(T value) {
  return static_cast<double>(value);
}

std::vector<double> FromRaw(const std::string& raw, int type) {
  switch (type) {
    case kOnnxFloat:
      return FromRaw<float>(raw, Plain);
    case kOnnxDouble:
      return FromRaw<double>(raw, Plain);
    case kOnnxFloat16:
      return FromRaw<uint16_t>(raw, FromFloat16);
    case kOnnxBFloat16:
      return FromRaw<uint16_t>(raw, FromBFloat16);
    case kOnnxInt64:
      return FromRaw<int64_t>(raw, Plain);
    case kOnnxInt32:
      return FromRaw<int32_t>(raw, Plain);
    case kInt16:
      return FromRaw<int16_t>(raw, Plain);
    case kInt8:
      return FromRaw<int8_t>(raw, Plain);
    case kUint64:
      return FromRaw<uint64_t>(raw, Plain);
    case kUint32:
      return FromRaw<uint32_t>(raw, Plain);
    case kUint16:
      return FromRaw<uint16_t>(raw, Plain);
    case kUint8:
    case kOnnxBool:
      return FromRaw<uint8_t>(raw, Plain);
    default:
      return {};
  }
}

// Whether a name is printable text in UTF-8.
bool IsText(const std::string& text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto first = static_cast<unsigned char>(text[i]);
    if (first < 0x20 || first == 0x7f || first > 0xf4 ||
        (first >= 0x80 && first < 0xc2)) {
      return false;
    }
    const int more = first < 0x80 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
    for (int j = 0; j < more; ++j) {
      if (++i == text.size() || (text[i] & 0xc0) != 0x80) return false;
    }
  }
  return true;
}

bool AllText(const std::vector<std::string>& texts) {
  return std::ranges::all_of(texts, IsText);
}

bool HasReadableNames(const OnnxModel& model) {
  const auto readable = [](const OnnxNode& node) {
    return IsText(node.name) && IsText(node.op) && AllText(node.inputs) &&
           AllText(node.outputs) &&
           std::ranges::all_of(node.attributes, [](const OnnxAttribute& a) {
             return AllText(a.strings);
           });
  };
  return std::ranges::all_of(model.nodes, readable) &&
         std::ranges::all_of(model.initializers, IsText, &OnnxTensor::name) &&
         std::ranges::all_of(model.initializers, IsText,
                             &OnnxTensor::location) &&
         std::ranges::all_of(model.inputs,
                             [](const OnnxInput& input) {
                               return IsText(input.name) &&
                                      std::ranges::all_of(
                                          input.dims, IsText,
                                          &OnnxDimension::symbol);
                             }) &&
         AllText(model.outputs);
}

// Tables of angles, masks and the like.
constexpr int64_t kMostBytesElsewhere = int64_t{1} << 22;
constexpr int64_t kMostFloatsElsewhere = int64_t{1} << 12;

int64_t SizeOfType(int type) {
  switch (type) {
    case kUint8:
    case kInt8:
    case kOnnxBool:
      return 1;
    case kUint16:
    case kInt16:
    case kOnnxFloat16:
    case kOnnxBFloat16:
      return 2;
    case kOnnxDouble:
    case kUint64:
    case kOnnxInt64:
      return 8;
    default:
      return 4;
  }
}

// The bytes of a small tensor in another file; empty where they are not there.
std::string ReadElsewhere(const OnnxTensor& tensor, const std::string& path) {
  const double elements = LargeElementCount(tensor.dims);
  const int64_t size = SizeOfType(tensor.type);
  const int64_t most = IsOnnxFloat(tensor.type) ? kMostFloatsElsewhere
                                                : kMostBytesElsewhere / size;
  if (!(elements >= 0 && elements <= static_cast<double>(most))) return "";
  const std::string elsewhere = OnnxDataFile(path, tensor.location);
  if (elsewhere.empty() || tensor.offset < 0) return "";
  std::ifstream file(elsewhere, std::ios::binary);
  std::string bytes(static_cast<size_t>(elements) * static_cast<size_t>(size),
                    '\0');
  file.seekg(tensor.offset);
  file.read(bytes.data(), std::ssize(bytes));
  return file.gcount() == std::ssize(bytes) ? bytes : "";
}

// `path`: of the file that it is in.
OnnxTensor FromProto(proto::onnx::Tensor& from, const std::string& path) {
  OnnxTensor tensor;
  tensor.name = from.name();
  tensor.type = from.data_type();
  tensor.dims.assign(from.dims().begin(), from.dims().end());
  if (from.data_location() != 0) {
    for (const proto::onnx::Entry& entry : from.external_data()) {
      if (entry.key() == "location") tensor.location = entry.value();
      if (entry.key() == "offset") {
        tensor.offset = std::atoll(entry.value().c_str());
      }
    }
    tensor.raw = ReadElsewhere(tensor, path);
    return tensor;
  }
  tensor.raw = std::move(*from.mutable_raw_data());
  const auto append = [&](const auto& values) {
    tensor.typed.insert(tensor.typed.end(), values.begin(), values.end());
  };
  append(from.float_data());
  append(from.double_data());
  append(from.int64_data());
  append(from.uint64_data());
  // Small types, too; of 16-bit floats the bits.
  for (int32_t value : from.int32_data()) {
    const auto bits = static_cast<uint16_t>(value);
    tensor.typed.push_back(tensor.type == kOnnxFloat16    ? FromFloat16(bits)
                           : tensor.type == kOnnxBFloat16 ? FromBFloat16(bits)
                                                          : value);
  }
  return tensor;
}

// The texts between `before` and the next "'".
std::vector<std::string> Quoted(std::string_view text,
                                std::string_view before) {
  std::vector<std::string> found;
  for (size_t at = text.find(before); at != text.npos;
       at = text.find(before, at)) {
    at += before.size();
    const size_t end = text.find('\'', at);
    if (end == text.npos) break;
    found.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return found;
}

// The names in a line of PyTorch's graph, "%y : call(args = (%x, %p_w))".
std::vector<std::string> Named(std::string_view line) {
  std::vector<std::string> names;
  for (size_t at = line.find('%'); at != line.npos; at = line.find('%', at)) {
    const size_t begin = ++at;
    while (at < line.size() &&
           (std::isalnum(static_cast<unsigned char>(line[at])) != 0 ||
            line[at] == '_')) {
      ++at;
    }
    names.emplace_back(line.substr(begin, at - begin));
  }
  return names;
}

OnnxNode FromProto(proto::onnx::Node& from, const std::string& path) {
  OnnxNode node;
  node.name = from.name();
  node.op = from.op_type();
  for (const proto::onnx::Entry& note : from.metadata_props()) {
    if (note.key() == "pkg.torch.onnx.fx_node") {
      std::vector<std::string> names = Named(note.value());
      if (names.empty()) continue;
      node.call.name = names[0];
      names.erase(names.begin());
      node.call.reads = std::move(names);
    } else if (note.key() == "pkg.torch.onnx.name_scopes") {
      // Modules from the outermost one on, and the call.
      const std::vector<std::string> scopes = Quoted(note.value(), "'");
      if (scopes.size() > 1) node.call.module = scopes[scopes.size() - 2];
    }
  }
  if (!from.domain().empty() && from.domain() != "ai.onnx") {
    node.op = from.domain() + "." + node.op;
  }
  node.inputs.assign(from.input().begin(), from.input().end());
  node.outputs.assign(from.output().begin(), from.output().end());
  for (proto::onnx::Attribute& attribute : *from.mutable_attribute()) {
    OnnxAttribute to;
    to.name = attribute.name();
    to.f = attribute.f();
    to.i = attribute.i();
    to.s = attribute.s();
    to.floats.assign(attribute.floats().begin(), attribute.floats().end());
    to.ints.assign(attribute.ints().begin(), attribute.ints().end());
    to.strings.assign(attribute.strings().begin(), attribute.strings().end());
    if (attribute.has_t()) to.t = FromProto(*attribute.mutable_t(), path);
    node.attributes.push_back(std::move(to));
  }
  return node;
}

OnnxInput FromProto(const proto::onnx::ValueInfo& from) {
  OnnxInput input;
  input.name = from.name();
  input.type = from.type().tensor_type().elem_type();
  for (const auto& dim : from.type().tensor_type().shape().dim()) {
    input.dims.push_back({dim.dim_value(), dim.dim_param()});
  }
  return input;
}

// Whether a call of PyTorch of this name, "transpose_1", gives elements other
// places or makes constants; so does a step within a call, "val_7", which lays
// out what the call reads.
bool OnlyMoves(std::string_view name) {
  constexpr std::string_view kMoves[] = {"_to_copy",
                                         "alias",
                                         "arange",
                                         "as_strided",
                                         "broadcast_in_dim",
                                         "cat",
                                         "chunk",
                                         "clone",
                                         "concat",
                                         "constant_pad_nd",
                                         "contiguous",
                                         "detach",
                                         "embedding",
                                         "empty",
                                         "empty_like",
                                         "expand",
                                         "expand_as",
                                         "flatten",
                                         "flip",
                                         "full",
                                         "full_like",
                                         "gather",
                                         "getitem",
                                         "index",
                                         "index_select",
                                         "lift_fresh_copy",
                                         "movedim",
                                         "narrow",
                                         "new_full",
                                         "new_ones",
                                         "new_zeros",
                                         "ones",
                                         "ones_like",
                                         "pad",
                                         "permute",
                                         "repeat",
                                         "repeat_interleave",
                                         "reshape",
                                         "reshape_as",
                                         "roll",
                                         "scalar_tensor",
                                         "select",
                                         "slice",
                                         "split",
                                         "split_with_sizes",
                                         "squeeze",
                                         "stack",
                                         "swapaxes",
                                         "t",
                                         "tile",
                                         "to",
                                         "transpose",
                                         "unbind",
                                         "unflatten",
                                         "unsqueeze",
                                         "val",
                                         "view",
                                         "view_as",
                                         "zeros",
                                         "zeros_like"};
  return std::ranges::any_of(kMoves, [&](std::string_view move) {
    if (!name.starts_with(move)) return false;
    const std::string_view number = name.substr(move.size());
    return number.empty() ||
           (number[0] == '_' &&
            number.find_first_not_of("0123456789", 1) == number.npos);
  });
}

// Notes of PyTorch's newer exporter: the graph's of all parameters, an
// initializer's of what it is, or of the names that it was computed from.
void FindParameters(const proto::onnx::Graph& graph, OnnxModel& model) {
  constexpr std::string_view kSignature =
      "pkg.torch.export.ExportedProgram.graph_signature";
  constexpr std::string_view kKind =
      "pkg.torch.export.graph_signature.InputSpec.kind";
  constexpr std::string_view kFoldedFrom =
      "pkg.onnxscript.optimizer.folded_from";
  std::set<std::string> parameters;
  bool listed = false;
  for (const proto::onnx::Entry& entry : graph.metadata_props()) {
    if (entry.key() != kSignature) continue;
    listed = true;
    std::istringstream lines(entry.value());
    for (std::string line; std::getline(lines, line);) {
      // "p_body_w: PARAMETER target='body.w'"
      const size_t end = line.find(": ");
      const std::vector<std::string> names = Quoted(line, " target='");
      if (end == line.npos || names.empty()) continue;
      const bool is_parameter = line.find(": PARAMETER ") == end;
      model.torch_tensors[line.substr(0, end)] = {names[0], is_parameter};
      if (is_parameter) parameters.insert(names[0]);
    }
  }
  std::set<std::string> listed_names;
  for (const auto& [as, tensor] : model.torch_tensors) {
    listed_names.insert(tensor.name);
  }
  std::map<std::string, bool> known;
  std::map<std::string, std::vector<std::string>> folded;
  std::set<std::string> copies;
  std::map<std::string, std::string> arithmetic;
  std::set<std::string> repeated;
  for (const proto::onnx::ValueInfo& value : graph.value_info()) {
    for (const proto::onnx::Entry& entry : value.metadata_props()) {
      if (entry.key() == kKind) {
        known[value.name()] = entry.value() == "PARAMETER";
      } else if (entry.key() == kFoldedFrom && listed) {
        std::vector<std::string> names = Quoted(entry.value(), "'");
        if (names.size() == 1) copies.insert(value.name());
        const auto note = [&](const std::string& name) {
          if (name.starts_with("expand") || name.starts_with("repeat") ||
              name.starts_with("tile")) {
            repeated.insert(value.name());
          }
          if (listed_names.contains(name) || OnlyMoves(name)) return;
          arithmetic.emplace(value.name(), name);
        };
        note(value.name());
        std::ranges::for_each(names, note);
        std::erase_if(names, [&](const std::string& name) {
          return !parameters.contains(name);
        });
        known[value.name()] = !names.empty();
        folded[value.name()] = std::move(names);
      }
    }
  }
  for (OnnxTensor& tensor : model.initializers) {
    const auto found = known.find(tensor.name);
    if (found != known.end()) tensor.is_parameter = found->second;
    const auto made = folded.find(tensor.name);
    if (made == folded.end()) continue;
    tensor.is_folded = true;
    tensor.made_of = made->second;
    tensor.is_copy = copies.contains(tensor.name);
    tensor.is_repeated = repeated.contains(tensor.name);
    const auto computed = arithmetic.find(tensor.name);
    if (!tensor.made_of.empty() && computed != arithmetic.end()) {
      tensor.arithmetic = computed->second;
    }
  }
}

}  // namespace

bool IsOnnxFloat(int type) {
  return type == kOnnxFloat || type == kOnnxDouble || type == kOnnxFloat16 ||
         type == kOnnxBFloat16;
}

std::vector<double> OnnxTensor::Values() const {
  std::vector<double> values = typed.empty() ? FromRaw(raw, type) : typed;
  double elements = 1;
  for (int64_t extent : dims) {
    elements *= extent < 0 ? NAN : static_cast<double>(extent);
  }
  if (elements != static_cast<double>(values.size())) values.clear();
  return values;
}

std::string OnnxDataFile(const std::string& path, const std::string& location) {
  const std::filesystem::path beside = location;
  bool inside = !beside.empty() && beside.is_relative();
  for (const auto& part : beside) inside = inside && part != "..";
  if (!inside) return "";
  return (std::filesystem::path(path).parent_path() / beside).string();
}

const OnnxAttribute* OnnxNode::Find(std::string_view attribute) const {
  const auto found =
      std::ranges::find(attributes, attribute, &OnnxAttribute::name);
  return found == attributes.end() ? nullptr : &*found;
}

int64_t OnnxNode::Int(std::string_view attribute, int64_t fallback) const {
  const OnnxAttribute* const found = Find(attribute);
  return found == nullptr ? fallback : found->i;
}

double OnnxNode::Float(std::string_view attribute, double fallback) const {
  const OnnxAttribute* const found = Find(attribute);
  return found == nullptr ? fallback : found->f;
}

std::vector<int64_t> OnnxNode::Ints(std::string_view attribute,
                                    std::vector<int64_t> fallback) const {
  const OnnxAttribute* const found = Find(attribute);
  return found == nullptr ? fallback : found->ints;
}

std::string OnnxNode::Text(std::string_view attribute,
                           std::string fallback) const {
  const OnnxAttribute* const found = Find(attribute);
  return found == nullptr ? fallback : found->s;
}

Result<OnnxModel> ReadOnnxFile(const std::string& path) {
  TESSERA_TRY(const std::string bytes, ReadFile(path));
  // What it would say on stderr, errors say.
  const google::protobuf::LogSilencer silencer;
  proto::onnx::Model file;
  if (!file.ParseFromString(bytes)) {
    return InvalidInput("not an ONNX file, or cut off", path);
  }
  OnnxModel model;
  for (const proto::onnx::OperatorSet& opset : file.opset_import()) {
    if (opset.domain().empty() || opset.domain() == "ai.onnx") {
      model.opset = opset.version();
    }
  }
  if (!file.has_graph() || model.opset == 0) {
    return InvalidInput(
        "not an ONNX file, or cut off: expected a graph and "
        "the version of its operators",
        path);
  }
  std::set<std::string_view> initialized;
  for (proto::onnx::Tensor& tensor :
       *file.mutable_graph()->mutable_initializer()) {
    model.initializers.push_back(FromProto(tensor, path));
    initialized.insert(tensor.name());
  }
  model.producer = file.producer_name();
  FindParameters(file.graph(), model);
  for (proto::onnx::Node& node : *file.mutable_graph()->mutable_node()) {
    model.nodes.push_back(FromProto(node, path));
  }
  for (const proto::onnx::ValueInfo& input : file.graph().input()) {
    if (!initialized.contains(input.name())) {
      model.inputs.push_back(FromProto(input));
    }
  }
  for (const proto::onnx::ValueInfo& output : file.graph().output()) {
    model.outputs.push_back(output.name());
    model.shapes[output.name()] = FromProto(output).dims;
  }
  for (const proto::onnx::ValueInfo& value : file.graph().value_info()) {
    model.shapes[value.name()] = FromProto(value).dims;
  }
  if (!HasReadableNames(model)) {
    return InvalidInput("has names that are not UTF-8", path);
  }
  return model;
}

}  // namespace tessera
