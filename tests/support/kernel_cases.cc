#include "tests/support/kernel_cases.h"

#include <algorithm>
#include <cmath>

#include "planner/plan/plan.h"

namespace tessera {
namespace {

constexpr Ints kIncreasing = {Ints::kIncreasing};
constexpr Ints kShuffled = {Ints::kShuffled};

Ints Below(int32_t high) {
  return {Ints::kRandom, 0, high};
}

KernelCase Elementwise(std::string op, int operands = 1) {
  KernelCase result = {op, op, "bsf", {{'b', 3}, {'s', 5}, {'f', 29}}};
  for (int i = 1; i < operands; ++i) result.rule += ",bsf";
  result.rule += "->bsf";
  return result;
}

KernelCase With(KernelCase c, std::vector<Attribute> attributes) {
  c.attributes = std::move(attributes);
  return c;
}

KernelCase Conditional(KernelCase c) {
  c.conditions = {0};
  return c;
}

KernelCase Positive(KernelCase c) {
  c.above = 0.4;
  return c;
}

// Operands on both sides of where the function bends, at 3.
KernelCase Beyond(KernelCase c) {
  c.name += "_beyond";
  c.above = 2.4;
  return c;
}

std::vector<Attribute> AdafactorAttributes() {
  return {{"beta2_decay", -0.8}, {"d", 1},    {"epsilon1", 1e-3},
          {"epsilon2", 1e-3},    {"lr", 0.1}, {"weight_decay", 0.1}};
}

KernelCase AttentionCase(std::string name, std::map<char, int64_t> extents,
                         double window, Ints queries, Ints keys) {
  return {"attention_" + name,
          "attention",
          "",
          std::move(extents),
          {{"scale", 0.6}, {"window", window}},
          {{3, queries}, {4, keys}}};
}

// `groups` of three experts, of which two are open by their `group_best`.
KernelCase GateCase(const std::string& name, double capacity,
                    double renormalise, double sigmoid = 0, double groups = 1,
                    double group_best = 1) {
  return {"moe_gate_" + name,
          "moe_gate",
          "",
          {{'b', 3},
           {'s', 7},
           {'e', groups == 1 ? 5 : 3 * static_cast<int64_t>(groups)},
           {'k', 3}},
          {{"capacity", capacity},
           {"group_best", group_best},
           {"groups", groups},
           {"renormalise", renormalise},
           {"scale", groups},
           {"sigmoid", sigmoid},
           {"top_groups", groups == 1 ? 1.0 : 2.0},
           {"top_k", 3}}};
}

// A window over images.
struct Window {
  int64_t height = 1;
  int64_t width = 1;
  int64_t stride = 1;
  int64_t dilation = 1;
  int64_t pad_top = 0;  // and as much below
  int64_t pad_left = 0;
};

// Adds the extents of the result, and makes the attributes that all have.
std::vector<Attribute> Place(const Window& w,
                             std::map<char, int64_t>& extents) {
  const auto places = [&](int64_t image, int64_t pad, int64_t size) {
    return (image + 2 * pad - w.dilation * (size - 1) - 1) / w.stride + 1;
  };
  if (extents.contains('h')) {
    extents['y'] = places(extents['h'], w.pad_top, w.height);
  }
  const int64_t rows = extents.contains('h') ? extents['y'] : 1;
  extents['x'] = places(extents['w'], w.pad_left, w.width);
  return {{"out_height", static_cast<double>(rows)},
          {"out_width", static_cast<double>(extents['x'])},
          {"pad_left", static_cast<double>(w.pad_left)},
          {"pad_top", static_cast<double>(w.pad_top)},
          {"stride_height",
           static_cast<double>(extents.contains('h') ? w.stride : 1)},
          {"stride_width", static_cast<double>(w.stride)}};
}

KernelCase Convolution(const std::string& name, std::string rule,
                       std::map<char, int64_t> extents, const Window& window) {
  std::vector<Attribute> attributes = Place(window, extents);
  const bool tall = extents.contains('h');
  const auto dilation = static_cast<double>(window.dilation);
  attributes.push_back({"dilation_height", tall ? dilation : 1});
  attributes.push_back({"dilation_width", dilation});
  if (tall) extents['k'] = window.height;
  extents['l'] = window.width;
  return {"conv2d_" + name, "conv2d", std::move(rule), std::move(extents),
          std::move(attributes)};
}

// `extents` of the image, places and window.
KernelCase Transposed(const std::string& name, std::string rule,
                      std::map<char, int64_t> extents, const Window& window) {
  const bool tall = extents.contains('h');
  const auto dilation = static_cast<double>(window.dilation);
  const auto stride = static_cast<double>(window.stride);
  if (tall) extents['k'] = window.height;
  extents['l'] = window.width;
  return {"conv_transpose2d_" + name,
          "conv_transpose2d",
          std::move(rule),
          extents,
          {{"dilation_height", tall ? dilation : 1},
           {"dilation_width", dilation},
           {"image_height", static_cast<double>(tall ? extents['h'] : 1)},
           {"image_width", static_cast<double>(extents['w'])},
           {"pad_left", static_cast<double>(window.pad_left)},
           {"pad_top", static_cast<double>(window.pad_top)},
           {"stride_height", tall ? stride : 1},
           {"stride_width", stride}}};
}

KernelCase Resampling(const std::string& name, std::string rule,
                      std::map<char, int64_t> extents, double start,
                      double step, double linear) {
  return {"resample_" + name,
          "resample",
          std::move(rule),
          extents,
          {{"linear", linear},
           {"places", static_cast<double>(extents['d'])},
           {"start", start},
           {"step", step}}};
}

KernelCase Pooling(const std::string& op, std::string rule,
                   const Window& window, std::optional<int> count_pad = {}) {
  std::map<char, int64_t> extents = {{'b', 2}, {'g', 2}, {'c', 3}, {'w', 6}};
  const bool tall = rule.find('h') != std::string::npos;
  if (tall) extents['h'] = 7;
  std::vector<Attribute> attributes = Place(window, extents);
  attributes.push_back({"window_height", static_cast<double>(window.height)});
  attributes.push_back({"window_width", static_cast<double>(window.width)});
  std::string name = op;
  if (count_pad) {
    attributes.push_back({"count_pad", static_cast<double>(*count_pad)});
    name += *count_pad != 0 ? "_with_pad" : "_without_pad";
  }
  if (!tall) name += "_of_signals";
  return {std::move(name), op, std::move(rule), std::move(extents),
          std::move(attributes)};
}

KernelCase BalanceCase(const std::string& name, double sigmoid, double groups) {
  return {"moe_balance" + name,
          "moe_balance",
          "",
          {{'b', 3}, {'s', 7}, {'e', groups == 1 ? 5 : 6}},
          {{"coefficient", 0.3},
           {"group_best", 1},
           {"groups", groups},
           {"sigmoid", sigmoid},
           {"top_groups", 1},
           {"top_k", 2}}};
}

#define TESSERA_KERNELS(family) std::vector<KernelCase> family##Cases();
#include "runtime/kernels/kernels.def"
#undef TESSERA_KERNELS

std::vector<KernelCase> EmbeddingCases() {
  return {
      {"embedding",
       "embedding",
       "",
       {{'b', 3}, {'s', 5}, {'v', 7}, {'h', 3}},
       {},
       {{0, Below(7)}}},
      {"embedding_bag",
       "embedding_bag",
       "",
       {{'b', 5}, {'n', 3}, {'v', 7}, {'h', 11}},
       {{"mean", 0}},
       {{0, {Ints::kRandom, -1, 7}}}},
      {"embedding_bag_mean",
       "embedding_bag",
       "",
       {{'b', 5}, {'n', 4}, {'v', 7}, {'h', 3}},
       {{"mean", 1}},
       {{0, {Ints::kRandom, -3, 7}}}},
  };
}

std::vector<KernelCase> LinearCases() {
  return {
      {"linear_bias",
       "linear",
       "bsi,oi+o->bso",
       {{'b', 3}, {'s', 3}, {'i', 5}, {'o', 7}}},
      {"linear_no_bias",
       "linear",
       "bsi,oi->bso",
       {{'b', 3}, {'s', 5}, {'i', 7}, {'o', 3}}},
      {"linear_to_heads",
       "linear",
       "bsi,grdi+grd->bsgrd",
       {{'b', 2}, {'s', 3}, {'i', 5}, {'g', 2}, {'r', 3}, {'d', 3}}},
      {"linear_from_heads",
       "linear",
       "bsgre,ogre+o->bso",
       {{'b', 3}, {'s', 2}, {'o', 5}, {'g', 2}, {'r', 3}, {'e', 3}}},
      // Beyond Eigen's threshold for blocked products.
      {"linear_large",
       "linear",
       "bsi,oi+o->bso",
       {{'b', 3}, {'s', 11}, {'i', 37}, {'o', 41}}},
      // Vectors, which Eigen multiplies by other code.
      {"linear_one_row",
       "linear",
       "bsi,oi+o->bso",
       {{'b', 1}, {'s', 1}, {'i', 37}, {'o', 41}}},
      {"linear_one_column",
       "linear",
       "bsi,oi+o->bso",
       {{'b', 3}, {'s', 11}, {'i', 37}, {'o', 1}}},
      {"linear_fp32",
       "linear_fp32",
       "bsi,ei->bse",
       {{'b', 3}, {'s', 5}, {'i', 7}, {'e', 3}}},
  };
}

std::vector<KernelCase> NormCases() {
  return {
      {"layer_norm",
       "layer_norm",
       "",
       {{'b', 3}, {'s', 5}, {'h', 7}},
       {{"epsilon", 1e-5}}},
      {"layer_norm_wide",
       "layer_norm",
       "",
       {{'b', 3}, {'s', 3}, {'h', 133}},
       {{"epsilon", 1e-5}}},
      {"rms_norm",
       "rms_norm",
       "",
       {{'b', 3}, {'s', 5}, {'h', 7}},
       {{"epsilon", 1e-6}}},
      {"rms_norm_of_heads",
       "rms_norm",
       "bsgrd!,d->bsgrd,bsgr",
       {{'b', 3}, {'s', 3}, {'g', 2}, {'r', 3}, {'d', 5}},
       {{"epsilon", 1e-6}}},
  };
}

std::vector<KernelCase> StatisticsCases() {
  return {
      {"row_mean", "row_mean", "", {{'b', 3}, {'s', 5}, {'h', 7}}},
      {"row_std",
       "row_std",
       "",
       {{'b', 3}, {'s', 5}, {'h', 7}},
       {{"epsilon", 1e-5}}},
      {"normalize", "normalize", "", {{'b', 3}, {'s', 5}, {'h', 7}}},
  };
}

std::vector<KernelCase> RotaryCases() {
  return {
      {"rotary_queries",
       "rotary",
       "bsgrd!,bs->bsgrd",
       {{'b', 3}, {'s', 5}, {'g', 2}, {'r', 3}, {'d', 6}},
       {{"fraction", 1}, {"theta", 10000}},
       {{1, kIncreasing}}},
      {"rotary_keys_in_part",
       "rotary",
       "bsgd!,bs->bsgd",
       {{'b', 3}, {'s', 5}, {'g', 3}, {'d', 8}},
       {{"fraction", 0.5}, {"theta", 100}},
       {{1, kShuffled}}},
      {"rotary_linear",
       "rotary_linear",
       "bsgd!,bs->bsgd",
       {{'b', 3}, {'s', 5}, {'g', 3}, {'d', 6}},
       {{"factor", 4}, {"fraction", 1}, {"theta", 100}},
       {{1, kShuffled}}},
      // A third of the features, as of DeepSeek's queries; a ramp of three
      // pairs.
      {"rotary_yarn",
       "rotary_yarn",
       "bsgrd!,bs->bsgrd",
       {{'b', 3}, {'s', 5}, {'g', 2}, {'r', 3}, {'d', 24}},
       {{"beta_fast", 4},
        {"beta_slow", 1},
        {"factor", 40},
        {"fraction", 1.0 / 3},
        {"magnitude", 1.25},
        {"original_positions", 32},
        {"theta", 10}},
       {{1, kIncreasing}}},
      // Of four pairs one stays, one is on the ramp, two are slowed.
      {"rotary_llama3",
       "rotary_llama3",
       "bsgd!,bs->bsgd",
       {{'b', 3}, {'s', 5}, {'g', 3}, {'d', 8}},
       {{"factor", 8},
        {"fraction", 1},
        {"high_frequency", 4},
        {"low_frequency", 1},
        {"original_positions", 40},
        {"theta", 100}},
       {{1, kShuffled}}},
      // Two pairs of three features each way, slowed each by its own number.
      {"rotary_longrope",
       "rotary_longrope",
       "bsgd!,bs->bsgd",
       {{'b', 3}, {'s', 5}, {'g', 3}, {'d', 6}},
       {{"divisor", 1.5},
        {"divisor", 7},
        {"fraction", 2.0 / 3},
        {"magnitude", 1.19},
        {"theta", 100}},
       {{1, kShuffled}}},
  };
}

std::vector<KernelCase> ConcatCases() {
  return {
      {"concat_shared",
       "concat",
       "bsm!,bsgn!->bsgd!",
       {{'b', 3}, {'s', 5}, {'g', 4}, {'n', 3}, {'m', 2}, {'d', 5}},
       {{"features", 5}}},
      {"concat_alike",
       "concat",
       "bsgm!,bsgn!->bsgd!",
       {{'b', 3}, {'s', 5}, {'g', 3}, {'n', 2}, {'m', 7}, {'d', 9}},
       {{"features", 9}}},
  };
}

std::vector<KernelCase> SelectCases() {
  return {
      {"select",
       "select",
       "",
       {{'b', 3}, {'s', 5}, {'o', 1}, {'h', 7}},
       {{"count", 1}, {"place", 3}}},
  };
}

std::vector<KernelCase> StepsCases() {
  return {
      {"stack",
       "stack",
       "bh,bh,bh->bd!h",
       {{'b', 3}, {'d', 3}, {'h', 7}},
       {{"steps", 3}}},
      // More than one digit of a signature's.
      {"unstack",
       "unstack",
       "bd!h->bh,bh,bh,bh,bh,bh,bh,bh,bh,bh,bh,bh",
       {{'b', 3}, {'d', 12}, {'h', 5}},
       {{"steps", 12}}},
  };
}

std::vector<KernelCase> RecurrentCases() {
  return {
      {"lstm_gates",
       "lstm_gates",
       "bg!j,bj->bj,bj",
       {{'b', 3}, {'g', 4}, {'j', 133}}},
      {"lstm_gates_first",
       "lstm_gates",
       "bg!j->bj,bj",
       {{'b', 3}, {'g', 4}, {'j', 7}}},
      {"lstm_gates_last",
       "lstm_gates",
       "bg!j,bj->bj",
       {{'b', 3}, {'g', 4}, {'j', 7}}},
      {"gru_gates",
       "gru_gates",
       "bg!j,j,bg!j,bj->bj",
       {{'b', 5}, {'g', 3}, {'j', 133}}},
      {"gru_gates_first",
       "gru_gates",
       "bg!j,j->bj",
       {{'b', 3}, {'g', 3}, {'j', 7}}},
  };
}

std::vector<KernelCase> AttentionCases() {
  return {
      AttentionCase("causal",
                    {{'b', 3},
                     {'s', 5},
                     {'g', 3},
                     {'r', 1},
                     {'d', 4},
                     {'t', 5},
                     {'e', 4}},
                    0, kIncreasing, kIncreasing),
      AttentionCase("grouped",
                    {{'b', 2},
                     {'s', 7},
                     {'g', 2},
                     {'r', 3},
                     {'d', 3},
                     {'t', 7},
                     {'e', 5}},
                    0, kShuffled, kShuffled),
      AttentionCase("window",
                    {{'b', 2},
                     {'s', 7},
                     {'g', 2},
                     {'r', 2},
                     {'d', 3},
                     {'t', 7},
                     {'e', 3}},
                    3, kIncreasing, kIncreasing),
      AttentionCase("one_query",
                    {{'b', 2},
                     {'s', 1},
                     {'g', 2},
                     {'r', 1},
                     {'d', 5},
                     {'t', 70},
                     {'e', 3}},
                    0, Below(70), kIncreasing),
      // Some queries see no key at all.
      AttentionCase("blind",
                    {{'b', 3},
                     {'s', 5},
                     {'g', 2},
                     {'r', 3},
                     {'d', 3},
                     {'t', 7},
                     {'e', 3}},
                    2, Below(9), Below(9)),
      // Several tiles each way, ragged; most of them are skipped.
      AttentionCase("tiles",
                    {{'b', 1},
                     {'s', 150},
                     {'g', 1},
                     {'r', 2},
                     {'d', 5},
                     {'t', 203},
                     {'e', 3}},
                    0, kIncreasing, kIncreasing),
      AttentionCase("tiles_window",
                    {{'b', 1},
                     {'s', 203},
                     {'g', 2},
                     {'r', 1},
                     {'d', 5},
                     {'t', 203},
                     {'e', 3}},
                    70, kIncreasing, kIncreasing),
      AttentionCase("tiles_shuffled",
                    {{'b', 1},
                     {'s', 150},
                     {'g', 1},
                     {'r', 2},
                     {'d', 5},
                     {'t', 150},
                     {'e', 3}},
                    40, kShuffled, kShuffled),
      // Six heads: four of one series of slopes, two of the other.
      {"attention_alibi",
       "attention_alibi",
       "",
       {{'b', 2}, {'s', 7}, {'g', 2}, {'r', 3}, {'d', 3}, {'t', 7}, {'e', 5}},
       {{"alibi_heads", 6}, {"scale", 0.6}, {"window", 0}},
       {{3, kShuffled}, {4, kShuffled}}},
      {"attention_alibi_tiles",
       "attention_alibi",
       "",
       {{'b', 1},
        {'s', 150},
        {'g', 2},
        {'r', 1},
        {'d', 5},
        {'t', 203},
        {'e', 3}},
       {{"alibi_heads", 2}, {"scale", 0.6}, {"window", 70}},
       {{3, kIncreasing}, {4, kIncreasing}}},
      // Some keys are padding.
      {"attention_bidirectional",
       "attention_bidirectional",
       "",
       {{'b', 3}, {'s', 5}, {'g', 2}, {'r', 3}, {'d', 3}, {'t', 9}, {'e', 5}},
       {{"causal", 0}, {"scale", 0.6}, {"window", 0}},
       {{3, kShuffled}, {4, {Ints::kRandom, -3, 9}}}},
      {"attention_bidirectional_window",
       "attention_bidirectional",
       "",
       {{'b', 2}, {'s', 9}, {'g', 2}, {'r', 1}, {'d', 3}, {'t', 7}, {'e', 3}},
       {{"causal", 0}, {"scale", 0.6}, {"window", 3}},
       {{3, kShuffled}, {4, kIncreasing}}},
      {"attention_bidirectional_tiles",
       "attention_bidirectional",
       "",
       {{'b', 1},
        {'s', 150},
        {'g', 1},
        {'r', 2},
        {'d', 5},
        {'t', 203},
        {'e', 3}},
       {{"causal", 0}, {"scale", 0.6}, {"window", 70}},
       {{3, kIncreasing}, {4, kIncreasing}}},
      // Per side two buckets of one distance and two of several.
      {"attention_relative",
       "attention_relative",
       "",
       {{'b', 2},
        {'s', 9},
        {'g', 2},
        {'r', 3},
        {'d', 3},
        {'t', 11},
        {'e', 5},
        {'n', 8}},
       {{"causal", 0}, {"max_distance", 6}, {"scale", 0.6}},
       {{3, kShuffled}, {4, {Ints::kRandom, -2, 12}}}},
      {"attention_relative_causal",
       "attention_relative",
       "",
       {{'b', 3},
        {'s', 9},
        {'g', 3},
        {'r', 1},
        {'d', 3},
        {'t', 9},
        {'e', 3},
        {'n', 6}},
       {{"causal", 1}, {"max_distance", 7}, {"scale", 0.6}},
       {{3, kIncreasing}, {4, kShuffled}}},
      {"attention_relative_tiles",
       "attention_relative",
       "",
       {{'b', 2},
        {'s', 150},
        {'g', 1},
        {'r', 2},
        {'d', 5},
        {'t', 130},
        {'e', 3},
        {'n', 32}},
       {{"causal", 0}, {"max_distance", 128}, {"scale", 0.6}},
       {{3, kIncreasing}, {4, kIncreasing}}},
  };
}

std::vector<KernelCase> ConvolutionCases() {
  return {
      Convolution("plain", "bch!w!,ock!l!->boyx",
                  {{'b', 3}, {'c', 3}, {'o', 5}, {'h', 6}, {'w', 5}},
                  {.height = 3, .width = 2}),
      // Not all rows and columns of the image are under a window.
      Convolution("strided", "bch!w!,ock!l!+o->boyx",
                  {{'b', 2}, {'c', 3}, {'o', 4}, {'h', 8}, {'w', 7}},
                  {.height = 3, .width = 1, .stride = 2, .pad_top = 1}),
      Convolution("dilated", "bch!w!,ock!l!+o->boyx",
                  {{'b', 2}, {'c', 2}, {'o', 3}, {'h', 7}, {'w', 8}},
                  {.height = 2,
                   .width = 3,
                   .dilation = 2,
                   .pad_top = 1,
                   .pad_left = 3}),
      Convolution("grouped", "bgch!w!,gnck!l!+gn->bgnyx",
                  {{'b', 2}, {'g', 3}, {'c', 2}, {'n', 3}, {'h', 5}, {'w', 5}},
                  {.height = 3, .width = 3, .pad_top = 1, .pad_left = 1}),
      // As for a grouped one behind it.
      Convolution("to_groups", "bih!w!,gcik!l!->bgcyx",
                  {{'b', 2}, {'i', 3}, {'g', 2}, {'c', 3}, {'h', 4}, {'w', 3}},
                  {.height = 1, .width = 1}),
      Convolution("of_signals", "bcw!,ocl!+o->box",
                  {{'b', 3}, {'c', 3}, {'o', 4}, {'w', 11}},
                  {.width = 3, .stride = 2, .dilation = 2, .pad_left = 2}),
      Convolution("of_signals_grouped", "bgcw!,gncl!->bgnx",
                  {{'b', 2}, {'g', 2}, {'c', 2}, {'n', 3}, {'w', 7}},
                  {.width = 3, .pad_left = 1}),
      // 4 * 2 - 2 * 1 + 3 = 9 rows; the last two columns are under no window.
      Transposed(
          "strided", "bnyx,nck!l!->bch!w!",
          {{'b', 2},
           {'n', 3},
           {'c', 2},
           {'y', 5},
           {'x', 4},
           {'h', 9},
           {'w', 9}},
          {.height = 3, .width = 3, .stride = 2, .pad_top = 1, .pad_left = 1}),
      Transposed("grouped", "bgnyx,gnck!l!->bgch!w!",
                 {{'b', 2},
                  {'g', 2},
                  {'n', 2},
                  {'c', 3},
                  {'y', 3},
                  {'x', 4},
                  {'h', 6},
                  {'w', 8}},
                 {.height = 2, .width = 2, .stride = 2}),
      Transposed("of_signals", "bnx,ncl!->bcw!",
                 {{'b', 2}, {'n', 3}, {'c', 2}, {'x', 5}, {'w', 11}},
                 {.width = 4, .stride = 2, .dilation = 1, .pad_left = 1}),
  };
}

std::vector<KernelCase> PoolingCases() {
  return {
      Pooling("max_pool", "bch!w!->bcyx",
              {.height = 3, .width = 2, .stride = 2, .pad_top = 1}),
      Pooling("max_pool", "bcw!->bcx", {.width = 3, .stride = 2}),
      Pooling("average_pool", "bcw!->bcx",
              {.width = 2, .stride = 2, .pad_left = 1}, 1),
      Pooling("average_pool", "bch!w!->bcyx",
              {.height = 2, .width = 3, .stride = 1, .pad_left = 2}, 1),
      Pooling("average_pool", "bgch!w!->bgcyx",
              {.height = 3, .width = 3, .stride = 3, .pad_top = 1}, 0),
      {"image_mean",
       "image_mean",
       "",
       {{'b', 3}, {'c', 5}, {'h', 3}, {'w', 4}}},
      {"image_mean_grouped",
       "image_mean",
       "bgchw->bgc",
       {{'b', 2}, {'g', 3}, {'c', 2}, {'h', 3}, {'w', 5}}},
  };
}

std::vector<KernelCase> BatchNormCases() {
  return {
      {"batch_norm",
       "batch_norm",
       "bchw,c,c->bchw,c,c",
       {{'b', 4}, {'c', 5}, {'h', 3}, {'w', 4}},
       {{"epsilon", 1e-5}}},
      {"batch_norm_of_signals",
       "batch_norm",
       "bcw,c,c->bcw,c,c",
       {{'b', 4}, {'c', 5}, {'w', 7}},
       {{"epsilon", 1e-5}}},
      {"batch_norm_of_features",
       "batch_norm",
       "bc,c,c->bc,c,c",
       {{'b', 9}, {'c', 5}},
       {{"epsilon", 1e-5}}},
      {"ghost_batch_norm_of_features",
       "ghost_batch_norm",
       "bc,c,c->bc,bc,bc",
       {{'b', 12}, {'c', 5}},
       {{"epsilon", 1e-5}, {"groups", 3}}},
      {"batch_norm_of_groups",
       "batch_norm",
       "bgchw,gc,gc->bgchw,gc,gc",
       {{'b', 3}, {'g', 2}, {'c', 3}, {'h', 5}, {'w', 2}},
       {{"epsilon", 1e-3}}},
      {"ghost_batch_norm",
       "ghost_batch_norm",
       "bchw,c,c->bchw,bc,bc",
       {{'b', 10}, {'c', 3}, {'h', 3}, {'w', 4}},
       {{"epsilon", 1e-5}, {"groups", 5}}},
      // Two shards cut no group, three do.
      {"ghost_batch_norm_of_groups",
       "ghost_batch_norm",
       "bgchw,gc,gc->bgchw,bgc,bgc",
       {{'b', 12}, {'g', 2}, {'c', 2}, {'h', 3}, {'w', 2}},
       {{"epsilon", 1e-3}, {"groups", 4}}},
      {"tracked_batch_norm",
       "tracked_batch_norm",
       "bchw,c,c,c,c->bchw,c,c",
       {{'b', 4}, {'c', 5}, {'h', 3}, {'w', 4}},
       {{"epsilon", 1e-5}, {"momentum", 0.1}}},
      {"tracked_batch_norm_of_groups",
       "tracked_batch_norm",
       "bgchw,gc,gc,gc,gc->bgchw,gc,gc",
       {{'b', 3}, {'g', 2}, {'c', 3}, {'h', 5}, {'w', 2}},
       {{"epsilon", 1e-3}, {"momentum", 0.1}}},
      {"tracked_ghost_batch_norm",
       "tracked_ghost_batch_norm",
       "bchw,c,c,c,c->bchw,bc,bc",
       {{'b', 12}, {'c', 3}, {'h', 3}, {'w', 4}},
       {{"epsilon", 1e-5}, {"groups", 4}, {"momentum", 0.1}}},
  };
}

std::vector<KernelCase> ChannelsCases() {
  return {
      {"concat_channels_last",
       "concat_channels",
       "bsm!,bsn!->bsd!",
       {{'b', 3}, {'s', 5}, {'m', 2}, {'n', 4}, {'d', 6}},
       {{"channels", 6}}},
      {"concat_channels_first",
       "concat_channels",
       "m!b,p!b,o!b->d!b",
       {{'b', 5}, {'m', 2}, {'p', 4}, {'o', 1}, {'d', 7}},
       {{"channels", 7}}},
      {"concat_channels",
       "concat_channels",
       "bm!hw,bn!hw,bo!hw->bd!hw",
       {{'b', 3}, {'m', 2}, {'n', 1}, {'o', 4}, {'d', 7}, {'h', 3}, {'w', 4}},
       {{"channels", 7}}},
  };
}

std::vector<KernelCase> ElementwiseCases() {
  return {
      Elementwise("gelu"),
      Elementwise("gelu_erf"),
      Elementwise("silu"),
      Elementwise("relu"),
      Elementwise("sigmoid"),
      Elementwise("tanh"),
      {"scale",
       "scale",
       "bsf->bsf",
       {{'b', 3}, {'s', 5}, {'f', 29}},
       {{"factor", 1.75}}},
      With(Elementwise("offset"), {{"amount", 1.25}}),
      Elementwise("exp"),
      Positive(Elementwise("log")),
      Positive(Elementwise("sqrt")),
      Positive(Elementwise("reciprocal")),
      Elementwise("abs"),
      Elementwise("erf"),
      Elementwise("sin"),
      Elementwise("cos"),
      Elementwise("softplus"),
      Elementwise("hard_sigmoid"),
      Beyond(Elementwise("hard_sigmoid")),
      Elementwise("hard_swish"),
      Beyond(Elementwise("hard_swish")),
      With(Elementwise("power"), {{"exponent", 3}}),
      With(Elementwise("clip"), {{"least", -0.4}, {"most", 0.55}}),
      With(Elementwise("leaky_relu"), {{"slope", 0.1}}),
      With(Elementwise("elu"), {{"alpha", 0.7}}),
      Elementwise("add", 2),
      Elementwise("sum", 3),
  };
}

std::vector<KernelCase> BroadcastCases() {
  return {
      Elementwise("multiply", 2),
      {"multiply_broadcast",
       "multiply",
       "bsh,h->bsh",
       {{'b', 3}, {'s', 5}, {'h', 7}}},
      {"multiply_outer",
       "multiply",
       "sb,hs->bsh",
       {{'b', 3}, {'s', 5}, {'h', 7}}},
      // A dimension of one, which the result lacks.
      {"broadcast_add",
       "broadcast_add",
       "bsh,u!s->bsh",
       {{'b', 3}, {'s', 5}, {'h', 7}, {'u', 1}}},
      {"broadcast_add_rows",
       "broadcast_add",
       "bsh,h->bsh",
       {{'b', 3}, {'s', 40}, {'h', 9}}},
      Elementwise("subtract", 2),
      {"subtract_broadcast",
       "subtract",
       "h,bsh->bsh",
       {{'b', 3}, {'s', 5}, {'h', 7}}},
      Positive(Elementwise("divide", 2)),
      Positive({"divide_broadcast",
                "divide",
                "bsh,bs->bsh",
                {{'b', 3}, {'s', 5}, {'h', 7}}}),
      Elementwise("maximum", 2),
      {"maximum_broadcast",
       "maximum",
       "bsh,h->bsh",
       {{'b', 3}, {'s', 5}, {'h', 7}}},
      Elementwise("minimum", 2),
      {"equal", "equal", "bsh,bsh->bsh", {{'b', 3}, {'s', 5}, {'h', 7}}},
      {"not_equal", "not_equal", "bsh,h->bsh", {{'b', 3}, {'s', 5}, {'h', 7}}},
      {"less", "less", "bsh,bsh->bsh", {{'b', 3}, {'s', 5}, {'h', 7}}},
      {"less_equal",
       "less_equal",
       "bsh,h->bsh",
       {{'b', 3}, {'s', 5}, {'h', 7}}},
      {"greater", "greater", "bsh,bsh->bsh", {{'b', 3}, {'s', 5}, {'h', 7}}},
      {"greater_equal",
       "greater_equal",
       "bsh,h->bsh",
       {{'b', 3}, {'s', 5}, {'h', 7}}},
      Conditional({"where",
                   "where",
                   "bsh,bsh,bsh->bsh",
                   {{'b', 3}, {'s', 5}, {'h', 7}}}),
      Conditional({"where_broadcast",
                   "where",
                   "bs,h,bsh->bsh",
                   {{'b', 3}, {'s', 5}, {'h', 7}}}),
      Conditional({"where_turned",
                   "where",
                   "hs,b,hb->bsh",
                   {{'b', 3}, {'s', 5}, {'h', 7}}}),
  };
}

std::vector<KernelCase> ReductionCases() {
  return {
      {"transpose",
       "transpose",
       "bshc->hbcs",
       {{'b', 3}, {'s', 5}, {'h', 7}, {'c', 4}}},
      {"reduce_sum", "reduce_sum", "bsh->bh", {{'b', 3}, {'s', 5}, {'h', 7}}},
      {"reduce_sum_of_all",
       "reduce_sum",
       "bsh->",
       {{'b', 3}, {'s', 5}, {'h', 17}}},
      {"reduce_sum_turned",
       "reduce_sum",
       "bshc->cb",
       {{'b', 3}, {'s', 5}, {'h', 7}, {'c', 4}}},
      {"reduce_mean",
       "reduce_mean",
       "bshc->bh",
       {{'b', 3}, {'s', 5}, {'h', 7}, {'c', 4}}},
      {"reduce_max",
       "reduce_max",
       "bs!hc!->bh",
       {{'b', 3}, {'s', 5}, {'h', 7}, {'c', 13}}},
      With({"reduce_variance",
            "reduce_variance",
            "bsh!->sb",
            {{'b', 3}, {'s', 5}, {'h', 41}}},
           {{"correction", 1}}),
  };
}

std::vector<KernelCase> SoftmaxCases() {
  return {
      {"softmax", "softmax", "bsz->bsz", {{'b', 3}, {'s', 5}, {'z', 7}}},
      {"softmax_wide", "softmax", "bz->bz", {{'b', 3}, {'z', 301}}},
      {"softmax_of_channels",
       "softmax",
       "xbzwh->xbzwh",
       {{'b', 3}, {'z', 5}, {'h', 2}, {'w', 3}, {'x', 2}}},
      {"log_softmax",
       "log_softmax",
       "szb->szb",
       {{'b', 3}, {'s', 5}, {'z', 37}}},
  };
}

std::vector<KernelCase> CausalMaskCases() {
  return {
      {"causal_mask",
       "causal_mask",
       "bhqk->bhqk",
       {{'b', 2}, {'h', 3}, {'q', 5}, {'k', 7}},
       {{"value", -2}}},
      {"causal_mask_turned",
       "causal_mask",
       "kbq->kbq",
       {{'k', 6}, {'b', 2}, {'q', 5}},
       {{"value", 0.5}}},
  };
}

std::vector<KernelCase> EinsumCases() {
  return {
      {"einsum_scores",
       "einsum",
       "bhqd,bhkd->bhqk",
       {{'b', 3}, {'h', 3}, {'q', 5}, {'k', 7}, {'d', 6}}},
      {"einsum_heads_inside",
       "einsum",
       "bqhd,bkgd->bgqhk",
       {{'b', 3}, {'h', 3}, {'g', 2}, {'q', 5}, {'k', 4}, {'d', 6}}},
      {"einsum_broadcast",
       "einsum",
       "u!bmk,kn->bmn",
       {{'b', 3}, {'m', 3}, {'n', 5}, {'k', 7}, {'u', 1}}},
      {"einsum_large",
       "einsum",
       "bmk,bkn->bmn",
       {{'b', 3}, {'m', 17}, {'n', 37}, {'k', 41}}},
  };
}

std::vector<KernelCase> SliceCases() {
  return {
      With({"slice",
            "slice",
            "bm!h->bd!h",
            {{'b', 3}, {'m', 7}, {'h', 5}, {'d', 3}}},
           {{"places", 3}, {"start", 1}, {"step", 2}}),
      With({"slice_backwards",
            "slice",
            "bhm!->bhd!",
            {{'b', 3}, {'m', 7}, {'h', 5}, {'d', 4}}},
           {{"places", 4}, {"start", 6}, {"step", -2}}),
      With({"pad",
            "pad",
            "bm!h->bd!h",
            {{'b', 3}, {'m', 4}, {'h', 5}, {'d', 9}}},
           {{"before", 2}, {"places", 9}, {"value", 0.5}}),
  };
}

std::vector<KernelCase> ResampleCases() {
  return {
      // Twice as many places of images, between the centres of pixels.
      Resampling("linear", "bcm!w->bcd!w",
                 {{'b', 2}, {'c', 3}, {'m', 4}, {'d', 8}, {'w', 3}}, -0.25, 0.5,
                 1),
      Resampling("corners", "bcm!->bcd!",
                 {{'b', 2}, {'c', 3}, {'m', 5}, {'d', 7}}, 0, 4.0 / 6, 1),
      Resampling("nearest", "bm!cw->bd!cw",
                 {{'b', 2}, {'c', 3}, {'m', 3}, {'d', 7}, {'w', 5}}, 1e-9,
                 3.0 / 7, 0),
      Resampling("down", "bcm!->bcd!", {{'b', 2}, {'c', 3}, {'m', 9}, {'d', 4}},
                 0.625, 2.25, 1),
      // Three times the first place in front, twice the last one behind.
      Resampling("edges", "bcm!->bcd!",
                 {{'b', 2}, {'c', 3}, {'m', 4}, {'d', 9}}, -3, 1, 0),
  };
}

std::vector<KernelCase> ReshapeCases() {
  return {
      {"reshape_joined",
       "reshape",
       "bcm!n!w->bcd!w",
       {{'b', 2}, {'c', 3}, {'m', 2}, {'n', 3}, {'w', 5}, {'d', 6}},
       {{"first", 6}, {"second", 1}, {"third", 1}}},
      {"reshape_apart",
       "reshape",
       "bm!h->bd!e!f!h",
       {{'b', 3}, {'m', 12}, {'h', 2}, {'d', 2}, {'e', 3}, {'f', 2}},
       {{"first", 2}, {"second", 3}, {"third", 2}}},
  };
}

std::vector<KernelCase> GatherCases() {
  return {
      {"gather_rows",
       "gather",
       "vh,bs->bsh",
       {{'b', 3}, {'s', 5}, {'v', 7}, {'h', 3}},
       {},
       {{1, Below(7)}}},
      {"gather_of_samples",
       "gather",
       "bvh,bt->bth",
       {{'b', 3}, {'t', 5}, {'v', 7}, {'h', 3}},
       {},
       {{1, Below(7)}}},
      {"gather_elements",
       "gather",
       "bhv,hbt->thb",
       {{'b', 3}, {'t', 5}, {'v', 4}, {'h', 3}},
       {},
       {{1, {Ints::kRandom, -1, 5}}}},
      {"scatter_add_rows",
       "scatter_add",
       "bsh,bs->vh",
       {{'b', 3}, {'s', 5}, {'v', 7}, {'h', 3}},
       {{"places", 7}},
       {{1, Below(7)}}},
      {"scatter_add_of_samples",
       "scatter_add",
       "bth,bt->bhv",
       {{'b', 3}, {'t', 5}, {'v', 4}, {'h', 3}},
       {{"places", 4}},
       {{1, {Ints::kRandom, -1, 5}}}},
      {"one_hot",
       "one_hot",
       "bs->bsv",
       {{'b', 3}, {'s', 5}, {'v', 4}},
       {{"first", 0}, {"places", 4}},
       {{0, {Ints::kRandom, -1, 5}}}},
      {"one_hot_turned",
       "one_hot",
       "bs->vsb",
       {{'b', 3}, {'s', 5}, {'v', 3}},
       {{"first", 2}, {"places", 3}},
       {{0, Below(7)}}},
  };
}

std::vector<KernelCase> TopKCases() {
  return {
      {"top_k",
       "top_k",
       "bsv!->bsk!,bsk!",
       {{'b', 3}, {'s', 5}, {'v', 7}, {'k', 3}},
       {{"k", 3}, {"largest", 1}, {"last", 0}}},
      {"top_k_smallest",
       "top_k",
       "bv!s->sk!b,sk!b",
       {{'b', 3}, {'s', 5}, {'v', 4}, {'k', 4}},
       {{"k", 4}, {"largest", 0}, {"last", 1}}},
  };
}

std::vector<KernelCase> PairwiseDotCases() {
  return {
      {"pairwise_dot",
       "pairwise_dot",
       "",
       {{'b', 3}, {'n', 5}, {'h', 37}, {'p', 10}},
       {{"pairs", 10}}},
  };
}

std::vector<KernelCase> DropoutCases() {
  return {
      {"dropout",
       "dropout",
       "bsh->bsh",
       {{'b', 3}, {'s', 5}, {'h', 7}},
       {{"probability", 0.4}, {"salt", 11}}},
  };
}

std::vector<KernelCase> CrossEntropyCases() {
  return {
      {"count_labels",
       "count_labels",
       "",
       {{'b', 3}, {'s', 5}},
       {},
       {{0, {Ints::kRandom, -2, 7}}}},
      {"cross_entropy",
       "cross_entropy",
       "",
       {{'b', 3}, {'s', 5}, {'v', 7}},
       {},
       {{1, {Ints::kRandom, -2, 7}}}},
      {"cross_entropy_of_samples",
       "cross_entropy",
       "bv,b,->,b",
       {{'b', 6}, {'v', 7}},
       {},
       {{1, {Ints::kRandom, -2, 7}}}},
      {"cross_entropy_wide",
       "cross_entropy",
       "",
       {{'b', 3}, {'s', 3}, {'v', 301}},
       {},
       {{1, {Ints::kRandom, 0, 301}}}},
      // Shards of padding alone.
      {"cross_entropy_padded",
       "cross_entropy",
       "",
       {{'b', 3}, {'s', 5}, {'v', 7}},
       {{"vocabulary", 4}},
       {{1, {Ints::kRandom, -2, 4}}}},
      {"cross_entropy_padded_wide",
       "cross_entropy",
       "",
       {{'b', 3}, {'s', 3}, {'v', 304}},
       {{"vocabulary", 301}},
       {{1, {Ints::kRandom, 0, 301}}}},
  };
}

std::vector<KernelCase> LossesCases() {
  return {
      {"mean_squared_error",
       "mean_squared_error",
       "bsf,bsf->",
       {{'b', 3}, {'s', 5}, {'f', 7}},
       {{"weight", 0.3}}},
      {"mean_squared_error_of_samples",
       "mean_squared_error",
       "b,b->",
       {{'b', 37}},
       {{"weight", 1}}},
      {"binary_cross_entropy",
       "binary_cross_entropy",
       "bsf,bsf->",
       {{'b', 3}, {'s', 5}, {'f', 7}},
       {{"weight", 0.3}}},
      {"binary_cross_entropy_of_samples",
       "binary_cross_entropy",
       "bf,bf->",
       {{'b', 6}, {'f', 11}},
       {{"weight", 1}}},
  };
}

std::vector<KernelCase> MoeCases() {
  return {
      GateCase("drops", 2, 1),
      GateCase("dropless", 7, 1),
      GateCase("as_they_are", 3, 0),
      GateCase("sigmoids", 3, 0, 1),
      GateCase("groups", 3, 0, 0, 4, 1),
      GateCase("groups_of_sigmoids", 3, 1, 1, 4, 2),
      BalanceCase("", 0, 1),
      BalanceCase("_of_sigmoids", 1, 3),
      // Some slots are taken twice, some choices were dropped.
      {"moe_dispatch",
       "moe_dispatch",
       "",
       {{'b', 3}, {'t', 5}, {'h', 7}, {'k', 2}, {'e', 4}, {'s', 3}},
       {{"capacity", 3}, {"experts", 4}},
       {{1, {Ints::kRandom, -3, 12}}}},
      {"moe_dispatch_wide",
       "moe_dispatch",
       "",
       {{'b', 1}, {'t', 5}, {'h', 133}, {'k', 1}, {'e', 3}, {'s', 2}},
       {{"capacity", 2}, {"experts", 3}},
       {{1, {Ints::kRandom, -1, 6}}}},
      {"moe_collect",
       "moe_collect",
       "",
       {{'b', 3}, {'t', 3}, {'h', 7}, {'k', 2}, {'e', 4}, {'s', 5}},
       {},
       {{1, {Ints::kRandom, -3, 12}}}},
      {"moe_combine",
       "moe_combine",
       "",
       {{'b', 3}, {'s', 5}, {'k', 3}, {'h', 7}}},
      {"moe_combine_wide",
       "moe_combine",
       "",
       {{'b', 1}, {'s', 3}, {'k', 2}, {'h', 133}}},
      {"expert_linear",
       "expert_linear",
       "",
       {{'e', 4}, {'b', 3}, {'s', 3}, {'i', 5}, {'o', 7}},
       {{"top_k", 2}}},
      {"expert_linear_one_row",
       "expert_linear",
       "",
       {{'e', 3}, {'b', 1}, {'s', 1}, {'i', 37}, {'o', 41}},
       {{"top_k", 1}}},
  };
}

std::vector<KernelCase> OptimizerCases() {
  return {
      {"adamw",
       "adamw",
       "",
       {{'n', 301}},
       {{"beta1", 0.9},
        {"beta2", 0.95},
        {"epsilon", 1e-8},
        {"lr", 0.01},
        {"weight_decay", 0.1}},
       {},
       /*in_place=*/true},
      {"adam",
       "adam",
       "",
       {{'n', 301}},
       {{"beta1", 0.9},
        {"beta2", 0.95},
        {"epsilon", 1e-8},
        {"lr", 0.01},
        {"weight_decay", 0}},
       {},
       /*in_place=*/true},
      {"momentum",
       "momentum",
       "",
       {{'n', 301}},
       {{"beta1", 0.9}, {"lr", 0.1}, {"weight_decay", 0.2}},
       {},
       /*in_place=*/true},
      {"sgd",
       "sgd",
       "",
       {{'n', 301}},
       {{"lr", 0.1}, {"weight_decay", 0.2}},
       {},
       /*in_place=*/true},
      {"running_average",
       "running_average",
       "",
       {{'n', 301}},
       {{"rate", 0.19}},
       {},
       /*in_place=*/true},
      {"cast", "cast", "", {{'n', 301}}},
      {"stochastic_cast", "stochastic_cast", "", {{'n', 301}}, {{"salt", 3}}},
      {"square_sum", "square_sum", "", {{'n', 301}}},
      {"clip_coefficient", "clip_coefficient", "", {}, {{"clip", 0.5}}},
  };
}

std::vector<KernelCase> AdafactorCases() {
  return {
      {"adafactor_sums", "adafactor_sums", "", {{'b', 3}, {'r', 7}, {'c', 37}}},
      {"adafactor_factors",
       "adafactor_factors",
       "",
       {{'b', 3}, {'r', 7}, {'c', 37}},
       AdafactorAttributes(),
       {},
       /*in_place=*/true,
       /*above=*/0.1},
      {"adafactor_norm",
       "adafactor_norm",
       "",
       {{'b', 3}, {'r', 7}, {'c', 37}},
       AdafactorAttributes(),
       {},
       /*in_place=*/false,
       /*above=*/0.1},
      {"adafactor_step",
       "adafactor_step",
       "",
       {{'b', 3}, {'r', 7}, {'c', 37}},
       AdafactorAttributes(),
       {},
       /*in_place=*/true,
       /*above=*/0.1},
      {"adafactor_vector_norm",
       "adafactor_vector_norm",
       "",
       {{'n', 301}},
       AdafactorAttributes(),
       {},
       /*in_place=*/true},
      {"adafactor_vector_step",
       "adafactor_vector_step",
       "",
       {{'n', 301}},
       AdafactorAttributes(),
       {},
       /*in_place=*/true,
       /*above=*/0.1},
  };
}

}  // namespace

const std::vector<KernelCase>& KernelCases() {
  static const std::vector<KernelCase>* const table = [] {
    auto* cases = new std::vector<KernelCase>();
#define TESSERA_KERNELS(family) \
  for (KernelCase & c : family##Cases()) cases->push_back(std::move(c));
#include "runtime/kernels/kernels.def"
#undef TESSERA_KERNELS
    return cases;
  }();
  return *table;
}

const KernelCase& KernelCaseNamed(std::string_view name) {
  for (const KernelCase& c : KernelCases()) {
    if (c.name == name) return c;
  }
  TESSERA_CHECK(false) << name;
  return KernelCases()[0];
}

const OpDef& OpNamed(std::string_view name) {
  return *FindOp(name).value();
}

namespace {

Shape ShapeOf(const IndexRule& rule, const Indices& indices,
              const std::map<char, int64_t>& extents) {
  Shape shape;
  for (uint8_t f : indices) {
    shape.push_back(extents.at(rule.factors[f].letter));
  }
  return shape;
}

}  // namespace

void FillRandom(HostTensor& tensor, Rng& rng) {
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    const double magnitude = 0.1 + 0.9 * rng.Uniform01();
    tensor.Set(i, rng.Below(2) == 0 ? magnitude : -magnitude);
  }
}

namespace {

void FillInts(HostTensor& tensor, const Ints& ints, Rng& rng) {
  const int64_t width = tensor.shape().back();
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    if (ints.kind == Ints::kRandom) {
      const auto range = static_cast<uint32_t>(ints.high - ints.low);
      tensor.Set(i, ints.low + static_cast<int32_t>(rng.Below(range)));
      continue;
    }
    const int64_t column = i % width;
    tensor.Set(i, static_cast<double>(column));
    if (ints.kind == Ints::kShuffled) {
      const int64_t other = i - rng.Below(static_cast<uint32_t>(column) + 1);
      const double swapped = tensor.At(other);
      tensor.Set(other, tensor.At(i));
      tensor.Set(i, swapped);
    }
  }
}

void MakePositive(HostTensor& tensor, double above) {
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    tensor.Set(i, above + std::abs(tensor.At(i)));
  }
}

void Choose(HostTensor& tensor, Rng& rng) {
  for (int64_t i = 0; i < tensor.elements(); ++i) tensor.Set(i, rng.Below(2));
}

}  // namespace

Problem ForwardProblem(const KernelCase& c) {
  Rng rng(7);
  Problem problem;
  problem.op = &OpNamed(c.op);
  problem.rule =
      IndexRule::Parse(c.rule.empty() ? problem.op->rule : c.rule).value();
  problem.attributes = c.attributes;
  for (size_t i = 0; i < problem.rule.operands.size(); ++i) {
    const Shape shape =
        ShapeOf(problem.rule, problem.rule.operands[i], c.extents);
    const auto ints = c.ints.find(i);
    if (ints != c.ints.end()) {
      problem.operands.emplace_back(shape, DType::kInt32);
      FillInts(problem.operands.back(), ints->second, rng);
    } else {
      problem.operands.emplace_back(shape, DType::kFloat64);
      FillRandom(problem.operands.back(), rng);
      if (c.above > 0) MakePositive(problem.operands.back(), c.above);
      if (shape.empty()) problem.operands.back().Set(0, 3);  // count, norm
      if (c.conditions.contains(i)) Choose(problem.operands.back(), rng);
    }
  }
  const std::vector<size_t>& integers = problem.op->integer_results;
  for (const Indices& indices : problem.rule.results) {
    const bool is_integer = std::find(integers.begin(), integers.end(),
                                      problem.initial.size()) != integers.end();
    problem.initial.emplace_back(ShapeOf(problem.rule, indices, c.extents),
                                 is_integer ? DType::kInt32 : DType::kFloat64);
    if (!c.in_place) continue;
    HostTensor& result = problem.initial.back();
    FillRandom(result, rng);
    for (int64_t i = 0; i < result.elements(); ++i) {  // v is not negative
      result.Set(i, std::abs(result.At(i)));
    }
  }
  return problem;
}

namespace {

void Call(const Problem& problem, std::string_view kernel,
          const std::vector<LocalTensor>& operands, const CallOptions& options,
          Tensors& results) {
  std::vector<LocalTensor> local;
  for (const HostTensor& result : results) local.push_back(result.Local());
  options.run(kernel, {.rule = &problem.rule,
                       .attributes = problem.attributes,
                       .operands = operands,
                       .results = local,
                       .accumulate = options.accumulate,
                       .seed = 5,
                       .step = 3,
                       .threads = options.threads});
}

std::vector<LocalTensor> Locals(const Tensors& tensors) {
  std::vector<LocalTensor> locals;
  for (const HostTensor& tensor : tensors) locals.push_back(tensor.Local());
  return locals;
}

// The state of one of `parts` shards; where its samples are groups of their
// own, it has only these.
HostTensor StateOf(const Problem& problem,
                   const std::vector<LocalTensor>& operands,
                   CallOptions options, int64_t part = 0, int64_t parts = 1) {
  const bool doubles = problem.initial[0].dtype() == DType::kFloat64;
  Shape shape;
  int64_t groups = 1;
  if (const auto name = problem.op->coupling.groups; !name.empty()) {
    groups = static_cast<int64_t>(
        std::ranges::find(problem.attributes, name, &Attribute::name)->value);
    shape.push_back(groups);
  }
  for (char letter : problem.op->coupling.state_indices) {
    const int f = problem.rule.FactorOf(letter);
    for (size_t i = 0; f >= 0 && i < operands.size(); ++i) {
      const Indices& indices = problem.rule.operands[i];
      const auto it = std::find(indices.begin(), indices.end(), f);
      if (it == indices.end()) continue;
      shape.push_back(operands[i].shape[it - indices.begin()]);
      break;
    }
  }
  shape.push_back(problem.op->coupling.state_width);
  Tensors state = {
      HostTensor(shape, doubles ? DType::kFloat64 : DType::kFloat32)};
  if (parts > 1) {
    state[0] =
        state[0].Part(0, part * groups / parts, (part + 1) * groups / parts);
  }
  options.accumulate = false;
  Call(problem, std::string(problem.op->name) + ".state", operands, options,
       state);
  return state[0];
}

}  // namespace

void RunCpuKernel(std::string_view kernel, const KernelCall& call) {
  FindCpuKernel(kernel).value()->run(call);
}

Tensors Compute(const Problem& problem, const CallOptions& options) {
  Tensors results = problem.initial;
  std::vector<LocalTensor> operands = Locals(problem.operands);
  HostTensor state;
  if (problem.op->coupling.exists()) {
    state = StateOf(problem, operands, options);
    operands.push_back(state.Local());
  }
  Call(problem, problem.op->name, operands, options, results);
  return results;
}

Problem Converted(Problem problem, DType dtype, int64_t skew) {
  for (HostTensor& tensor : problem.operands) tensor = tensor.As(dtype, skew);
  for (HostTensor& tensor : problem.initial) tensor = tensor.As(dtype, skew);
  return problem;
}

// ---- Adjoints ---------------------------------------------------------------

std::vector<Symbol> Symbols(std::string_view text) {
  std::vector<Symbol> symbols(1);
  for (char c : text) {
    if (c == ',') {
      symbols.emplace_back();
    } else if (c == 'd') {
      symbols.back().gradient = true;
    } else if (c == 'x' || c == 'y') {
      symbols.back().of_result = c == 'y';
    } else {
      symbols.back().index =
          10 * symbols.back().index + static_cast<size_t>(c - '0');
    }
  }
  return symbols;
}

size_t ResultsWithGradients(const Problem& forward) {
  size_t results = 1;
  for (const AdjointDef& adjoint : forward.op->adjoints) {
    const size_t arrow = adjoint.signature.find("->");
    for (const Symbol& s : Symbols(adjoint.signature.substr(0, arrow))) {
      if (s.gradient) results = std::max(results, s.index + 1);
    }
  }
  return std::min(results, forward.initial.size());
}

HostTensor GradientOfResult(const HostTensor& dy, size_t k) {
  HostTensor gradient = dy;
  for (int64_t i = 0; i < dy.elements(); ++i) {
    gradient.Set(i, dy.At(i) / static_cast<double>(k + 1));
  }
  return gradient;
}

std::optional<AdjointProblem> Adjoint(const Problem& forward,
                                      const Tensors& results,
                                      const HostTensor& dy,
                                      const AdjointDef& adjoint) {
  if (adjoint.op.empty()) return std::nullopt;
  const size_t arrow = adjoint.signature.find("->");
  AdjointProblem backward;
  Problem& problem = backward.problem;
  problem.op = &OpNamed(adjoint.op);
  problem.attributes = forward.attributes;
  problem.rule.factors = forward.rule.factors;
  for (const Symbol& s : Symbols(adjoint.signature.substr(arrow + 2))) {
    if (s.index >= forward.operands.size()) continue;
    backward.gradients_of.push_back(s.index);
    problem.rule.results.push_back(forward.rule.operands[s.index]);
    problem.initial.emplace_back(forward.operands[s.index].shape(), dy.dtype());
  }
  if (backward.gradients_of.empty()) return std::nullopt;
  for (const Symbol& s : Symbols(adjoint.signature.substr(0, arrow))) {
    if (s.index >= (s.of_result ? results : forward.operands).size()) continue;
    problem.rule.operands.push_back(s.of_result
                                        ? forward.rule.results[s.index]
                                        : forward.rule.operands[s.index]);
    problem.rule.terms.push_back(0);
    problem.operands.push_back(s.gradient    ? GradientOfResult(dy, s.index)
                               : s.of_result ? results[s.index]
                                             : forward.operands[s.index]);
  }
  return backward;
}

HostTensor OutputGradient(const Problem& forward) {
  Rng rng(13);
  HostTensor dy(forward.initial[0].shape(), DType::kFloat64);
  FillRandom(dy, rng);
  if (dy.shape().empty()) dy.Set(0, 1);  // the loss itself
  return dy;
}

std::vector<Problem> AllProblems(const KernelCase& c) {
  const Problem forward = ForwardProblem(c);
  std::vector<Problem> problems = {forward};
  if (forward.op->adjoints.empty()) return problems;
  const Tensors results = Compute(forward);
  const HostTensor dy = OutputGradient(forward);
  for (const AdjointDef& adjoint : forward.op->adjoints) {
    auto backward = Adjoint(forward, results, dy, adjoint);
    if (backward) problems.push_back(std::move(backward->problem));
  }
  return problems;
}

// ---- Splitting --------------------------------------------------------------

int64_t Extent(const Problem& problem, int factor) {
  const auto find = [&](const std::vector<Indices>& sides,
                        const Tensors& tensors) -> int64_t {
    for (size_t i = 0; i < sides.size(); ++i) {
      for (size_t dim = 0; dim < sides[i].size(); ++dim) {
        if (sides[i][dim] == factor) return tensors[i].shape()[dim];
      }
    }
    return 0;
  };
  const int64_t extent = find(problem.rule.operands, problem.operands);
  return extent > 0 ? extent : find(problem.rule.results, problem.initial);
}

namespace {

// What a plan that splits one factor of the problem's node gives to each of
// `parts` devices.
class SplitNode {
 public:
  SplitNode(const Problem& problem, int factor, int64_t parts) {
    node_.op = problem.op;
    node_.rule = problem.rule;
    node_.attributes = problem.attributes;
    for (const HostTensor& tensor : problem.operands) {
      node_.operands.push_back(Add(tensor));
    }
    for (const HostTensor& tensor : problem.initial) {
      node_.results.push_back(Add(tensor));
    }
    placement_.axes[static_cast<size_t>(factor)] = 1;
    group_.axes = {{"split", static_cast<int>(parts)}};
    for (int64_t i = 0; i < parts; ++i) group_.devices.push_back(DeviceId(i));
  }

  HostTensor Operand(const HostTensor& whole, size_t i, int64_t part) const {
    return Block(whole, OperandLayout(graph_, node_, placement_, group_, i),
                 part);
  }
  HostTensor Result(const HostTensor& whole, size_t k, int64_t part) const {
    return Block(whole, ResultLayout(graph_, node_, placement_, group_, k),
                 part);
  }
  bool MergesStates() const {
    return MergedAxes(node_, placement_, group_) != 0;
  }

 private:
  TensorId Add(const HostTensor& tensor) {
    Tensor added;
    added.shape = tensor.shape();
    graph_.tensors.push_back(std::move(added));
    return TensorId(graph_.tensors.size() - 1);
  }
  HostTensor Block(const HostTensor& whole, const Layout& layout,
                   int64_t part) const {
    const std::vector<Range> block =
        BlockAt(layout, group_, whole.shape(), static_cast<int>(part));
    HostTensor result = whole;
    for (size_t dim = 0; dim < block.size(); ++dim) {
      if (block[dim].size() == whole.shape()[dim]) continue;
      result = result.Part(dim, block[dim].begin, block[dim].end);
    }
    return result;
  }

  Graph graph_;
  Node node_;
  OpPlacement placement_;
  DeviceGroup group_;
};

}  // namespace

Tensors ComputeSplit(const Problem& problem, int factor, int64_t parts,
                     const CallOptions& options, Mistake mistake) {
  const IndexRule& rule = problem.rule;
  const bool reduction =
      std::none_of(rule.results.begin(), rule.results.end(),
                   [&](const Indices& r) { return Holds(r, factor); });
  const SplitNode split(problem, factor, parts);
  const bool coupled = split.MergesStates();
  const bool own_groups =
      !problem.op->coupling.groups.empty() && !coupled &&
      problem.op->coupling.Merges(rule.factors[factor].letter);
  std::vector<Tensors> operands(parts);
  std::vector<std::vector<LocalTensor>> locals(parts);
  for (int64_t part = 0; part < parts; ++part) {
    for (size_t i = 0; i < problem.operands.size(); ++i) {
      operands[part].push_back(split.Operand(problem.operands[i], i, part));
      if (mistake == Mistake::kLocalIndex) operands[part].back().ForgetPlace();
      locals[part].push_back(operands[part].back().Local());
      if (reduction && part > 0 && rule.terms[i] > 0 &&
          !Holds(rule.operands[i], factor) &&
          mistake != Mistake::kTermsEverywhere) {
        locals[part].back().data = nullptr;
      }
    }
  }
  // The states of all shards of a coupled factor, in rank order.
  std::vector<HostTensor> states(parts);
  if (problem.op->coupling.exists()) {
    std::vector<double> gathered;
    for (int64_t part = 0; part < parts; ++part) {
      states[part] = own_groups
                         ? StateOf(problem, locals[part], options, part, parts)
                         : StateOf(problem, locals[part], options);
      const std::vector<double> values = states[part].Values();
      gathered.insert(gathered.end(), values.begin(), values.end());
    }
    Shape shape = states[0].shape();
    shape.insert(shape.begin(), parts);
    for (int64_t part = 0; part < parts; ++part) {
      if (coupled && mistake != Mistake::kOwnStateOnly) {
        states[part] = HostTensor(shape, states[part].dtype(), gathered);
      }
      locals[part].push_back(states[part].Local());
    }
  }

  Tensors whole;
  for (const HostTensor& initial : problem.initial) {
    whole.emplace_back(initial.shape(), initial.dtype());
  }
  for (int64_t part = 0; part < parts; ++part) {
    Tensors results;
    for (size_t k = 0; k < rule.results.size(); ++k) {
      results.push_back(split.Result(problem.initial[k], k, part));
    }
    Call(problem, problem.op->name, locals[part], options, results);
    for (size_t k = 0; k < results.size(); ++k) {
      if (coupled && !Holds(rule.results[k], factor)) {
        whole[k] = results[k];  // whole on every shard
      } else {
        whole[k].Add(results[k]);
      }
    }
  }
  return whole;
}

double Difference(const Tensors& a, const Tensors& b) {
  double worst = 0;
  for (size_t k = 0; k < a.size(); ++k) {
    double largest = 1;
    double difference = 0;
    for (int64_t i = 0; i < a[k].elements(); ++i) {
      const double x = a[k].At(i);
      const double y = b[k].At(i);
      if (x == y) continue;
      if (!std::isfinite(x) || !std::isfinite(y)) return INFINITY;
      difference = std::max(difference, std::abs(x - y));
      largest = std::max(largest, std::abs(x));
    }
    worst = std::max(worst, difference / largest);
  }
  return worst;
}

}  // namespace tessera
