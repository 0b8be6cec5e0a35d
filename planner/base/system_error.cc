#include "planner/base/system_error.h"

#include <cerrno>
#include <cstring>

namespace tessera {
namespace {

ErrorCode CodeOf(int error) {
  switch (error) {
    case ENOENT:
      return ErrorCode::kNotFound;
    case EACCES:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case ENOTDIR:
      return ErrorCode::kInvalidInput;
    default:
      return ErrorCode::kUnavailable;
  }
}

}  // namespace

Error SystemError(std::string_view action, const std::string& path, int error) {
  return {CodeOf(error), std::string(action) + ": " + std::strerror(error),
          path};
}

}  // namespace tessera
