#include "tools/export_config.h"

#include <filesystem>
#include <utility>

#include "planner/base/file.h"
#include "planner/io/graph_io.h"
#include "planner/io/huggingface.h"
#include "planner/io/zoo.h"
#include "tools/json.h"

namespace tessera {
namespace {

constexpr std::string_view kTextConfig = "text_config";
// Of the model, whatever it has beside its text.
constexpr std::string_view kArchitectures = "architectures";

Json ToJson(const JsonValue& value) {
  switch (value.kind) {
    case JsonValue::Kind::kString:
      return value.text;
    case JsonValue::Kind::kArray:
      return Json::ArrayOf(value.items, ToJson);
    case JsonValue::Kind::kObject: {
      Json object = Json::Object();
      for (const auto& [key, field] : value.fields) {
        object.Set(key, ToJson(field));
      }
      return object;
    }
    default:
      return Json::Raw(value.ToString());
  }
}

Result<std::string> TextOfConfig(const std::string& model) {
  if (IsZoo(model)) {
    TESSERA_TRY(const ZooModel* row, FindInZoo(model));
    return std::string(row->config);
  }
  return ReadFile(std::filesystem::is_directory(model) ? model + "/config.json"
                                                       : model);
}

}  // namespace

Result<std::string> ConfigToExport(
    const std::string& model,
    const std::map<std::string, JsonValue>& overrides) {
  if (!IsHuggingFace(model) || IsGraphFile(model)) return std::string();
  TESSERA_TRY(std::string text, TextOfConfig(model));
  // Where a family has the text's keys in an object of their own, this gives
  // them as the model's.
  TESSERA_TRY(const JsonValue read, ReadModelConfig(model));
  auto parsed = ParseJson(text);
  if (!parsed) return parsed.error().At(model);
  JsonValue config = *std::move(parsed);
  const auto own = config.fields.find(kTextConfig);
  const bool nested =
      own != config.fields.end() && !read.fields.contains(kTextConfig);
  bool is_other = false;
  for (const auto& [key, value] : overrides) {
    if (key == "vocab_multiple") continue;
    is_other = true;
    if (value.is_null()) {
      config.fields.erase(key);
      if (nested) own->second.fields.erase(key);
    } else if (nested && key != kArchitectures) {
      own->second.fields[key] = value;
    } else {
      config.fields[key] = value;
    }
  }
  return is_other ? ToJson(config).ToString() + "\n" : std::move(text);
}

}  // namespace tessera
