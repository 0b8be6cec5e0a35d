#pragma once
// JSON output: a value that is built and then printed. Objects keep the order
// in which their fields are given.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

class Json {
 public:
  using Field = std::pair<std::string, Json>;

  Json();  // null
  Json(bool value);
  // The shortest text that reads back as the same double; null when it is not
  // finite.
  Json(double value);
  Json(int value);
  Json(int64_t value);
  Json(uint64_t value);
  Json(std::string_view text);
  Json(const std::string& text) : Json(std::string_view(text)) {}
  Json(const char* text) : Json(std::string_view(text)) {}

  static Json Object(std::vector<Field> fields = {});
  static Json Array(std::vector<Json> items = {});
  // `make(item)` for each item of a range.
  template <typename Range, typename Make>
  static Json ArrayOf(const Range& range, Make make) {
    std::vector<Json> items;
    for (const auto& item : range) items.push_back(make(item));
    return Array(std::move(items));
  }
  // `text` as it is. REQUIRES: it is one JSON value.
  static Json Raw(std::string text);

  // REQUIRES: an object.
  Json& Set(std::string key, Json value);
  // Adds the fields of `other`. REQUIRES: both are objects.
  Json& Extend(Json other);
  // REQUIRES: an array.
  Json& Append(Json value);

  // On several lines, indented by two spaces, without a line end; an object or
  // array of plain values alone stays on one line where it fits 80 columns.
  std::string ToString() const;
  // On one line, however long.
  std::string OneLine() const;

 private:
  enum class Kind : uint8_t { kPlain, kObject, kArray };

  bool IsFlat() const;
  void Print(size_t indent, size_t used, std::string& out) const;

  Kind kind_ = Kind::kPlain;
  std::string text_ = "null";  // kPlain, as printed
  std::vector<Field> fields_;  // kObject; kArray with empty keys
};

// Null where there is nothing.
template <typename T>
Json OrNull(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

}  // namespace tessera
