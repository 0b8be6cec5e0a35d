#pragma once
// The config.json that `run --export` leaves beside the weights, with which
// they are a model.

#include <map>
#include <span>
#include <string>

#include "planner/base/result.h"
#include "planner/io/json_value.h"

namespace tessera {

// That of the model: its text as it is, or where --set has put others in place
// of its keys, what these make of it; the others are as they were written, and
// so is each of `settings`, --set's PATH=VALUE. A number stays the whole number
// or the fraction that its key had: 0 in place of 0.5 is 0.0. Rows that pad a
// vocabulary are in no file of weights, and so are not in this one. Empty for a
// model without one.
Result<std::string> ConfigToExport(
    const std::string& model, const std::map<std::string, JsonValue>& overrides,
    std::span<const std::string> settings);

}  // namespace tessera
