#pragma once
// Checks a JSON text against a message type before protobuf converts it:
// protobuf's own reader neither names the line of an error nor insists on
// strict JSON. Included only by *_io.cc files.

#include <google/protobuf/descriptor.h>

#include <string>
#include <string_view>

#include "planner/base/result.h"

namespace tessera {

// An error whose `where` is "line:column" at the first place where `text` is
// not strict JSON (RFC 8259) in UTF-8, has a number beyond those of 64 bits, or
// an object has a key that is unknown to its message type
// (google.protobuf.Struct knows every key) or occurs twice, or where an object
// stands for a field that has no fields, or a list in a list.
Result<void> CheckJson(std::string_view text,
                       const google::protobuf::Descriptor& type);

// What a field wants whose type protobuf calls "TYPE_INT32", in words; by the
// full name of an enum, perhaps behind a '/', its values. Enums are those of
// the file of `root`.
std::string ExpectedBy(std::string_view type,
                       const google::protobuf::Descriptor& root);

// What protobuf says of a text, without what it quotes of it in more lines.
std::string FirstLine(std::string_view message);

// "line:column" of the value at `path`, such as "links[2].from_vertex" (keys as
// the text has them), of a text that CheckJson accepts; empty where the text
// has no such value.
std::string JsonPlace(std::string_view text,
                      const google::protobuf::Descriptor& type,
                      std::string_view path);

}  // namespace tessera
