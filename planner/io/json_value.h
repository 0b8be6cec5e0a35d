#pragma once
// A JSON file as a plain value, for formats of others that have no .proto.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"

namespace tessera {

struct JsonValue {
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  bool boolean = false;
  double number = 0;
  std::string text;
  std::vector<JsonValue> items;
  std::map<std::string, JsonValue, std::less<>> fields;

  bool is_null() const { return kind == Kind::kNull; }
  // The field called `key` of an object; null where there is none.
  const JsonValue& Field(std::string_view key) const;
  // As JSON on one line, for error messages.
  std::string ToString() const;
};

// The object that `text` is. kInvalidInput with `where` "line:column" for what
// is not strict JSON, breaks off, or has a key twice in one object.
Result<JsonValue> ParseJson(std::string_view text);

// The object in the file at `path`. Errors: kNotFound for a missing file;
// kInvalidInput with `where` "path:line:column" for what is not strict JSON,
// breaks off, or has a key twice in one object.
Result<JsonValue> ReadJson(const std::string& path);

}  // namespace tessera
