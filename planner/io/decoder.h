#pragma once
// Decoders of which each block is attention and an MLP, or experts, with norms
// and residuals: Llama and what is made like it. A family is what it does
// differently; names and defaults are those of transformers' configs and
// models.

#include <string>
#include <string_view>
#include <vector>

#include "planner/io/importer.h"
#include "planner/io/model_config.h"
#include "planner/io/model_head.h"
#include "planner/io/transformer.h"

namespace tessera {

enum class NormKind : uint8_t {
  kRms,
  kLayer,
  kLayerWithoutShift,
  kPlainLayer,  // without scale, too
};

// How a family calls the keys of its config, and what stands where one is
// missing; 0: it must be there.
struct DecoderKeys {
  std::string_view hidden = "hidden_size";
  std::string_view layers = "num_hidden_layers";
  std::string_view heads = "num_attention_heads";
  std::string_view key_value_heads = "num_key_value_heads";
  std::string_view inner = "intermediate_size";
  std::string_view positions = "max_position_embeddings";
  int64_t default_positions = 0;
  std::string_view epsilon = "rms_norm_eps";  // empty: it has none
  double default_epsilon = 1e-6;
  std::string_view activation = "hidden_act";
  std::string_view default_activation = "silu";
  std::string_view attention_dropout = "attention_dropout";
};

// How a family calls its layers. An empty norm: it has none there, but a
// parallel block without one before the MLP has that of the attention.
struct DecoderNames {
  std::string embedding = "model.embed_tokens";
  std::string layer = "model.layers.";
  std::string before_attention = ".input_layernorm";
  std::string behind_attention = {};
  std::string before_mlp = ".post_attention_layernorm";
  std::string behind_mlp = {};
  std::string attention_module = ".self_attn";
  AttentionNames attention = {"q_proj", "k_proj", "v_proj", "o_proj"};
  GatedNames mlp = {};
  std::string last_norm = "model.norm";
};

struct Decoder {
  std::vector<HeadClass> classes;
  int64_t key_value_heads = 1;
  DecoderKeys keys = {};
  DecoderNames names = {};
  bool qkv_bias = false;
  bool out_bias = false;
  bool mlp_bias = false;
  bool head_bias = false;   // of the language model's head
  bool head_norm = false;   // RMS norms of queries and keys, by head
  bool width_norm = false;  // the same of all heads together
  bool tied = false;        // where the config does not say
  bool parallel = false;    // attention and MLP read the same residual stream
  NormKind norm = NormKind::kRms;
  // Where the config does not say, as its class in transformers 5.24 has it; 0:
  // hidden / heads, 4 hidden.
  int64_t head_size = 0;
  bool reads_head_size = true;  // its class in transformers has "head_dim"
  int64_t inner = 0;
  int64_t window = 0;               // 0: none
  std::vector<bool> windowed = {};  // by layer; empty: all have the window
  bool reads_layer_types = false;   // which say it where there are some
  std::vector<bool> turned = {};    // by layer; empty: all have positions
  bool turns_part = false;          // partial_rotary_factor is one of its keys
  double turned_part = 1;           // where the config does not say
  double theta = kRotaryTheta;      // the same
  double stddev = 0.02;             // of initial weights; the same
  // Of the layers with the window, in place of the config's; null: the same.
  const Rotary* windowed_rotary = nullptr;
  // In place of what ReadRotary makes of the config; null: that.
  const Rotary* rotary = nullptr;
  double score_scale = 0;  // 0: 1 / sqrt(head size)
  double score_cap = 0;
  double embedding_scale = 1;
  double residual_scale = 1;  // of what is added to the residual stream
  double logit_scale = 1;
  double logit_cap = 0;
  double embedding_dropout = 0;
  double residual_dropout = 0;
  // Experts, in the layers that have some; none: an MLP everywhere.
  ExpertOptions experts = {};
  std::string_view expert_module = ".mlp";
  int64_t expert_inner = 0;
  int64_t shared_inner = 0;  // of an MLP beside them, weighed; 0: none
  int64_t expert_step = 1;   // every so many layers
  std::vector<int64_t> dense_layers = {};
};

Result<Graph> BuildDecoder(ModelConfig& config, const ImportOptions& options,
                           const Decoder& decoder);

// "sliding_window"; 0 where it is null. `fallback`: where the config does not
// say.
int64_t ReadWindow(ModelConfig& config, int64_t fallback);

// "num_key_value_heads"; null: as many as there are heads. `fallback`: where
// the config does not say; 0: the same.
int64_t KeyValueHeads(ModelConfig& config, int64_t fallback = 0);

}  // namespace tessera
