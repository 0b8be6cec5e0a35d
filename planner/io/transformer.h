#pragma once
// The parts that transformers share, on top of GraphBuilder: layers with their
// weights, attention heads, the loss. Each importer's family lists its own
// layers with them. Not for several threads.

#include <string>
#include <string_view>
#include <vector>

#include "planner/io/importer.h"
#include "planner/io/model_config.h"
#include "planner/io/model_head.h"
#include "planner/io/vocabulary.h"
#include "planner/ir/graph.h"

namespace tessera {

// Attention's heads: `groups` key/value heads, `per_group` query heads each.
struct Heads {
  int64_t groups = 1;
  int64_t per_group = 1;
  int64_t size = 1;
};

// Heads by the keys of a config: `heads` query heads over `hidden`, with
// `key_value_heads` groups. An error in `config` where they do not divide;
// a positive `head_size` replaces hidden / heads.
Heads ReadHeads(ModelConfig& config, std::string_view hidden_key,
                std::string_view heads_key, int64_t key_value_heads,
                std::string_view key_value_heads_key, int64_t head_size = 0);

// The operator of an activation's name in transformers.
Result<std::string> ActivationNamed(std::string_view name);
// The same by the key of a config; an error in `config` where it has none.
std::string ReadActivation(ModelConfig& config, std::string_view key,
                           std::string_view fallback);

// Rotary embedding of a model; `fraction` of each head is turned.
struct Rotary {
  double theta = 0;
  double fraction = 1;
  // A row of planner/ops/rotary.cc, and its attributes besides these.
  std::string op = "rotary";
  std::vector<Attribute> scaling = {};
  // What DeepSeek's models multiply scores by, where the rotary is scaled.
  double score_scale = 1;
};

// Su et al. 2021's.
inline constexpr double kRotaryTheta = 10000;

// Rotary embedding by the keys of a config, which transformers 5 gathers in
// "rope_parameters". Scaled forms ("rope_scaling") that are not known are
// errors.
Rotary ReadRotary(ModelConfig& config, std::string_view theta_key,
                  std::string_view fraction_key, double default_fraction,
                  int64_t head_size, int64_t seq_len,
                  double default_theta = kRotaryTheta);

// An error in `config` where options.seq_len exceeds the positions of `key`,
// which is missing where `fallback` is 0 and the config does not say.
void CheckSeqLen(ModelConfig& config, std::string_view key,
                 const ImportOptions& options, int64_t fallback = 0);

// Says once in options.warnings that a dropout probability is left out.
void WarnAttentionDropout(ModelConfig& config, std::string_view key,
                          double fallback, const ImportOptions& options);

// How a layer's weights start and what it has.
struct LinearOptions {
  double stddev = 0;
  bool bias = false;
};

// How the projections of an attention layer are called.
struct AttentionNames {
  std::string q, k, v, out;
};

struct AttentionOptions {
  Heads heads;
  double scale = 0;
  int64_t window = 0;              // 0: none
  const Rotary* rotary = nullptr;  // null: none
  bool alibi = false;              // scores are biased by distance
  // Whether a query sees no key behind it. Otherwise it sees all those whose
  // positions are not negative.
  bool causal = true;
  // T5's biases of scores by distance, (buckets, groups, per_group), the last
  // of them from max_distance on; invalid: none. Not with a window or ALiBi.
  TensorId relative_bias = {};
  int64_t max_distance = 0;
  // What keys and values are made of, where it is not x (cross attention).
  TensorId memory = {};
  // By which masks go; invalid: the model's mask positions.
  TensorId query_positions = {};
  TensorId key_positions = {};
  // Epsilon of RMS norms of queries and keys, of each head or of all heads
  // together; 0: none.
  double head_norm = 0;
  double width_norm = 0;
  // c of scores that are c tanh(score / c) (Gemma 2); 0: they are as they are.
  // The attention is written out then: not with a window that is narrower than
  // the sequence, nor with documents.
  double score_cap = 0;
  LinearOptions qkv;
  double query_stddev = 0;  // of the queries' weight; 0: as of the others
  LinearOptions out;
};

// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1):
// queries, keys and values of all heads are made of a few shared features, the
// latents, each behind an RMS norm; a part of the features of queries and keys
// is turned by position, that of the keys one for all heads.
struct LatentAttentionOptions {
  int64_t heads = 1;
  int64_t query_rank = 0;      // latent features; 0: queries are made directly
  int64_t key_value_rank = 1;  // latent features
  int64_t turned_size = 2;     // of a head's queries and keys
  int64_t plain_size = 1;      // the others
  int64_t value_size = 1;
  double scale = 0;
  double epsilon = 1e-6;
  Rotary rotary = {};
  LinearOptions latents;  // projections to latents and to the turned keys
  LinearOptions heads_of_latents;
  LinearOptions out;
};

// How the parts of a gated MLP are called, or with an empty `gate` those of an
// MLP without.
struct GatedNames {
  std::string gate = "gate_proj";
  std::string up = "up_proj";
  std::string down = "down_proj";
};

// What a config without "expert_capacity_factor" stands for: room for a quarter
// more tokens than an expert has on average, the middle one of the factors that
// Fedus et al. 2022 (Switch Transformer, table 1) train with.
inline constexpr double kExpertCapacityFactor = 1.25;

// A mixture of experts instead of an MLP (planner/ops/moe.cc).
struct ExpertOptions {
  int64_t experts = 0;
  int64_t top_k = 1;
  int64_t groups = 1;  // of experts
  int64_t top_groups = 1;
  int64_t group_best = 1;
  bool sigmoid = false;
  bool renormalise = true;
  double scale = 1;  // of the weights of the choices
  // Slots of an expert for each sample; 0: as many as it has tokens, so that
  // none is dropped.
  double capacity_factor = 0;
  double balance = 0;  // coefficient of the auxiliary loss
  double stddev = 0;
  GatedNames names = {};
};

// What a decoder makes logits of tokens with.
struct LanguageHead {
  std::string name = "lm_head";
  TensorId tied_to = {};  // the embedding; invalid: it has a matrix of its own
  Vocabulary vocabulary;
  int64_t width = 0;  // of the last hidden states
  double stddev = 0;
  bool bias = false;
  double scale = 1;  // of the logits
  double cap = 0;    // c of logits that are c tanh(logit / c); 0: none
};

class Transformer {
 public:
  // Adds the inputs "tokens", "labels" and "positions", (samples, places); for
  // documents "mask_positions" too. A head of one label a sample has, instead
  // of "labels", "next_token" (samples, 1); of a model that reads no tokens
  // that is "labels". Where the loss is one of elements there are none.
  Transformer(const ModelConfig& config, const ImportOptions& options,
              int64_t hidden, const Head& head = {}, bool reads_tokens = true);

  void BeginBlock(std::string name) { builder_.BeginBlock(std::move(name)); }

  // A further input of as many rows as there are samples.
  TensorId Input(std::string name, Shape row, DType dtype = DType::kInt32);

  TensorId tokens() const { return tokens_; }
  TensorId labels() const { return labels_; }
  TensorId positions() const { return positions_; }

  // A weight with weight decay, which biases and norms do not have (Radford
  // et al. 2018, section 4.1).
  TensorId Matrix(std::string name, Shape shape, double stddev,
                  bool weight_decay = true);
  // Biases of T5's attention (AttentionOptions::relative_bias).
  TensorId RelativeBias(std::string name, int64_t buckets, const Heads& heads,
                        double stddev);

  // Rows of `table` by `ids`.
  TensorId Lookup(std::string name, TensorId ids, TensorId table);
  // The same of tokens.
  TensorId Lookup(std::string name, TensorId ids, TensorId table,
                  const Vocabulary& vocabulary);
  // y[.., n] = x[.., k] w[n, k] + bias[n]: `n` and `k` are runs of letters,
  // `shape` has their extents. Weights NAME.weight and NAME.bias.
  TensorId Linear(const std::string& name, TensorId x, std::string_view n,
                  std::string_view k, Shape shape,
                  const LinearOptions& options);
  // The same by a matrix that is there, such as a tied one; with the bias
  // NAME.bias where `bias` says so.
  TensorId LinearBy(const std::string& name, TensorId x, std::string_view n,
                    std::string_view k, TensorId matrix, Shape shape,
                    bool bias);
  TensorId LayerNorm(const std::string& name, TensorId x, double epsilon);
  // The same without scale and shift.
  TensorId PlainLayerNorm(const std::string& name, TensorId x, double epsilon);
  // The same without the shift: an RMS norm of what is off the mean.
  TensorId LayerNormWithoutShift(const std::string& name, TensorId x,
                                 double epsilon);
  // Over the hidden size, or `width` where it is not 0.
  TensorId RmsNorm(const std::string& name, TensorId x, double epsilon,
                   int64_t width = 0);
  // x itself where the probability is 0.
  TensorId Dropout(std::string name, TensorId x, double probability);
  TensorId Add(std::string name, TensorId x, TensorId y);
  TensorId Multiply(std::string name, TensorId x, TensorId y);
  // Of two losses.
  TensorId AddLosses(std::string name, TensorId x, TensorId y);
  // Projections, rotary embedding and attention, without the norm before and
  // the residual behind. `name` is the attention module's.
  TensorId Attention(const std::string& name, const AttentionNames& names,
                     TensorId x, const AttentionOptions& options);
  // The same of multi-head latent attention. The turned features come first in
  // every head; which ones they are is no matter, since scores are sums over
  // them. Weights as in transformers' DeepseekV3Attention, kv_a_proj_with_mqa
  // and kv_b_proj in two parts each.
  TensorId LatentAttention(const std::string& name, TensorId x,
                           const LatentAttentionOptions& options);
  // Inner layer `up` to `inner` features, activation, outer layer `down`.
  TensorId Mlp(const std::string& name, std::string_view up,
               std::string_view down, std::string_view activation, TensorId x,
               int64_t inner, const LinearOptions& up_options,
               const LinearOptions& down_options);
  // down(activation(gate(x)) * up(x)): Shazeer 2020.
  TensorId GatedMlp(const std::string& name, std::string_view activation,
                    TensorId x, int64_t inner, const LinearOptions& options,
                    const GatedNames& names = {});
  // A GatedMlp times the sigmoid of one number a token, x by the weight
  // WEIGHT.weight [1, h]. Its last weight is [1, h, inner].
  TensorId WeighedMlp(const std::string& name, std::string_view weight,
                      std::string_view activation, TensorId x, int64_t inner,
                      const LinearOptions& options);
  // x times a number.
  TensorId Scale(std::string name, TensorId x, double factor);

  // A router, and for each token the weighted sum of its experts, each a
  // GatedMlp without biases. Weights NAME.gate.weight [e, h] and
  // NAME.experts.{gate_proj,up_proj,down_proj}.weight [e, out, in], or by
  // other names.
  TensorId Experts(const std::string& name, std::string_view activation,
                   TensorId x, int64_t inner, const ExpertOptions& options);

  // One place of a sequence as a sequence of length 1.
  TensorId Select(std::string name, TensorId x, int64_t place);
  // An elementwise operator.
  TensorId Activate(std::string_view op, std::string name, TensorId x);
  // The mean cross-entropy of `logits` (b, s, v) over the labels that are not
  // negative, which the node `count` counts.
  TensorId Loss(std::string name, TensorId logits, TensorId labels,
                std::string count = "count",
                std::vector<Attribute> attributes = {});

  // Logits by `matrix` [vocabulary.rows, hidden], and their loss, auxiliary
  // losses added.
  Result<Graph> Finish(std::string head_name, TensorId x, TensorId matrix,
                       const Vocabulary& vocabulary);
  // The same of a head that is not the family's own, on x (b, places, width).
  // Of several places a label of the sample is that of the last.
  Result<Graph> Finish(const Head& head, TensorId x, int64_t places,
                       int64_t width, double stddev);
  // The same of a loss that is there.
  Result<Graph> Finish(TensorId loss);
  // The same of a decoder: by `own` where the head is the family's own.
  Result<Graph> FinishDecoder(const Head& head, TensorId x,
                              const LanguageHead& own);

 private:
  // activation(gate(x)) * up(x).
  TensorId Gated(const std::string& name, std::string_view activation,
                 TensorId x, int64_t inner, const LinearOptions& options,
                 const GatedNames& names);
  // An RMS norm of each head.
  TensorId HeadNorm(const std::string& name, TensorId x, std::string_view rule,
                    int64_t size, double epsilon);
  // A projection, an RMS norm of all its features, and these by head: of the
  // extents `heads`, without the last dimension of the weight.
  TensorId NormedProjection(const std::string& name, const std::string& norm,
                            TensorId x, const Shape& heads,
                            const LinearOptions& linear, double epsilon);
  // c tanh(x / c); `rule` is that of the elementwise operators.
  TensorId Cap(const std::string& name, TensorId x, std::string_view rule,
               double cap);
  // Attention of capped scores, operator by operator.
  TensorId AttendCapped(const std::string& name, TensorId q, TensorId k,
                        TensorId v, const AttentionOptions& options);
  // x by the positions; `rule` as of the operator rotary.
  TensorId Turn(std::string name, TensorId x, std::string_view rule,
                const Rotary& rotary);
  // Attention alone, without projections and rotary embedding.
  TensorId Attend(const std::string& name, TensorId q, TensorId k, TensorId v,
                  const AttentionOptions& options);

  GraphBuilder builder_;
  int64_t batch_;
  int64_t hidden_;
  int64_t seq_len_;
  DType dtype_;
  TensorId tokens_;
  TensorId labels_;
  TensorId positions_;
  TensorId mask_positions_;    // what attention's mask reads
  int64_t widest_window_ = 0;  // 0: any
  TensorId balance_;           // sum of the auxiliary losses so far, if any
  int dropouts_ = 0;
};

}  // namespace tessera
