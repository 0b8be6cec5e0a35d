#include "tests/support/paths.h"

namespace tessera {

std::string TestdataPath(const std::string& name) {
  return std::string(TESSERA_TESTDATA) + "/" + name;
}

std::string ExamplePath(const std::string& name) {
  return std::string(TESSERA_EXAMPLES) + "/" + name;
}

}  // namespace tessera
