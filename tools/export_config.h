#pragma once
// The config.json that `run --export` leaves beside the weights, with which
// they are a model.

#include <map>
#include <string>

#include "planner/base/result.h"
#include "planner/io/json_value.h"

namespace tessera {

// That of the model: its text as it is, or where --set has put others in place
// of its keys, what these make of it. Rows that pad a vocabulary are in no file
// of weights, and so are not in this one. Empty for a model without one.
Result<std::string> ConfigToExport(
    const std::string& model,
    const std::map<std::string, JsonValue>& overrides);

}  // namespace tessera
