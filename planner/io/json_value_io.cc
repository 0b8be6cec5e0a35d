#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <charconv>
#include <cmath>
#include <cstdint>
#include <sstream>

#include "planner/base/file.h"
#include "planner/io/json_check_io.h"
#include "planner/io/json_value.h"

namespace tessera {
namespace {

JsonValue FromStruct(const google::protobuf::Struct& message);

JsonValue FromValue(const google::protobuf::Value& message) {
  JsonValue value;
  switch (message.kind_case()) {
    case google::protobuf::Value::kBoolValue:
      value.kind = JsonValue::Kind::kBool;
      value.boolean = message.bool_value();
      break;
    case google::protobuf::Value::kNumberValue:
      value.kind = JsonValue::Kind::kNumber;
      value.number = message.number_value();
      break;
    case google::protobuf::Value::kStringValue:
      value.kind = JsonValue::Kind::kString;
      value.text = message.string_value();
      break;
    case google::protobuf::Value::kListValue:
      value.kind = JsonValue::Kind::kArray;
      for (const auto& item : message.list_value().values()) {
        value.items.push_back(FromValue(item));
      }
      break;
    case google::protobuf::Value::kStructValue:
      return FromStruct(message.struct_value());
    case google::protobuf::Value::kNullValue:
    case google::protobuf::Value::KIND_NOT_SET:
      break;
  }
  return value;
}

JsonValue FromStruct(const google::protobuf::Struct& message) {
  JsonValue value;
  value.kind = JsonValue::Kind::kObject;
  for (const auto& [key, field] : message.fields()) {
    value.fields.emplace(key, FromValue(field));
  }
  return value;
}

// The shortest that reads as `number`. Whole ones have no exponent, with which
// other readers would take them for fractions (Python's json).
std::string NumberText(double number) {
  const bool is_whole =
      number == std::trunc(number) && std::abs(number) < 0x1p53;
  char buffer[32];
  char* const end = buffer + sizeof(buffer);
  const auto written =
      is_whole ? std::to_chars(buffer, end, static_cast<int64_t>(number))
               : std::to_chars(buffer, end, number);
  return {buffer, written.ptr};
}

}  // namespace

const JsonValue& JsonValue::Field(std::string_view key) const {
  static const JsonValue* const null = new JsonValue();
  const auto found = fields.find(key);
  return found == fields.end() ? *null : found->second;
}

std::string JsonValue::ToString() const {
  std::ostringstream out;
  const char* separator = "";
  switch (kind) {
    case Kind::kNull:
      return "null";
    case Kind::kBool:
      return boolean ? "true" : "false";
    case Kind::kNumber:
      return NumberText(number);
    case Kind::kString:
      return "\"" + text + "\"";
    case Kind::kArray:
      out << "[";
      for (const JsonValue& item : items) {
        out << separator << item.ToString();
        separator = ", ";
      }
      out << "]";
      return out.str();
    case Kind::kObject:
      out << "{";
      for (const auto& [key, value] : fields) {
        out << separator << "\"" << key << "\": " << value.ToString();
        separator = ", ";
      }
      out << "}";
      return out.str();
  }
  return "";
}

Result<JsonValue> ParseJson(std::string_view text) {
  google::protobuf::Struct message;
  TESSERA_RETURN_IF_ERROR(CheckJson(text, *message.GetDescriptor()));
  const auto status = google::protobuf::util::JsonStringToMessage(
      google::protobuf::StringPiece(text.data(), text.size()), &message);
  if (!status.ok())
    return InvalidInput(FirstLine(std::string(status.message())));
  return FromStruct(message);
}

Result<JsonValue> ReadJson(const std::string& path) {
  TESSERA_TRY(std::string bytes, ReadFile(path));
  DropByteOrderMark(bytes);
  auto value = ParseJson(bytes);
  if (value) return value;
  Error error = value.error();
  error.where = error.where.empty() ? path : path + ":" + error.where;
  return error;
}

}  // namespace tessera
