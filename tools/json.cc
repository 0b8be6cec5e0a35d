#include "tools/json.h"

#include <charconv>
#include <cmath>

#include "planner/base/check.h"
#include "planner/base/json_string.h"

namespace tessera {
namespace {

constexpr size_t kColumns = 80;

template <typename Number>
std::string NumberText(Number value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  return std::string(buffer, end);
}

}  // namespace

Json::Json() = default;
Json::Json(bool value) : text_(value ? "true" : "false") {}
Json::Json(double value)
    : text_(std::isfinite(value) ? NumberText(value) : "null") {}
Json::Json(int value) : text_(NumberText(value)) {}
Json::Json(int64_t value) : text_(NumberText(value)) {}
Json::Json(uint64_t value) : text_(NumberText(value)) {}
Json::Json(std::string_view text) : text_(JsonString(text)) {}

Json Json::Object(std::vector<Field> fields) {
  Json json;
  json.kind_ = Kind::kObject;
  json.fields_ = std::move(fields);
  return json;
}

Json Json::Array(std::vector<Json> items) {
  Json json;
  json.kind_ = Kind::kArray;
  for (Json& item : items) json.Append(std::move(item));
  return json;
}

Json Json::Raw(std::string text) {
  Json json;
  json.text_ = std::move(text);
  return json;
}

Json& Json::Set(std::string key, Json value) {
  TESSERA_CHECK(kind_ == Kind::kObject) << key;
  fields_.emplace_back(std::move(key), std::move(value));
  return *this;
}

Json& Json::Extend(Json other) {
  TESSERA_CHECK(kind_ == Kind::kObject && other.kind_ == Kind::kObject);
  for (Field& field : other.fields_) fields_.push_back(std::move(field));
  return *this;
}

Json& Json::Append(Json value) {
  TESSERA_CHECK(kind_ == Kind::kArray);
  fields_.emplace_back("", std::move(value));
  return *this;
}

// Whether no field is an object or array of something.
bool Json::IsFlat() const {
  for (const auto& [key, value] : fields_) {
    if (value.kind_ != Kind::kPlain && !value.fields_.empty()) return false;
  }
  return true;
}

std::string Json::OneLine() const {
  if (kind_ == Kind::kPlain) return text_;
  std::string line(1, kind_ == Kind::kObject ? '{' : '[');
  for (const auto& [key, value] : fields_) {
    if (line.size() > 1) line += ", ";
    if (kind_ == Kind::kObject) line += JsonString(key) + ": ";
    line += value.OneLine();
  }
  return line + (kind_ == Kind::kObject ? '}' : ']');
}

void Json::Print(size_t indent, size_t used, std::string& out) const {
  if (kind_ == Kind::kPlain) {
    out += text_;
    return;
  }
  if (IsFlat()) {
    const std::string line = OneLine();
    if (fields_.empty() || used + line.size() + 1 <= kColumns) {
      out += line;
      return;
    }
  }
  const std::string inner(indent + 2, ' ');
  out += kind_ == Kind::kObject ? '{' : '[';
  const char* separator = "\n";
  for (const auto& [key, value] : fields_) {
    out += separator + inner;
    const std::string name =
        kind_ == Kind::kObject ? JsonString(key) + ": " : "";
    out += name;
    value.Print(indent + 2, indent + 2 + name.size(), out);
    separator = ",\n";
  }
  out += "\n" + std::string(indent, ' ');
  out += kind_ == Kind::kObject ? '}' : ']';
}

std::string Json::ToString() const {
  std::string out;
  Print(0, 0, out);
  return out;
}

}  // namespace tessera
