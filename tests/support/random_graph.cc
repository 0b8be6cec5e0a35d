#include "tests/support/random_graph.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>

#include "planner/base/check.h"
#include "planner/io/recurrent.h"
#include "planner/io/transformer.h"
#include "planner/io/vision.h"

namespace tessera {
namespace {

constexpr double kDropout = 0.2;
constexpr double kStddev = 0.3;
constexpr double kEpsilon = 1e-5;
constexpr double kBalance = 0.1;

int Pick(Rng& rng, std::initializer_list<int> choices) {
  return choices.begin()[rng.Below(static_cast<uint32_t>(choices.size()))];
}

// Of each form some specs have one.
Rotary RotaryOf(const GraphSpec& spec) {
  Rotary rotary = {.theta = 100, .fraction = 1};
  const int form = (spec.layers + spec.bias) % 4;
  if (form == 1) {
    rotary.op = "rotary_linear";
    rotary.scaling = {{"factor", 2}};
  } else if (form == 2) {
    rotary.op = "rotary_yarn";
    rotary.scaling = {{"beta_fast", 4},
                      {"beta_slow", 1},
                      {"factor", 4},
                      {"magnitude", 1.1},
                      {"original_positions", 16}};
  } else if (form == 3) {
    rotary.op = "rotary_longrope";
    rotary.scaling = {{"magnitude", 1.2}};
    for (int pair = 0; pair < spec.head_size / 2; ++pair) {
      rotary.scaling.push_back({"divisor", 1.5 + pair});
    }
  }
  return rotary;
}

// One of them is padded.
Vocabulary VocabularyOf(const GraphSpec& spec) {
  return {spec.vocabulary, spec.vocabulary == 13 ? 16 : spec.vocabulary};
}

class SmallTransformer {
 public:
  SmallTransformer(const GraphSpec& spec, DType dtype)
      : spec_(spec),
        options_({.global_batch = spec.batch,
                  .seq_len = spec.sequence,
                  .dtype = dtype}),
        model_(ModelConfig("random/config.json", {}), options_, spec.hidden),
        vocabulary_(VocabularyOf(spec)),
        rotary_(RotaryOf(spec)),
        linear_({.stddev = kStddev, .bias = spec.bias == 1}) {}

  Graph Build() {
    const TensorId table =
        model_.Matrix("embed.weight", {vocabulary_.rows, spec_.hidden}, 1);
    const bool encodes = spec_.encoder > 0 && spec_.layers > 0;
    if (spec_.relative == 1 && spec_.layers > 0 &&
        (spec_.latent == 0 || encodes)) {
      biases_ = model_.RelativeBias(
          "biases.weight", 8,
          {.groups = spec_.groups, .per_group = spec_.per_group}, kStddev);
    }
    if (encodes) Encode(table);
    TensorId x = model_.Lookup("embed", model_.tokens(), table, vocabulary_);
    if (spec_.rotary == 0) {
      const TensorId positions =
          model_.Matrix("positions.weight", {spec_.sequence, spec_.hidden}, 1);
      x = model_.Add("embed.add", x,
                     model_.Lookup("positions", model_.positions(), positions));
    }
    x = Dropout("embed.dropout", x);
    for (int i = 0; i < spec_.layers; ++i) {
      const std::string name = "h." + std::to_string(i);
      model_.BeginBlock(name);
      x = Layer(name, x);
    }
    model_.BeginBlock("head");
    x = Norm("head.norm", x);
    const TensorId matrix =
        spec_.tied == 1
            ? table
            : model_.Matrix("head.weight", {vocabulary_.rows, spec_.hidden},
                            kStddev);
    auto forward = model_.Finish("head", x, matrix, vocabulary_);
    TESSERA_CHECK(forward.has_value()) << forward.error().ToString();
    auto graph = Differentiate(*std::move(forward));
    TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
    return *std::move(graph);
  }

 private:
  TensorId Norm(const std::string& name, TensorId x) {
    return spec_.rms == 1 ? model_.RmsNorm(name, x, kEpsilon)
                          : model_.LayerNorm(name, x, kEpsilon);
  }

  TensorId Dropout(const std::string& name, TensorId x) {
    return model_.Dropout(name, x, spec_.dropout == 1 ? kDropout : 0);
  }

  TensorId Attention(const std::string& name, TensorId x) {
    if (spec_.latent > 0) {
      x = model_.LatentAttention(
          name, x,
          {.heads = spec_.groups,
           .query_rank = spec_.latent == 2 ? spec_.hidden - 1 : 0,
           .key_value_rank = spec_.hidden / 2,
           .turned_size = 2,
           .plain_size = spec_.head_size - 1,
           .value_size = spec_.head_size,
           .scale = 1 / std::sqrt(static_cast<double>(spec_.head_size + 1)),
           .rotary = {.theta = 100,
                      .op = "rotary_llama3",
                      .scaling = {{"factor", 4},
                                  {"high_frequency", 4},
                                  {"low_frequency", 1},
                                  {"original_positions", 4}}},
           .latents = linear_,
           .heads_of_latents = linear_,
           .out = linear_});
      return Dropout(name + ".dropout", x);
    }
    AttentionOptions options = Plain();
    options.window = spec_.window;
    options.rotary = spec_.rotary == 1 ? &rotary_ : nullptr;
    options.alibi = spec_.alibi == 1;
    options.causal = spec_.bidirectional == 0;
    options.relative_bias = biases_;
    options.max_distance = 6;
    x = model_.Attention(name, {"q", "k", "v", "out"}, x, options);
    return Dropout(name + ".dropout", x);
  }

  AttentionOptions Plain() const {
    return {.heads = {spec_.groups, spec_.per_group, spec_.head_size},
            .scale = 1 / std::sqrt(static_cast<double>(spec_.head_size)),
            .qkv = linear_,
            .out = linear_};
  }

  // Sets memory_.
  void Encode(TensorId table) {
    const int64_t length = spec_.sequence + 1;
    const TensorId source = model_.Input("source", {length});
    places_ = model_.Input("source_positions", {length});
    TensorId x = model_.Lookup("source.embed", source, table, vocabulary_);
    for (int i = 0; i < spec_.encoder; ++i) {
      const std::string name = "encoder." + std::to_string(i);
      model_.BeginBlock(name);
      AttentionOptions options = Plain();
      options.causal = false;
      options.relative_bias = biases_;
      options.max_distance = 6;
      options.query_positions = options.key_positions = places_;
      TensorId y = model_.Attention(name + ".attention", {"q", "k", "v", "out"},
                                    Norm(name + ".norm", x), options);
      x = model_.Add(name + ".add", x, Dropout(name + ".dropout", y));
      y = model_.Mlp(name + ".mlp", "up", "down", "gelu",
                     Norm(name + ".mlp.norm", x), spec_.inner, linear_,
                     linear_);
      x = model_.Add(name + ".mlp.add", x, y);
    }
    model_.BeginBlock("encoder.norm");
    memory_ = Norm("encoder.norm", x);
  }

  TensorId Experts(const std::string& name, TensorId x) {
    const int64_t groups =
        spec_.experts % spec_.routing_groups == 0 ? spec_.routing_groups : 1;
    TensorId shared;
    if (spec_.shared == 1) {
      shared =
          model_.GatedMlp(name + ".shared", "silu", x, spec_.inner, linear_);
    }
    x = model_.Experts(
        name, "silu", x, spec_.inner,
        {.experts = spec_.experts,
         .top_k = std::min<int64_t>(spec_.top_k, spec_.experts / groups),
         .groups = groups,
         .sigmoid = spec_.sigmoid == 1,
         .renormalise = spec_.sigmoid == 0,
         .capacity_factor = spec_.drops == 1 ? 1.0 : 0.0,
         .balance = spec_.balance == 1 ? kBalance : 0,
         .stddev = kStddev});
    if (shared.valid()) x = model_.Add(name + ".shared_add", x, shared);
    return Dropout(name + ".dropout", x);
  }

  TensorId Mlp(const std::string& name, bool gated, TensorId x) {
    if (spec_.experts > 0 && name.ends_with(".mlp")) return Experts(name, x);
    x = gated ? model_.GatedMlp(name, "silu", x, spec_.inner, linear_)
              : model_.Mlp(name, "up", "down", "gelu", x, spec_.inner, linear_,
                           linear_);
    return Dropout(name + ".dropout", x);
  }

  TensorId Layer(const std::string& name, TensorId x) {
    const bool gated = spec_.gated == 1;
    if (memory_.valid()) {
      AttentionOptions cross = Plain();
      cross.causal = false;
      cross.memory = memory_;
      cross.key_positions = places_;
      x = model_.Add(name + ".cross.add", x,
                     model_.Attention(name + ".cross", {"q", "k", "v", "out"},
                                      Norm(name + ".cross.norm", x), cross));
    }
    const TensorId norm = Norm(name + ".norm", x);
    TensorId y = Attention(name + ".attention", norm);
    if (spec_.residual == 0) {
      x = model_.Add(name + ".attention.add", x, y);
      y = Mlp(name + ".mlp", gated, Norm(name + ".mlp.norm", x));
    } else if (spec_.residual == 1) {
      const TensorId z = Mlp(name + ".mlp", gated, Norm(name + ".mlp.norm", x));
      y = model_.Add(name + ".branches.add", y, z);
    } else {
      const TensorId z = Mlp(name + ".mlp", gated, norm);
      const TensorId other = Mlp(name + ".other", !gated, norm);
      y = model_.Add(name + ".branches.add", y,
                     model_.Add(name + ".mlps.add", z, other));
    }
    return model_.Add(name + ".add", x, y);
  }

  const GraphSpec& spec_;
  const ImportOptions options_;
  Transformer model_;
  const Vocabulary vocabulary_;
  const Rotary rotary_;
  const LinearOptions linear_;
  TensorId biases_;  // by distance, of all layers
  TensorId memory_;  // the encoder's result, and where its tokens are
  TensorId places_;
};

class SmallCnn {
 public:
  SmallCnn(const GraphSpec& spec, DType dtype)
      : spec_(spec),
        model_(ModelConfig("random/config.json", {}),
               {.global_batch = spec.batch, .dtype = dtype},
               {spec.sequence, 2, spec.vocabulary}) {}

  Graph Build() {
    Features x = Unit("stem", model_.images(), spec_.hidden, 3);
    x = spec_.rms == 1 ? model_.MaxPool("stem.pool", x, WindowOf(2))
                       : model_.AveragePool("stem.pool", x, WindowOf(2));
    const Features stem = x;
    for (int i = 0; i < spec_.layers; ++i) {
      const std::string name = "h." + std::to_string(i);
      model_.BeginBlock(name);
      x = Layer(name, x);
    }
    model_.BeginBlock("head");
    if (spec_.tied == 1) x = model_.Mean("head.mean", x);
    x = model_.Dropout("head.dropout", x, spec_.dropout == 1 ? kDropout : 0);
    if (spec_.balance == 1) {
      model_.Loss("first.loss",
                  model_.Linear("first", model_.Mean("first.mean", stem),
                                spec_.vocabulary),
                  1);
    }
    model_.Loss("loss", model_.Linear("head", x, spec_.vocabulary),
                spec_.balance == 1 ? 0.3 : 1);
    auto forward = model_.Finish();
    TESSERA_CHECK(forward.has_value()) << forward.error().ToString();
    auto graph = Differentiate(*std::move(forward));
    TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
    return *std::move(graph);
  }

 private:
  Window WindowOf(int64_t size) const {
    return {.height = size,
            .width = size,
            .stride = 1,
            .pad_height = size / 2,
            .pad_width = size / 2};
  }

  Features Unit(const std::string& name, const Features& x, int64_t channels,
                int64_t size, int64_t stride = 1, int64_t groups = 1) {
    Window window = WindowOf(size);
    window.stride = stride;
    const Features y =
        model_.Convolution(name, x, channels, window, spec_.bias == 1, groups);
    if (spec_.image != 2) return y;
    return model_.BatchNorm(name + ".norm", y,
                            {.epsilon = kEpsilon,
                             .groups = BatchNormGroups(spec_),
                             .tracked = spec_.shared == 0});
  }

  Features Active(const std::string& name, const Features& x, int64_t channels,
                  int64_t size, int64_t stride = 1, int64_t groups = 1) {
    return model_.Relu(name + ".relu",
                       Unit(name, x, channels, size, stride, groups));
  }

  Features Layer(const std::string& name, const Features& in) {
    const int64_t stride = spec_.gated == 1 && in.height > 1 ? 2 : 1;
    Features x = in;
    Features y;
    if (spec_.residual == 0) {
      y = Unit(name + ".b", Active(name + ".a", x, spec_.inner, 3, stride),
               spec_.hidden, 3);
    } else if (spec_.residual == 1) {
      const int64_t inner = spec_.inner - spec_.inner % spec_.groups;
      const int64_t groups = inner > 0 ? spec_.groups : 1;
      y = Active(name + ".a", x, std::max<int64_t>(1, inner), 1, 1, groups);
      y = Active(name + ".b", y, y.channels, 3, stride, groups);
      y = Unit(name + ".c", y, spec_.hidden, 1);
    } else {
      const Features a = Active(name + ".a", x, 1, 3, stride);
      const Features b = Active(name + ".b", x, spec_.hidden - 1, 1, stride);
      y = model_.Concat(name + ".concat", {a, b});
    }
    if (stride != 1) x = Unit(name + ".shortcut", x, spec_.hidden, 1, stride);
    return model_.Relu(name + ".relu", model_.Add(name + ".add", y, x));
  }

  const GraphSpec& spec_;
  Vision model_;
};

Graph MakeRecurrent(const GraphSpec& spec, DType dtype) {
  // Of a single step a state is read by none.
  const int64_t length = std::max(2, spec.sequence);
  const ImportOptions options = {
      .global_batch = spec.batch, .seq_len = length, .dtype = dtype};
  const RecurrentSizes sizes = {
      .cell = spec.recurrent == 2 ? CellKind::kGru : CellKind::kLstm,
      .hidden = spec.hidden,
      .embedding = spec.inner,
      .layers = std::max(1, spec.layers),
      .dropout = spec.dropout == 1 ? kDropout : 0,
      .steps_per_block = spec.per_group};
  Recurrent model(ModelConfig("random/config.json", {}), options, sizes);
  const bool translates = spec.recurrent == 4;
  const TensorId tokens = model.Input("tokens", length);
  const TensorId labels = spec.recurrent == 3 ? model.Input("next_token", 1)
                                              : model.Input("labels", length);
  const Vocabulary vocabulary = VocabularyOf(spec);
  std::vector<Recurrent::State> states;
  TensorId places;
  TensorId memory;
  if (translates) {
    const TensorId source = model.Input("source", length + 1);
    places = model.Input("source_positions", length + 1);
    const Steps encoded =
        model.Layers("encoder", model.Lookup("source", source, vocabulary),
                     spec.inner, states, /*continues=*/true);
    model.BeginBlock("target");
    memory = model.Stack("encoder.steps", encoded);
  }
  const Steps steps =
      model.Layers("rnn", model.Lookup("embed", tokens, vocabulary), spec.inner,
                   states, /*continues=*/false);
  model.BeginBlock("head");
  TensorId x = model.Stack("head.steps",
                           spec.recurrent == 3 ? Steps{steps.back()} : steps);
  if (translates) {
    x = model.Attend("attention", spec.hidden % 3 == 0 ? 3 : 1, x, memory,
                     model.Input("positions", length), places);
  }
  auto forward = model.Finish(
      model.Linear("head", x, vocabulary.rows, spec.hidden, spec.bias == 1),
      labels, vocabulary.attributes());
  TESSERA_CHECK(forward.has_value()) << forward.error().ToString();
  auto graph = Differentiate(*std::move(forward));
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  return *std::move(graph);
}

// Layers of operators whose rules are the node's own, of tensors whose sizes
// are the hidden one's and the sequence's.
class SmallGeneral {
 public:
  SmallGeneral(const GraphSpec& spec, DType dtype)
      : spec_(spec),
        dtype_(dtype),
        builder_("general", spec.batch, spec.sequence, dtype) {}

  Graph Build() {
    builder_.BeginBlock("embed");
    const Shape places = {spec_.batch, spec_.sequence};
    const TensorId tokens = builder_.Input("tokens", places, DType::kInt32);
    const TensorId labels = builder_.Input("labels", places, DType::kInt32);
    const TensorId table = builder_.Weight(
        "embed.weight", {spec_.vocabulary, spec_.hidden}, {.stddev = 1}, true);
    TensorId x = builder_.Add1("embedding", "embed", {tokens, table});
    for (int i = 0; i < spec_.layers; ++i) {
      const std::string name = "h." + std::to_string(i);
      builder_.BeginBlock(name);
      const TensorId normed =
          spec_.rms == 1 ? Norm(name + ".norm", x) : Gate(name + ".gate", x);
      const int kind =
          spec_.signals == 1 && i == 0 ? 4 : (spec_.residual + i) % 4;
      TensorId y = kind == 4   ? Signals(name + ".signals", normed)
                   : kind == 0 ? Attention(name + ".attention", normed)
                   : kind == 1 ? Places(name + ".places", normed)
                   : kind == 2 ? Functions(name + ".functions", normed)
                               : Choices(name + ".choices", normed);
      y = Dense(name + ".out", y, spec_.hidden, spec_.hidden);
      x = builder_.Add1("add", name + ".add", {x, y}, "bsh,bsh->bsh");
    }
    builder_.BeginBlock("head");
    x = Norm("head.norm", x);
    const TensorId logits = Dense("head", x, spec_.vocabulary, spec_.hidden);
    const TensorId count = builder_.Add1("count_labels", "count", {labels});
    TensorId loss =
        builder_.Add1("cross_entropy", "loss", {logits, labels, count});
    if (spec_.balance == 1) {
      loss = AddLoss("squares", "mean_squared_error", loss, x, spec_.hidden);
      loss = AddLoss("sigmoids", "binary_cross_entropy", loss, logits,
                     spec_.vocabulary);
    }
    auto forward = builder_.Finish(loss);
    TESSERA_CHECK(forward.has_value()) << forward.error().ToString();
    auto graph = Differentiate(*std::move(forward));
    TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
    return *std::move(graph);
  }

 private:
  TensorId Op(std::string_view op, const std::string& name,
              std::vector<TensorId> operands, std::string_view rule,
              std::vector<Attribute> attributes = {}) {
    return builder_.Add1(op, name, std::move(operands), rule,
                         std::move(attributes));
  }

  // `loss` and one of elements.
  TensorId AddLoss(const std::string& name, std::string_view op, TensorId loss,
                   TensorId x, int64_t width) {
    const TensorId targets = builder_.Input(
        name + ".targets", {spec_.batch, spec_.sequence, width}, dtype_);
    const TensorId other =
        Op(op, name, {x, targets}, "bsh,bsh->", {{"weight", 0.5}});
    return Op("add", name + ".total", {loss, other}, ",->");
  }

  TensorId Dense(const std::string& name, TensorId x, int64_t out, int64_t in) {
    const TensorId weight =
        builder_.Weight(name + ".weight", {out, in}, {.stddev = kStddev}, true);
    return Op("linear", name, {x, weight}, "bsi,oi->bso");
  }

  TensorId Vector(const std::string& name, double constant) {
    return builder_.Weight(name, {spec_.hidden}, {.constant = constant}, false);
  }

  // (x - mean) / sqrt(variance + epsilon) * scale + shift.
  TensorId Norm(const std::string& name, TensorId x) {
    const TensorId mean = Op("reduce_mean", name + ".mean", {x}, "bsh->bs");
    const TensorId centred =
        Op("subtract", name + ".centred", {x, mean}, "bsh,bs->bsh");
    TensorId scale = Op("reduce_variance", name + ".variance", {x}, "bsh!->bs",
                        {{"correction", 0}});
    scale =
        Op("offset", name + ".offset", {scale}, "bs->bs", {{"amount", 0.1}});
    scale = Op("sqrt", name + ".sqrt", {scale}, "bs->bs");
    TensorId y =
        Op("divide", name + ".divide", {centred, scale}, "bsh,bs->bsh");
    y = Op("multiply", name + ".scaled", {y, Vector(name + ".scale", 1)},
           "bsh,h->bsh");
    const TensorId shift =
        Op("scale", name + ".shift.read", {Vector(name + ".shift", 0.1)},
           "h->h", {{"factor", 1}});
    return Op("broadcast_add", name + ".shifted", {y, shift}, "bsh,h->bsh");
  }

  // x times the softmax of what all places share.
  TensorId Gate(const std::string& name, TensorId x) {
    TensorId gate = Op("reduce_sum", name + ".sum", {x}, "bsh->bh");
    gate = Op("tanh", name + ".tanh", {gate}, "bh->bh");
    gate = Op("softmax", name + ".softmax", {gate}, "bz->bz");
    const TensorId log = Op("log_softmax", name + ".log", {x}, "bzh->bzh");
    const TensorId y =
        Op("multiply", name + ".product", {x, gate}, "bsh,bh->bsh");
    return Op("subtract", name + ".difference", {y, log}, "bsh,bsh->bsh");
  }

  TensorId Attention(const std::string& name, TensorId x) {
    const TensorId q = Dense(name + ".q", x, spec_.hidden, spec_.hidden);
    TensorId scores = Op("einsum", name + ".scores", {q, x}, "bsh,bth->bst");
    scores =
        Op("scale", name + ".scale", {scores}, "bst->bst", {{"factor", 0.3}});
    if (spec_.bidirectional == 0) {
      scores = Op("causal_mask", name + ".mask", {scores}, "bqk->bqk",
                  {{"value", -60000}});
    }
    scores = Op("softmax", name + ".softmax", {scores}, "bsz->bsz");
    TensorId y = Op("einsum", name + ".values", {scores, x}, "bst,bth->bsh");
    y = Op("transpose", name + ".turned", {y}, "bsh->sbh");
    return Op("transpose", name + ".back", {y}, "sbh->bsh");
  }

  // All places but the first feature, with a constant in its stead, beside the
  // largest and every second feature.
  TensorId Places(const std::string& name, TensorId x) {
    const auto rest = static_cast<double>(spec_.hidden - 1);
    const auto half = static_cast<double>((spec_.hidden + 1) / 2);
    TensorId y = Op("slice", name + ".slice", {x}, "bsm!->bsd!",
                    {{"places", rest}, {"start", 1}, {"step", 1}});
    y = Op("pad", name + ".pad", {y}, "bsm!->bsd!",
           {{"before", 1}, {"places", rest + 1}, {"value", 0.5}});
    const TensorId even = Op("slice", name + ".even", {x}, "bsm!->bsd!",
                             {{"places", half}, {"start", 0}, {"step", 2}});
    const TensorId both =
        Op("concat_channels", name + ".concat", {y, even}, "bsm!,bsn!->bsd!",
           {{"channels", rest + 1 + half}});
    const TensorId most = Op("reduce_max", name + ".max", {both}, "bsh!->bs");
    return Op("maximum", name + ".larger", {y, most}, "bsh,bs->bsh");
  }

  // Features are channels, and places the width of an image of one row.
  TensorId Signals(const std::string& name, TensorId x) {
    const int64_t width = spec_.sequence;
    const int64_t half = (width - 1) / 2 + 1;  // windows of 2, 2 apart, padded
    const auto number = [](int64_t n) { return static_cast<double>(n); };
    const auto weight = [&](const std::string& of, int64_t window) {
      return builder_.Weight(name + of + ".weight",
                             {spec_.hidden, spec_.hidden, window},
                             {.stddev = kStddev}, true);
    };
    const auto windows = [](int64_t stride, int64_t pad,
                            std::vector<Attribute> more) {
      more.insert(more.end(), {{"pad_left", static_cast<double>(pad)},
                               {"pad_top", 0},
                               {"stride_height", 1},
                               {"stride_width", static_cast<double>(stride)}});
      return more;
    };
    TensorId y = Op("transpose", name + ".turned", {x}, "bsh->bhs");
    y = Op("conv2d", name + ".conv", {y, weight(".conv", 3)}, "bcw!,ocl!->box",
           windows(1, 1,
                   {{"dilation_height", 1},
                    {"dilation_width", 1},
                    {"out_height", 1},
                    {"out_width", number(width)}}));
    y = Op("average_pool", name + ".pool", {y}, "bcw!->bcx",
           windows(2, 1,
                   {{"count_pad", 0},
                    {"out_height", 1},
                    {"out_width", number(half)},
                    {"window_height", 1},
                    {"window_width", 2}}));
    // Windows of 3, of which the first place of the image is in one's middle.
    TensorId z = Op("conv_transpose2d", name + ".longer",
                    {y, weight(".longer", 3)}, "bnx,ncl!->bcw!",
                    windows(2, 1,
                            {{"dilation_height", 1},
                             {"dilation_width", 1},
                             {"image_height", 1},
                             {"image_width", number(width)}}));
    y = Op("resample", name + ".between", {y}, "bcm!->bcd!",
           {{"linear", spec_.bias == 1 ? 1.0 : 0.0},
            {"places", number(width)},
            {"start", -0.25},
            {"step", number(half) / number(width)}});
    y = Op("add", name + ".sum", {y, z}, "bcw,bcw->bcw");
    y = Op(
        "reshape", name + ".flat", {y}, "bm!n!->bd!",
        {{"first", number(spec_.hidden * width)}, {"second", 1}, {"third", 1}});
    y = Op("tanh", name + ".tanh", {y}, "bf->bf");
    y = Op("reshape", name + ".apart", {y}, "bm!->bd!e!",
           {{"first", number(spec_.hidden)},
            {"second", number(width)},
            {"third", 1}});
    return Op("transpose", name + ".back", {y}, "bhs->bsh");
  }

  TensorId Functions(const std::string& name, TensorId x) {
    const auto f = [&](std::string_view op, TensorId of,
                       std::vector<Attribute> attributes = {}) {
      return Op(op, name + "." + std::string(op), {of}, "bsh->bsh",
                std::move(attributes));
    };
    TensorId y = f("clip", x, {{"least", -1.5}, {"most", 1.5}});
    y = f("exp", y);
    y = f("log", f("offset", y, {{"amount", 1}}));
    y = f("power", f("reciprocal", y), {{"exponent", 1.5}});
    TensorId z = f("softplus", f("elu", x, {{"alpha", 0.5}}));
    y = Op("minimum", name + ".smaller", {y, z}, "bsh,bsh->bsh");
    z = f("hard_sigmoid", f("erf", f("abs", x)));
    z = f("leaky_relu", f("cos", z), {{"slope", 0.1}});
    y = Op("add", name + ".add", {y, z}, "bsh,bsh->bsh");
    z = f("hard_swish", f("gelu_erf", f("sigmoid", f("sin", x))));
    y = Op("multiply", name + ".product", {y, z}, "bsh,bsh->bsh");
    // A number for each place and feature, and a matrix, that are not trained.
    y = Op("multiply", name + ".known",
           {y, Constant(name + ".table", {spec_.sequence, spec_.hidden})},
           "bsh,sh->bsh");
    return Op("einsum", name + ".mixed",
              {y, Constant(name + ".matrix", {spec_.hidden, spec_.hidden})},
              "bsi,oi->bso");
  }

  TensorId Constant(const std::string& name, Shape shape) {
    std::vector<double> values;
    for (int64_t i = 0; i < shape[0] * shape[1]; ++i) {
      values.push_back(std::cos(static_cast<double>(3 * i + 1)));
    }
    return builder_.Constant(name, std::move(shape), std::move(values));
  }

  TensorId Ids(const std::string& name, int64_t count) {
    return builder_.Input(name + ".ids", {spec_.batch, count}, DType::kInt32);
  }

  // A layer norm in parts, and the features of the last place beside it.
  TensorId Parts(const std::string& name, TensorId x) {
    const TensorId mean =
        builder_.Add1("row_mean", name + ".row_mean", {x}, "bsh->bs");
    const TensorId deviation = builder_.Add1("row_std", name + ".row_std", {x},
                                             "bsh!->bs", {{"epsilon", 1e-3}});
    const TensorId y =
        builder_.Add1("normalize", name + ".normalize",
                      {x, mean, deviation, Vector(name + ".parts.scale", 1),
                       Vector(name + ".parts.shift", 0.1)},
                      "bsh,bs,bs,h,h->bsh");
    TensorId last = builder_.Add1(
        "select", name + ".last", {x}, "bsh->bo!h",
        {{"count", 1}, {"place", static_cast<double>(spec_.sequence - 1)}});
    last = Op("reduce_sum", name + ".features", {last}, "boh->bh");
    return Op("broadcast_add", name + ".beside", {y, last}, "bsh,bh->bsh");
  }

  // How often x is on which side of the mean over the places, of five.
  TensorId Sides(const std::string& name, TensorId x, TensorId mean) {
    const auto beside = [&](std::string_view op) {
      return Op(op, name + "." + std::string(op), {x, mean}, "bsh,bh->bsh");
    };
    const TensorId less = beside("less");
    const TensorId no_more = beside("less_equal");
    const TensorId no_less = beside("greater_equal");
    const auto of = [&](std::string_view op, TensorId a, TensorId b) {
      return Op(op, name + "." + std::string(op), {a, b}, "bsh,bsh->bsh");
    };
    const TensorId same = of("equal", less, no_more);
    const TensorId other = of("not_equal", no_more, no_less);
    TensorId sum = Op("add", name + ".once", {less, no_less}, "bsh,bsh->bsh");
    sum = Op("add", name + ".twice", {sum, same}, "bsh,bsh->bsh");
    return Op("add", name + ".thrice", {sum, other}, "bsh,bsh->bsh");
  }

  // What is above the mean over the places, in places that ids say; the sum of
  // a bag's rows, and how much it, the tensor's mean and the sums at three
  // places agree.
  TensorId Choices(const std::string& name, TensorId from) {
    TensorId x = Parts(name, from);
    const TensorId mean = Op("reduce_mean", name + ".mean", {x}, "bsh->bh");
    x = Op("multiply", name + ".sides", {x, Sides(name, x, mean)},
           "bsh,bsh->bsh");
    const TensorId above =
        Op("greater", name + ".above", {x, mean}, "bsh,bh->bsh");
    TensorId y = Op("where", name + ".where",
                    {above, x, Vector(name + ".else", 0.1)}, "bsh,bsh,h->bsh");
    const TensorId ids = Ids(name, spec_.sequence);
    y = Op("gather", name + ".gather", {y, ids}, "bvh,bs->bsh");
    TensorId sums = Op("scatter_add", name + ".scatter", {y, ids},
                       "bsh,bs->bvh", {{"places", 3}});
    sums = Op("reduce_sum", name + ".sums", {sums}, "bvh->bh");
    // The best places' ids choose features, whose marks weigh these.
    const std::vector<TensorId> best = builder_.Add(
        "top_k", name + ".top_k", {y}, "bv!h->bk!h,bk!h",
        {{"k", 1}, {"largest", spec_.bias == 1 ? 1.0 : 0.0}, {"last", 0}});
    const TensorId marks =
        Op("one_hot", name + ".one_hot", {best[1]}, "bkh->bvkh",
           {{"first", 0}, {"places", static_cast<double>(spec_.sequence)}});
    const TensorId marked =
        Op("einsum", name + ".marked", {marks, best[0]}, "bvkh,bkh->bvh");
    y = Op("add", name + ".mark", {y, marked}, "bsh,bsh->bsh");
    const TensorId table =
        builder_.Weight(name + ".bag.weight", {spec_.vocabulary, spec_.hidden},
                        {.stddev = 1}, true);
    const TensorId bag =
        Op("embedding_bag", name + ".bag", {Ids(name + ".bag", 3), table},
           "bn!,vh->bh", {{"mean", spec_.bias == 1 ? 1.0 : 0.0}});
    const TensorId stacked = Op("stack", name + ".stack", {mean, sums, bag},
                                "bh,bh,bh->bd!h", {{"steps", 3}});
    TensorId products = Op("pairwise_dot", name + ".products", {stacked},
                           "bn!h->bp!", {{"pairs", 3}});
    products = Op("reduce_sum", name + ".product", {products}, "bp->b");
    products = Op("tanh", name + ".tanh", {products}, "b->b");
    y = Op("broadcast_add", name + ".add", {y, bag}, "bsh,bh->bsh");
    return Op("multiply", name + ".multiply", {y, products}, "bsh,b->bsh");
  }

  const GraphSpec& spec_;
  const DType dtype_;
  GraphBuilder builder_;
};

}  // namespace

int64_t BatchNormGroups(const GraphSpec& spec) {
  const int groups = spec.top_k * spec.routing_groups;
  return spec.image == 2 && spec.batch % groups == 0 ? groups : 1;
}

GraphSpec RandomGraphSpec(Rng& rng) {
  GraphSpec spec;
  spec.layers = Pick(rng, {0, 1, 1, 2, 2, 3, 4});
  spec.residual = Pick(rng, {0, 0, 1, 2});
  spec.rms = Pick(rng, {0, 1});
  spec.gated = Pick(rng, {0, 1});
  spec.experts = Pick(rng, {0, 0, 2, 3, 4, 5});
  spec.top_k = Pick(rng, {1, 2});
  spec.drops = Pick(rng, {0, 1});
  spec.balance = Pick(rng, {0, 1});
  spec.sigmoid = Pick(rng, {0, 1});
  spec.routing_groups = Pick(rng, {1, 2});
  spec.shared = Pick(rng, {0, 1});
  spec.latent = Pick(rng, {0, 0, 0, 0, 0, 1, 2});
  spec.rotary = Pick(rng, {0, 1});
  spec.tied = Pick(rng, {0, 1});
  spec.bias = Pick(rng, {0, 1});
  spec.dropout = Pick(rng, {0, 1});
  spec.window = Pick(rng, {0, 0, 0, 2, 3});
  spec.alibi = Pick(rng, {0, 0, 0, 1});
  spec.bidirectional = Pick(rng, {0, 0, 1});
  spec.relative = Pick(rng, {0, 0, 0, 1});
  spec.encoder = Pick(rng, {0, 0, 1, 2});
  spec.groups = Pick(rng, {1, 1, 2, 3, 4, 5});
  spec.per_group = Pick(rng, {1, 1, 2, 3, 4});
  spec.head_size = Pick(rng, {2, 4});
  spec.hidden = Pick(rng, {6, 7, 8, 9, 10, 12});
  spec.inner = Pick(rng, {6, 7, 9, 10, 12, 16});
  spec.vocabulary = Pick(rng, {11, 13, 16, 18, 21});
  spec.sequence = Pick(rng, {4, 4, 6, 7, 8});
  spec.batch = Pick(rng, {4, 6, 6, 8, 9, 10, 12, 12});
  spec.image = Pick(rng, {0, 0, 0, 0, 1, 2, 3});
  Rng aside = rng;  // so that other draws stay as they are
  spec.recurrent = Pick(aside, {0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4});
  spec.signals = Pick(aside, {0, 0, 1});
  return spec;
}

Graph MakeGraph(const GraphSpec& spec, DType dtype) {
  if (spec.image == 3) return SmallGeneral(spec, dtype).Build();
  if (spec.image > 0) return SmallCnn(spec, dtype).Build();
  return spec.recurrent > 0 ? MakeRecurrent(spec, dtype)
                            : SmallTransformer(spec, dtype).Build();
}

}  // namespace tessera
