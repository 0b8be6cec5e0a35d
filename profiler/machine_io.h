#pragma once
// Machines as messages (proto/machine.proto): between the hosts of a job, and
// for people and programs to read.

#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "profiler/machine.h"

namespace tessera {

// Binary; ParseMachine reads it back. kInvalidInput for what is no machine.
std::string SerializeMachine(const Machine& machine);
Result<Machine> ParseMachine(std::string_view bytes);

// As JSON, with the field names of the .proto file.
Result<std::string> JsonOfMachine(const Machine& machine);

}  // namespace tessera
