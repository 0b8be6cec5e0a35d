#include "planner/io/model_config.h"

#include <cmath>
#include <filesystem>
#include <sstream>
#include <system_error>

#include "planner/io/zoo.h"

namespace tessera {
namespace {

// No extent of a model comes near; products of three stay within int64.
constexpr int64_t kMaxSize = 1 << 20;

bool IsWhole(const JsonValue& value, int64_t least, int64_t most) {
  return value.kind == JsonValue::Kind::kNumber &&
         value.number >= static_cast<double>(least) &&
         value.number <= static_cast<double>(most) &&
         value.number == std::floor(value.number);
}

std::string Range(int64_t least, int64_t most) {
  return " from " + std::to_string(least) + " to " + std::to_string(most);
}

}  // namespace

std::string GraphName(const std::string& path) {
  if (IsZoo(path)) return path.substr(path.find(':') + 1);
  std::error_code error;
  const std::filesystem::path whole = std::filesystem::absolute(path, error);
  if (error) return "model";
  const std::filesystem::path file = whole.lexically_normal();
  return (file.filename() == "config.json" ? file.parent_path().filename()
                                           : file.stem())
      .string();
}

Error NotRegular(const std::string& path) {
  return InvalidInput(
      "is no regular file: a model is read more than once, which a pipe or "
      "device cannot be",
      path);
}

ModelConfig::ModelConfig(std::string path, JsonValue values)
    : path_(std::move(path)), values_(std::move(values)) {}

const JsonValue* ModelConfig::Find(std::string_view key) const {
  asked_.emplace(key);
  const JsonValue& value = values_.Field(key);
  return value.is_null() ? nullptr : &value;
}

bool ModelConfig::Has(std::string_view key) const {
  return Find(key) != nullptr;
}

const JsonValue& ModelConfig::Value(std::string_view key) const {
  asked_.emplace(key);
  return values_.Field(key);
}

int64_t ModelConfig::WholeNumber(std::string_view key, int64_t most) {
  const JsonValue* value = Find(key);
  if (value == nullptr) {
    Wrong(key, "missing: expected a whole number");
    return 1;
  }
  if (!IsWhole(*value, 1, most)) {
    Wrong(key, "is " + value->ToString() + ": expected a whole number" +
                   Range(1, most));
    return 1;
  }
  return static_cast<int64_t>(value->number);
}

int64_t ModelConfig::Size(std::string_view key) {
  return WholeNumber(key, kMaxSize);
}

int64_t ModelConfig::Layers(std::string_view key) {
  return WholeNumber(key, kMostModelLayers);
}

int64_t ModelConfig::Size(std::string_view key, int64_t fallback) {
  return Has(key) ? Size(key) : fallback;
}

double ModelConfig::Number(std::string_view key, double fallback, double least,
                           double most) {
  const JsonValue* value = Find(key);
  if (value == nullptr) return fallback;
  const double number = value->number;
  if (value->kind == JsonValue::Kind::kNumber && number >= least &&
      number <= most) {
    return number;
  }
  std::ostringstream message;
  message << "is " << value->ToString() << ": expected a number from " << least
          << " to " << most;
  Wrong(key, message.str());
  return fallback;
}

std::vector<double> ModelConfig::Numbers(std::string_view key, size_t count,
                                         double least, double most) {
  const JsonValue* value = Find(key);
  if (value == nullptr) {
    Wrong(key,
          "missing: expected a list of " + std::to_string(count) + " numbers");
    return {};
  }
  const std::vector<JsonValue>& items = ItemsOf(key, *value);
  std::vector<double> numbers;
  for (const JsonValue& item : items) {
    if (item.kind == JsonValue::Kind::kNumber && item.number >= least &&
        item.number <= most) {
      numbers.push_back(item.number);
    }
  }
  if (numbers.size() != count || items.size() != count) {
    std::ostringstream message;
    message << "has " << items.size() << " items, " << numbers.size()
            << " of them numbers from " << least << " to " << most
            << ": expected " << count << " such numbers";
    Wrong(key, message.str());
  }
  return numbers;
}

std::vector<int64_t> ModelConfig::WholeNumbers(std::string_view key,
                                               const ListLimits& limits,
                                               std::vector<int64_t> fallback) {
  const std::string expected =
      "expected a list of " + std::to_string(limits.least_items) + " to " +
      std::to_string(limits.most_items) + " whole numbers" +
      Range(limits.least, limits.most);
  const JsonValue* value = Find(key);
  if (value == nullptr) {
    if (fallback.size() < limits.least_items) {
      Wrong(key, "missing: " + expected);
    }
    return fallback;
  }
  std::vector<int64_t> numbers;
  for (const JsonValue& item : ItemsOf(key, *value)) {
    if (IsWhole(item, limits.least, limits.most)) {
      numbers.push_back(static_cast<int64_t>(item.number));
    }
  }
  if (numbers.size() != value->items.size() ||
      numbers.size() < limits.least_items ||
      numbers.size() > limits.most_items) {
    Wrong(key, "is " + value->ToString() + ": " + expected);
    return fallback;
  }
  return numbers;
}

std::vector<std::string> ModelConfig::Strings(std::string_view key) {
  const JsonValue* value = Find(key);
  if (value == nullptr) return {};
  std::vector<std::string> strings;
  for (const JsonValue& item : ItemsOf(key, *value)) {
    if (item.kind != JsonValue::Kind::kString) {
      Wrong(key, "is " + value->ToString() + ": expected a list of strings");
      return {};
    }
    strings.push_back(item.text);
  }
  return strings;
}

const std::vector<JsonValue>& ModelConfig::ItemsOf(std::string_view key,
                                                   const JsonValue& value) {
  static const std::vector<JsonValue>* const none = new std::vector<JsonValue>;
  if (value.kind == JsonValue::Kind::kArray) return value.items;
  Wrong(key, "is " + value.ToString() + ": expected a list");
  return *none;
}

bool ModelConfig::Bool(std::string_view key, bool fallback) {
  const JsonValue* value = Find(key);
  if (value == nullptr) return fallback;
  if (value->kind != JsonValue::Kind::kBool) {
    Wrong(key, "is " + value->ToString() + ": expected true or false");
    return fallback;
  }
  return value->boolean;
}

std::string ModelConfig::String(std::string_view key,
                                std::string_view fallback) {
  const JsonValue* value = Find(key);
  if (value == nullptr) return std::string(fallback);
  if (value->kind != JsonValue::Kind::kString) {
    Wrong(key, "is " + value->ToString() + ": expected a string");
    return std::string(fallback);
  }
  return value->text;
}

void ModelConfig::Refuse(std::string_view key) {
  const JsonValue* value = Find(key);
  if (value == nullptr) return;
  if (value->kind == JsonValue::Kind::kBool && !value->boolean) return;
  Wrong(key, "is " + value->ToString() + ": not supported");
}

void ModelConfig::Wrong(std::string_view key, std::string message) {
  if (error_.has_value()) return;
  error_ = InvalidInput(std::move(message), path_ + ": " + std::string(key));
}

Result<void> ModelConfig::Check() const {
  if (error_.has_value()) return *error_;
  return {};
}

}  // namespace tessera
