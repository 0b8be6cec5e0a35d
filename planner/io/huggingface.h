#pragma once
// Models of Hugging Face's transformers, from their config.json. Keys
// that do not change the computation are skipped (a config has dozens); keys
// that do, with a value that is not supported, are errors.
//
// Tensors are called as in the models' safetensors files. A fused projection
// (c_attn, query_key_value) is three weights here, "....q.weight", ".k", ".v":
// every dimension holds one factor, so queries are [g, r, d, i] for g groups
// of r query heads of size d on i inputs.

#include <array>
#include <span>
#include <string>
#include <string_view>

#include "planner/io/importer.h"
#include "planner/io/model_config.h"

namespace tessera {

bool IsHuggingFace(const std::string& path);

// Names of sizes, and the keys that they stand for: "layers" for
// "num_hidden_layers", whatever a family calls it.
struct ModelAlias {
  std::string_view name;
  std::array<std::string_view, 3> keys;
};
std::span<const ModelAlias> ModelAliases();

// The config of a model of the zoo (planner/io/zoo.h), of a config.json or of a
// folder that holds one. The keys of "text_config" are in it as the model's own
// where its family is a part of a model of text and images.
Result<JsonValue> ReadModelConfig(const std::string& path);

// `path` is what ReadModelConfig reads.
Result<Graph> ImportHuggingFace(const std::string& path,
                                const ImportOptions& options);

// One kind of model: the "model_type" of its config.json.
struct ModelFamily {
  std::string_view name;
  std::string_view summary;
  // REQUIRES: options.global_batch is positive, and options.seq_len unless
  // `samples`.
  Result<Graph> (*build)(ModelConfig& config, const ImportOptions& options);
  // Trained on images or clicks, which say how long a sequence is, if there is
  // one.
  bool samples = false;
  bool encoder_decoder = false;  // may have "is_encoder_decoder"
  // Its sequences are unrolled: the config may say how long they are, "steps",
  // where the options do not.
  bool unrolled = false;
  // Its config is "text_config", beside those of other parts, which are left
  // out; keys that it lacks have these values, an object of JSON. Empty: its
  // config is the file's.
  std::string_view text_defaults = {};
  // A format of Tessera's own, docs/models.md: it has the keys that are asked
  // for and no others. (Configs of Hugging Face have many that shape nothing.)
  bool own_format = false;
};

std::span<const ModelFamily> ModelFamilies();

// Whether the model at `path`, which is for this importer, is known to need no
// sequence length: one of images or clicks, or unrolled over a number of steps.
bool HasOwnLength(const std::string& path);

// Whether it is known to be of images or clicks, which have no sequence or say
// how long it is.
bool HasNoSequence(const std::string& path);

// The families, in planner/io/huggingface_<family>.cc, and those that are short
// in huggingface_decoders.cc.
Result<Graph> BuildGpt2(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildLlama(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildMistral(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildMixtral(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildQwen2(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildQwen2Moe(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildQwen3(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildQwen3Moe(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildGemma(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildGemma2(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildGemma3(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildOlmo(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildOlmo2(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildGranite(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildSmolLm3(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildStarcoder2(ModelConfig& config,
                              const ImportOptions& options);
Result<Graph> BuildPhi(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildFalcon(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildGptJ(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildStableLm(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildGlm4(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildCohere(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildPhi3(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildOpt(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildBloom(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildGptNeox(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildBert(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildT5(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildVit(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildDeepseekV2(ModelConfig& config,
                              const ImportOptions& options);
Result<Graph> BuildDeepseekV3(ModelConfig& config,
                              const ImportOptions& options);
Result<Graph> BuildResNet(ModelConfig& config, const ImportOptions& options);
// In planner/io/cnn.cc.
Result<Graph> BuildCnn(ModelConfig& config, const ImportOptions& options);
// In planner/io/dlrm.cc.
Result<Graph> BuildDlrm(ModelConfig& config, const ImportOptions& options);
// In planner/io/rnn.cc.
Result<Graph> BuildRnnLm(ModelConfig& config, const ImportOptions& options);
Result<Graph> BuildRnnClassifier(ModelConfig& config,
                                 const ImportOptions& options);
Result<Graph> BuildRnnTranslator(ModelConfig& config,
                                 const ImportOptions& options);

}  // namespace tessera
