#pragma once
// The zoo: models by name, "zoo:llama-3-8b". They are the config.json files of
// examples/models, one folder a model, which the build writes into the program.

#include <span>
#include <string>
#include <string_view>

#include "planner/base/result.h"

namespace tessera {

struct ZooModel {
  std::string_view name;    // of its folder
  std::string_view config;  // the text of its config.json
};

// By name.
std::span<const ZooModel> Zoo();

// Whether `model` is of the form "zoo:NAME".
bool IsZoo(std::string_view model);

// The row that "zoo:NAME" names. REQUIRES: IsZoo(model).
Result<const ZooModel*> FindInZoo(std::string_view model);

}  // namespace tessera
