#include "planner/base/result.h"

namespace tessera {

Error Error::At(std::string_view outer) const {
  Error result = *this;
  if (where.empty()) {
    result.where = outer;
  } else if (where.front() == '[') {
    result.where = std::string(outer) + where;
  } else {
    result.where = std::string(outer) + ": " + where;
  }
  return result;
}

std::string Error::ToString() const {
  return where.empty() ? message : where + ": " + message;
}

}  // namespace tessera
