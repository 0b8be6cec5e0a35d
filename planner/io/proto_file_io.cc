#include "planner/io/proto_file_io.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "planner/base/file.h"
#include "planner/base/table.h"
#include "planner/io/json_check_io.h"
#include "planner/io/proto_endings.h"
#include "planner/io/text_check_io.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using google::protobuf::TextFormat;

// ---- text ----------------------------------------------------------------

// Keeps the first error.
class FirstError : public google::protobuf::io::ErrorCollector {
 public:
  // `line` and `column` are 0-based; -1 where unknown.
  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    if (error.has_value()) return;
    error = InvalidInput(message);
    if (line >= 0) {
      error->where =
          std::to_string(line + 1) + ":" + std::to_string(column + 1);
    }
  }

  std::optional<Error> error;
};

// protobuf says: Message type "a.B" has no field named "x". Adds the nearest
// name that the type does have.
std::string WithNearestField(const std::string& message,
                             const Descriptor& root) {
  const std::string_view type_prefix = "Message type \"";
  const std::string_view middle = "\" has no field named \"";
  const size_t split = message.find(middle);
  if (!message.starts_with(type_prefix) || split == std::string::npos) {
    return message;
  }
  const std::string type_name =
      message.substr(type_prefix.size(), split - type_prefix.size());
  std::string field = message.substr(split + middle.size());
  field = field.substr(0, field.find('"'));
  const Descriptor* type =
      root.file()->pool()->FindMessageTypeByName(type_name);
  if (type == nullptr) return message;
  std::vector<std::string_view> known;
  for (int i = 0; i < type->field_count(); ++i) {
    known.push_back(type->field(i)->name());
  }
  return UnknownName("field", field, known).message;
}

Result<void> ParseText(const std::string& bytes, Message& out) {
  FirstError errors;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  if (parser.ParseFromString(bytes, &out)) {
    return CheckTextFields(bytes, *out.GetDescriptor());
  }
  Error error = errors.error.value_or(InvalidInput("not a text proto"));
  error.message = WithNearestField(error.message, *out.GetDescriptor());
  return error;
}

Result<std::string> PrintText(const Message& message) {
  TextFormat::Printer printer;
  printer.SetUseUtf8StringEscaping(true);
  std::string text;
  TESSERA_CHECK(printer.PrintToString(message, &text));
  return text;
}

// ---- JSON ----------------------------------------------------------------

// Of JSON that CheckJson accepts a value may yet not fit its field, which
// protobuf describes as "(links[2].from_vertex): invalid value X for type
// TYPE_INT32". The same with its line and column.
Error MisfitError(std::string message, const std::string& bytes,
                  const Descriptor& type) {
  const size_t end = message.find("): ");
  if (!message.starts_with('(') || end == std::string::npos) {
    return InvalidInput(FirstLine(message));
  }
  const std::string path = message.substr(1, end - 1);
  const std::string place = JsonPlace(bytes, type, path);
  message.erase(0, end + 3);
  const std::string_view before = "invalid value ";
  const std::string_view middle = " for type ";
  const size_t split = message.rfind(middle);
  if (message.starts_with(before) && split != std::string::npos) {
    message = "is " + message.substr(before.size(), split - before.size()) +
              ": expected " +
              ExpectedBy(message.substr(split + middle.size()), type);
  }
  return InvalidInput(message, place.empty() ? path : place + ": " + path);
}

Result<void> ParseJson(const std::string& bytes, Message& out) {
  TESSERA_RETURN_IF_ERROR(CheckJson(bytes, *out.GetDescriptor()));
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = false;
  const auto status =
      google::protobuf::util::JsonStringToMessage(bytes, &out, options);
  if (status.ok()) return {};
  return MisfitError(std::string(status.message()), bytes,
                     *out.GetDescriptor());
}

Result<std::string> PrintJson(const Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  std::string text;
  const auto status =
      google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!status.ok()) return InvalidInput(std::string(status.message()));
  return text;
}

// ---- binary --------------------------------------------------------------

// The path of the first unknown field inside `message`, or "".
std::string FindUnknownField(const Message& message) {
  const Reflection& reflection = *message.GetReflection();
  const auto& unknown = reflection.GetUnknownFields(message);
  if (!unknown.empty()) {
    return "field number " + std::to_string(unknown.field(0).number()) +
           " of " + std::string(message.GetDescriptor()->name());
  }
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      const std::string found =
          FindUnknownField(reflection.GetMessage(message, field));
      if (!found.empty()) return found;
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
      const std::string found =
          FindUnknownField(reflection.GetRepeatedMessage(message, field, i));
      if (!found.empty()) return found;
    }
  }
  return "";
}

int64_t SchemaVersionOf(const Message& message) {
  const FieldDescriptor* field =
      message.GetDescriptor()->FindFieldByName("schema_version");
  TESSERA_CHECK(field != nullptr &&
                field->cpp_type() == FieldDescriptor::CPPTYPE_INT32 &&
                !field->is_repeated())
      << message.GetDescriptor()->name() << " lacks int32 schema_version";
  return message.GetReflection()->GetInt32(message, field);
}

// Which other kind of file it is, such as "a plan"; empty where none fits.
std::string KindOf(const std::string& bytes) {
  constexpr std::pair<const char*, const char*> kKinds[] = {
      {"Graph", "a graph"},
      {"Plan", "a plan"},
      {"Cluster", "a cluster"},
      {"Profile", "a profile"},
      {"Timeline", "a timeline"}};
  const auto* const pool = google::protobuf::DescriptorPool::generated_pool();
  for (const auto& [type, words] : kKinds) {
    const Descriptor* const descriptor =
        pool->FindMessageTypeByName(std::string("tessera.proto.") + type);
    if (descriptor == nullptr) continue;
    const std::unique_ptr<Message> message(
        google::protobuf::MessageFactory::generated_factory()
            ->GetPrototype(descriptor)
            ->New());
    if (message->ParseFromString(bytes) && FindUnknownField(*message).empty() &&
        SchemaVersionOf(*message) == kSchemaVersion) {
      return words;
    }
  }
  // Of which only some fields are read.
  const Descriptor* const onnx =
      pool->FindMessageTypeByName("tessera.proto.onnx.Model");
  if (onnx == nullptr) return "";
  const std::unique_ptr<Message> model(
      google::protobuf::MessageFactory::generated_factory()
          ->GetPrototype(onnx)
          ->New());
  const FieldDescriptor* const graph = onnx->FindFieldByName("graph");
  const bool is_model = model->ParseFromString(bytes) && graph != nullptr &&
                        model->GetReflection()->HasField(*model, graph);
  return is_model ? "an ONNX model" : "";
}

Result<void> ParseBinary(const std::string& bytes, Message& out) {
  // What it would say on stderr, the error says.
  const google::protobuf::LogSilencer silencer;
  const std::string wanted(out.GetDescriptor()->name());
  const bool parsed = out.ParseFromString(bytes);
  const std::string unknown = parsed ? FindUnknownField(out) : "";
  if (parsed && unknown.empty()) return {};
  if (const std::string kind = KindOf(bytes); !kind.empty()) {
    return InvalidInput("is " + kind + ": expected a binary " + wanted);
  }
  if (parsed) return InvalidInput("unknown " + unknown);
  return InvalidInput("not a whole binary " + wanted +
                      ": of another kind, truncated or garbage");
}

Result<std::string> PrintBinary(const Message& message) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    TESSERA_CHECK(message.SerializeToCodedStream(&coded));
  }
  return bytes;
}

// ---- the table of encodings ----------------------------------------------

struct Encoding {
  Result<void> (*parse)(const std::string& bytes, Message& out);
  Result<std::string> (*print)(const Message& message);
};

// In the order of ProtoEncoding.
constexpr std::array kEncodings = {
    Encoding{ParseText, PrintText},
    Encoding{ParseJson, PrintJson},
    Encoding{ParseBinary, PrintBinary},
};

Result<const Encoding*> EncodingOf(const std::string& path) {
  const auto encoding = ProtoEncodingOf(path);
  if (encoding) return &kEncodings[static_cast<size_t>(*encoding)];
  return InvalidInput("unknown file ending: expected " + ProtoEndings(), path);
}

// "path" + "line:column" is "path:line:column".
Error InFile(const Error& error, const std::string& path) {
  Error result = error;
  result.where = error.where.empty() ? path : path + ":" + error.where;
  return result;
}

}  // namespace

Result<void> ReadProtoFile(const std::string& path, Message& out) {
  TESSERA_TRY(const Encoding* encoding, EncodingOf(path));
  TESSERA_TRY(std::string bytes, ReadFile(path));
  if (encoding->parse != ParseBinary) DropByteOrderMark(bytes);
  out.Clear();
  if (auto parsed = encoding->parse(bytes, out); !parsed) {
    return InFile(parsed.error(), path);
  }
  const int64_t version = SchemaVersionOf(out);
  if (version == 0) {
    return InvalidInput(
        "schema_version is missing: expected " + std::to_string(kSchemaVersion),
        path);
  }
  if (version != kSchemaVersion) {
    return InvalidInput("schema_version is " + std::to_string(version) +
                            ": expected " + std::to_string(kSchemaVersion),
                        path);
  }
  return {};
}

Result<void> WriteProtoFile(const std::string& path, const Message& message) {
  TESSERA_CHECK(SchemaVersionOf(message) == kSchemaVersion)
      << message.GetDescriptor()->name();
  TESSERA_TRY(const Encoding* encoding, EncodingOf(path));
  TESSERA_TRY(const std::string bytes, encoding->print(message));
  return WriteFileAtomically(path, bytes);
}

Result<std::string> JsonOf(const Message& message) {
  return PrintJson(message);
}

}  // namespace tessera
