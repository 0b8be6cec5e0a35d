#include "tools/export_config.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/base/file.h"
#include "planner/base/json_string.h"
#include "planner/io/graph_io.h"
#include "planner/io/huggingface.h"
#include "planner/io/zoo.h"
#include "tools/json.h"

namespace tessera {
namespace {

constexpr std::string_view kTextConfig = "text_config";
// Of the model, whatever it has beside its text.
constexpr std::string_view kArchitectures = "architectures";
constexpr std::string_view kPadding = "vocab_multiple";

// Fractions that may be whole, by the name that transformers' configs have for
// them: those refuse 0 where they expect 0.0.
constexpr std::array<std::string_view, 22> kFractions = {
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "aux_loss_alpha",
    "classifier_dropout",
    "classifier_dropout_prob",
    "dropout",
    "dropout_rate",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "initializer_factor",
    "layerdrop",
    "logit_scale",
    "partial_rotary_factor",
    "resid_pdrop",
    "residual_dropout",
    "rope_theta",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "router_jitter_noise"};

// A key of an object and its value, which is JSON as it was written. A number
// keeps its form so: other readers tell 0.0 from 0.
struct Field {
  std::string key;
  std::string value;
};

// Where the string ends that begins at `begin`.
size_t EndOfString(std::string_view json, size_t begin) {
  size_t end = begin + 1;
  while (json[end] != '"') end += json[end] == '\\' ? 2 : 1;
  return end + 1;
}

// Where the value ends that begins at `begin`, with white space behind it.
size_t EndOfValue(std::string_view json, size_t begin) {
  int depth = 0;
  for (size_t end = begin;; ++end) {
    const char c = json[end];
    if (depth == 0 && (c == ',' || c == '}')) return end;
    if (c == '"') {
      end = EndOfString(json, end) - 1;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
}

// The fields of an object, in order. REQUIRES: ParseJson reads it.
std::vector<Field> FieldsOf(std::string_view object) {
  constexpr std::string_view kSpace = " \t\r\n";
  std::vector<Field> fields;
  const auto next_from = [&](size_t place) {
    return object.find_first_of("\"}", place);
  };
  size_t next = next_from(object.find('{') + 1);
  while (object[next] == '"') {
    const size_t key_end = EndOfString(object, next);
    const std::string key(object.substr(next, key_end - next));
    const size_t begin =
        object.find_first_not_of(kSpace, object.find(':', key_end) + 1);
    const size_t end = EndOfValue(object, begin);
    const size_t last = object.find_last_not_of(kSpace, end - 1);
    // A key may have escapes.
    fields.push_back({ParseJson("{" + key + ": 0}")->fields.begin()->first,
                      std::string(object.substr(begin, last + 1 - begin))});
    next = next_from(end);
  }
  return fields;
}

std::string ObjectText(const std::vector<Field>& fields) {
  Json object = Json::Object();
  for (const auto& [key, value] : fields) object.Set(key, Json::Raw(value));
  return object.ToString();
}

bool IsNumber(std::string_view value) {
  return value.find_first_of("-0123456789") == 0;
}

bool IsFraction(std::string_view number) {
  return number.find_first_of(".eE") != std::string_view::npos;
}

// `value` as JSON, which --set gives as `written`. A number has the form of the
// one before it, if there is one.
std::string TextOf(const std::string& key, const JsonValue& value,
                   std::string_view before, const std::string& written) {
  switch (value.kind) {
    case JsonValue::Kind::kString:
      return JsonString(value.text);
    case JsonValue::Kind::kArray:
    case JsonValue::Kind::kObject:
      return written.empty() ? value.ToString() : written;
    case JsonValue::Kind::kNumber: {
      const bool fraction =
          IsNumber(before)
              ? IsFraction(before)
              : IsFraction(written) || std::ranges::count(kFractions, key) > 0;
      std::string text = value.ToString();
      if (fraction && !IsFraction(text)) text += ".0";
      return text;
    }
    default:
      return value.ToString();
  }
}

// Puts `value` in place of the key's, or behind all others.
void SetField(const std::string& key, const JsonValue& value,
              const std::string& written, std::vector<Field>& fields) {
  const auto field = std::ranges::find(fields, key, &Field::key);
  if (field == fields.end()) {
    fields.push_back({key, TextOf(key, value, "", written)});
  } else {
    field->value = TextOf(key, value, field->value, written);
  }
}

// What --set gives a key of the model; empty where it is set by another name.
std::string WrittenFor(const std::string& key,
                       std::span<const std::string> settings) {
  const std::string begin = "model." + key + "=";
  for (const std::string& setting : settings) {
    if (setting.starts_with(begin)) return setting.substr(begin.size());
  }
  return "";
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
    const std::string& model, const std::map<std::string, JsonValue>& overrides,
    std::span<const std::string> settings) {
  if (!IsHuggingFace(model) || IsGraphFile(model)) return std::string();
  TESSERA_TRY(std::string text, TextOfConfig(model));
  // Of the vocabulary's padding nothing is written.
  const bool is_other = std::ranges::any_of(
      overrides, [](const auto& set) { return set.first != kPadding; });
  if (!is_other) return text;
  // Where a family has the text's keys in an object of their own, this gives
  // them as the model's.
  TESSERA_TRY(const JsonValue read, ReadModelConfig(model));
  DropByteOrderMark(text);
  if (const auto parsed = ParseJson(text); !parsed) {
    return parsed.error().At(model);
  }
  std::vector<Field> config = FieldsOf(text);
  const auto own = std::ranges::find(config, kTextConfig, &Field::key);
  const bool nested = own != config.end() && !read.fields.contains(kTextConfig);
  std::vector<Field> of_text;
  if (nested) of_text = FieldsOf(own->value);
  for (const auto& [key, value] : overrides) {
    if (key == kPadding) continue;
    SetField(key, value, WrittenFor(key, settings),
             nested && key != kArchitectures ? of_text : config);
  }
  for (auto& [key, text_or_other] : config) {
    if (nested && key == kTextConfig) text_or_other = ObjectText(of_text);
  }
  return ObjectText(config) + "\n";
}

}  // namespace tessera
