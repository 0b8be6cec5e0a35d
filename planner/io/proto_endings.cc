#include "planner/io/proto_endings.h"

#include <array>

namespace tessera {
namespace {

struct EndingRow {
  std::string_view ending;
  ProtoEncoding encoding;
};
constexpr std::array kEndings = {
    EndingRow{".txtpb", ProtoEncoding::kText},
    EndingRow{".textproto", ProtoEncoding::kText},
    EndingRow{".pbtxt", ProtoEncoding::kText},
    EndingRow{".json", ProtoEncoding::kJson},
    EndingRow{".pb", ProtoEncoding::kBinary},
};

}  // namespace

std::optional<ProtoEncoding> ProtoEncodingOf(std::string_view path) {
  for (const EndingRow& row : kEndings) {
    if (path.ends_with(row.ending)) return row.encoding;
  }
  return std::nullopt;
}

bool HasProtoFileEnding(std::string_view path) {
  return ProtoEncodingOf(path).has_value();
}

std::string ProtoEndings() {
  std::string text;
  for (const EndingRow& row : kEndings) {
    const bool last = &row == &kEndings.back();
    text += (text.empty() ? "" : last ? " or " : ", ");
    text += row.ending;
  }
  return text;
}

}  // namespace tessera
