#pragma once
// Where tests find what lies beside them in the source tree.

#include <string>

namespace tessera {

// A path in tests/testdata: "golden/plans_in_words.txt".
std::string TestdataPath(const std::string& name);

// A path in examples: "models/gpt2-tiny/config.json".
std::string ExamplePath(const std::string& name);

}  // namespace tessera
