#pragma once
// Fields of messages set by their paths, as a command line names them:
// "device_types[0].memory_bytes". A repeated field without an index, or with
// [*], is all of its elements; [NAME] is the one of that name. A unit at the
// end of a field's name may be left out ("memory", "latency"); the amount must
// have it. Included only by *_io.cc files. Functions without state.

#include <google/protobuf/message.h>

#include <string>
#include <string_view>
#include <vector>

#include "planner/base/amount.h"
#include "planner/base/result.h"

namespace tessera {

// Sets it. A factor multiplies what a number is. Errors name the part of the
// path that is wrong, with the near names, or the dimension that is expected.
Result<void> SetField(std::string_view path, const Amount& amount,
                      google::protobuf::Message& message);

// The paths of all plain fields below `message`'s type, repeated ones with [*]
// and units left out.
std::vector<std::string> FieldPaths(const google::protobuf::Message& message);

}  // namespace tessera
