// ViT (Dosovitskiy et al. 2021): pre-norm blocks of bidirectional attention
// over the patches of an image, behind a token that stands for its class. Names
// and defaults are those of transformers' ViTConfig and
// ViTForImageClassification, or, where `architectures` says so, of ViTModel,
// which has a pooler instead of the classifier.
//
// A convolution whose stride is its kernel is a dense layer of patches: the
// input "patches" has them behind a patch of zeros, where the class token
// stands. What differs between that place and the others is looked up: the
// token is row 0 of a table of one row, by position, and the layer's bias that
// of another, by "patch_rows", which is -1 there and else 0; ids beyond a table
// read zeros.
//
// Keys of Tessera's own are what Dehghani et al. (2023, section 2) changed for
// 22 billion parameters: "parallel_blocks" (attention and MLP side by side,
// behind one norm), "qk_norm" (norms of each head's queries and keys) and
// "rms_norm" (norms without a mean and a shift).

#include <array>
#include <cmath>

#include "planner/io/huggingface.h"
#include "planner/io/transformer.h"

namespace tessera {

Result<Graph> BuildVit(ModelConfig& config, const ImportOptions& options) {
  const int64_t hidden = config.Size("hidden_size", 768);
  const int64_t layers = config.Layers("num_hidden_layers");
  const int64_t inner = config.Size("intermediate_size", 3072);
  const int64_t image = config.Size("image_size", 224);
  const int64_t patch = config.Size("patch_size", 16);
  const int64_t channels = config.Size("num_channels", 3);
  const Heads heads =
      ReadHeads(config, "hidden_size", "num_attention_heads",
                config.Size("num_attention_heads"), "num_attention_heads");
  const std::string activation = ReadActivation(config, "hidden_act", "gelu");
  const double epsilon = config.Number("layer_norm_eps", 1e-12, 0, 1);
  const double stddev = config.Number("initializer_range", 0.02, 0, 10);
  // 0.99: with nothing kept there is nothing to scale.
  const double dropout = config.Number("hidden_dropout_prob", 0, 0, 0.99);
  const bool bias = config.Bool("qkv_bias", true);
  const bool parallel = config.Bool("parallel_blocks", false);
  const bool head_norms = config.Bool("qk_norm", false);
  const bool rms = config.Bool("rms_norm", false);
  const std::array classes = {
      HeadClass{.name = "ViTForImageClassification",
                .kind = HeadKind::kLabel,
                .module = "classifier",
                .bias = true},
      HeadClass{.name = "ViTModel", .kind = HeadKind::kNone}};
  const Head head = ReadHead(config, classes, options);
  const bool pooled = head.kind == HeadKind::kNone;
  // transformers 5; earlier ones have neither key.
  const int64_t pooled_size =
      pooled ? config.Size("pooler_output_size", hidden) : 0;
  if (pooled && config.String("pooler_act", "tanh") != "tanh") {
    config.Wrong("pooler_act", "expected \"tanh\"");
  }
  if (image % patch != 0) {
    config.Wrong("patch_size", "is " + std::to_string(patch) +
                                   ": expected a divisor of image_size " +
                                   std::to_string(image));
  }
  TESSERA_RETURN_IF_ERROR(config.Check());
  WarnAttentionDropout(config, "attention_probs_dropout_prob", 0, options);
  TESSERA_RETURN_IF_ERROR(config.Check());

  const LinearOptions linear = {.stddev = stddev, .bias = true};
  const AttentionOptions attention = {
      .heads = heads,
      .scale = 1 / std::sqrt(static_cast<double>(heads.size)),
      .causal = false,
      .head_norm = head_norms ? epsilon : 0,
      .qkv = {.stddev = stddev, .bias = bias},
      .out = linear};

  // The image says how many places there are.
  ImportOptions of_image = options;
  of_image.documents = false;
  of_image.seq_len = image / patch * (image / patch) + 1;
  Transformer model(config, of_image, hidden, head,
                    /*reads_tokens=*/false);
  const TensorId patches =
      model.Input("patches", {of_image.seq_len, channels, patch, patch},
                  options.dtype.value_or(DType::kFloat32));
  const TensorId rows = model.Input("patch_rows", {of_image.seq_len});
  const std::string embeddings = "vit.embeddings.";
  const std::string projection = embeddings + "patch_embeddings.projection";
  TensorId x =
      model.Linear(projection, patches, "o", "cuv",
                   {hidden, channels, patch, patch}, {.stddev = stddev});
  const TensorId projection_bias =
      model.Matrix(projection + ".bias", {1, hidden}, 0,
                   /*weight_decay=*/false);
  x = model.Add(
      projection + ".add_bias", x,
      model.Lookup(projection + ".bias_of_patches", rows, projection_bias));
  const auto add = [&](const std::string& name, int64_t count) {
    const TensorId table =
        model.Matrix(embeddings + name, {count, hidden}, stddev);
    x = model.Add(
        embeddings + "add_" + name, x,
        model.Lookup(embeddings + name + ".rows", model.positions(), table));
  };
  add("cls_token", 1);
  add("position_embeddings", of_image.seq_len);
  x = model.Dropout(embeddings + "dropout", x, dropout);
  const auto norm = [&](const std::string& name, TensorId of) {
    return rms ? model.RmsNorm(name, of, epsilon)
               : model.LayerNorm(name, of, epsilon);
  };
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = "vit.encoder.layer." + std::to_string(layer);
    model.BeginBlock(name);
    const TensorId normed = norm(name + ".layernorm_before", x);
    TensorId y = model.Attention(
        name + ".attention",
        {"attention.query", "attention.key", "attention.value", "output.dense"},
        normed, attention);
    y = model.Dropout(name + ".attention.output.dropout", y, dropout);
    if (!parallel) x = model.Add(name + ".attention.add", x, y);
    TensorId z = parallel ? normed : norm(name + ".layernorm_after", x);
    z = model.Mlp(name, "intermediate.dense", "output.dense", activation, z,
                  inner, linear, linear);
    z = model.Dropout(name + ".output.dropout", z, dropout);
    if (parallel) z = model.Add(name + ".branches.add", y, z);
    x = model.Add(name + ".output.add", x, z);
  }
  model.BeginBlock("head");
  x = norm("vit.layernorm", x);
  x = model.Select("classifier.token", x, 0);
  if (pooled) {
    x = model.Linear("vit.pooler.dense", x, "o", "i", {pooled_size, hidden},
                     linear);
    x = model.Activate("tanh", "vit.pooler.activation", x);
  }
  return model.Finish(head, x, /*places=*/1, pooled ? pooled_size : hidden,
                      stddev);
}

}  // namespace tessera
