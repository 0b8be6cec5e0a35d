#include "planner/io/decoder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <sstream>
#include <system_error>

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
};

// The name of the config's folder: the files themselves are all called alike.
std::string GraphName(const std::string& path) {
  std::error_code error;
  const std::filesystem::path whole = std::filesystem::absolute(path, error);
  if (error) return "model";
  return whole.lexically_normal().parent_path().filename().string();
}

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

std::string ReadActivation(ModelConfig& config, std::string_view key,
                           std::string_view fallback) {
  const std::string name = config.String(key, fallback);
  auto found =
      Find("activation", std::span<const Activation>(kActivations), name);
  if (found) return std::string((*found)->op);
  config.Wrong(key, found.error().message);
  return "gelu";
}

Rotary ReadRotary(ModelConfig& config, std::string_view theta_key,
                  std::string_view fraction_key, double default_fraction,
                  int64_t head_size) {
  // The same keys, at the top or inside rope_parameters.
  const JsonValue& inner = config.values().Field("rope_parameters");
  ModelConfig nested(config.path() + ": rope_parameters", inner);
  ModelConfig& source =
      inner.kind == JsonValue::Kind::kObject ? nested : config;
  if (&source == &nested) {
    theta_key = "rope_theta";
    fraction_key = "partial_rotary_factor";
  }
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const JsonValue& scaling = config.values().Field(key);
    if (scaling.is_null()) continue;
    const JsonValue& type = scaling.Field("rope_type").is_null()
                                ? scaling.Field("type")
                                : scaling.Field("rope_type");
    if (type.text != "default") {
      config.Wrong(key, "is " + scaling.ToString() +
                            ": scaled rotary embeddings are not supported");
    }
  }
  const Rotary rotary = {
      // Bounds that only a mistake exceeds; 10000 is Su et al. 2021's.
      .theta = source.Number(theta_key, 10000, 1, 1e12),
      .fraction = source.Number(fraction_key, default_fraction, 0, 1)};
  if (auto checked = nested.Check(); !checked) {
    config.Wrong("rope_parameters", checked.error().message);
  }
  const double turned = rotary.fraction * static_cast<double>(head_size);
  if (turned < 2 || std::fmod(turned, 2) != 0) {
    std::ostringstream message;
    message << "is " << rotary.fraction << " of heads of size " << head_size
            << ": expected an even number of turned features";
    config.Wrong(fraction_key, message.str());
  }
  return rotary;
}

void CheckSeqLen(ModelConfig& config, std::string_view key,
                 const ImportOptions& options) {
  const int64_t positions = config.Size(key);
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

Decoder::Decoder(const ModelConfig& config, const ImportOptions& options,
                 int64_t hidden)
    : builder_(GraphName(config.path()), options.global_batch, options.seq_len,
               options.dtype.value_or(DType::kFloat32)),
      hidden_(hidden),
      seq_len_(options.seq_len) {
  const Shape shape = {options.global_batch, options.seq_len};
  builder_.BeginBlock("embed");
  tokens_ = builder_.Input("tokens", shape, DType::kInt32);
  labels_ = builder_.Input("labels", shape, DType::kInt32);
  positions_ = builder_.Input("positions", shape, DType::kInt32);
  mask_positions_ = positions_;
  if (options.documents) {
    mask_positions_ = builder_.Input("mask_positions", shape, DType::kInt32);
    widest_window_ = options.seq_len;
  }
}

TensorId Decoder::Matrix(std::string name, Shape shape, double stddev) {
  return builder_.Weight(std::move(name), std::move(shape), {.stddev = stddev},
                         /*weight_decay=*/true);
}

TensorId Decoder::Lookup(std::string name, TensorId ids, TensorId table) {
  return builder_.Add1("embedding", std::move(name), {ids, table});
}

TensorId Decoder::Linear(const std::string& name, TensorId x,
                         std::string_view n, std::string_view k, Shape shape,
                         const LinearOptions& options) {
  const std::string in(k);
  const std::string out(n);
  std::string rule = "bs" + in + "," + out + in;
  std::vector<TensorId> operands = {
      x, Matrix(name + ".weight", shape, options.stddev)};
  if (options.bias) {
    rule += "+" + out;
    shape.resize(out.size());
    operands.push_back(builder_.Weight(name + ".bias", shape, {},
                                       /*weight_decay=*/false));
  }
  return builder_.Add1("linear", name, operands, rule + "->bs" + out);
}

TensorId Decoder::LayerNorm(const std::string& name, TensorId x,
                            double epsilon) {
  const TensorId scale =
      builder_.Weight(name + ".weight", {hidden_}, {.constant = 1}, false);
  const TensorId shift = builder_.Weight(name + ".bias", {hidden_}, {}, false);
  return builder_.Add1("layer_norm", name, {x, scale, shift}, "",
                       {{"epsilon", epsilon}});
}

TensorId Decoder::RmsNorm(const std::string& name, TensorId x, double epsilon) {
  const TensorId scale =
      builder_.Weight(name + ".weight", {hidden_}, {.constant = 1}, false);
  return builder_.Add1("rms_norm", name, {x, scale}, "",
                       {{"epsilon", epsilon}});
}

TensorId Decoder::Dropout(std::string name, TensorId x, double probability) {
  if (probability == 0) return x;
  return builder_.Add1("dropout", std::move(name), {x}, "bsh->bsh",
                       {{"probability", probability},
                        {"salt", static_cast<double>(dropouts_++)}});
}

TensorId Decoder::Add(std::string name, TensorId x, TensorId y) {
  return builder_.Add1("add", std::move(name), {x, y}, "bsh,bsh->bsh");
}

TensorId Decoder::Attention(const std::string& name,
                            const AttentionNames& names, TensorId x,
                            const AttentionOptions& options) {
  const auto& [g, r, d] = options.heads;
  const std::string prefix = name + ".";
  TensorId q =
      Linear(prefix + names.q, x, "grd", "i", {g, r, d, hidden_}, options.qkv);
  TensorId k =
      Linear(prefix + names.k, x, "gd", "i", {g, d, hidden_}, options.qkv);
  const TensorId v =
      Linear(prefix + names.v, x, "ge", "i", {g, d, hidden_}, options.qkv);
  if (options.rotary != nullptr) {
    const std::vector<Attribute> attributes = {
        {"fraction", options.rotary->fraction},
        {"theta", options.rotary->theta}};
    q = builder_.Add1("rotary", prefix + "rotary_q", {q, positions_},
                      "bsgrd!,bs->bsgrd", attributes);
    k = builder_.Add1("rotary", prefix + "rotary_k", {k, positions_},
                      "bsgd!,bs->bsgd", attributes);
  }
  int64_t window = options.window;
  if (widest_window_ > 0) {
    window = window > 0 ? std::min(window, widest_window_) : widest_window_;
  }
  const TensorId attended = builder_.Add1(
      "attention", name, {q, k, v, mask_positions_, mask_positions_}, "",
      {{"scale", options.scale}, {"window", static_cast<double>(window)}});
  return Linear(prefix + names.out, attended, "o", "gre", {hidden_, g, r, d},
                options.out);
}

TensorId Decoder::Mlp(const std::string& name, std::string_view up,
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

TensorId Decoder::GatedMlp(const std::string& name, std::string_view activation,
                           TensorId x, int64_t inner,
                           const LinearOptions& options) {
  TensorId gate =
      Linear(name + ".gate_proj", x, "f", "i", {inner, hidden_}, options);
  gate = builder_.Add1(activation, name + ".act_fn", {gate}, "bsf->bsf");
  const TensorId up =
      Linear(name + ".up_proj", x, "f", "i", {inner, hidden_}, options);
  const TensorId product =
      builder_.Add1("multiply", name + ".product", {gate, up}, "bsf,bsf->bsf");
  return Linear(name + ".down_proj", product, "o", "f", {hidden_, inner},
                options);
}

TensorId Decoder::Experts(const std::string& name, std::string_view activation,
                          TensorId x, int64_t inner,
                          const ExpertOptions& options) {
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
  const std::vector<TensorId> routes = builder_.Add(
      "moe_gate", prefix + "routes", {logits}, "",
      {{"capacity", capacity}, {"renormalise", 1}, {"top_k", top_k}});
  if (options.balance > 0) {
    const TensorId balance =
        builder_.Add1("moe_balance", prefix + "balance", {logits}, "",
                      {{"coefficient", options.balance}, {"top_k", top_k}});
    balance_ = balance_.valid() ? builder_.Add1("add", prefix + "balance_add",
                                                {balance_, balance}, ",->")
                                : balance;
  }
  const TensorId slots =
      builder_.Add1("moe_dispatch", prefix + "dispatch", {x, routes[1]}, "",
                    {{"capacity", capacity}, {"experts", experts}});
  const auto linear = [&](const char* part, TensorId in, int64_t rows,
                          int64_t columns) {
    const std::string whole = prefix + "experts." + part;
    const TensorId matrix = Matrix(
        whole + ".weight", {options.experts, rows, columns}, options.stddev);
    return builder_.Add1("expert_linear", whole, {in, matrix}, "",
                         {{"top_k", top_k}});
  };
  TensorId gate = linear("w1", slots, inner, hidden_);
  gate = builder_.Add1(activation, prefix + "experts.act_fn", {gate},
                       "ebsf->ebsf");
  const TensorId up = linear("w3", slots, inner, hidden_);
  const TensorId product = builder_.Add1("multiply", prefix + "experts.product",
                                         {gate, up}, "ebsf,ebsf->ebsf");
  const TensorId down = linear("w2", product, hidden_, inner);
  const TensorId collected =
      builder_.Add1("moe_collect", prefix + "collect", {down, routes[1]});
  return builder_.Add1("moe_combine", prefix + "combine",
                       {collected, routes[0]});
}

Result<Graph> Decoder::Finish(std::string head_name, TensorId x,
                              TensorId matrix) {
  const TensorId logits =
      builder_.Add1("linear", std::move(head_name), {x, matrix}, "bsi,vi->bsv");
  const TensorId count = builder_.Add1("count_labels", "count", {labels_});
  TensorId loss =
      builder_.Add1("cross_entropy", "loss", {logits, labels_, count});
  if (balance_.valid()) {
    loss = builder_.Add1("add", "loss.total", {loss, balance_}, ",->");
  }
  return builder_.Finish(loss);
}

}  // namespace tessera
