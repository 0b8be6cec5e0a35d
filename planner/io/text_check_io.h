#pragma once
// What protobuf's reader of its text format lets pass. Included only by *_io.cc
// files.

#include <google/protobuf/descriptor.h>

#include <string>

#include "planner/base/result.h"

namespace tessera {

// An error whose `where` is "line:column" where a message of `text` has a field
// a second time that is not repeated: protobuf finds these by their values, but
// for those that are 0. REQUIRES: protobuf has read `text` as a `type`.
Result<void> CheckTextFields(const std::string& text,
                             const google::protobuf::Descriptor& type);

}  // namespace tessera
