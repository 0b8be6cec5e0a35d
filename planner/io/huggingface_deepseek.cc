// DeepSeek-V2 and V3: Llama's layers with multi-head latent attention and, but
// for the first ones, a mixture of many small experts beside shared ones that
// every token takes. Names and defaults are those of transformers'
// DeepseekV2Config, DeepseekV3Config and their models.
//
// Left out, with a warning: the layers that predict further tokens, and the
// bias that V3 adds to scores before it chooses, which starts at zero and is
// trained by rules of its own (arXiv 2412.19437, section 2.1.2).
//
// `expert_capacity_factor` is Tessera's own key, as for Mixtral. The auxiliary
// loss is that of each sequence ("seq_aux").

#include <cmath>

#include "planner/io/huggingface.h"
#include "planner/io/transformer.h"

namespace tessera {
namespace {

// What tells the versions apart: how routers score, and what holds where the
// config does not say.
struct Version {
  std::string_view family;  // of transformers' classes
  bool sigmoid = false;
  int64_t group_best = 1;  // scores that rank a group
  int64_t groups = 1;
  int64_t top_groups = 1;
  double scale = 1;
  int64_t dense_layers = 0;
  int64_t shared = 2;  // experts
};

// Null: 0.
int64_t SizeOrNone(ModelConfig& config, std::string_view key,
                   int64_t fallback) {
  if (!config.values().fields.contains(key)) return fallback;
  return config.Has(key) ? config.Size(key) : 0;
}

ExpertOptions ReadExperts(ModelConfig& config, const Version& version) {
  ExpertOptions experts = {
      .experts = config.Size("n_routed_experts"),
      .top_k = config.Size("num_experts_per_tok"),
      .groups = config.Size("n_group", version.groups),
      .top_groups = config.Size("topk_group", version.top_groups),
      .group_best = version.group_best,
      .sigmoid = version.sigmoid,
      // Of V2's weights transformers makes no sum of one, whatever this says.
      .renormalise = config.Bool("norm_topk_prob", true) && version.sigmoid,
      .scale = config.Number("routed_scaling_factor", version.scale, 1e-6, 1e6),
      .capacity_factor = config.Number("expert_capacity_factor",
                                       kExpertCapacityFactor, 0, 1e6),
      .balance = config.Number("aux_loss_alpha", 0.001, 0, 1e6),
      .stddev = config.Number("initializer_range", 0.02, 0, 10)};
  // V3 has one method.
  const std::string method = config.String("topk_method", "greedy");
  if (!version.sigmoid && method == "greedy") {
    experts.groups = experts.top_groups = 1;
  }
  const std::string scoring = version.sigmoid ? "sigmoid" : "softmax";
  if (config.String("scoring_func", scoring) != scoring) {
    config.Wrong("scoring_func", "is \"" + config.String("scoring_func", "") +
                                     "\": expected \"" + scoring + "\"");
  }
  return experts;
}

void Warn(const ModelConfig& config, const ImportOptions& options,
          const std::string& message) {
  if (options.warnings == nullptr) return;
  options.warnings->push_back(config.path() + ": " + message);
}

Result<Graph> Build(ModelConfig& config, const ImportOptions& options,
                    const Version& version) {
  const int64_t hidden = config.Size("hidden_size");
  const int64_t layers = config.Layers("num_hidden_layers");
  const Vocabulary vocabulary = ReadVocabulary(config);
  const int64_t inner = config.Size("intermediate_size");
  const int64_t shared = SizeOrNone(config, "n_shared_experts", version.shared);
  const auto dense_layers = static_cast<int64_t>(
      config.Number("first_k_dense_replace",
                    static_cast<double>(version.dense_layers), 0, 1e6));
  if (!version.sigmoid) config.Refuse("mlp_bias");
  const int64_t every = config.Size("moe_layer_freq", 1);
  const std::string activation = ReadActivation(config, "hidden_act", "silu");
  const double epsilon = config.Number("rms_norm_eps", 1e-6, 0, 1);
  const double stddev = config.Number("initializer_range", 0.02, 0, 10);
  const bool bias = config.Bool("attention_bias", false);
  const bool tied = config.Bool("tie_word_embeddings", false);
  // Their weights' rows lie in another order.
  if (!config.Bool("rope_interleave", true)) {
    config.Wrong("rope_interleave", "is false: not supported");
  }
  // A model whose layers are all dense says nothing of experts.
  const bool any_experts = dense_layers < layers;
  const int64_t expert_inner =
      any_experts ? config.Size("moe_intermediate_size") : 1;
  const ExpertOptions experts =
      any_experts ? ReadExperts(config, version) : ExpertOptions();
  const LinearOptions plain = {.stddev = stddev};
  const LinearOptions biased = {.stddev = stddev, .bias = bias};
  LatentAttentionOptions attention = {
      .heads = config.Size("num_attention_heads"),
      .query_rank = SizeOrNone(config, "q_lora_rank", 1536),
      .key_value_rank = config.Size("kv_lora_rank"),
      .turned_size = config.Size("qk_rope_head_dim"),
      .plain_size = config.Size("qk_nope_head_dim"),
      .value_size = config.Size("v_head_dim"),
      .latents = biased,
      .heads_of_latents = plain,
      .out = biased};
  if (config.Size("num_key_value_heads", attention.heads) != attention.heads) {
    config.Wrong("num_key_value_heads", "expected num_attention_heads " +
                                            std::to_string(attention.heads) +
                                            ": latents are those of all heads");
  }
  const Head head =
      ReadHead(config, DecoderClasses(std::string(version.family)), options);
  CheckSeqLen(config, "max_position_embeddings", options);
  TESSERA_RETURN_IF_ERROR(config.Check());
  attention.rotary = ReadRotary(config, "rope_theta", "partial_rotary_factor",
                                1, attention.turned_size, options.seq_len);
  attention.scale = attention.rotary.score_scale /
                    std::sqrt(static_cast<double>(attention.turned_size +
                                                  attention.plain_size));
  TESSERA_RETURN_IF_ERROR(config.Check());
  WarnAttentionDropout(config, "attention_dropout", 0, options);
  if (config.Number("num_nextn_predict_layers", 0, 0, 1e6) > 0) {
    Warn(config, options,
         "num_nextn_predict_layers: layers that predict further tokens are "
         "left out");
  }
  if (version.sigmoid) {
    Warn(config, options,
         "e_score_correction_bias is left out: it starts at zero, and "
         "gradients do not train it");
  }
  TESSERA_RETURN_IF_ERROR(config.Check());

  Transformer model(config, options, hidden, head);
  const TensorId embedding = model.Matrix("model.embed_tokens.weight",
                                          {vocabulary.rows, hidden}, stddev);
  TensorId x =
      model.Lookup("model.embed_tokens", model.tokens(), embedding, vocabulary);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = "model.layers." + std::to_string(layer);
    model.BeginBlock(name);
    TensorId y = model.RmsNorm(name + ".input_layernorm", x, epsilon);
    y = model.LatentAttention(name + ".self_attn", y, attention);
    x = model.Add(name + ".self_attn.add", x, y);
    y = model.RmsNorm(name + ".post_attention_layernorm", x, epsilon);
    const std::string mlp = name + ".mlp";
    if (layer < dense_layers || layer % every != 0) {
      y = model.GatedMlp(mlp, activation, y, inner, plain);
    } else {
      const TensorId routed =
          model.Experts(mlp, activation, y, expert_inner, experts);
      y = shared == 0
              ? routed
              : model.Add(mlp + ".shared_add", routed,
                          model.GatedMlp(mlp + ".shared_experts", activation, y,
                                         shared * expert_inner, plain));
    }
    x = model.Add(mlp + ".add", x, y);
  }
  model.BeginBlock("head");
  x = model.RmsNorm("model.norm", x, epsilon);
  return model.FinishDecoder(head, x,
                             {.tied_to = tied ? embedding : TensorId(),
                              .vocabulary = vocabulary,
                              .width = hidden,
                              .stddev = stddev});
}

}  // namespace

Result<Graph> BuildDeepseekV2(ModelConfig& config,
                              const ImportOptions& options) {
  return Build(config, options, {.family = "DeepseekV2"});
}

Result<Graph> BuildDeepseekV3(ModelConfig& config,
                              const ImportOptions& options) {
  return Build(config, options,
               {.family = "DeepseekV3",
                .sigmoid = true,
                .group_best = 2,
                .groups = 8,
                .top_groups = 4,
                .scale = 2.5,
                .dense_layers = 3,
                .shared = 1});
}

}  // namespace tessera
