#include "planner/io/transformer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

#include "planner/base/element_count.h"
#include "planner/base/table.h"

namespace tessera {
namespace {

// What transformers calls the activations (ACT2FN in its activations.py);
// gelu_fast and gelu_pytorch_tanh are gelu_new written differently.
struct Activation {
  std::string_view name;
  std::string_view op;
};
constexpr std::array kActivations = {
    Activation{"gelu", "gelu_erf"},  Activation{"gelu_new", "gelu"},
    Activation{"gelu_fast", "gelu"}, Activation{"gelu_pytorch_tanh", "gelu"},
    Activation{"silu", "silu"},      Activation{"swish", "silu"},
    Activation{"relu", "relu"},
};

// What scores of places behind a query are, as in PyTorch's masks: within the
// range of bf16, and far below any score.
constexpr double kHidden = -1e9;

}  // namespace

Heads ReadHeads(ModelConfig& config, std::string_view hidden_key,
                std::string_view heads_key, int64_t key_value_heads,
                std::string_view key_value_heads_key, int64_t head_size) {
  const int64_t hidden = config.Size(hidden_key);
  const int64_t heads = config.Size(heads_key);
  if (head_size == 0 && hidden % heads != 0) {
    config.Wrong(heads_key,
                 "is " + std::to_string(heads) + ": expected a divisor of " +
                     std::string(hidden_key) + " " + std::to_string(hidden));
  }
  if (heads % key_value_heads != 0) {
    config.Wrong(key_value_heads_key, "is " + std::to_string(key_value_heads) +
                                          ": expected a divisor of " +
                                          std::string(heads_key) + " " +
                                          std::to_string(heads));
  }
  return {.groups = key_value_heads,
          .per_group = heads / key_value_heads,
          .size = head_size > 0 ? head_size : hidden / heads};
}

Result<std::string> ActivationNamed(std::string_view name) {
  TESSERA_TRY(
      const Activation* activation,
      Find("activation", std::span<const Activation>(kActivations), name));
  return std::string(activation->op);
}

std::string ReadActivation(ModelConfig& config, std::string_view key,
                           std::string_view fallback) {
  const auto found = ActivationNamed(config.String(key, fallback));
  if (found) return *found;
  config.Wrong(key, found.error().message);
  return "gelu";
}

namespace {

// What a scaled form may depend on besides its keys.
struct RotaryModel {
  ModelConfig& config;
  int64_t head_size = 0;
  int64_t seq_len = 0;
};

constexpr std::string_view kOriginal = "original_max_position_embeddings";

// How far positions are stretched; transformers has no default either.
double Stretch(ModelConfig& keys) {
  if (!keys.Has("factor")) {
    keys.Wrong("factor", "missing: expected a number of at least 1");
  }
  return keys.Number("factor", 1, 1, 1e6);
}

// How much YaRN stretches scores or features (Peng et al. 2023, equation 22),
// as transformers' modeling_rope_utils names and defaults its keys.
double YarnMagnitude(double factor, double multiplier) {
  return factor <= 1 ? 1 : 0.1 * multiplier * std::log(factor) + 1;
}

void ReadYarn(ModelConfig& keys, const RotaryModel& model, Rotary& rotary) {
  const double factor = Stretch(keys);
  const int64_t original =
      (keys.Has(kOriginal) ? keys : model.config)
          .Size(kOriginal, model.config.Size("max_position_embeddings"));
  const double turned = keys.Number("mscale", 0, 0, 1e3);
  const double all = keys.Number("mscale_all_dim", 0, 0, 1e3);
  const double magnitude =
      turned > 0 && all > 0
          ? YarnMagnitude(factor, turned) / YarnMagnitude(factor, all)
          : YarnMagnitude(factor, 1);
  rotary.op = "rotary_yarn";
  rotary.scaling = {
      {"beta_fast", keys.Number("beta_fast", 32, 1e-3, 1e6)},
      {"beta_slow", keys.Number("beta_slow", 1, 1e-3, 1e6)},
      {"factor", factor},
      {"magnitude", keys.Number("attention_factor", magnitude, 1e-3, 1e3)},
      {"original_positions", static_cast<double>(original)}};
  // Of queries and of keys.
  rotary.score_scale = std::pow(YarnMagnitude(factor, all), 2);
}

void ReadLinear(ModelConfig& keys, const RotaryModel&, Rotary& rotary) {
  rotary.op = "rotary_linear";
  rotary.scaling = {{"factor", Stretch(keys)}};
}

void ReadLlama3(ModelConfig& keys, const RotaryModel&, Rotary& rotary) {
  const double low = keys.Number("low_freq_factor", 1, 1e-3, 1e6);
  const double high = keys.Number("high_freq_factor", 4, 1e-3, 1e6);
  if (low >= high) {
    keys.Wrong("low_freq_factor", "expected less than high_freq_factor");
  }
  const auto original = static_cast<double>(keys.Size(kOriginal));
  rotary.op = "rotary_llama3";
  rotary.scaling = {{"factor", Stretch(keys)},
                    {"high_frequency", high},
                    {"low_frequency", low},
                    {"original_positions", original}};
}

// The numbers of one of two keys, by whether a sequence is longer than those
// that a model was first trained on, and how much features are stretched (as in
// transformers' modeling_rope_utils). Phi-3's configs have the original
// positions outside of `keys`.
void ReadLongRope(ModelConfig& keys, const RotaryModel& model, Rotary& rotary) {
  const auto original = static_cast<double>(
      (keys.Has(kOriginal) ? keys : model.config).Size(kOriginal));
  const auto most =
      static_cast<double>(model.config.Size("max_position_embeddings"));
  if (original < 2) keys.Wrong(kOriginal, "is 1: expected at least 2");
  const double factor = keys.Number("factor", most / original, 1e-6, 1e6);
  const double magnitude =
      factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(original));
  rotary.op = "rotary_longrope";
  rotary.scaling = {
      {"magnitude", keys.Number("attention_factor", magnitude, 1e-3, 1e3)}};
  const auto pairs = static_cast<size_t>(
      rotary.fraction * static_cast<double>(model.head_size) / 2);
  const bool is_long = static_cast<double>(model.seq_len) > original;
  for (const std::string_view key : {"long_factor", "short_factor"}) {
    const std::vector<double> divisors = keys.Numbers(key, pairs, 1e-3, 1e6);
    if ((key == "long_factor") != is_long) continue;
    for (double divisor : divisors) {
      rotary.scaling.push_back({"divisor", divisor});
    }
  }
}

// What transformers calls the scaled forms ("rope_type").
struct RotaryForm {
  std::string_view name;
  void (*read)(ModelConfig& keys, const RotaryModel& model, Rotary& rotary);
};
constexpr std::array kRotaryForms = {
    RotaryForm{"default", [](ModelConfig&, const RotaryModel&, Rotary&) {}},
    RotaryForm{"linear", ReadLinear},
    RotaryForm{"yarn", ReadYarn},
    RotaryForm{"llama3", ReadLlama3},
    RotaryForm{"longrope", ReadLongRope},
};

// Of those that the sizes of turned heads follow from the first that is there.
std::string_view HeadSizeKey(const ModelConfig& config) {
  for (std::string_view key : {"qk_rope_head_dim", "head_dim"}) {
    if (!config.Value(key).is_null()) return key;
  }
  return "hidden_size";
}

}  // namespace

Rotary ReadRotary(ModelConfig& config, std::string_view theta_key,
                  std::string_view fraction_key, double default_fraction,
                  int64_t head_size, int64_t seq_len, double default_theta) {
  // The same keys, at the top or inside rope_parameters.
  const JsonValue& inner = config.Value("rope_parameters");
  ModelConfig nested(config.path() + ": rope_parameters", inner);
  ModelConfig& source =
      inner.kind == JsonValue::Kind::kObject ? nested : config;
  // Bounds that only a mistake exceeds.
  double theta = config.Number(theta_key, default_theta, 1, 1e12);
  double fraction = config.Number(fraction_key, default_fraction, 0, 1);
  if (&source == &nested) {
    // What it does not have is as at the top.
    theta_key = "rope_theta";
    fraction_key = "partial_rotary_factor";
    theta = source.Number(theta_key, theta, 1, 1e12);
    fraction = source.Number(fraction_key, fraction, 0, 1);
  }
  const JsonValue& scaled = config.Value("rope_scaling");
  if (&source == &config && scaled.kind == JsonValue::Kind::kObject &&
      !scaled.Field("rope_theta").is_null()) {
    ModelConfig keys(config.path() + ": rope_scaling", scaled);
    theta = keys.Number("rope_theta", theta, 1, 1e12);
  }
  Rotary rotary = {.theta = theta, .fraction = fraction};
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const JsonValue& scaling = config.Value(key);
    if (scaling.is_null()) continue;
    const char* const type_key =
        scaling.Field("rope_type").is_null() ? "type" : "rope_type";
    const JsonValue& type = scaling.Field(type_key);
    // As the default form.
    if (key == std::string_view("rope_parameters") && type.is_null()) continue;
    // Phi-3's first configs have other names for it.
    const bool renamed = config.Value("model_type").text == "phi3" &&
                         (type.text == "su" || type.text == "yarn");
    const auto form = std::ranges::find(
        kRotaryForms, renamed ? "longrope" : std::string_view(type.text),
        &RotaryForm::name);
    if (form == kRotaryForms.end()) {
      // The other fields may be lists of a number for each feature.
      config.Wrong(
          std::string(key) + ": " + type_key,
          (type.is_null() ? "missing: expected a form of rotary embeddings"
                          : "is " + type.ToString() +
                                ": this form of rotary embeddings is not "
                                "supported") +
              std::string("; known: default, linear, yarn, llama3, longrope"));
      continue;
    }
    ModelConfig keys(key, scaling);
    form->read(keys, {config, head_size, seq_len}, rotary);
    if (auto checked = keys.Check(); !checked) {
      config.Wrong(checked.error().where, checked.error().message);
    }
  }
  if (auto checked = nested.Check(); !checked) {
    config.Wrong("rope_parameters", checked.error().message);
  }
  const double turned = rotary.fraction * static_cast<double>(head_size);
  if (turned < 2 || std::fmod(turned, 2) != 0) {
    std::ostringstream message;
    const bool is_given = !config.Value(fraction_key).is_null() ||
                          !source.Value(fraction_key).is_null();
    if (is_given) {
      message << "is " << rotary.fraction << " of heads of size " << head_size;
    } else {
      message << "makes heads of size " << head_size << ", of which "
              << rotary.fraction << " is turned";
    }
    message << ": expected an even number of turned features";
    config.Wrong(is_given ? fraction_key : HeadSizeKey(config), message.str());
  }
  return rotary;
}

void CheckSeqLen(ModelConfig& config, std::string_view key,
                 const ImportOptions& options, int64_t fallback) {
  const int64_t positions =
      fallback > 0 ? config.Size(key, fallback) : config.Size(key);
  if (options.seq_len > positions) {
    config.Wrong(key, "is " + std::to_string(positions) +
                          ": a sequence length of " +
                          std::to_string(options.seq_len) + " exceeds it");
  }
}

void WarnAttentionDropout(ModelConfig& config, std::string_view key,
                          double fallback, const ImportOptions& options) {
  const double probability = config.Number(key, fallback, 0, 1);
  if (probability == 0 || options.warnings == nullptr) return;
  std::ostringstream message;
  message << config.path() << ": " << key << "=" << probability
          << ": dropout on attention probabilities is not applied";
  options.warnings->push_back(message.str());
}

Transformer::Transformer(const ModelConfig& config,
                         const ImportOptions& options, int64_t hidden,
                         const Head& head, bool reads_tokens)
    : builder_(GraphName(config.path()), options.global_batch, options.seq_len,
               options.dtype.value_or(DType::kFloat32)),
      batch_(options.global_batch),
      hidden_(hidden),
      seq_len_(options.seq_len),
      dtype_(options.dtype.value_or(DType::kFloat32)) {
  builder_.BeginBlock("embed");
  if (reads_tokens) tokens_ = Input("tokens", {seq_len_});
  if (!head.loss->of_elements) {
    const bool one = head.kind == HeadKind::kLabel || !reads_tokens;
    labels_ = Input(one && reads_tokens ? "next_token" : "labels",
                    {one ? 1 : seq_len_});
  }
  positions_ = Input("positions", {seq_len_});
  mask_positions_ = positions_;
  if (options.documents) {
    mask_positions_ = Input("mask_positions", {seq_len_});
    widest_window_ = options.seq_len;
  }
}

TensorId Transformer::Input(std::string name, Shape row, DType dtype) {
  row.insert(row.begin(), batch_);
  return builder_.Input(std::move(name), std::move(row), dtype);
}

TensorId Transformer::Matrix(std::string name, Shape shape, double stddev,
                             bool weight_decay) {
  return builder_.Weight(std::move(name), std::move(shape), {.stddev = stddev},
                         weight_decay);
}

TensorId Transformer::RelativeBias(std::string name, int64_t buckets,
                                   const Heads& heads, double stddev) {
  return Matrix(std::move(name), {buckets, heads.groups, heads.per_group},
                stddev);
}

TensorId Transformer::Lookup(std::string name, TensorId ids, TensorId table) {
  return builder_.Add1("embedding", std::move(name), {ids, table});
}

TensorId Transformer::Lookup(std::string name, TensorId ids, TensorId table,
                             const Vocabulary& vocabulary) {
  return builder_.Add1("embedding", std::move(name), {ids, table}, "",
                       vocabulary.attributes());
}

TensorId Transformer::Linear(const std::string& name, TensorId x,
                             std::string_view n, std::string_view k,
                             Shape shape, const LinearOptions& options) {
  const TensorId matrix = Matrix(name + ".weight", shape, options.stddev);
  return LinearBy(name, x, n, k, matrix, std::move(shape), options.bias);
}

TensorId Transformer::LinearBy(const std::string& name, TensorId x,
                               std::string_view n, std::string_view k,
                               TensorId matrix, Shape shape, bool bias) {
  const std::string in(k);
  const std::string out(n);
  std::string rule = "bs" + in + "," + out + in;
  std::vector<TensorId> operands = {x, matrix};
  if (bias) {
    rule += "+" + out;
    shape.resize(out.size());
    operands.push_back(builder_.Weight(name + ".bias", shape, {},
                                       /*weight_decay=*/false));
  }
  return builder_.Add1("linear", name, operands, rule + "->bs" + out);
}

TensorId Transformer::LayerNorm(const std::string& name, TensorId x,
                                double epsilon) {
  const TensorId scale =
      builder_.Weight(name + ".weight", {hidden_}, {.constant = 1}, false);
  const TensorId shift = builder_.Weight(name + ".bias", {hidden_}, {}, false);
  return builder_.Add1("layer_norm", name, {x, scale, shift}, "",
                       {{"epsilon", epsilon}});
}

TensorId Transformer::PlainLayerNorm(const std::string& name, TensorId x,
                                     double epsilon) {
  const TensorId mean = builder_.Add1("row_mean", name + ".mean", {x});
  const TensorId deviation =
      builder_.Add1("row_std", name + ".std", {x}, "", {{"epsilon", epsilon}});
  x = builder_.Add1("subtract", name + ".centred", {x, mean}, "bsh,bs->bsh");
  return builder_.Add1("divide", name, {x, deviation}, "bsh,bs->bsh");
}

TensorId Transformer::LayerNormWithoutShift(const std::string& name, TensorId x,
                                            double epsilon) {
  const TensorId mean = builder_.Add1("row_mean", name + ".mean", {x});
  x = builder_.Add1("subtract", name + ".centred", {x, mean}, "bsh,bs->bsh");
  return RmsNorm(name, x, epsilon);
}

TensorId Transformer::RmsNorm(const std::string& name, TensorId x,
                              double epsilon, int64_t width) {
  const TensorId scale = builder_.Weight(
      name + ".weight", {width > 0 ? width : hidden_}, {.constant = 1}, false);
  return builder_.Add1("rms_norm", name, {x, scale}, "",
                       {{"epsilon", epsilon}});
}

TensorId Transformer::Dropout(std::string name, TensorId x,
                              double probability) {
  if (probability == 0) return x;
  return builder_.Add1("dropout", std::move(name), {x}, "bsh->bsh",
                       {{"probability", probability},
                        {"salt", static_cast<double>(dropouts_++)}});
}

TensorId Transformer::Add(std::string name, TensorId x, TensorId y) {
  return builder_.Add1("add", std::move(name), {x, y}, "bsh,bsh->bsh");
}

TensorId Transformer::Multiply(std::string name, TensorId x, TensorId y) {
  return builder_.Add1("multiply", std::move(name), {x, y}, "bsh,bsh->bsh");
}

TensorId Transformer::AddLosses(std::string name, TensorId x, TensorId y) {
  return builder_.Add1("add", std::move(name), {x, y}, ",->");
}

TensorId Transformer::Attention(const std::string& name,
                                const AttentionNames& names, TensorId x,
                                const AttentionOptions& options) {
  const auto& [g, r, d] = options.heads;
  const std::string prefix = name + ".";
  LinearOptions queries = options.qkv;
  if (options.query_stddev > 0) queries.stddev = options.query_stddev;
  const TensorId memory = options.memory.valid() ? options.memory : x;
  TensorId q;
  TensorId k;
  if (options.width_norm > 0) {
    q = NormedProjection(prefix + names.q, prefix + "q_norm", x, {g, r, d},
                         queries, options.width_norm);
    k = NormedProjection(prefix + names.k, prefix + "k_norm", memory, {g, d},
                         options.qkv, options.width_norm);
  } else {
    q = Linear(prefix + names.q, x, "grd", "i", {g, r, d, hidden_}, queries);
    k = Linear(prefix + names.k, memory, "gd", "i", {g, d, hidden_},
               options.qkv);
  }
  const TensorId v =
      Linear(prefix + names.v, memory, "ge", "i", {g, d, hidden_}, options.qkv);
  if (options.head_norm > 0) {
    q = HeadNorm(prefix + "q_norm", q, "bsgrd!,d->bsgrd,bsgr", d,
                 options.head_norm);
    k = HeadNorm(prefix + "k_norm", k, "bsgd!,d->bsgd,bsg", d,
                 options.head_norm);
  }
  if (options.rotary != nullptr) {
    q = Turn(prefix + "rotary_q", q, "bsgrd!,bs->bsgrd", *options.rotary);
    k = Turn(prefix + "rotary_k", k, "bsgd!,bs->bsgd", *options.rotary);
  }
  const TensorId attended = Attend(name, q, k, v, options);
  return Linear(prefix + names.out, attended, "o", "gre", {hidden_, g, r, d},
                options.out);
}

TensorId Transformer::HeadNorm(const std::string& name, TensorId x,
                               std::string_view rule, int64_t size,
                               double epsilon) {
  const TensorId scale =
      builder_.Weight(name + ".weight", {size}, {.constant = 1}, false);
  return builder_.Add1("rms_norm", name, {x, scale}, rule,
                       {{"epsilon", epsilon}});
}

TensorId Transformer::NormedProjection(const std::string& name,
                                       const std::string& norm, TensorId x,
                                       const Shape& heads,
                                       const LinearOptions& linear,
                                       double epsilon) {
  const int64_t width = ElementCount(heads);
  x = Linear(name, x, "o", "i", {width, hidden_}, linear);
  x = RmsNorm(norm, x, epsilon, width);
  std::vector<Attribute> extents = {
      {"first", static_cast<double>(heads[0])},
      {"second", static_cast<double>(heads[1])},
      {"third", heads.size() > 2 ? static_cast<double>(heads[2]) : 1}};
  return builder_.Add1("reshape", name + ".heads", {x},
                       heads.size() > 2 ? "bsh!->bsd!e!f!" : "bsh!->bsd!e!",
                       std::move(extents));
}

TensorId Transformer::Cap(const std::string& name, TensorId x,
                          std::string_view rule, double cap) {
  x = builder_.Add1("scale", name + ".narrow", {x}, rule,
                    {{"factor", 1 / cap}});
  x = builder_.Add1("tanh", name + ".tanh", {x}, rule);
  return builder_.Add1("scale", name + ".widen", {x}, rule, {{"factor", cap}});
}

TensorId Transformer::Turn(std::string name, TensorId x, std::string_view rule,
                           const Rotary& rotary) {
  std::vector<Attribute> attributes = rotary.scaling;
  attributes.insert(attributes.end(),
                    {{"fraction", rotary.fraction}, {"theta", rotary.theta}});
  return builder_.Add1(rotary.op, std::move(name), {x, positions_}, rule,
                       attributes);
}

TensorId Transformer::Attend(const std::string& name, TensorId q, TensorId k,
                             TensorId v, const AttentionOptions& options) {
  if (options.score_cap > 0) return AttendCapped(name, q, k, v, options);
  int64_t window = options.window;
  if (widest_window_ > 0) {
    window = window > 0 ? std::min(window, widest_window_) : widest_window_;
  }
  const auto positions = [&](TensorId given) {
    return given.valid() ? given : mask_positions_;
  };
  std::vector<TensorId> operands = {q, k, v, positions(options.query_positions),
                                    positions(options.key_positions)};
  std::vector<Attribute> attributes = {{"scale", options.scale}};
  const auto add = [&](std::string attribute, int64_t value) {
    attributes.push_back({std::move(attribute), static_cast<double>(value)});
  };
  if (options.relative_bias.valid()) {
    operands.push_back(options.relative_bias);
    add("causal", options.causal ? 1 : 0);
    add("max_distance", options.max_distance);
    return builder_.Add1("attention_relative", name, operands, "", attributes);
  }
  add("window", window);
  if (!options.causal) {
    add("causal", 0);
    return builder_.Add1("attention_bidirectional", name, operands, "",
                         attributes);
  }
  if (options.alibi) {
    add("alibi_heads", options.heads.groups * options.heads.per_group);
    return builder_.Add1("attention_alibi", name, operands, "", attributes);
  }
  return builder_.Add1("attention", name, operands, "", attributes);
}

TensorId Transformer::AttendCapped(const std::string& name, TensorId q,
                                   TensorId k, TensorId v,
                                   const AttentionOptions& options) {
  TESSERA_CHECK(options.window == 0 || options.window >= seq_len_) << name;
  TESSERA_CHECK(widest_window_ == 0) << name;
  TensorId scores =
      builder_.Add1("einsum", name + ".scores", {q, k}, "bqgrd,bkgd->bgrqk");
  scores = builder_.Add1("scale", name + ".scaled", {scores}, "bgrqk->bgrqk",
                         {{"factor", options.scale}});
  scores = Cap(name, scores, "bgrqk->bgrqk", options.score_cap);
  scores = builder_.Add1("causal_mask", name + ".mask", {scores},
                         "bgrqk->bgrqk", {{"value", kHidden}});
  scores =
      builder_.Add1("softmax", name + ".softmax", {scores}, "bgrqz->bgrqz");
  return builder_.Add1("einsum", name, {scores, v}, "bgrqk,bkgd->bqgrd");
}

TensorId Transformer::LatentAttention(const std::string& name, TensorId x,
                                      const LatentAttentionOptions& options) {
  const std::string prefix = name + ".";
  const int64_t heads = options.heads;
  const int64_t rank = options.key_value_rank;
  const int64_t size = options.turned_size + options.plain_size;
  TensorId q = x;
  if (options.query_rank > 0) {
    q = Linear(prefix + "q_a_proj", x, "o", "i", {options.query_rank, hidden_},
               options.latents);
    q = RmsNorm(prefix + "q_a_layernorm", q, options.epsilon,
                options.query_rank);
    q = Linear(prefix + "q_b_proj", q, "grd", "i",
               {heads, 1, size, options.query_rank}, options.heads_of_latents);
  } else {
    q = Linear(prefix + "q_proj", x, "grd", "i", {heads, 1, size, hidden_},
               options.heads_of_latents);
  }
  Rotary rotary = options.rotary;
  rotary.fraction =
      static_cast<double>(options.turned_size) / static_cast<double>(size);
  q = Turn(prefix + "rotary_q", q, "bsgrd!,bs->bsgrd", rotary);

  const std::string down = prefix + "kv_a_proj_with_mqa.";
  TensorId turned = Linear(down + "rotary", x, "d", "i",
                           {options.turned_size, hidden_}, options.latents);
  rotary.fraction = 1;
  turned = Turn(prefix + "rotary_k", turned, "bsd!,bs->bsd", rotary);
  TensorId latent =
      Linear(down + "latent", x, "o", "i", {rank, hidden_}, options.latents);
  latent = RmsNorm(prefix + "kv_a_layernorm", latent, options.epsilon, rank);
  const std::string up = prefix + "kv_b_proj.";
  const TensorId plain =
      Linear(up + "k", latent, "gd", "i", {heads, options.plain_size, rank},
             options.heads_of_latents);
  const TensorId v =
      Linear(up + "v", latent, "ge", "i", {heads, options.value_size, rank},
             options.heads_of_latents);
  const TensorId k = builder_.Add1("concat", prefix + "keys", {turned, plain},
                                   "bsm!,bsgn!->bsgd!",
                                   {{"features", static_cast<double>(size)}});
  AttentionOptions plain_attention;
  plain_attention.scale = options.scale;
  const TensorId attended = Attend(name, q, k, v, plain_attention);
  return Linear(prefix + "o_proj", attended, "o", "gre",
                {hidden_, heads, 1, options.value_size}, options.out);
}

TensorId Transformer::Mlp(const std::string& name, std::string_view up,
                          std::string_view down, std::string_view activation,
                          TensorId x, int64_t inner,
                          const LinearOptions& up_options,
                          const LinearOptions& down_options) {
  const std::string prefix = name + ".";
  x = Linear(prefix + std::string(up), x, "f", "i", {inner, hidden_},
             up_options);
  x = builder_.Add1(activation, prefix + "act", {x}, "bsf->bsf");
  return Linear(prefix + std::string(down), x, "o", "f", {hidden_, inner},
                down_options);
}

TensorId Transformer::Gated(const std::string& name,
                            std::string_view activation, TensorId x,
                            int64_t inner, const LinearOptions& options,
                            const GatedNames& names) {
  const std::string prefix = name + ".";
  TensorId gate =
      Linear(prefix + names.gate, x, "f", "i", {inner, hidden_}, options);
  gate = builder_.Add1(activation, prefix + "act_fn", {gate}, "bsf->bsf");
  const TensorId up =
      Linear(prefix + names.up, x, "f", "i", {inner, hidden_}, options);
  return builder_.Add1("multiply", prefix + "product", {gate, up},
                       "bsf,bsf->bsf");
}

TensorId Transformer::GatedMlp(const std::string& name,
                               std::string_view activation, TensorId x,
                               int64_t inner, const LinearOptions& options,
                               const GatedNames& names) {
  const TensorId product = Gated(name, activation, x, inner, options, names);
  return Linear(name + "." + names.down, product, "o", "f", {hidden_, inner},
                options);
}

TensorId Transformer::WeighedMlp(const std::string& name,
                                 std::string_view weight,
                                 std::string_view activation, TensorId x,
                                 int64_t inner, const LinearOptions& options) {
  const TensorId product = Gated(name, activation, x, inner, options, {});
  // One choice (k) for each token, as of experts.
  const TensorId down =
      Matrix(name + ".down_proj.weight", {1, hidden_, inner}, options.stddev);
  const TensorId choice = builder_.Add1("linear", name + ".down_proj",
                                        {product, down}, "bsf,k!hf->bskh");
  const std::string gate(weight);
  TensorId logit =
      builder_.Add1("linear", gate,
                    {x, Matrix(gate + ".weight", {1, hidden_}, options.stddev)},
                    "bsi,k!i->bsk");
  logit = builder_.Add1("sigmoid", gate + ".sigmoid", {logit}, "bsk->bsk");
  return builder_.Add1("moe_combine", name + ".weighed", {choice, logit});
}

TensorId Transformer::Scale(std::string name, TensorId x, double factor) {
  return builder_.Add1("scale", std::move(name), {x}, "bsh->bsh",
                       {{"factor", factor}});
}

TensorId Transformer::Experts(const std::string& name,
                              std::string_view activation, TensorId x,
                              int64_t inner, const ExpertOptions& options) {
  const std::string prefix = name + ".";
  const auto experts = static_cast<double>(options.experts);
  const auto top_k = static_cast<double>(options.top_k);
  const auto tokens = static_cast<double>(seq_len_);
  const double capacity = options.capacity_factor == 0
                              ? tokens
                              : std::clamp(std::ceil(options.capacity_factor *
                                                     top_k * tokens / experts),
                                           1.0, tokens);
  const TensorId router = Matrix(prefix + "gate.weight",
                                 {options.experts, hidden_}, options.stddev);
  const TensorId logits =
      builder_.Add1("linear_fp32", prefix + "gate", {x, router}, "bsi,ei->bse");
  // How the router chooses; what it makes of the choices.
  std::vector<Attribute> routing = {
      {"group_best", static_cast<double>(options.group_best)},
      {"groups", static_cast<double>(options.groups)},
      {"sigmoid", options.sigmoid ? 1.0 : 0.0},
      {"top_groups", static_cast<double>(options.top_groups)},
      {"top_k", top_k}};
  std::vector<Attribute> gate_attributes = routing;
  gate_attributes.insert(gate_attributes.end(),
                         {{"capacity", capacity},
                          {"renormalise", options.renormalise ? 1.0 : 0.0},
                          {"scale", options.scale}});
  const std::vector<TensorId> routes = builder_.Add(
      "moe_gate", prefix + "routes", {logits}, "", gate_attributes);
  if (options.balance > 0) {
    routing.push_back({"coefficient", options.balance});
    const TensorId balance =
        builder_.Add1("moe_balance", prefix + "balance", {logits}, "", routing);
    balance_ = balance_.valid() ? builder_.Add1("add", prefix + "balance_add",
                                                {balance_, balance}, ",->")
                                : balance;
  }
  const TensorId slots =
      builder_.Add1("moe_dispatch", prefix + "dispatch", {x, routes[1]}, "",
                    {{"capacity", capacity}, {"experts", experts}});
  const auto linear = [&](const std::string& part, TensorId in, int64_t rows,
                          int64_t columns) {
    const std::string whole = prefix + "experts." + part;
    const TensorId matrix = Matrix(
        whole + ".weight", {options.experts, rows, columns}, options.stddev);
    return builder_.Add1("expert_linear", whole, {in, matrix}, "",
                         {{"top_k", top_k}});
  };
  TensorId gate = linear(options.names.gate, slots, inner, hidden_);
  gate = builder_.Add1(activation, prefix + "experts.act_fn", {gate},
                       "ebsf->ebsf");
  const TensorId up = linear(options.names.up, slots, inner, hidden_);
  const TensorId product = builder_.Add1("multiply", prefix + "experts.product",
                                         {gate, up}, "ebsf,ebsf->ebsf");
  const TensorId down = linear(options.names.down, product, hidden_, inner);
  const TensorId collected =
      builder_.Add1("moe_collect", prefix + "collect", {down, routes[1]});
  return builder_.Add1("moe_combine", prefix + "combine",
                       {collected, routes[0]});
}

Result<Graph> Transformer::Finish(std::string head_name, TensorId x,
                                  TensorId matrix,
                                  const Vocabulary& vocabulary) {
  const TensorId logits =
      builder_.Add1("linear", std::move(head_name), {x, matrix}, "bsi,vi->bsv");
  return Finish(
      Loss("loss", logits, labels_, "count", vocabulary.attributes()));
}

Result<Graph> Transformer::Finish(const Head& head, TensorId x, int64_t places,
                                  int64_t width, double stddev) {
  if (head.kind == HeadKind::kLabel && places > 1) {
    x = Select(head.module + ".last_token", x, places - 1);
    places = 1;
  }
  if (head.kind != HeadKind::kNone) {
    x = Dropout(head.module + ".dropout", x, head.dropout.value_or(0));
    x = Linear(head.module, x, "v", "i", {head.labels, width},
               {.stddev = stddev, .bias = head.bias});
    width = head.labels;
  }
  if (!head.loss->of_elements) return Finish(Loss("loss", x, labels_));
  // As the graph's activations are.
  const TensorId targets = Input("targets", {places, width}, dtype_);
  return Finish(
      AddElementLoss(builder_, *head.loss, "loss", x, targets, "bsv", 1));
}

Result<Graph> Transformer::FinishDecoder(const Head& head, TensorId x,
                                         const LanguageHead& own) {
  if (head.kind != HeadKind::kOwn) {
    return Finish(head, x, seq_len_, own.width, own.stddev);
  }
  const Shape shape = {own.vocabulary.rows, own.width};
  const TensorId matrix = own.tied_to.valid()
                              ? own.tied_to
                              : Matrix(own.name + ".weight", shape, own.stddev);
  // The hidden states are fewer than their logits.
  if (own.scale != 1) x = Scale(own.name + ".scale", x, own.scale);
  TensorId logits = LinearBy(own.name, x, "v", "i", matrix, shape, own.bias);
  if (own.cap > 0) logits = Cap(own.name, logits, "bsv->bsv", own.cap);
  return Finish(
      Loss("loss", logits, labels_, "count", own.vocabulary.attributes()));
}

TensorId Transformer::Select(std::string name, TensorId x, int64_t place) {
  return builder_.Add1("select", std::move(name), {x}, "",
                       {{"count", 1}, {"place", static_cast<double>(place)}});
}

TensorId Transformer::Activate(std::string_view op, std::string name,
                               TensorId x) {
  return builder_.Add1(op, std::move(name), {x}, "bsh->bsh");
}

TensorId Transformer::Loss(std::string name, TensorId logits, TensorId labels,
                           std::string count,
                           std::vector<Attribute> attributes) {
  const TensorId counted =
      builder_.Add1("count_labels", std::move(count), {labels});
  return builder_.Add1("cross_entropy", std::move(name),
                       {logits, labels, counted}, "", std::move(attributes));
}

Result<Graph> Transformer::Finish(TensorId loss) {
  if (balance_.valid()) {
    loss = builder_.Add1("add", "loss.total", {loss, balance_}, ",->");
  }
  return builder_.Finish(loss);
}

}  // namespace tessera
