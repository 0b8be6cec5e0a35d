#include "planner/io/proto_field_io.h"

#include <google/protobuf/descriptor.h>

#include <array>
#include <cmath>
#include <limits>

#include "planner/base/table.h"
#include "planner/base/whole_number.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// The longest first: "_bytes_per_second" ends in "_per_second" too.
struct Suffix {
  std::string_view text;
  Dimension dimension;
};
constexpr std::array kSuffixes = {
    Suffix{"_flops_per_second", Dimension::kFlops},
    Suffix{"_bytes_per_second", Dimension::kBandwidth},
    Suffix{"_usd_per_hour", Dimension::kPrice},
    Suffix{"_bytes", Dimension::kBytes},
    Suffix{"_seconds", Dimension::kTime},
    Suffix{"_watts", Dimension::kPower},
};

Dimension DimensionOf(const FieldDescriptor& field) {
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    return Dimension::kText;
  }
  for (const Suffix& suffix : kSuffixes) {
    if (std::string_view(field.name()).ends_with(suffix.text)) {
      return suffix.dimension;
    }
  }
  // "host_seconds_per_operator".
  if (field.name().find("_seconds_") != std::string::npos) {
    return Dimension::kTime;
  }
  return Dimension::kNumber;
}

std::string_view WithoutUnit(std::string_view name) {
  for (const Suffix& suffix : kSuffixes) {
    if (name.ends_with(suffix.text)) {
      return name.substr(0, name.size() - suffix.text.size());
    }
  }
  return name;
}

Result<const FieldDescriptor*> FindField(const Descriptor& type,
                                         std::string_view name) {
  std::vector<std::string_view> known;
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor* field = type.field(i);
    if (field->name() == name || WithoutUnit(field->name()) == name) {
      return field;
    }
    known.push_back(WithoutUnit(field->name()));
  }
  return UnknownName("field", name, known);
}

// One part of a path: "device_types[0]".
struct Part {
  std::string_view name;
  std::string_view element;  // in brackets; empty for all
};

Result<Part> TakePart(std::string_view& path) {
  Part part;
  const size_t end = path.find_first_of(".[");
  part.name = path.substr(0, end);
  path.remove_prefix(std::min(end, path.size()));
  if (path.starts_with('[')) {
    const size_t close = path.find(']');
    if (close == std::string_view::npos) {
      return InvalidInput("'[' without ']'");
    }
    part.element = path.substr(1, close - 1);
    path.remove_prefix(close + 1);
  }
  if (path.empty()) return part;
  if (!path.starts_with('.') || path.size() == 1) {
    return InvalidInput("expected '.' and a field behind '" +
                        std::string(part.name) + "'");
  }
  path.remove_prefix(1);
  return part;
}

std::string NameOfElement(const Message& element) {
  const auto* field = element.GetDescriptor()->FindFieldByName("name");
  if (field == nullptr) return "";
  return element.GetReflection()->GetString(element, field);
}

// The elements of a repeated field of messages that `selector` means.
Result<std::vector<int>> Select(const Message& message,
                                const FieldDescriptor& field,
                                std::string_view selector) {
  const Reflection& reflection = *message.GetReflection();
  const int size = reflection.FieldSize(message, &field);
  std::vector<int> all;
  std::vector<int> named;
  std::vector<std::string> names;
  const auto index = ParseWhole<int>(selector);
  for (int i = 0; i < size; ++i) {
    all.push_back(i);
    names.push_back(
        NameOfElement(reflection.GetRepeatedMessage(message, &field, i)));
    if (index && *index == i) return std::vector<int>{i};
    if (!index && selector == names.back()) named.push_back(i);
  }
  if (!named.empty()) return named;
  if (selector.empty() || selector == "*") return all;
  if (index) {
    return InvalidInput("there are " + std::to_string(size) + " of '" +
                        std::string(field.name()) + "', from 0");
  }
  std::vector<std::string_view> known(names.begin(), names.end());
  if (known.size() > 20) known.resize(20);
  return UnknownName("element", selector, known);
}

// Whether it is the number of an element of a list ("device_types[0].host") or
// of a version, of which there is no multiple. What is counted has factors.
bool IsIndex(const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_INT32 &&
         field.name() != "multiprocessors";
}

// The number that `amount` makes of `before`; of a field that counts a whole
// one. Bytes and what a factor gives are rounded.
Result<double> NumberOf(const FieldDescriptor& field, const Amount& amount,
                        double before) {
  if (amount.dimension == Dimension::kFactor && !IsIndex(field)) {
    return before * amount.value;
  }
  const Dimension dimension = DimensionOf(field);
  if (!IsOf(amount, dimension)) {
    return InvalidInput("'" + amount.text + "' is not " +
                        std::string(Expected(dimension)));
  }
  const bool counts = field.cpp_type() != FieldDescriptor::CPPTYPE_DOUBLE &&
                      dimension == Dimension::kNumber;
  if (counts && amount.value != std::floor(amount.value)) {
    return InvalidInput("'" + amount.text + "' is not a whole number");
  }
  return amount.value;
}

template <typename Integer>
Result<Integer> ToInteger(double number) {
  number = std::round(number);
  if (std::abs(number) >
      static_cast<double>(std::numeric_limits<Integer>::max() / 2)) {
    return InvalidInput("the number is too large");
  }
  return static_cast<Integer>(number);
}

Result<void> SetPlain(const FieldDescriptor& field, const Amount& amount,
                      Message& message) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      TESSERA_TRY(
          const double number,
          NumberOf(field, amount, reflection.GetDouble(message, &field)));
      reflection.SetDouble(&message, &field, number);
      return {};
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      const auto before =
          static_cast<double>(reflection.GetInt64(message, &field));
      TESSERA_TRY(const double number, NumberOf(field, amount, before));
      TESSERA_TRY(const int64_t whole, ToInteger<int64_t>(number));
      reflection.SetInt64(&message, &field, whole);
      return {};
    }
    case FieldDescriptor::CPPTYPE_INT32: {
      TESSERA_TRY(
          const double number,
          NumberOf(field, amount, reflection.GetInt32(message, &field)));
      TESSERA_TRY(const int32_t whole, ToInteger<int32_t>(number));
      reflection.SetInt32(&message, &field, whole);
      return {};
    }
    case FieldDescriptor::CPPTYPE_BOOL:
      if (amount.text != "true" && amount.text != "false") {
        return InvalidInput("'" + amount.text + "' is not true or false");
      }
      reflection.SetBool(&message, &field, amount.text == "true");
      return {};
    case FieldDescriptor::CPPTYPE_STRING:
      reflection.SetString(&message, &field, amount.text);
      return {};
    case FieldDescriptor::CPPTYPE_ENUM: {
      const auto& type = *field.enum_type();
      const auto* value = type.FindValueByName(amount.text);
      if (value == nullptr) {
        std::vector<std::string_view> known;
        for (int i = 0; i < type.value_count(); ++i) {
          known.push_back(type.value(i)->name());
        }
        return InvalidInput(UnknownName("value", amount.text, known).message);
      }
      reflection.SetEnum(&message, &field, value);
      return {};
    }
    default:
      return InvalidInput("cannot be set");
  }
}

Result<void> SetBelow(std::string_view path, const Amount& amount,
                      Message& message) {
  TESSERA_TRY(const Part part, TakePart(path));
  TESSERA_TRY(const FieldDescriptor* field,
              FindField(*message.GetDescriptor(), part.name));
  const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
  if (!part.element.empty() && !field->is_repeated()) {
    return InvalidInput("'" + std::string(part.name) + "' is no list");
  }
  if (is_message == path.empty()) {
    return InvalidInput(
        "'" + std::string(part.name) +
        (is_message ? "' needs a field behind it" : "' has no fields"));
  }
  if (!is_message) {
    if (field->is_repeated()) return InvalidInput("cannot be set");
    return SetPlain(*field, amount, message);
  }
  const Reflection& reflection = *message.GetReflection();
  if (!field->is_repeated()) {
    return SetBelow(path, amount, *reflection.MutableMessage(&message, field));
  }
  TESSERA_TRY(const std::vector<int> elements,
              Select(message, *field, part.element));
  for (const int i : elements) {
    TESSERA_RETURN_IF_ERROR(SetBelow(
        path, amount, *reflection.MutableRepeatedMessage(&message, field, i)));
  }
  return {};
}

void AddPaths(const Descriptor& type, const std::string& before,
              std::vector<std::string>& paths) {
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    std::string path = before + std::string(WithoutUnit(field.name()));
    if (field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
      if (!field.is_repeated()) paths.push_back(std::move(path));
      continue;
    }
    if (field.is_repeated()) path += "[*]";
    AddPaths(*field.message_type(), path + ".", paths);
  }
}

}  // namespace

Result<void> SetField(std::string_view path, const Amount& amount,
                      Message& message) {
  return SetBelow(path, amount, message);
}

std::vector<std::string> FieldPaths(const Message& message) {
  std::vector<std::string> paths;
  AddPaths(*message.GetDescriptor(), "", paths);
  return paths;
}

}  // namespace tessera
