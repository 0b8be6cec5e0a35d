#include "planner/io/huggingface.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "planner/base/file.h"
#include "planner/base/table.h"
#include "planner/io/zoo.h"

namespace tessera {
namespace {

constexpr std::string_view kTextConfig = "text_config";
constexpr std::string_view kVisionConfig = "vision_config";

// What published configs leave out: transformers 5.24's Gemma3TextConfig.
constexpr std::string_view kGemma3TextDefaults = R"({
    "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216,
    "max_position_embeddings": 131072, "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "vocab_size": 262208})";

bool IsFolder(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

// The file that holds a model's config, or its name in the zoo.
std::string ConfigFile(const std::string& path) {
  return IsFolder(path) ? path + "/config.json" : path;
}

// Weights that are published in fp8 are trained as any others are; forms that
// are for inference alone are errors.
void ReadQuantization(ModelConfig& config, const ImportOptions& options) {
  const JsonValue& quantization = config.Value("quantization_config");
  if (quantization.Field("quant_method").text != "fp8") {
    config.Refuse("quantization_config");
  } else if (options.warnings != nullptr) {
    options.warnings->push_back(
        config.path() +
        ": quantization_config: parameters are not quantized, they are " +
        std::string(NameOf(options.dtype.value_or(DType::kFloat32))));
  }
}

// Files have keys that change nothing here, which nothing reads. One that is
// like a key that is read, and not there, is misspelt: a warning.
void WarnMisspelt(const ModelConfig& config, const ImportOptions& options) {
  if (options.warnings == nullptr) return;
  for (const auto& [key, value] : config.values().fields) {
    if (config.asked().contains(key)) continue;
    // In a short key any other letter makes another word.
    const size_t most = key.size() < 6 ? 0 : key.size() < 12 ? 1 : 2;
    for (const std::string& known : config.asked()) {
      if (config.Has(known) || EditDistance(key, known) > most) continue;
      options.warnings->push_back(config.path() + ": " + key +
                                  ": is not read; did you mean '" + known +
                                  "'?");
      break;
    }
  }
}

// Keys that may be set: those that were read, and their names in common.
std::vector<std::string_view> KnownKeys(const ModelConfig& config) {
  std::vector<std::string_view> known;
  for (const ModelAlias& alias : ModelAliases()) {
    // SetModelKeys finds those that the file has.
    if (std::ranges::any_of(alias.keys, [&](std::string_view key) {
          return config.asked().contains(key) && config.Has(key);
        })) {
      known.push_back(alias.name);
    }
  }
  known.insert(known.end(), config.asked().begin(), config.asked().end());
  return known;
}

}  // namespace

std::span<const ModelAlias> ModelAliases() {
  static constexpr std::array kAliases = {
      ModelAlias{"layers", {"num_hidden_layers", "n_layer", "num_layers"}},
      ModelAlias{"hidden", {"hidden_size", "n_embd", "d_model"}},
      ModelAlias{"heads", {"num_attention_heads", "n_head", "num_heads"}},
      ModelAlias{"vocab", {"vocab_size", "vocab_size", "vocab_size"}},
  };
  return kAliases;
}

std::span<const ModelFamily> ModelFamilies() {
  static constexpr std::array kFamilies = {
      ModelFamily{.name = "gpt2",
                  .summary = "GPT-2 (Radford et al. 2019)",
                  .build = BuildGpt2},
      ModelFamily{.name = "llama",
                  .summary = "Llama 1 to 3 (Touvron et al. 2023)",
                  .build = BuildLlama},
      ModelFamily{.name = "mistral",
                  .summary = "Mistral (Jiang et al. 2023)",
                  .build = BuildMistral},
      ModelFamily{.name = "mixtral",
                  .summary = "Mixtral (Jiang et al. 2024)",
                  .build = BuildMixtral},
      ModelFamily{.name = "qwen2",
                  .summary = "Qwen2 (Yang et al. 2024)",
                  .build = BuildQwen2},
      ModelFamily{
          .name = "qwen2_moe",
          .summary = "Qwen1.5 and Qwen2 with experts (Yang et al. 2024)",
          .build = BuildQwen2Moe},
      ModelFamily{.name = "qwen3",
                  .summary = "Qwen3 (Yang et al. 2025)",
                  .build = BuildQwen3},
      ModelFamily{.name = "qwen3_moe",
                  .summary = "Qwen3 with experts (Yang et al. 2025)",
                  .build = BuildQwen3Moe},
      ModelFamily{.name = "gemma",
                  .summary = "Gemma (Gemma Team 2024)",
                  .build = BuildGemma},
      ModelFamily{.name = "gemma2",
                  .summary = "Gemma 2 (Gemma Team 2024)",
                  .build = BuildGemma2},
      ModelFamily{.name = "gemma3_text",
                  .summary = "Gemma 3 (Gemma Team 2025)",
                  .build = BuildGemma3},
      ModelFamily{.name = "gemma3",
                  .summary = "Gemma 3 with images, of which the text alone",
                  .build = BuildGemma3,
                  .text_defaults = kGemma3TextDefaults},
      ModelFamily{.name = "phi3",
                  .summary = "Phi-3 and Phi-4 (Abdin et al. 2024)",
                  .build = BuildPhi3},
      ModelFamily{.name = "olmo",
                  .summary = "OLMo (Groeneveld et al. 2024)",
                  .build = BuildOlmo},
      ModelFamily{.name = "olmo2",
                  .summary = "OLMo 2 (OLMo Team 2025)",
                  .build = BuildOlmo2},
      ModelFamily{.name = "granite",
                  .summary = "Granite 3 (IBM 2024)",
                  .build = BuildGranite},
      ModelFamily{.name = "smollm3",
                  .summary = "SmolLM3 (Hugging Face 2025)",
                  .build = BuildSmolLm3},
      ModelFamily{.name = "starcoder2",
                  .summary = "StarCoder2 (Lozhkov et al. 2024)",
                  .build = BuildStarcoder2},
      ModelFamily{.name = "phi",
                  .summary = "Phi-1 to 2 (Gunasekar et al. 2023)",
                  .build = BuildPhi},
      ModelFamily{.name = "falcon",
                  .summary = "Falcon (Almazrouei et al. 2023)",
                  .build = BuildFalcon},
      ModelFamily{.name = "gptj",
                  .summary = "GPT-J (Wang and Komatsuzaki 2021)",
                  .build = BuildGptJ},
      ModelFamily{.name = "stablelm",
                  .summary = "StableLM (Bellagente et al. 2024)",
                  .build = BuildStableLm},
      ModelFamily{.name = "glm4",
                  .summary = "GLM-4-0414 (GLM Team 2024)",
                  .build = BuildGlm4},
      ModelFamily{.name = "cohere",
                  .summary = "Command R (Cohere 2024)",
                  .build = BuildCohere},
      ModelFamily{.name = "opt",
                  .summary = "OPT (Zhang et al. 2022)",
                  .build = BuildOpt},
      ModelFamily{.name = "bloom",
                  .summary = "BLOOM (Le Scao et al. 2022)",
                  .build = BuildBloom},
      ModelFamily{.name = "gpt_neox",
                  .summary = "GPT-NeoX and Pythia (Black et al. 2022)",
                  .build = BuildGptNeox},
      ModelFamily{.name = "bert",
                  .summary = "BERT (Devlin et al. 2019)",
                  .build = BuildBert},
      ModelFamily{.name = "t5",
                  .summary = "T5 (Raffel et al. 2020)",
                  .build = BuildT5,
                  .encoder_decoder = true},
      ModelFamily{.name = "vit",
                  .summary = "ViT (Dosovitskiy et al. 2021)",
                  .build = BuildVit,
                  .samples = true},
      ModelFamily{.name = "deepseek_v2",
                  .summary = "DeepSeek-V2 (DeepSeek-AI 2024)",
                  .build = BuildDeepseekV2},
      ModelFamily{.name = "deepseek_v3",
                  .summary = "DeepSeek-V3 and R1 (DeepSeek-AI 2024)",
                  .build = BuildDeepseekV3},
      ModelFamily{.name = "resnet",
                  .summary = "ResNet (He et al. 2016), on images",
                  .build = BuildResNet,
                  .samples = true},
      ModelFamily{.name = "cnn",
                  .summary = "a list of layers (docs/models.md), on images",
                  .build = BuildCnn,
                  .samples = true,
                  .own_format = true},
      ModelFamily{.name = "dlrm",
                  .summary = "DLRM (Naumov et al. 2019), on clicks",
                  .build = BuildDlrm,
                  .samples = true,
                  .own_format = true},
      ModelFamily{.name = "rnn_lm",
                  .summary = "a recurrent language model (docs/models.md)",
                  .build = BuildRnnLm,
                  .unrolled = true,
                  .own_format = true},
      ModelFamily{.name = "rnn_classifier",
                  .summary = "a recurrent network with a label a text",
                  .build = BuildRnnClassifier,
                  .unrolled = true,
                  .own_format = true},
      ModelFamily{.name = "rnn_translator",
                  .summary = "a recurrent encoder and decoder with attention",
                  .build = BuildRnnTranslator,
                  .encoder_decoder = true,
                  .unrolled = true,
                  .own_format = true},
  };
  return kFamilies;
}

bool HasNoSequence(const std::string& path) {
  const auto values = ReadModelConfig(path);
  if (!values) return false;
  const auto family =
      Find("model_type", ModelFamilies(), values->Field("model_type").text);
  return family && (*family)->samples;
}

bool HasOwnLength(const std::string& path) {
  const auto values = ReadModelConfig(path);
  if (!values) return false;
  const auto family =
      Find("model_type", ModelFamilies(), values->Field("model_type").text);
  return family && ((*family)->samples ||
                    ((*family)->unrolled && values->fields.contains("steps")));
}

namespace {

// With the keys of "text_config" as the model's own where its family has one.
JsonValue WithText(JsonValue values) {
  const auto family = std::ranges::find(
      ModelFamilies(), values.Field("model_type").text, &ModelFamily::name);
  const JsonValue text = values.Field(kTextConfig);
  if (family == ModelFamilies().end() || family->text_defaults.empty() ||
      text.kind != JsonValue::Kind::kObject) {
    return values;
  }
  values.fields.erase(std::string(kTextConfig));
  const auto defaults = ParseJson(family->text_defaults);
  TESSERA_CHECK(defaults.has_value()) << family->name;
  for (const auto& [key, value] : defaults->fields) values.fields[key] = value;
  for (const auto& [key, value] : text.fields) {
    if (key != "model_type") values.fields[key] = value;
  }
  return values;
}

}  // namespace

bool IsHuggingFace(const std::string& path) {
  return IsZoo(path) || path.ends_with(".json") || IsFolder(path);
}

Result<JsonValue> ReadModelConfig(const std::string& path) {
  if (!IsZoo(path)) {
    const std::string file = ConfigFile(path);
    const bool readable = access(file.c_str(), R_OK) == 0;
    if (readable && !IsRegularFile(file)) return NotRegular(file);
    TESSERA_TRY(JsonValue values, ReadJson(file));
    return WithText(std::move(values));
  }
  TESSERA_TRY(const ZooModel* model, FindInZoo(path));
  auto values = ParseJson(model->config);
  if (!values) return values.error().At(path);
  return WithText(*std::move(values));
}

Result<Graph> ImportHuggingFace(const std::string& path,
                                const ImportOptions& options) {
  const std::string file = ConfigFile(path);
  TESSERA_TRY(JsonValue values, ReadModelConfig(path));
  if (options.global_batch < 1) {
    return InvalidInput("the model needs a global batch of at least 1", file);
  }
  if (options.dtype.has_value() && !IsFloat(*options.dtype)) {
    return InvalidInput(
        "parameters cannot be " + std::string(NameOf(*options.dtype)), file);
  }
  for (const auto& [key, value] : options.overrides) values.fields[key] = value;
  ModelConfig config(file, std::move(values));
  if (!config.Has("model_type")) {
    return InvalidInput("missing: expected the name of a model family",
                        file + ": model_type");
  }
  const std::string type = config.String("model_type", "");
  TESSERA_RETURN_IF_ERROR(config.Check());
  const auto family = Find("model_type", ModelFamilies(), type);
  if (!family) {
    return InvalidInput(family.error().message +
                            "; of others tools/export_torch.py makes a graph "
                            "file where transformers is, and torch.onnx an "
                            "ONNX file (docs/models.md, PyTorch)",
                        file + ": model_type");
  }
  if (options.layout != nullptr) options.layout->family = type;
  ImportOptions known = options;
  if ((*family)->unrolled && config.Has("steps")) {
    const int64_t steps = config.Size("steps");
    TESSERA_RETURN_IF_ERROR(config.Check());
    if (known.seq_len < 1) known.seq_len = steps;
    if (options.overrides.contains("steps") && known.seq_len != steps) {
      return InvalidInput(
          "is " + std::to_string(steps) + ": expected the sequence length, " +
              std::to_string(known.seq_len) + ", where that is given too",
          file + ": steps");
    }
  }
  if (known.seq_len < 1 && !(*family)->samples) {
    return InvalidInput("the model needs a sequence length of at least 1",
                        file);
  }
  if (!(*family)->own_format) {
    config.Refuse("add_cross_attention");
    if (!(*family)->encoder_decoder) config.Refuse("is_encoder_decoder");
    ReadQuantization(config, options);
    config.Strings("architectures");  // a list, or an error
    TESSERA_RETURN_IF_ERROR(config.Check());
  }
  if (!(*family)->text_defaults.empty() && config.Has(kVisionConfig) &&
      options.warnings != nullptr) {
    options.warnings->push_back(
        file + ": " + std::string(kVisionConfig) +
        ": images are left out; the model is that of text_config");
  }
  auto graph = (*family)->build(config, known);
  // What was set in vain.
  for (const auto& [key, value] : config.values().fields) {
    if (!(*family)->own_format && !options.overrides.contains(key)) continue;
    if (!graph || config.asked().contains(key)) continue;
    return Error{ErrorCode::kNotFound,
                 UnknownName("key of " + type, key, KnownKeys(config)).message,
                 file};
  }
  // A config whose own values cannot be put together.
  if (!graph && graph.error().where.find(file) == std::string::npos) {
    return graph.error().At(file);
  }
  if (graph) WarnMisspelt(config, options);
  return graph;
}

}  // namespace tessera
