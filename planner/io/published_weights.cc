#include "planner/io/published_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <span>

#include "planner/base/element_count.h"
#include "planner/ir/vocabulary.h"

namespace tessera {
namespace {

int64_t Product(const Shape& shape, size_t begin, size_t end) {
  return ElementCount(std::span(shape).subspan(begin, end - begin));
}

// Of a BERT whose head is not tied.
constexpr std::string_view kBertHead = "cls.predictions.decoder.weight";

// A weight as a matrix of outputs by inputs, or a vector.
struct Matrix {
  int64_t rows = 1;
  int64_t columns = 1;
};

// Whether a weight is one of an attention's output projection, whose dimensions
// are all inputs but for the first.
bool IsOutput(std::string_view name) {
  constexpr std::array<std::string_view, 7> kNames = {
      "o_proj.weight",     "c_proj.weight",
      "out_proj.weight",   "attention.dense.weight",
      "attn.dense.weight", "attention.output.dense.weight",
      "Attention.o.weight"};
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
  Layout(std::string_view family, const Graph& graph, const Tensor& weight,
         PublishedExperts experts)
      : family_(family),
        graph_(graph),
        weight_(weight),
        experts_(experts),
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
    if (family_.starts_with("deepseek")) {
      if (auto latent = LatentAttention()) return *latent;
    }
    if (weight_.name.find(".experts.") != std::string::npos &&
        weight_.shape.size() == 3) {
      return ByExpert();
    }
    PublishedPiece piece = Whole();
    if (family_ == "bert") piece.tensor = OfBert();
    if (family_ == "t5") piece.tensor = OfT5();
    if (family_ == "vit") piece.shape = OfVit();
    if (family_ == "resnet") piece.shape = weight_.shape;
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
    } else if (weight_.name.ends_with("relative_attention_bias.weight")) {
      // Heads are the columns.
      piece.shape = {weight_.shape[0], elements_ / weight_.shape[0]};
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
        piece.block = Pairs(turned, columns);
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

  // Latent attention: of each head's queries those features that are turned
  // come behind the others, and pairs of them are neighbours, where here they
  // are in front, the second ones of all pairs behind the first ones; the key
  // that all heads turn is below the latent; of each head the keys' rows are
  // above the values'.
  std::optional<std::vector<PublishedPiece>> LatentAttention() const {
    const auto ends = [&](std::string_view ending) {
      return weight_.name.ends_with(ending);
    };
    if (ends(".q_proj.weight") || ends(".q_b_proj.weight")) {
      const std::string rotary =
          weight_.name.substr(0, weight_.name.rfind(".q_") + 1) + "rotary_q";
      const auto turn = std::ranges::find(graph_.nodes, rotary, &Node::name);
      TESSERA_CHECK(turn != graph_.nodes.end()) << rotary;
      const int64_t size = weight_.shape[2];
      const int64_t columns = weight_.shape[3];
      const int64_t turned =
          std::llround(turn->attribute("fraction") * static_cast<double>(size));
      std::vector<PublishedPiece> pieces;
      for (int64_t head = 0; head < weight_.shape[0]; ++head) {
        const int64_t begin = head * size * columns;
        PublishedPiece piece = Whole();
        piece.begin = begin;
        piece.count = turned * columns;
        piece.offset = begin + (size - turned) * columns;
        piece.block = Pairs(turned, columns);
        pieces.push_back(piece);
        piece.begin = begin + turned * columns;
        piece.count = (size - turned) * columns;
        piece.offset = begin;
        piece.block = {};
        pieces.push_back(piece);
      }
      return pieces;
    }
    constexpr std::string_view kDown = ".kv_a_proj_with_mqa.";
    if (const size_t at = weight_.name.find(kDown); at != std::string::npos) {
      const bool bias = ends(".bias");
      const bool turned = weight_.name.find(".rotary.") != std::string::npos;
      const int64_t rows = weight_.shape[0];
      const int64_t columns = bias ? 1 : weight_.shape[1];
      const std::string kind = bias ? "bias" : "weight";
      const std::string base = weight_.name.substr(0, at + kDown.size());
      const int64_t other =
          Named(base + (turned ? "latent." : "rotary.") + kind).shape[0];
      PublishedPiece piece = Whole();
      piece.tensor = base + kind;
      piece.shape[0] = rows + other;
      if (turned) {
        piece.offset = other * columns;
        piece.block = Pairs(rows, columns);
      }
      return {{piece}};
    }
    constexpr std::string_view kUp = ".kv_b_proj.";
    if (const size_t at = weight_.name.find(kUp); at != std::string::npos) {
      const bool values = weight_.name.find(".v.") != std::string::npos;
      const std::string base = weight_.name.substr(0, at + kUp.size());
      const int64_t rows = weight_.shape[1];
      const int64_t columns = weight_.shape[2];
      const int64_t other =
          Named(base + (values ? "k.weight" : "v.weight")).shape[1];
      std::vector<PublishedPiece> pieces;
      for (int64_t head = 0; head < weight_.shape[0]; ++head) {
        PublishedPiece& piece = pieces.emplace_back();
        piece.tensor = base + "weight";
        piece.shape = {weight_.shape[0] * (rows + other), columns};
        piece.begin = head * rows * columns;
        piece.count = rows * columns;
        piece.offset = (head * (rows + other) + (values ? other : 0)) * columns;
      }
      return pieces;
    }
    return std::nullopt;
  }

  // A head that is its own has its own bias, too.
  std::string OfBert() const {
    const bool own = std::ranges::find(graph_.tensors, kBertHead,
                                       &Tensor::name) != graph_.tensors.end();
    return own && weight_.name == "cls.predictions.bias"
               ? "cls.predictions.decoder.bias"
               : weight_.name;
  }

  // With labels for tokens the encoder is a module of the model.
  std::string OfT5() const {
    constexpr std::string_view kLabels = "classifier.";
    const bool labels = std::ranges::any_of(
        graph_.tensors,
        [&](const Tensor& tensor) { return tensor.name.starts_with(kLabels); });
    return labels && !weight_.name.starts_with(kLabels)
               ? "transformer." + weight_.name
               : weight_.name;
  }

  // The class token and the positions are those of a batch of one.
  Shape OfVit() const {
    if (weight_.name.ends_with("cls_token") ||
        weight_.name.ends_with("position_embeddings")) {
      return {1, weight_.shape[0], weight_.shape[1]};
    }
    return weight_.name.ends_with("projection.weight") ? weight_.shape
                                                       : Whole().shape;
  }

  // Weights [e, out, in] are a matrix for each expert, or, fused, those of all
  // behind each other, of a gate above the others'.
  std::vector<PublishedPiece> ByExpert() const {
    constexpr std::string_view kExperts = ".experts.";
    const size_t at = weight_.name.rfind(kExperts) + kExperts.size();
    const std::string part =
        weight_.name.substr(at, weight_.name.rfind('.') - at);
    const bool is_down = part == "w2" || part == "down_proj";
    const bool is_up = part == "w3" || part == "up_proj";
    const int64_t count = elements_ / weight_.shape[0];
    std::vector<PublishedPiece> pieces;
    for (int64_t expert = 0; expert < weight_.shape[0]; ++expert) {
      PublishedPiece& piece = pieces.emplace_back();
      piece.tensor = weight_.name;
      piece.shape = {weight_.shape[1], weight_.shape[2]};
      piece.begin = expert * count;
      piece.count = count;
      if (experts_ == PublishedExperts::kEach) {
        piece.tensor.insert(at, std::to_string(expert) + ".");
        continue;
      }
      const int64_t matrices = is_down ? 1 : 2;
      piece.tensor.resize(at);
      piece.tensor += is_down ? "down_proj" : "gate_up_proj";
      piece.shape = {weight_.shape[0], matrices * weight_.shape[1],
                     weight_.shape[2]};
      piece.offset = (expert * matrices + (is_up ? 1 : 0)) * count;
    }
    return pieces;
  }

  // Rows of `turned` features that are neighbours by pairs.
  static std::vector<PublishedPiece::Dim> Pairs(int64_t turned,
                                                int64_t columns) {
    return {{2, columns}, {turned / 2, 2 * columns}, {columns, 1}};
  }

  const Tensor& Named(const std::string& name) const {
    const auto found = std::ranges::find(graph_.tensors, name, &Tensor::name);
    TESSERA_CHECK(found != graph_.tensors.end()) << name;
    return *found;
  }

  std::string_view family_;
  const Graph& graph_;
  const Tensor& weight_;
  PublishedExperts experts_;
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
    Family{"olmo", "model."},        Family{"bert", "bert."},
    Family{"t5", "transformer."},    Family{"vit", "vit."},
    Family{"resnet", "resnet."},     Family{"deepseek_v2", "model."},
    Family{"deepseek_v3", "model."},
};

// What other files have in place of a part of a tensor's name.
struct Renaming {
  std::string_view family;
  std::string_view published;
  std::string_view other;
};
constexpr std::array kRenamings = {
    // Files of before 2020.
    Renaming{"bert", "LayerNorm.weight", "LayerNorm.gamma"},
    Renaming{"bert", "LayerNorm.bias", "LayerNorm.beta"},
    // In memory of transformers 5.
    Renaming{"mixtral", "block_sparse_moe.", "mlp."},
    Renaming{"gemma3", "language_model.model.", "model.language_model."},
    Renaming{"vit", "encoder.layer.", "layers."},
    Renaming{"vit", "attention.attention.query.", "attention.q_proj."},
    Renaming{"vit", "attention.attention.key.", "attention.k_proj."},
    Renaming{"vit", "attention.attention.value.", "attention.v_proj."},
    Renaming{"vit", "attention.output.dense.", "attention.o_proj."},
    Renaming{"vit", "intermediate.dense.", "mlp.fc1."},
    Renaming{"vit", ".output.dense.", ".mlp.fc2."},
};

struct LeftOut {
  std::string_view family;
  std::string_view name;  // a part of the tensors' names
  std::string_view what;
};
constexpr std::string_view kImages = "the part that reads images";
constexpr std::string_view kHead = "a head that the model has not";
constexpr std::array kLeftOut = {
    LeftOut{"gemma3", "vision_tower.", kImages},
    LeftOut{"gemma3", "multi_modal_projector.", kImages},
    LeftOut{"bert", "cls.predictions.", kHead},
    LeftOut{"bert", "cls.seq_relationship.", kHead},
    LeftOut{"bert", "pooler.", kHead},
    LeftOut{"bert", "classifier.", kHead},
    LeftOut{"vit", "pooler.", kHead},
    LeftOut{"vit", "classifier.", kHead},
    LeftOut{"resnet", "classifier.", kHead},
    LeftOut{"t5", "decoder.", "a decoder that the model has not"},
    LeftOut{"t5", "classifier.", kHead},
    LeftOut{"deepseek_v3", ".e_score_correction_bias",
            "biases of routers' choices"},
};

bool HasWeight(const Graph& graph, std::string_view part) {
  return std::ranges::any_of(graph.tensors, [&](const Tensor& tensor) {
    return tensor.kind == TensorKind::kWeight &&
           tensor.name.find(part) != std::string::npos;
  });
}

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

std::string OtherPublishedName(std::string_view family, std::string tensor) {
  for (const Renaming& renaming : kRenamings) {
    const size_t at = tensor.find(renaming.published);
    if (renaming.family != family || at == std::string::npos) continue;
    tensor.replace(at, renaming.published.size(), renaming.other);
  }
  return tensor;
}

std::string_view PartLeftOut(std::string_view family, const Graph& graph,
                             std::string_view tensor) {
  const auto* const found =
      std::ranges::find_if(kLeftOut, [&](const LeftOut& part) {
        return part.family == family &&
               tensor.find(part.name) != std::string_view::npos &&
               !HasWeight(graph, part.name);
      });
  return found == kLeftOut.end() ? "" : found->what;
}

std::vector<PublishedPiece> PublishedPieces(std::string_view family,
                                            const Graph& graph,
                                            const Tensor& weight,
                                            PublishedExperts experts) {
  TESSERA_CHECK(HasPublishedWeights(family)) << family;
  return Layout(family, graph, weight, experts).Pieces();
}

std::vector<PublishedZeros> ZerosInFiles(std::string_view family,
                                         const Graph& graph) {
  std::vector<PublishedZeros> zeros;
  const std::map<TensorId, int64_t> padded = PaddedWeights(graph);
  for (const Tensor& weight : graph.tensors) {
    if (weight.kind != TensorKind::kWeight) continue;
    int64_t rows = weight.shape.empty() ? 1 : weight.shape[0];
    for (const auto& [id, unpadded] : padded) {
      if (&graph.tensor(id) == &weight) rows = unpadded;
    }
    if (family == "bert" && weight.name == kBertHead) {
      // Nothing reads it: the head has a bias of its own.
      zeros.push_back({"cls.predictions.bias", {rows}});
    }
    constexpr std::string_view kRouter = ".mlp.gate.weight";
    if (family == "deepseek_v3" && weight.name.ends_with(kRouter)) {
      const std::string router = weight.name.substr(0, weight.name.rfind('.'));
      zeros.push_back({router + ".e_score_correction_bias", {rows}});
    }
  }
  return zeros;
}

std::string WhyNotPublished(const PublishedLayout& layout, const Graph& graph) {
  const std::string& family = layout.family;
  if (layout.onnx || family.empty()) return "";
  if (!HasPublishedWeights(family)) {
    return "'" + family + "' is a family of Tessera's own";
  }
  if (family == "vit") {
    if (HasWeight(graph, ".q_norm.")) return "its 'vit' has no qk_norm";
    const bool shifts = HasWeight(graph, "vit.layernorm.bias");
    if (!shifts) return "its 'vit' has no rms_norm";
    const bool blocks = HasWeight(graph, ".layernorm_before.");
    if (blocks && !HasWeight(graph, ".layernorm_after.")) {
      return "its 'vit' has no parallel_blocks";
    }
  }
  const bool grouped = std::ranges::any_of(graph.tensors, [](const Tensor& t) {
    return t.kind == TensorKind::kWeight && t.shape.size() > 4;
  });
  if (family == "resnet" && grouped) return "its 'resnet' has no groups";
  return "";
}

}  // namespace tessera
