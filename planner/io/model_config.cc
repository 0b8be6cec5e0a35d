#include "planner/io/model_config.h"

#include <cmath>
#include <filesystem>
#include <sstream>
#include <system_error>

#include "planner/io/zoo.h"

namespace tessera {
namespace {

// No extent of a model comes near; products of three stay within int64.
constexpr double kMaxSize = 1 << 20;
// The deepest published transformers have 1,000 layers (Wang et al. 2022,
// "DeepNet").
constexpr int64_t kMaxLayers = 4096;

}  // namespace

std::string GraphName(const std::string& path) {
  if (IsZoo(path)) return path.substr(path.find(':') + 1);
  std::error_code error;
  const std::filesystem::path whole = std::filesystem::absolute(path, error);
  if (error) return "model";
  return whole.lexically_normal().parent_path().filename().string();
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

int64_t ModelConfig::Size(std::string_view key) {
  const JsonValue* value = Find(key);
  if (value == nullptr) {
    Wrong(key, "missing: expected a whole number");
    return 1;
  }
  const double number = value->number;
  if (value->kind != JsonValue::Kind::kNumber || number < 1 ||
      number > kMaxSize || number != std::floor(number)) {
    Wrong(key, "is " + value->ToString() +
                   ": expected a whole number from 1 to 1048576");
    return 1;
  }
  return static_cast<int64_t>(number);
}

int64_t ModelConfig::Layers(std::string_view key) {
  const int64_t layers = Size(key);
  if (layers <= kMaxLayers) return layers;
  Wrong(key, "is " + std::to_string(layers) + ": expected at most " +
                 std::to_string(kMaxLayers) + " layers");
  return 1;
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
  const JsonValue missing;
  const JsonValue& list = value == nullptr ? missing : *value;
  std::vector<double> numbers;
  for (const JsonValue& item : list.items) {
    if (item.kind == JsonValue::Kind::kNumber && item.number >= least &&
        item.number <= most) {
      numbers.push_back(item.number);
    }
  }
  if (numbers.size() != count || list.items.size() != count) {
    std::ostringstream message;
    message << "has " << list.items.size() << " items, " << numbers.size()
            << " of them numbers from " << least << " to " << most
            << ": expected " << count << " such numbers";
    Wrong(key, message.str());
  }
  return numbers;
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
