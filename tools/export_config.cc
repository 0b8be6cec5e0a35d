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
  TESSERA_TRY(JsonValue config, ReadModelConfig(model));
  bool is_other = false;
  for (const auto& [key, value] : overrides) {
    if (key == "vocab_multiple") continue;
    is_other = true;
    if (value.is_null()) {
      config.fields.erase(key);
    } else {
      config.fields[key] = value;
    }
  }
  return is_other ? ToJson(config).ToString() + "\n" : std::move(text);
}

}  // namespace tessera
