#pragma once
// The report of `tessera whatif -o`: one HTML page with its plots inside,
// readable offline, without scripts, light or dark as the reader has it.

#include <string>

#include "tools/whatif_output.h"

namespace tessera {

std::string WhatifReport(const WhatifResult& result);

}  // namespace tessera
