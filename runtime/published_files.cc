#include "runtime/published_files.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include "planner/io/json_value.h"
#include "runtime/float16.h"

namespace tessera {
namespace {

constexpr std::string_view kFile = "model.safetensors";
constexpr std::string_view kIndex = "model.safetensors.index.json";

int64_t ElementsIn(const Shape& shape) {
  int64_t elements = 1;
  for (int64_t extent : shape) elements *= extent;
  return elements;
}

std::string UnknownLayout(const std::string& family) {
  if (family.empty() || HasPublishedWeights(family)) return "";
  return ", as the graph has it: no published layout of '" + family +
         "' is known";
}

// n elements from `from` on, a stride apart, in fp32.
void ReadFloats(const SafetensorsView& view, int64_t from, int64_t n,
                int64_t stride, float* to) {
  const int64_t size = SizeOf(view.dtype);
  const std::byte* at = view.data + from * size;
  if (view.dtype == DType::kFloat32 && stride == 1) {
    std::memcpy(to, at, static_cast<size_t>(n * size));
    return;
  }
  if (Is16Bit(view.dtype) && stride == 1) {
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

}  // namespace

std::vector<PublishedPiece> PiecesInFiles(const std::string& family,
                                          const Graph& graph,
                                          const Tensor& weight) {
  if (HasPublishedWeights(family)) {
    return PublishedPieces(family, graph, weight);
  }
  PublishedPiece piece;
  piece.tensor = weight.name;
  piece.shape = weight.shape;
  piece.count = ElementsIn(weight.shape);
  return {piece};
}

Result<PublishedFiles> PublishedFiles::Open(const std::string& path,
                                            const std::string& family,
                                            const Graph& graph) {
  PublishedFiles opened;
  opened.path_ = path;
  opened.family_ = family;
  opened.graph_ = &graph;
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
  TESSERA_RETURN_IF_ERROR(opened.CheckAllAreUsed());
  return opened;
}

std::optional<std::string> PublishedFiles::NameOf(
    const std::string& tensor) const {
  const std::string prefix(PublishedPrefix(family_));
  std::vector<std::string> names = {tensor, prefix + tensor};
  if (!prefix.empty() && tensor.starts_with(prefix)) {
    names.push_back(tensor.substr(prefix.size()));
  }
  for (std::string& name : names) {
    if (file_of_.contains(name)) return std::move(name);
  }
  return std::nullopt;
}

Result<void> PublishedFiles::CheckAllAreUsed() const {
  if (!HasPublishedWeights(family_)) return {};
  std::set<std::string> used;
  for (const PublishedTensor& tensor : PublishedTensors(family_, *graph_)) {
    if (auto name = NameOf(tensor.name)) used.insert(*std::move(name));
  }
  constexpr std::array kNoWeights = {".attn.bias",     ".attention.bias",
                                     ".masked_bias",   ".inv_freq",
                                     "lm_head.weight", "embed_out.weight"};
  std::string first;
  size_t count = 0;
  for (const auto& [name, file] : file_of_) {
    const bool expected =
        used.contains(name) ||
        std::ranges::any_of(kNoWeights, [&](std::string_view ending) {
          return name.ends_with(ending);
        });
    if (!expected && count++ == 0) first = name;
  }
  if (count == 0) return {};
  return InvalidInput(
      "is no weight of the model" +
          (count > 1 ? ", nor are " + std::to_string(count - 1) + " more"
                     : std::string()),
      path_ + ": tensor '" + first + "'");
}

Result<SafetensorsView> PublishedFiles::Find(
    const PublishedPiece& piece) const {
  const auto name = NameOf(piece.tensor);
  if (!name) {
    return InvalidInput("is missing" + UnknownLayout(family_),
                        path_ + ": tensor '" + piece.tensor + "'");
  }
  TESSERA_TRY(SafetensorsView view,
              files_[file_of_.find(*name)->second].View(*name));
  if (!IsFloat(view.dtype) || view.shape != piece.shape) {
    return InvalidInput("is " + SafetensorsText(view.dtype, view.shape) +
                            ": expected " +
                            SafetensorsText(DType::kFloat32, piece.shape) +
                            " or another float" + UnknownLayout(family_),
                        path_ + ": tensor '" + *name + "'");
  }
  return view;
}

Result<std::vector<float>> PublishedFiles::Read(const Tensor& weight,
                                                const Placement& here) const {
  const std::vector<PublishedPiece> pieces =
      PiecesInFiles(family_, *graph_, weight);
  std::vector<SafetensorsView> views(pieces.size());
  std::vector<float> elements(static_cast<size_t>(here.elements()));
  float* to = elements.data();
  // A run of the weight, from each piece that has some of it.
  const auto read = [&](int64_t begin, int64_t count) -> Result<void> {
    const auto after =
        std::ranges::upper_bound(pieces, begin, {}, &PublishedPiece::begin);
    auto p = static_cast<size_t>(after - pieces.begin()) - 1;
    while (count > 0) {
      const PublishedPiece& piece = pieces[p];
      if (views[p].data == nullptr) {
        TESSERA_TRY(views[p], Find(piece));
      }
      int64_t inside = begin - piece.begin;
      int64_t n = std::min(count, piece.count - inside);
      int64_t from = piece.offset + inside;
      int64_t stride = 1;
      if (piece.stride > 0) {
        const int64_t row = inside / piece.columns;
        const int64_t column = inside % piece.columns;
        n = std::min(n, piece.columns - column);
        from = piece.offset + column * piece.stride + row;
        stride = piece.stride;
      }
      ReadFloats(views[p], from, n, stride, to);
      if (piece.added != 0) {
        for (int64_t i = 0; i < n; ++i) {
          to[i] += static_cast<float>(piece.added);
        }
      }
      to += n;
      begin += n;
      count -= n;
      inside += n;
      if (inside == piece.count) ++p;
    }
    return {};
  };
  for (const Box& box : BoxesOf(here)) {
    TESSERA_RETURN_IF_ERROR(ForEachRun(weight.shape, box, read));
  }
  return elements;
}

std::vector<PublishedTensor> PublishedTensors(const std::string& family,
                                              const Graph& graph) {
  std::map<std::string, PublishedTensor> tensors;
  for (const Tensor& weight : graph.tensors) {
    if (weight.kind != TensorKind::kWeight) continue;
    for (PublishedPiece& piece : PiecesInFiles(family, graph, weight)) {
      PublishedTensor& tensor = tensors[piece.tensor];
      tensor.name = piece.tensor;
      tensor.shape = piece.shape;
      tensor.parts.push_back({&weight, std::move(piece)});
    }
  }
  std::vector<PublishedTensor> list;
  for (auto& [name, tensor] : tensors) list.push_back(std::move(tensor));
  return list;
}

void PutPiece(const PublishedPiece& piece, const float* weight, float* tensor) {
  for (int64_t i = 0; i < piece.count; ++i) {
    const int64_t to = piece.stride == 0
                           ? piece.offset + i
                           : piece.offset + i % piece.columns * piece.stride +
                                 i / piece.columns;
    tensor[to] = weight[piece.begin + i] - static_cast<float>(piece.added);
  }
}

}  // namespace tessera
