#include "tools/json.h"

#include <charconv>
#include <cmath>

#include "planner/base/check.h"

namespace tessera {
namespace {

constexpr size_t kColumns = 80;

template <typename Number>
std::string NumberText(Number value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  return std::string(buffer, end);
}

// Length of the UTF-8 sequence at the start of `text`, or 0 if there is none
// (RFC 3629: no overlong forms, no surrogates, at most U+10FFFF).
size_t Utf8Length(std::string_view text) {
  const auto byte = [&](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const auto tail = [&](size_t i) { return (byte(i) & 0xc0U) == 0x80U; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0 && tail(1)) return 2;
  if (first >= 0xe0 && first < 0xf0 && tail(1) && tail(2)) {
    const bool overlong = first == 0xe0 && byte(1) < 0xa0;
    const bool surrogate = first == 0xed && byte(1) >= 0xa0;
    return overlong || surrogate ? 0 : 3;
  }
  if (first >= 0xf0 && first < 0xf5 && tail(1) && tail(2) && tail(3)) {
    const bool overlong = first == 0xf0 && byte(1) < 0x90;
    const bool too_large = first == 0xf4 && byte(1) >= 0x90;
    return overlong || too_large ? 0 : 4;
  }
  return 0;
}

}  // namespace

std::string JsonString(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
      ++i;
    } else if (c == '\n') {
      out += "\\n";
      ++i;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += "\\u00";
      out += kHex[static_cast<size_t>(c) >> 4];
      out += kHex[static_cast<size_t>(c) & 15];
      ++i;
    } else {
      const size_t length = Utf8Length(text.substr(i));
      out += length == 0 ? "\\ufffd" : text.substr(i, length);
      i += std::max<size_t>(1, length);
    }
  }
  return out + "\"";
}

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
