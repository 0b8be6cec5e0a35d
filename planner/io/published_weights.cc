#include "planner/io/published_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <span>

#include "planner/base/element_count.h"

namespace tessera {
namespace {

int64_t Product(const Shape& shape, size_t begin, size_t end) {
  return ElementCount(std::span(shape).subspan(begin, end - begin));
}

// A weight as a matrix of outputs by inputs, or a vector.
struct Matrix {
  int64_t rows = 1;
  int64_t columns = 1;
};

// Whether a weight is one of an attention's output projection, whose dimensions
// are all inputs but for the first.
bool IsOutput(std::string_view name) {
  constexpr std::array<std::string_view, 5> kNames = {
      "o_proj.weight", "c_proj.weight", "out_proj.weight",
      "attention.dense.weight", "attn.dense.weight"};
  return std::ranges::any_of(
      kNames, [&](std::string_view ending) { return name.ends_with(ending); });
}

// Of other weights the last dimension alone is inputs.
Matrix MatrixOf(const Tensor& weight) {
  const Shape& shape = weight.shape;
  const size_t dims = shape.size();
  if (IsOutput(weight.name)) return {shape[0], Product(shape, 1, dims)};
  return {Product(shape, 0, dims - 1), shape[dims - 1]};
}

class Layout {
 public:
  Layout(std::string_view family, const Graph& graph, const Tensor& weight)
      : family_(family),
        graph_(graph),
        weight_(weight),
        elements_(Product(weight.shape, 0, weight.shape.size())) {}

  std::vector<PublishedPiece> Pieces() const {
    if (family_ == "gpt2") return Gpt2();
    if (family_ == "phi3" || family_ == "glm4") {
      if (auto fused = FusedInOrder({".q.", ".k.", ".v."})) return *fused;
      if (auto fused = FusedInOrder({".gate.", ".up."})) return *fused;
    }
    if (family_ == "gpt_neox" || family_ == "bloom" || family_ == "falcon") {
      if (auto fused = FusedByGroup()) return *fused;
    }
    if (family_ == "gptj" || family_ == "glm4" || family_ == "cohere") {
      if (auto pairs = InPairs()) return *pairs;
    }
    if (family_ == "opt" && weight_.name.ends_with("embed_positions.weight")) {
      // Its positions count from 2; what no token has is first there.
      PublishedPiece used = Whole();
      PublishedPiece unused = used;
      used.offset = unused.count = 2 * weight_.shape[1];
      used.count = unused.begin = elements_ - unused.count;
      return {used, unused};
    }
    if (weight_.name.find(".experts.") != std::string::npos &&
        weight_.shape.size() == 3) {
      return ByExpert();
    }
    PublishedPiece piece = Whole();
    if (family_.starts_with("gemma") && weight_.name.ends_with("norm.weight")) {
      piece.added = 1;
    }
    if (family_ == "gemma3") piece.tensor = "language_model." + piece.tensor;
    return {piece};
  }

 private:
  // The same elements in the same order.
  PublishedPiece Whole() const {
    PublishedPiece piece;
    piece.tensor = weight_.name;
    piece.shape = weight_.shape;
    piece.count = elements_;
    if (weight_.name.ends_with(".bias")) {
      piece.shape = {elements_};
    } else if (weight_.shape.size() > 2) {
      const Matrix matrix = MatrixOf(weight_);
      piece.shape = {matrix.rows, matrix.columns};
    }
    return piece;
  }

  // Linear layers are Conv1D: inputs by outputs.
  std::vector<PublishedPiece> Gpt2() const {
    PublishedPiece piece = Whole();
    if (weight_.name.find(".c_") == std::string::npos) return {piece};
    const bool bias = weight_.name.ends_with(".bias");
    const Matrix matrix = bias ? Matrix{elements_, 1} : MatrixOf(weight_);
    int64_t outputs = matrix.rows;
    constexpr std::array<std::string_view, 3> kParts = {".q.", ".k.", ".v."};
    for (size_t p = 0; p < kParts.size(); ++p) {
      const size_t at = weight_.name.rfind(kParts[p]);
      if (at == std::string::npos) continue;
      piece.tensor.erase(at, kParts[p].size() - 1);
      piece.offset = static_cast<int64_t>(p) * matrix.rows;
      outputs = 3 * matrix.rows;
    }
    if (bias) {
      piece.shape = {outputs};
      return {piece};
    }
    piece.shape = {matrix.columns, outputs};
    piece.block = {{matrix.rows, 1}, {matrix.columns, outputs}};
    return {piece};
  }

  // Projections one behind the other: all rows of the first, then of the next.
  std::optional<std::vector<PublishedPiece>> FusedInOrder(
      std::initializer_list<std::string_view> parts) const {
    for (std::string_view part : parts) {
      const size_t at = weight_.name.rfind(part);
      if (at == std::string::npos) continue;
      PublishedPiece piece = Whole();
      int64_t rows = 0;
      for (std::string_view other : parts) {
        std::string name = weight_.name;
        name.replace(at, part.size(), other);
        const Tensor& sibling = Named(name);
        if (other == part) piece.offset = rows * piece.shape[1];
        rows += MatrixOf(sibling).rows;
      }
      piece.shape[0] = rows;
      piece.tensor.erase(at, part.size() - 1);
      return {{piece}};
    }
    return std::nullopt;
  }

  // Of each group of heads the rows of its queries, its key and its value.
  std::optional<std::vector<PublishedPiece>> FusedByGroup() const {
    constexpr std::array<std::string_view, 3> kParts = {".q.", ".k.", ".v."};
    for (size_t p = 0; p < kParts.size(); ++p) {
      const size_t at = weight_.name.rfind(kParts[p]);
      if (at == std::string::npos) continue;
      std::string queries = weight_.name;
      queries.replace(at, kParts[p].size(), kParts[0]);
      const int64_t per_group = Named(queries).shape[1];
      const bool bias = weight_.name.ends_with(".bias");
      const int64_t groups = weight_.shape[0];
      const int64_t of_group = elements_ / groups;  // of this part
      const int64_t of_head = p == 0 ? of_group / per_group : of_group;
      const int64_t begin =
          p == 0 ? 0 : (per_group + static_cast<int64_t>(p) - 1) * of_head;
      const int64_t columns = bias ? 1 : weight_.shape.back();
      std::vector<PublishedPiece> pieces;
      for (int64_t group = 0; group < groups; ++group) {
        PublishedPiece& piece = pieces.emplace_back();
        piece.tensor = weight_.name;
        piece.tensor.erase(at, kParts[p].size() - 1);
        piece.shape = {groups * (per_group + 2) * of_head / columns, columns};
        if (bias) piece.shape.pop_back();
        piece.begin = group * of_group;
        piece.count = of_group;
        piece.offset = group * (per_group + 2) * of_head + begin;
      }
      return pieces;
    }
    return std::nullopt;
  }

  // Queries and keys whose turned features are pairs of neighbours in the file,
  // where here the second ones of all pairs are behind the first ones
  // (planner/ops/rotary.cc).
  std::optional<std::vector<PublishedPiece>> InPairs() const {
    constexpr std::array<std::string_view, 2> kParts = {"q_proj.", "k_proj."};
    for (std::string_view part : kParts) {
      const size_t at = weight_.name.rfind(part);
      if (at == std::string::npos) continue;
      const std::string rotary =
          weight_.name.substr(0, at) + "rotary_" + std::string(part, 0, 1);
      const auto turn = std::ranges::find(graph_.nodes, rotary, &Node::name);
      TESSERA_CHECK(turn != graph_.nodes.end()) << rotary;
      const bool bias = weight_.name.ends_with(".bias");
      const size_t dims = weight_.shape.size();
      const int64_t columns = bias ? 1 : weight_.shape[dims - 1];
      const int64_t size = weight_.shape[bias ? dims - 1 : dims - 2];
      const int64_t turned =
          std::llround(turn->attribute("fraction") * static_cast<double>(size));
      std::vector<PublishedPiece> pieces;
      for (int64_t head = 0; head < elements_ / (size * columns); ++head) {
        PublishedPiece piece = Whole();
        piece.begin = piece.offset = head * size * columns;
        piece.count = turned * columns;
        piece.block = {{2, columns}, {turned / 2, 2 * columns}, {columns, 1}};
        pieces.push_back(piece);
        if (turned == size) continue;
        piece.begin = piece.offset = (head * size + turned) * columns;
        piece.count = (size - turned) * columns;
        piece.block = {};
        pieces.push_back(piece);
      }
      return pieces;
    }
    return std::nullopt;
  }

  // Weights [e, out, in] are a matrix for each expert.
  std::vector<PublishedPiece> ByExpert() const {
    constexpr std::string_view kExperts = ".experts.";
    const size_t at = weight_.name.rfind(kExperts) + kExperts.size();
    const int64_t count = elements_ / weight_.shape[0];
    std::vector<PublishedPiece> pieces;
    for (int64_t expert = 0; expert < weight_.shape[0]; ++expert) {
      PublishedPiece& piece = pieces.emplace_back();
      piece.tensor = weight_.name;
      piece.tensor.insert(at, std::to_string(expert) + ".");
      piece.shape = {weight_.shape[1], weight_.shape[2]};
      piece.begin = expert * count;
      piece.count = count;
    }
    return pieces;
  }

  const Tensor& Named(const std::string& name) const {
    const auto found = std::ranges::find(graph_.tensors, name, &Tensor::name);
    TESSERA_CHECK(found != graph_.tensors.end()) << name;
    return *found;
  }

  std::string_view family_;
  const Graph& graph_;
  const Tensor& weight_;
  int64_t elements_;
};

struct Family {
  std::string_view name;
  std::string_view prefix;
};
constexpr std::array kFamilies = {
    Family{"gpt2", "transformer."},  Family{"llama", "model."},
    Family{"mistral", "model."},     Family{"mixtral", "model."},
    Family{"qwen2", "model."},       Family{"qwen2_moe", "model."},
    Family{"qwen3", "model."},       Family{"qwen3_moe", "model."},
    Family{"gemma", "model."},       Family{"phi3", "model."},
    Family{"opt", "model."},         Family{"bloom", "transformer."},
    Family{"gpt_neox", "gpt_neox."}, Family{"gemma2", "model."},
    Family{"gemma3_text", "model."}, Family{"gemma3", "language_model."},
    Family{"olmo2", "model."},       Family{"granite", "model."},
    Family{"smollm3", "model."},     Family{"starcoder2", "model."},
    Family{"phi", "model."},         Family{"falcon", "transformer."},
    Family{"gptj", "transformer."},  Family{"stablelm", "model."},
    Family{"glm4", "model."},        Family{"cohere", "model."},
    Family{"olmo", "model."},
};

}  // namespace

int64_t PublishedPiece::PlaceOf(int64_t i) const {
  int64_t place = offset;
  for (size_t d = block.size(); d-- > 0;) {
    place += i % block[d].extent * block[d].stride;
    i /= block[d].extent;
  }
  return place + (block.empty() ? i : 0);
}

bool HasPublishedWeights(std::string_view family) {
  return std::ranges::find(kFamilies, family, &Family::name) != kFamilies.end();
}

std::string_view PublishedPrefix(std::string_view family) {
  const auto* const found = std::ranges::find(kFamilies, family, &Family::name);
  return found == kFamilies.end() ? "" : found->prefix;
}

std::vector<PublishedPiece> PublishedPieces(std::string_view family,
                                            const Graph& graph,
                                            const Tensor& weight) {
  TESSERA_CHECK(HasPublishedWeights(family)) << family;
  return Layout(family, graph, weight).Pieces();
}

}  // namespace tessera
