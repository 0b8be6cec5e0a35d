#include "runtime/published_files.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <set>
#include <utility>

#include "planner/io/json_value.h"
#include "planner/io/onnx.h"
#include "planner/ir/vocabulary.h"
#include "runtime/float16.h"
#include "runtime/placement.h"

namespace tessera {
namespace {

// Where a family's output head is its own.
constexpr std::array<std::string_view, 3> kHeads = {
    "lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight"};

// What else files have beside weights, by how names end: masks, counts, tables
// and biases that are tied to others, and one that nothing reads (T5's).
constexpr std::array<std::string_view, 11> kNoWeights = {
    ".attn.bias",
    ".attention.bias",
    ".masked_bias",
    ".inv_freq",
    ".position_ids",
    ".num_batches_tracked",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    ".EncDecAttention.relative_attention_bias.weight",
    "cls.predictions.bias",
    "cls.predictions.decoder.bias"};

constexpr std::string_view kFile = "model.safetensors";
constexpr std::string_view kIndex = "model.safetensors.index.json";

std::string UnknownLayout(const PublishedLayout& layout) {
  const std::string& family = layout.family;
  if (family.empty() || HasPublishedWeights(family)) return "";
  return ", as the graph has it: no published layout of '" + family +
         "' is known";
}

// n elements from `from` on, a stride apart, in fp32.
void ReadFloats(const TensorView& view, int64_t from, int64_t n, int64_t stride,
                float* to) {
  const int64_t size = SizeOf(view.dtype);
  const std::byte* at = view.data + from * size;
  if (view.dtype == DType::kFloat32 && stride == 1) {
    std::memcpy(to, at, static_cast<size_t>(n * size));
    return;
  }
  // Bytes of an ONNX file may begin anywhere.
  const bool aligned = reinterpret_cast<uintptr_t>(at) % sizeof(uint16_t) == 0;
  if (Is16Bit(view.dtype) && stride == 1 && aligned) {
    Widen(at, view.dtype, n, to);
    return;
  }
  for (int64_t i = 0; i < n; ++i, at += stride * size) {
    if (view.dtype == DType::kFloat32) {
      std::memcpy(to + i, at, sizeof(float));
    } else if (view.dtype == DType::kFloat64) {
      double wide = 0;
      std::memcpy(&wide, at, sizeof(wide));
      to[i] = static_cast<float>(wide);
    } else {
      uint16_t bits = 0;
      std::memcpy(&bits, at, sizeof(bits));
      to[i] = view.dtype == DType::kBFloat16 ? ToFloat(BFloat16{bits})
                                             : ToFloat(Float16{bits});
    }
  }
}

// Calls run(begin, count) for the elements of `box`, which lies in a tensor of
// `shape`, in runs that follow each other there.
template <typename Run>
Result<void> ForEachRun(const Shape& shape, const Box& box, const Run& run) {
  // Dimensions from `inner` on are whole but for the first of them.
  size_t inner = shape.size();
  int64_t count = 1;
  while (inner > 0) {
    --inner;
    count *= box[inner].size();
    if (box[inner].size() != shape[inner]) break;
  }
  if (ElementsOf(box) == 0) return {};
  std::vector<int64_t> at;
  for (size_t d = 0; d < shape.size(); ++d) at.push_back(box[d].begin);
  for (;;) {
    int64_t begin = 0;
    for (size_t d = 0; d < shape.size(); ++d) begin = begin * shape[d] + at[d];
    TESSERA_RETURN_IF_ERROR(run(begin, count));
    size_t d = inner;
    while (d > 0 && ++at[d - 1] == box[d - 1].end) {
      at[d - 1] = box[d - 1].begin;
      --d;
    }
    if (d == 0) return {};
  }
}

// The pieces of a weight whose first `rows` rows alone the files have: behind
// them is one of no tensor.
std::vector<PublishedPiece> WithPadding(std::vector<PublishedPiece> pieces,
                                        const Tensor& weight, int64_t rows) {
  TESSERA_CHECK(pieces.size() == 1 && pieces[0].block.empty() &&
                pieces[0].shape == weight.shape)
      << weight.name << " is not one tensor of the files";
  PublishedPiece padding;
  padding.begin = pieces[0].count / weight.shape[0] * rows;
  padding.count = pieces[0].count - padding.begin;
  pieces[0].shape[0] = rows;
  pieces[0].count = padding.begin;
  pieces.push_back(std::move(padding));
  return pieces;
}

std::vector<PublishedPiece> UnpaddedPieces(const PublishedLayout& layout,
                                           const Graph& graph,
                                           const Tensor& weight,
                                           PublishedExperts experts) {
  if (HasPublishedWeights(layout.family)) {
    return PublishedPieces(layout.family, graph, weight, experts);
  }
  if (layout.onnx) {
    const auto pieces = layout.pieces.find(weight.name);
    TESSERA_CHECK(pieces != layout.pieces.end()) << weight.name;
    return pieces->second;
  }
  PublishedPiece piece;
  piece.tensor = weight.name;
  piece.shape = weight.shape;
  piece.count = ElementsOf(WholeBox(weight.shape));
  return {piece};
}

// The pieces of a weight in files; those of unknown families have weights as
// the graph does. Rows that pad a vocabulary (`padded`: PaddedWeights) are a
// piece of no tensor: no file has them, and they are 0.
std::vector<PublishedPiece> PiecesInFiles(
    const PublishedLayout& layout, const Graph& graph,
    const std::map<TensorId, int64_t>& padded, const Tensor& weight,
    PublishedExperts experts) {
  std::vector<PublishedPiece> pieces =
      UnpaddedPieces(layout, graph, weight, experts);
  for (const auto& [table, rows] : padded) {
    if (&graph.tensor(table) != &weight) continue;
    return WithPadding(std::move(pieces), weight, rows);
  }
  return pieces;
}

}  // namespace

Result<PublishedFiles> PublishedFiles::Open(const std::string& path,
                                            const PublishedLayout& layout,
                                            const Graph& graph) {
  PublishedFiles opened;
  opened.path_ = path;
  opened.layout_ = &layout;
  opened.graph_ = &graph;
  opened.padded_ = PaddedWeights(graph);
  if (IsOnnx(path)) {
    if (!layout.onnx) {
      return InvalidInput(
          "is an ONNX file, but --model is none: expected safetensors", path);
    }
    TESSERA_TRY(OnnxTensors tensors, OnnxTensors::Open(path));
    opened.onnx_.emplace(std::move(tensors));
    for (const auto& [weight, pieces] : layout.pieces) {
      for (const PublishedPiece& piece : pieces) {
        TESSERA_RETURN_IF_ERROR(opened.Find(piece));
        for (const PublishedPiece& other : piece.plus) {
          TESSERA_RETURN_IF_ERROR(opened.Find(other));
        }
      }
    }
    return opened;
  }
  std::filesystem::path file = path;
  std::error_code code;
  if (std::filesystem::is_directory(file, code)) {
    // As transformers: an index only where there is no such file.
    const std::filesystem::path index = file / kIndex;
    file /= kFile;
    if (!std::filesystem::exists(file, code) &&
        std::filesystem::exists(index, code)) {
      file = index;
    }
  }
  if (file.extension() != ".json") {
    TESSERA_TRY(SafetensorsFile one, SafetensorsFile::Open(file));
    for (std::string& name : one.names()) {
      opened.file_of_.emplace(std::move(name), 0);
    }
    opened.files_.push_back(std::move(one));
    opened.ReadForm();
    TESSERA_RETURN_IF_ERROR(opened.CheckAllAreUsed());
    return opened;
  }
  TESSERA_TRY(const JsonValue index, ReadJson(file));
  std::map<std::string, size_t> numbers;
  for (const auto& [tensor, name] : index.Field("weight_map").fields) {
    if (name.text.empty() || name.text.find('/') != std::string::npos) {
      return InvalidInput("is " + name.ToString() +
                              ": expected the name of a file beside the index",
                          file.string() + ": weight_map." + tensor);
    }
    const auto [at, is_new] = numbers.try_emplace(name.text, numbers.size());
    if (is_new) {
      const std::filesystem::path shard = file.parent_path() / name.text;
      TESSERA_TRY(SafetensorsFile one, SafetensorsFile::Open(shard));
      opened.files_.push_back(std::move(one));
    }
    opened.file_of_.emplace(tensor, at->second);
  }
  if (opened.files_.empty()) {
    return InvalidInput("names no files: expected an object of tensors' files",
                        file.string() + ": weight_map");
  }
  opened.ReadForm();
  TESSERA_RETURN_IF_ERROR(opened.CheckAllAreUsed());
  return opened;
}

std::optional<std::string> PublishedFiles::NameOf(
    const std::string& tensor) const {
  if (onnx_) {
    return onnx_->Has(tensor) ? std::optional(tensor) : std::nullopt;
  }
  const std::string prefix(PublishedPrefix(layout_->family));
  std::vector<std::string> names;
  const auto with_and_without = [&](const std::string& name) {
    names.insert(names.end(), {name, prefix + name});
    if (!prefix.empty() && name.starts_with(prefix)) {
      names.push_back(name.substr(prefix.size()));
    }
  };
  with_and_without(tensor);
  if (std::string other = OtherPublishedName(layout_->family, tensor);
      other != tensor) {
    with_and_without(other);
  }
  for (std::string& name : names) {
    if (file_of_.contains(name)) return std::move(name);
  }
  return std::nullopt;
}

std::string PublishedFiles::HeadThatDiffers() const {
  if (onnx_ || !HasPublishedWeights(layout_->family)) return "";
  std::set<TensorId> tables;
  const Tensor* tied = nullptr;
  for (const Node& node : graph_->nodes) {
    if (node.pass != Pass::kForward) break;
    if (node.op->name == "embedding") tables.insert(node.operands[1]);
    if (node.op->op_class == OpClass::kMatmul && node.operands.size() > 1 &&
        tables.contains(node.operands[1])) {
      tied = &graph_->tensor(node.operands[1]);
    }
  }
  if (tied == nullptr) return "";
  const auto pieces =
      PiecesInFiles(*layout_, *graph_, padded_, *tied, experts_);
  const auto table = NameOf(pieces[0].tensor);
  const bool is_one = pieces.size() == 1 || pieces[1].tensor.empty();
  if (!is_one || !table) return "";
  const auto view = [&](const std::string& name) {
    return files_[file_of_.find(name)->second].View(name);
  };
  for (const auto& [name, file] : file_of_) {
    if (name == *table || !std::ranges::any_of(kHeads, [&](auto ending) {
          return name.ends_with(ending);
        })) {
      continue;
    }
    const auto a = view(*table);
    const auto b = view(name);
    if (!a || !b) continue;
    constexpr int64_t kCompared = int64_t{1} << 20;
    const int64_t bytes =
        std::min(kCompared, ElementsOf(WholeBox(a->shape)) * SizeOf(a->dtype));
    if (a->dtype != b->dtype || a->shape != b->shape ||
        std::memcmp(a->data, b->data, static_cast<size_t>(bytes)) != 0) {
      return name;
    }
  }
  return "";
}

void PublishedFiles::ReadForm() {
  const bool fused = std::ranges::any_of(file_of_, [](const auto& tensor) {
    return tensor.first.ends_with(".experts.gate_up_proj");
  });
  if (fused) experts_ = PublishedExperts::kFused;
}

std::string_view PublishedFiles::PartOf(const std::string& tensor) const {
  // A layer of DeepSeek-V3 that predicts a further token has these.
  constexpr std::string_view kLayers = "model.layers.";
  if (layout_->family == "deepseek_v3" && tensor.starts_with(kLayers)) {
    const size_t end = tensor.find('.', kLayers.size());
    if (file_of_.contains(tensor.substr(0, end) + ".eh_proj.weight")) {
      return "layers that predict further tokens";
    }
  }
  return PartLeftOut(layout_->family, *graph_, tensor);
}

bool PublishedFiles::IsZero(const std::string& tensor) const {
  const auto view = files_[file_of_.find(tensor)->second].View(tensor);
  if (!view) return false;
  const auto bytes = ElementsOf(WholeBox(view->shape)) * SizeOf(view->dtype);
  return std::all_of(view->data, view->data + bytes,
                     [](std::byte byte) { return byte == std::byte{0}; });
}

Result<void> PublishedFiles::CheckAllAreUsed() {
  if (!HasPublishedWeights(layout_->family)) return {};
  std::set<std::string> used;
  std::set<std::string> zeros;  // where they are as in what is exported
  for (const auto& tensor : PublishedTensors(*layout_, *graph_, experts_)) {
    auto name = NameOf(tensor.name);
    if (name) (tensor.parts.empty() ? zeros : used).insert(*std::move(name));
  }
  struct Part {
    std::string first;
    int64_t count = 0;
  };
  std::map<std::string_view, Part> parts;
  std::string first;
  size_t count = 0;
  for (const auto& [name, file] : file_of_) {
    const auto ends = [&, &name = name](std::string_view ending) {
      return name.ends_with(ending);
    };
    if (used.contains(name) || (zeros.contains(name) && IsZero(name))) continue;
    if (const std::string_view of = PartOf(name); !of.empty()) {
      Part& part = parts[of];
      if (part.count++ == 0) part.first = name;
    } else if (!std::ranges::any_of(kNoWeights, ends) &&
               !std::ranges::any_of(kHeads, ends) && count++ == 0) {
      first = name;
    }
  }
  for (const auto& [of, part] : parts) {
    passed_over_.push_back(std::to_string(part.count) +
                           (part.count == 1 ? " tensor of " : " tensors of ") +
                           std::string(of) +
                           (part.count == 1 ? " is passed over: '"
                                            : " are passed over, such as '") +
                           part.first + "'");
  }
  if (count == 0) return {};
  return InvalidInput(
      "is no weight of the model" +
          (count > 1 ? ", nor are " + std::to_string(count - 1) + " more"
                     : std::string()),
      path_ + ": tensor '" + first + "'");
}

Result<TensorView> PublishedFiles::Find(const PublishedPiece& piece) const {
  auto name = NameOf(piece.tensor);
  if (!name && !piece.stored_as.empty()) name = NameOf(piece.stored_as);
  if (!name) {
    return InvalidInput("is missing" + UnknownLayout(*layout_),
                        path_ + ": tensor '" + piece.tensor + "'");
  }
  TESSERA_TRY(TensorView view,
              onnx_ ? onnx_->View(*name)
                    : files_[file_of_.find(*name)->second].View(*name));
  if (!IsFloat(view.dtype) || view.shape != piece.shape) {
    return InvalidInput("is " + SafetensorsText(view.dtype, view.shape) +
                            ": expected " +
                            SafetensorsText(DType::kFloat32, piece.shape) +
                            " or another float" + UnknownLayout(*layout_),
                        path_ + ": tensor '" + *name + "'");
  }
  return view;
}

Result<std::vector<float>> PublishedFiles::Read(const Tensor& weight,
                                                const Placement& here) const {
  const std::vector<PublishedPiece> pieces =
      PiecesInFiles(*layout_, *graph_, padded_, weight, experts_);
  std::map<const PublishedPiece*, TensorView> views;
  std::vector<float> elements(static_cast<size_t>(here.elements()));
  float* to = elements.data();
  // `count` elements of a piece from the one at `first` on.
  const auto read_of = [&](const PublishedPiece& piece, int64_t first,
                           int64_t count, float* out) -> Result<void> {
    if (piece.tensor.empty()) {
      std::fill_n(out, count, 0.0F);
      return {};
    }
    if (!views.contains(&piece)) {
      TESSERA_TRY(views[&piece], Find(piece));
    }
    while (count > 0) {
      int64_t n = count;
      int64_t stride = 1;
      if (!piece.block.empty()) {
        const auto& [extent, apart] = piece.block.back();
        n = std::min(n, extent - first % extent);
        stride = apart;
      }
      ReadFloats(views[&piece], piece.PlaceOf(first), n, stride, out);
      first += n;
      out += n;
      count -= n;
    }
    return {};
  };
  // A run of the weight, from each piece that has some of it.
  const auto read = [&](int64_t begin, int64_t count) -> Result<void> {
    const auto after =
        std::ranges::upper_bound(pieces, begin, {}, &PublishedPiece::begin);
    auto p = static_cast<size_t>(after - pieces.begin()) - 1;
    for (; count > 0; ++p) {
      const PublishedPiece& piece = pieces[p];
      const int64_t first = begin - piece.begin;
      const int64_t n = std::min(count, piece.count - first);
      TESSERA_RETURN_IF_ERROR(read_of(piece, first, n, to));
      for (const PublishedPiece& other : piece.plus) {
        std::vector<float> more(static_cast<size_t>(n));
        TESSERA_RETURN_IF_ERROR(read_of(other, first, n, more.data()));
        std::transform(more.begin(), more.end(), to, to, std::plus());
      }
      if (piece.added != 0) {
        for (int64_t i = 0; i < n; ++i) {
          to[i] += static_cast<float>(piece.added);
        }
      }
      to += n;
      begin += n;
      count -= n;
    }
    return {};
  };
  for (const Box& box : BoxesOf(here)) {
    TESSERA_RETURN_IF_ERROR(ForEachRun(weight.shape, box, read));
  }
  return elements;
}

std::vector<PublishedTensor> PublishedTensors(const PublishedLayout& layout,
                                              const Graph& graph,
                                              PublishedExperts experts) {
  const std::map<TensorId, int64_t> padded = PaddedWeights(graph);
  std::map<std::string, PublishedTensor> tensors;
  for (const Tensor& weight : graph.tensors) {
    if (weight.kind != TensorKind::kWeight) continue;
    for (PublishedPiece& piece :
         PiecesInFiles(layout, graph, padded, weight, experts)) {
      if (piece.tensor.empty()) continue;  // padding
      for (const PublishedPiece& other : piece.plus) {
        tensors[other.tensor].name = other.tensor;
        tensors[other.tensor].shape = other.shape;
      }
      PublishedTensor& tensor = tensors[piece.tensor];
      tensor.name = piece.tensor;
      tensor.shape = piece.shape;
      tensor.parts.push_back({&weight, std::move(piece)});
    }
  }
  for (PublishedZeros& zeros : ZerosInFiles(layout.family, graph)) {
    tensors[zeros.tensor] = {zeros.tensor, zeros.shape, {}};
  }
  std::vector<PublishedTensor> list;
  for (auto& [name, tensor] : tensors) list.push_back(std::move(tensor));
  return list;
}

Result<void> CheckCanBePublished(const PublishedLayout& layout,
                                 const Graph& graph) {
  for (const PublishedTensor& tensor : PublishedTensors(layout, graph)) {
    std::map<int64_t, const PublishedTensor::Part*> parts;  // by place
    for (const PublishedTensor::Part& part : tensor.parts) {
      const auto [at, is_new] = parts.try_emplace(part.piece.offset, &part);
      if (is_new) continue;
      return InvalidInput("is read as '" + at->second->weight->name +
                              "' and as '" + part.weight->name +
                              "', which are trained apart",
                          "tensor '" + tensor.name + "'");
    }
  }
  return {};
}

void PutPiece(const PublishedPiece& piece, const float* weight, float* tensor) {
  for (int64_t i = 0; i < piece.count; ++i) {
    tensor[piece.PlaceOf(i)] =
        weight[piece.begin + i] - static_cast<float>(piece.added);
  }
}

}  // namespace tessera
