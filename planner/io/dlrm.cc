// Recommendation models, "model_type": "dlrm" (Naumov et al. 2019, "Deep
// Learning Recommendation Model for Personalization and Recommendation
// Systems"): numbers go through a bottom MLP, categories are looked up in a
// table each, all pairs of these vectors are multiplied, and a top MLP makes of
// the products and the bottom's result the logit of a click. Weights are called
// as in github.com/facebookresearch/dlrm, dlrm_s_pytorch.py, and start with its
// variances. The format of the config is Tessera's own, docs/models.md
// describes it.

#include <cmath>

#include "planner/io/huggingface.h"

namespace tessera {
namespace {

constexpr size_t kMostTables = kMostSteps - 1;  // stacked behind the bottom
constexpr size_t kMostLayers = 64;
// Ids are 32-bit numbers.
constexpr int64_t kMostRows = (int64_t{1} << 31) - 1;

struct DlrmSizes {
  int64_t dense = 13;
  int64_t features = 0;
  std::vector<int64_t> bottom;  // the last one is `features`
  std::vector<int64_t> top;
  std::vector<int64_t> rows;  // of each table
  int64_t bag = 1;
  bool mean = false;
};

class Dlrm {
 public:
  Dlrm(const ModelConfig& config, const ImportOptions& options,
       const DlrmSizes& sizes)
      : sizes_(sizes),
        dtype_(options.dtype.value_or(DType::kFloat32)),
        batch_(options.global_batch),
        builder_(GraphName(config.path()), options.global_batch, /*seq_len=*/1,
                 dtype_) {}

  Result<Graph> Build() {
    builder_.BeginBlock("bot_l");
    const TensorId numbers =
        builder_.Input("dense", {batch_, sizes_.dense}, dtype_);
    const TensorId targets = builder_.Input("targets", {batch_, 1}, dtype_);
    std::vector<TensorId> vectors = {Mlp("bot_l", numbers, sizes_.dense,
                                         sizes_.bottom, /*ends_in_relu=*/true)};
    // A block each, so that stages of a pipeline may hold some of the tables.
    for (size_t i = 0; i < sizes_.rows.size(); ++i) {
      vectors.push_back(Lookup(i));
    }
    builder_.BeginBlock("top_l");
    const auto count = static_cast<int64_t>(vectors.size());
    const int64_t pairs = count * (count - 1) / 2;
    std::string rule;
    for (int64_t i = 0; i < count; ++i) rule += i == 0 ? "bh" : ",bh";
    const TensorId stacked =
        builder_.Add1("stack", "interaction.stack", vectors, rule + "->bd!h",
                      {{"steps", static_cast<double>(count)}});
    const TensorId products =
        builder_.Add1("pairwise_dot", "interaction", {stacked}, "",
                      {{"pairs", static_cast<double>(pairs)}});
    const int64_t width = sizes_.features + pairs;
    const TensorId joined = builder_.Add1(
        "concat_channels", "interaction.concat", {vectors[0], products},
        "bm!,bn!->bd!", {{"channels", static_cast<double>(width)}});
    const TensorId logits =
        Mlp("top_l", joined, width, sizes_.top, /*ends_in_relu=*/false);
    return builder_.Finish(builder_.Add1("binary_cross_entropy", "loss",
                                         {logits, targets}, "bf,bf->",
                                         {{"weight", 1}}));
  }

 private:
  // Layer i is NAME.2i, as the activations between them have numbers, too.
  TensorId Mlp(const std::string& name, TensorId x, int64_t in,
               const std::vector<int64_t>& widths, bool ends_in_relu) {
    for (size_t i = 0; i < widths.size(); ++i) {
      const std::string layer = name + "." + std::to_string(2 * i);
      const auto rows = static_cast<double>(widths[i]);
      const TensorId weight = builder_.Weight(
          layer + ".weight", {widths[i], in},
          {.stddev = std::sqrt(2 / (static_cast<double>(in) + rows))}, true);
      const TensorId bias = builder_.Weight(
          layer + ".bias", {widths[i]}, {.stddev = std::sqrt(1 / rows)}, false);
      x = builder_.Add1("linear", layer, {x, weight, bias}, "bi,oi+o->bo");
      if (i + 1 < widths.size() || ends_in_relu) {
        x = builder_.Add1("relu", name + "." + std::to_string(2 * i + 1), {x},
                          "bf->bf");
      }
      in = widths[i];
    }
    return x;
  }

  TensorId Lookup(size_t i) {
    const std::string number = std::to_string(i);
    builder_.BeginBlock("emb_l." + number);
    const TensorId ids = builder_.Input("categories." + number,
                                        {batch_, sizes_.bag}, DType::kInt32);
    // Uniform between -1/sqrt(rows) and as much: a variance of 1 / (3 rows).
    const double variance = 1 / (3 * static_cast<double>(sizes_.rows[i]));
    const TensorId table = builder_.Weight("emb_l." + number + ".weight",
                                           {sizes_.rows[i], sizes_.features},
                                           {.stddev = std::sqrt(variance)},
                                           /*weight_decay=*/false);
    return builder_.Add1("embedding_bag", "emb_l." + number, {ids, table}, "",
                         {{"mean", sizes_.mean ? 1.0 : 0.0}});
  }

  const DlrmSizes& sizes_;
  const DType dtype_;
  const int64_t batch_;
  GraphBuilder builder_;
};

}  // namespace

Result<Graph> BuildDlrm(ModelConfig& config, const ImportOptions& options) {
  DlrmSizes sizes;
  sizes.dense = config.Size("num_dense_features", sizes.dense);
  const auto sizes_of = [&](std::string_view key, size_t most_items) {
    return config.WholeNumbers(key,
                               {.most_items = most_items, .most = kMostRows});
  };
  sizes.bottom = sizes_of("bottom_mlp", kMostLayers);
  sizes.top = sizes_of("top_mlp", kMostLayers);
  sizes.rows = sizes_of("table_rows", kMostTables);
  TESSERA_RETURN_IF_ERROR(config.Check());
  sizes.features = config.Size("embedding_dim", sizes.bottom.back());
  sizes.bag = config.Size("bag_size", 1);
  const std::string mode = config.String("bag_mode", "sum");
  sizes.mean = mode == "mean";
  if (!sizes.mean && mode != "sum") {
    config.Wrong("bag_mode",
                 "is \"" + mode + "\": expected \"sum\" or \"mean\"");
  }
  if (sizes.bottom.back() != sizes.features) {
    config.Wrong("bottom_mlp", "ends in " +
                                   std::to_string(sizes.bottom.back()) +
                                   ": expected the embedding_dim, " +
                                   std::to_string(sizes.features));
  }
  if (sizes.top.back() != 1) {
    config.Wrong("top_mlp", "ends in " + std::to_string(sizes.top.back()) +
                                ": expected 1, the logit of a click");
  }
  TESSERA_RETURN_IF_ERROR(config.Check());
  if (options.seq_len > 1 && options.warnings != nullptr) {
    options.warnings->push_back(config.path() +
                                ": its samples have no sequence: its length "
                                "is left out");
  }
  return Dlrm(config, options, sizes).Build();
}

}  // namespace tessera
