#pragma once
// Errors of the operating system.

#include <string>
#include <string_view>

#include "planner/base/result.h"

namespace tessera {

// That `action` ("cannot open") failed with the errno `error`: kNotFound for a
// missing file, kInvalidInput for a path that is a directory's or leads to
// none, or that may not be used, else kUnavailable.
Error SystemError(std::string_view action, const std::string& path, int error);

}  // namespace tessera
