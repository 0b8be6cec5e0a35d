#include "planner/io/decoder.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "planner/base/indexed.h"

namespace tessera {
namespace {

bool HasExperts(const Decoder& decoder, int64_t layer) {
  return decoder.experts.experts > 0 &&
         (layer + 1) % decoder.expert_step == 0 &&
         std::ranges::find(decoder.dense_layers, layer) ==
             decoder.dense_layers.end();
}

// Which layers have the window. transformers writes it down in "layer_types"
// since 4.53; families that do not read it have to agree with it.
std::vector<bool> WindowedLayers(ModelConfig& config, const Decoder& decoder,
                                 int64_t layers) {
  constexpr std::string_view kTypes = "layer_types";
  constexpr std::string_view kSliding = "sliding_attention";
  constexpr std::string_view kFull = "full_attention";
  std::vector<bool> windowed = decoder.windowed;
  if (windowed.empty()) {
    windowed.assign(static_cast<size_t>(layers), decoder.window > 0);
  }
  if (!config.Has(kTypes)) return windowed;
  std::vector<std::string> types = config.Strings(kTypes);
  // One type for all says it of any number of layers (--set model.layers=N).
  const bool one = !types.empty() &&
                   std::ranges::count(types, types[0]) == std::ssize(types);
  if (one) types.resize(windowed.size(), std::string(types[0]));
  if (types.size() != windowed.size()) {
    config.Wrong(kTypes, "has " + std::to_string(types.size()) +
                             " items: expected one for each of " +
                             std::to_string(layers) +
                             " layers, or null for what the family has");
    return windowed;
  }
  for (size_t i = 0; i < types.size(); ++i) {
    const bool sliding = types[i] == kSliding;
    std::string expected;
    if (!sliding && types[i] != kFull) {
      expected = std::string(kFull) + " or " + std::string(kSliding);
    } else if (sliding && decoder.window == 0) {
      expected = std::string(kFull) + ", as the model has no window";
    } else if (!decoder.reads_layer_types && sliding != windowed[i]) {
      expected = std::string(windowed[i] ? kSliding : kFull) +
                 ", as the family has in all such layers";
    }
    if (!expected.empty()) {
      config.Wrong(Indexed(kTypes, static_cast<int>(i)),
                   "is '" + types[i] + "': expected " + expected);
      break;
    }
    windowed[i] = sliding;
  }
  return windowed;
}

// What capped scores and logits cannot be combined with.
void CheckCaps(ModelConfig& config, const ImportOptions& options,
               const Decoder& decoder, const Vocabulary& vocabulary,
               bool tied) {
  constexpr std::string_view kScores = "attn_logit_softcapping";
  if (decoder.score_cap > 0 && options.documents) {
    config.Wrong(kScores,
                 "is not null: documents are not kept apart where scores are "
                 "capped");
  }
  if (decoder.score_cap > 0 && decoder.window > 0 &&
      decoder.window < options.seq_len) {
    config.Wrong("sliding_window",
                 "is " + std::to_string(decoder.window) +
                     ": expected at least the sequence length, " +
                     std::to_string(options.seq_len) + ", where " +
                     std::string(kScores) + " is not null");
  }
  if (decoder.logit_cap > 0 && !tied && vocabulary.rows > vocabulary.tokens) {
    config.Wrong("vocab_multiple",
                 "is not supported of a head of its own where "
                 "final_logit_softcapping is not null");
  }
}

}  // namespace

Result<Graph> BuildDecoder(ModelConfig& config, const ImportOptions& options,
                           const Decoder& decoder) {
  const DecoderKeys& keys = decoder.keys;
  const DecoderNames& names = decoder.names;
  const int64_t hidden = config.Size(keys.hidden);
  const int64_t layers = config.Layers(keys.layers);
  const Vocabulary vocabulary = ReadVocabulary(config);
  const int64_t inner = decoder.inner > 0
                            ? config.Size(keys.inner, decoder.inner)
                            : config.Size(keys.inner);
  const int64_t head_size = decoder.reads_head_size
                                ? config.Size("head_dim", decoder.head_size)
                                : decoder.head_size;
  const std::vector<bool> windowed = WindowedLayers(config, decoder, layers);
  const Heads heads =
      ReadHeads(config, keys.hidden, keys.heads, decoder.key_value_heads,
                keys.key_value_heads, head_size);
  const std::string activation =
      ReadActivation(config, keys.activation, keys.default_activation);
  const double epsilon =
      keys.epsilon.empty()
          ? keys.default_epsilon
          : config.Number(keys.epsilon, keys.default_epsilon, 0, 1);
  const double stddev =
      config.Number("initializer_range", decoder.stddev, 0, 10);
  const bool tied = config.Bool("tie_word_embeddings", decoder.tied);
  const Head head = ReadHead(config, decoder.classes, options);
  CheckSeqLen(config, keys.positions, options, keys.default_positions);
  CheckCaps(config, options, decoder, vocabulary, tied);
  TESSERA_RETURN_IF_ERROR(config.Check());
  const Rotary rotary =
      decoder.rotary != nullptr
          ? *decoder.rotary
          : ReadRotary(config, "rope_theta", "partial_rotary_factor",
                       decoder.turned_part, heads.size, options.seq_len,
                       decoder.theta);
  TESSERA_RETURN_IF_ERROR(config.Check());
  WarnAttentionDropout(config, keys.attention_dropout, 0, options);
  TESSERA_RETURN_IF_ERROR(config.Check());
  if (rotary.fraction != 1 && rotary.op == "rotary" && !decoder.turns_part &&
      options.warnings != nullptr) {
    std::ostringstream message;
    message << config.path() << ": partial_rotary_factor=" << rotary.fraction
            << ": is applied; transformers' model of this family turns all "
               "features";
    options.warnings->push_back(message.str());
  }

  ExpertOptions experts = decoder.experts;
  experts.stddev = stddev;
  const LinearOptions mlp = {.stddev = stddev, .bias = decoder.mlp_bias};
  AttentionOptions attention = {
      .heads = heads,
      .scale = decoder.score_scale > 0
                   ? decoder.score_scale
                   : 1 / std::sqrt(static_cast<double>(heads.size)),
      .head_norm = decoder.head_norm ? epsilon : 0,
      .width_norm = decoder.width_norm ? epsilon : 0,
      .score_cap = decoder.score_cap,
      .qkv = {.stddev = stddev, .bias = decoder.qkv_bias},
      .out = {.stddev = stddev, .bias = decoder.out_bias}};

  Transformer model(config, options, hidden, head);
  const auto norm = [&](const std::string& name, TensorId x) {
    switch (decoder.norm) {
      case NormKind::kLayer:
        return model.LayerNorm(name, x, epsilon);
      case NormKind::kLayerWithoutShift:
        return model.LayerNormWithoutShift(name, x, epsilon);
      case NormKind::kPlainLayer:
        return model.PlainLayerNorm(name, x, epsilon);
      case NormKind::kRms:
        break;
    }
    return model.RmsNorm(name, x, epsilon);
  };
  const auto scaled = [&](const std::string& name, TensorId x, double factor) {
    return factor == 1 ? x : model.Scale(name, x, factor);
  };
  const TensorId embedding = model.Matrix(names.embedding + ".weight",
                                          {vocabulary.rows, hidden}, stddev);
  TensorId x =
      model.Lookup(names.embedding, model.tokens(), embedding, vocabulary);
  x = scaled("model.embed_scale", x, decoder.embedding_scale);
  x = model.Dropout("model.embed_dropout", x, decoder.embedding_dropout);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = names.layer + std::to_string(layer);
    model.BeginBlock(name);
    const auto place = static_cast<size_t>(layer);
    const auto norm_of = [&](const std::string& part, TensorId z) {
      return part.empty() ? z : norm(name + part, z);
    };
    attention.window = windowed[place] ? decoder.window : 0;
    const bool turns = decoder.turned.empty() || decoder.turned[place];
    const bool other = windowed[place] && decoder.windowed_rotary != nullptr;
    attention.rotary = !turns  ? nullptr
                       : other ? decoder.windowed_rotary
                               : &rotary;
    const std::string module = name + names.attention_module;
    const TensorId normed = norm_of(names.before_attention, x);
    TensorId y = model.Attention(module, names.attention, normed, attention);
    y = norm_of(names.behind_attention, y);
    y = model.Dropout(name + ".resid_attn_dropout", y,
                      decoder.residual_dropout);
    y = scaled(module + ".scaled", y, decoder.residual_scale);
    if (!decoder.parallel) x = model.Add(module + ".add", x, y);
    TensorId z = decoder.parallel && names.before_mlp.empty()
                     ? normed
                     : norm_of(names.before_mlp, x);
    std::string mlp_module = name + ".mlp";
    if (HasExperts(decoder, layer)) {
      mlp_module = name + std::string(decoder.expert_module);
      TensorId routed = model.Experts(mlp_module, activation, z,
                                      decoder.expert_inner, experts);
      if (decoder.shared_inner > 0) {
        const TensorId shared = model.WeighedMlp(
            mlp_module + ".shared_expert", mlp_module + ".shared_expert_gate",
            activation, z, decoder.shared_inner, mlp);
        routed = model.Add(mlp_module + ".shared_add", routed, shared);
      }
      z = routed;
    } else if (names.mlp.gate.empty()) {
      z = model.Mlp(mlp_module, names.mlp.up, names.mlp.down, activation, z,
                    inner, mlp, mlp);
    } else {
      z = model.GatedMlp(mlp_module, activation, z, inner, mlp, names.mlp);
    }
    z = norm_of(names.behind_mlp, z);
    z = model.Dropout(name + ".resid_mlp_dropout", z, decoder.residual_dropout);
    z = scaled(mlp_module + ".scaled", z, decoder.residual_scale);
    if (decoder.parallel) z = model.Add(name + ".branches.add", y, z);
    x = model.Add(mlp_module + ".add", x, z);
  }
  model.BeginBlock("head");
  x = norm(names.last_norm, x);
  return model.FinishDecoder(head, x,
                             {.tied_to = tied ? embedding : TensorId(),
                              .vocabulary = vocabulary,
                              .width = hidden,
                              .stddev = stddev,
                              .bias = decoder.head_bias,
                              .scale = decoder.logit_scale,
                              .cap = decoder.logit_cap});
}

int64_t ReadWindow(ModelConfig& config, int64_t fallback) {
  if (!config.values().fields.contains("sliding_window")) return fallback;
  return config.Size("sliding_window", 0);
}

int64_t KeyValueHeads(ModelConfig& config, int64_t fallback) {
  constexpr std::string_view kKey = "num_key_value_heads";
  const bool says_nothing = !config.values().fields.contains(kKey);
  return config.Size(kKey, says_nothing && fallback > 0
                               ? fallback
                               : config.Size("num_attention_heads"));
}

}  // namespace tessera
