#include "planner/io/huggingface.h"

#include <sys/stat.h>

#include <array>

#include "planner/base/table.h"
#include "planner/io/zoo.h"

namespace tessera {
namespace {

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
  const JsonValue& quantization = config.values().Field("quantization_config");
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

}  // namespace

std::span<const ModelFamily> ModelFamilies() {
  static constexpr std::array kFamilies = {
      ModelFamily{"gpt2", "GPT-2 (Radford et al. 2019)", BuildGpt2},
      ModelFamily{"llama", "Llama 1 to 3 (Touvron et al. 2023)", BuildLlama},
      ModelFamily{"mistral", "Mistral (Jiang et al. 2023)", BuildMistral},
      ModelFamily{"mixtral", "Mixtral (Jiang et al. 2024)", BuildMixtral},
      ModelFamily{"qwen2", "Qwen2 (Yang et al. 2024)", BuildQwen2},
      ModelFamily{"qwen2_moe",
                  "Qwen1.5 and Qwen2 with experts (Yang et al. 2024)",
                  BuildQwen2Moe},
      ModelFamily{"qwen3", "Qwen3 (Yang et al. 2025)", BuildQwen3},
      ModelFamily{"qwen3_moe", "Qwen3 with experts (Yang et al. 2025)",
                  BuildQwen3Moe},
      ModelFamily{"gemma", "Gemma (Gemma Team 2024)", BuildGemma},
      ModelFamily{"phi3", "Phi-3 and Phi-4 (Abdin et al. 2024)", BuildPhi3},
      ModelFamily{"opt", "OPT (Zhang et al. 2022)", BuildOpt},
      ModelFamily{"bloom", "BLOOM (Le Scao et al. 2022)", BuildBloom},
      ModelFamily{"gpt_neox", "GPT-NeoX and Pythia (Black et al. 2022)",
                  BuildGptNeox},
      ModelFamily{"bert", "BERT (Devlin et al. 2019)", BuildBert},
      ModelFamily{"t5", "T5 (Raffel et al. 2020)", BuildT5,
                  /*samples=*/false, /*encoder_decoder=*/true},
      ModelFamily{"vit", "ViT (Dosovitskiy et al. 2021)", BuildVit,
                  /*samples=*/true},
      ModelFamily{"deepseek_v2", "DeepSeek-V2 (DeepSeek-AI 2024)",
                  BuildDeepseekV2},
      ModelFamily{"deepseek_v3", "DeepSeek-V3 and R1 (DeepSeek-AI 2024)",
                  BuildDeepseekV3},
      ModelFamily{"resnet", "ResNet (He et al. 2016), on images", BuildResNet,
                  /*samples=*/true},
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

bool IsHuggingFace(const std::string& path) {
  return IsZoo(path) || path.ends_with(".json") || IsFolder(path);
}

Result<JsonValue> ReadModelConfig(const std::string& path) {
  if (!IsZoo(path)) return ReadJson(ConfigFile(path));
  TESSERA_TRY(const ZooModel* model, FindInZoo(path));
  auto values = ParseJson(model->config);
  if (!values) return values.error().At(path);
  return values;
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
  for (const auto& [key, value] : options.overrides) {
    values.fields[key] = value;
  }
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
                            "; tools/export_torch.py makes a graph file of "
                            "others",
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
  }
  auto graph = (*family)->build(config, known);
  // What was set in vain.
  for (const auto& [key, value] : config.values().fields) {
    if (!(*family)->own_format && !options.overrides.contains(key)) continue;
    if (!graph || config.asked().contains(key)) continue;
    const std::vector<std::string_view> known(config.asked().begin(),
                                              config.asked().end());
    return Error{ErrorCode::kNotFound,
                 UnknownName("key of " + type, key, known).message, file};
  }
  // A config whose own values cannot be put together.
  if (!graph && graph.error().where.find(file) == std::string::npos) {
    return graph.error().At(file);
  }
  if (graph) WarnMisspelt(config, options);
  return graph;
}

}  // namespace tessera
