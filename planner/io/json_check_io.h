#pragma once
// Checks a JSON text against a message type before protobuf converts it:
// protobuf's own reader neither names the line of an error nor insists on
// strict JSON. Included only by *_io.cc files.

#include <google/protobuf/descriptor.h>

#include <string_view>

#include "planner/base/result.h"

namespace tessera {

// An error whose `where` is "line:column" at the first place where `text` is
// not strict JSON (RFC 8259), or an object has a key that is unknown to its
// message type (google.protobuf.Struct knows every key) or occurs twice.
Result<void> CheckJson(std::string_view text,
                       const google::protobuf::Descriptor& type);

}  // namespace tessera
