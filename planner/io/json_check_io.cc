#include "planner/io/json_check_io.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "planner/base/table.h"
#include "planner/base/utf8.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

// Deeper than any of the formats; bounds the recursion on hostile input.
constexpr int kMaxDepth = 100;

// What protobuf's name for a field's type wants, in words.
struct Wanted {
  std::string_view type;
  std::string_view expected;
};
constexpr std::array kWanted = {
    Wanted{"TYPE_INT32", "a whole number of 32 bits"},
    Wanted{"TYPE_INT64", "a whole number of 64 bits"},
    Wanted{"TYPE_DOUBLE", "a number"},
    Wanted{"TYPE_BOOL", "true or false"},
    Wanted{"TYPE_STRING", "a text in quotes"},
};

// "line:column", from 1, of a byte of a text.
std::string PlaceOf(std::string_view text, size_t position) {
  const std::string_view before = text.substr(0, position);
  const auto line = 1 + std::ranges::count(before, '\n');
  const size_t newline = before.rfind('\n');
  const size_t column =
      newline == std::string_view::npos ? position + 1 : position - newline;
  return std::to_string(line) + ":" + std::to_string(column);
}

std::string ToUpper(std::string text) {
  for (char& c : text) {
    c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return text;
}

// A recursive-descent reader that checks and keeps nothing but where the value
// at one path begins. `type` is the message type of the object at hand, or null
// where keys are free (a map).
class Checker {
 public:
  explicit Checker(std::string_view text, std::string_view wanted_path = "")
      : text_(text), wanted_path_(wanted_path) {}

  Result<void> Document(const Descriptor& type) {
    SkipSpace();
    if (Peek() != '{') return Wrong("expected '{'");
    const bool free_keys = type.full_name() == "google.protobuf.Struct";
    TESSERA_RETURN_IF_ERROR(Object(free_keys ? nullptr : &type, 0));
    SkipSpace();
    if (position_ != text_.size()) return Wrong("unexpected text at the end");
    return {};
  }

  // Of the value at the wanted path, once Document has passed it.
  std::optional<size_t> found() const { return found_; }

 private:
  char Peek() const {
    return position_ < text_.size() ? text_[position_] : '\0';
  }
  void SkipSpace() {
    while (position_ < text_.size() &&
           std::string_view(" \t\r\n").find(text_[position_]) !=
               std::string_view::npos) {
      ++position_;
    }
  }
  bool Skip(char c) {
    if (Peek() != c) return false;
    ++position_;
    return true;
  }

  Error Wrong(std::string message) const { return WrongAt(position_, message); }
  Error WrongAt(size_t position, std::string message) const {
    if (position >= text_.size()) message = "the file ends early: " + message;
    return InvalidInput(message, PlaceOf(text_, position));
  }

  Result<void> Object(const Descriptor* type, int depth) {
    if (depth > kMaxDepth) return Wrong("nested too deep");
    ++position_;  // '{'
    SkipSpace();
    if (Skip('}')) return {};
    std::set<std::string, std::less<>> seen;
    for (;;) {
      SkipSpace();
      const size_t start = position_;
      if (Peek() != '"') return Wrong("expected a field name in quotes");
      TESSERA_TRY(const std::string key, String());
      const FieldDescriptor* field = nullptr;
      if (type != nullptr) {
        field = FieldNamed(*type, key);
        if (field == nullptr) return UnknownKey(start, *type, key);
      }
      const std::string name =
          field == nullptr ? key : std::string(field->name());
      if (!seen.insert(name).second) {
        return WrongAt(start, "field '" + key + "' occurs twice");
      }
      SkipSpace();
      if (!Skip(':')) return Wrong("expected ':'");
      const size_t outer = path_.size();
      path_ += (outer == 0 ? "" : ".") + key;
      TESSERA_RETURN_IF_ERROR(FieldValue(field, depth));
      path_.resize(outer);
      SkipSpace();
      if (Skip(',')) continue;
      if (Skip('}')) return {};
      return Wrong("expected ',' or '}'");
    }
  }

  // The value of `field`; null for a free key.
  Result<void> FieldValue(const FieldDescriptor* field, int depth) {
    SkipSpace();
    if (field == nullptr) return Value(nullptr, nullptr, depth + 1);
    if (field->is_map()) {
      if (Peek() == '{') return Object(nullptr, depth + 1);
      return Wrong("expected '{'");
    }
    // A list of messages may have its only one in its place, as in a text file.
    const bool only = Peek() == '{' && field->message_type() != nullptr;
    if (field->is_repeated() && Peek() != '[' && Peek() != 'n' && !only) {
      return Wrong("expected '[': field '" + std::string(field->name()) +
                   "' is a list");
    }
    if (!field->is_repeated() && Peek() == '[') {
      return Wrong("field '" + std::string(field->name()) + "' is not a list");
    }
    return Value(field, field->message_type(), depth + 1);
  }

  // What `field` or, where it is a list, an item of it has; anything where
  // `field` is null.
  Result<void> Value(const FieldDescriptor* field, const Descriptor* type,
                     int depth) {
    if (depth > kMaxDepth) return Wrong("nested too deep");
    SkipSpace();
    if (path_ == wanted_path_) found_ = position_;
    switch (Peek()) {
      case '{':
        if (field != nullptr && type == nullptr) {
          return InvalidInput("is an object: expected " + Words(*field),
                              PlaceOf(text_, position_) + ": " + path_);
        }
        return Object(type, depth);
      case '[':
        return Array(field, type, depth);
      case '"': {
        auto text = String();
        if (!text) return text.error();
        return {};
      }
      default:
        return Literal();
    }
  }

  // What a field that is no message wants.
  static std::string Words(const FieldDescriptor& field) {
    const auto* const values = field.enum_type();
    std::string type = values != nullptr ? std::string(values->full_name())
                                         : "TYPE_" + ToUpper(field.type_name());
    return ExpectedBy(type, *field.containing_type());
  }

  Result<void> Array(const FieldDescriptor* field, const Descriptor* type,
                     int depth) {
    ++position_;  // '['
    SkipSpace();
    if (Skip(']')) return {};
    for (size_t i = 0;; ++i) {
      const size_t outer = path_.size();
      path_ += "[" + std::to_string(i) + "]";
      SkipSpace();
      if (field != nullptr && Peek() == '[') {
        return InvalidInput("is a list in a list: expected none",
                            PlaceOf(text_, position_) + ": " + path_);
      }
      TESSERA_RETURN_IF_ERROR(Value(field, type, depth + 1));
      path_.resize(outer);
      SkipSpace();
      if (Skip(',')) continue;
      if (Skip(']')) return {};
      return Wrong("expected ',' or ']'");
    }
  }

  // The text between quotes, escapes left as they are: field names have none.
  Result<std::string> String() {
    const size_t start = ++position_;
    while (position_ < text_.size()) {
      const char c = text_[position_];
      if (c == '"') {
        return std::string(text_.substr(start, position_++ - start));
      }
      if (static_cast<unsigned char>(c) < 0x20) {
        return Wrong("control character in a string");
      }
      if (c == '\\') {
        TESSERA_RETURN_IF_ERROR(Escape());
        continue;
      }
      const size_t bytes = Utf8Length(text_.substr(position_));
      if (bytes == 0) return Wrong("is no UTF-8: expected text in it");
      position_ += bytes;
    }
    position_ = text_.size();
    return Wrong("expected '\"'");
  }

  Result<void> Escape() {
    const char c = position_ + 1 < text_.size() ? text_[position_ + 1] : '\0';
    const std::string_view digits = text_.substr(position_).substr(2, 4);
    const bool hex = digits.size() == 4 &&
                     std::ranges::all_of(digits, [](unsigned char digit) {
                       return std::isxdigit(digit) != 0;
                     });
    if (position_ + 1 < text_.size() &&
        (c == 'u' ? !hex
                  : std::string_view("\"\\/bfnrt").find(c) ==
                        std::string_view::npos)) {
      return Wrong("'\\" + std::string(1, c) +
                   "' is no escape: expected one of JSON's, or '\\u' and four "
                   "hexadecimal digits");
    }
    position_ += 2;
    return {};
  }

  // true, false, null or a number.
  Result<void> Literal() {
    const size_t start = position_;
    while (std::isalnum(static_cast<unsigned char>(Peek())) != 0 ||
           Peek() == '+' || Peek() == '-' || Peek() == '.') {
      ++position_;
    }
    const std::string_view word = text_.substr(start, position_ - start);
    if (word == "true" || word == "false" || word == "null") return {};
    if (IsNumber(word)) {
      const double number = std::strtod(std::string(word).c_str(), nullptr);
      if (std::isfinite(number)) return {};
      return WrongAt(start, "is " + std::string(word) +
                                ": expected a number from -1.8e308 to 1.8e308");
    }
    if (word.empty()) return WrongAt(start, "expected a value");
    return WrongAt(start, "'" + std::string(word) + "' is not a value");
  }

  // -?(0|[1-9][0-9]*)(.[0-9]+)?([eE][+-]?[0-9]+)?
  static bool IsNumber(std::string_view word) {
    size_t i = 0;
    const auto digits = [&] {
      const size_t start = i;
      while (i < word.size() && word[i] >= '0' && word[i] <= '9') ++i;
      return i - start;
    };
    const auto skip = [&](std::string_view any) {
      if (i >= word.size() || any.find(word[i]) == any.npos) return false;
      ++i;
      return true;
    };
    skip("-");
    const size_t first = i;
    const size_t whole = digits();
    if (whole == 0 || (whole > 1 && word[first] == '0')) return false;
    if (skip(".") && digits() == 0) return false;
    if (skip("eE")) {
      skip("+-");
      if (digits() == 0) return false;
    }
    return i == word.size();
  }

  static const FieldDescriptor* FieldNamed(const Descriptor& type,
                                           const std::string& key) {
    const FieldDescriptor* field = type.FindFieldByName(key);
    return field != nullptr ? field : type.FindFieldByCamelcaseName(key);
  }

  Error UnknownKey(size_t start, const Descriptor& type,
                   const std::string& key) const {
    std::vector<std::string_view> known;
    for (int i = 0; i < type.field_count(); ++i) {
      known.push_back(type.field(i)->name());
    }
    return WrongAt(start, UnknownName("field", key, known).message);
  }

  std::string_view text_;
  size_t position_ = 0;
  std::string_view wanted_path_;
  std::string path_;  // of the value at hand
  std::optional<size_t> found_;
};

}  // namespace

std::string ExpectedBy(std::string_view type, const Descriptor& root) {
  const auto wanted = std::ranges::find(kWanted, type, &Wanted::type);
  if (wanted != kWanted.end()) return std::string(wanted->expected);
  const std::string name(type.substr(type.rfind('/') + 1));
  const auto* values = root.file()->pool()->FindEnumTypeByName(name);
  if (values == nullptr) return name;
  std::string names = "one of";
  for (int i = 0; i < values->value_count(); ++i) {
    names += (i == 0 ? " " : ", ") + std::string(values->value(i)->name());
  }
  return names;
}

std::string FirstLine(std::string_view message) {
  return std::string(message.substr(0, message.find('\n')));
}

Result<void> CheckJson(std::string_view text, const Descriptor& type) {
  return Checker(text).Document(type);
}

std::string JsonPlace(std::string_view text, const Descriptor& type,
                      std::string_view path) {
  Checker checker(text, path);
  TESSERA_CHECK(checker.Document(type).has_value()) << "not checked";
  return checker.found() ? PlaceOf(text, *checker.found()) : "";
}

}  // namespace tessera
