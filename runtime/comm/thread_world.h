#pragma once
// Ranks as threads of one process: for tests, debuggers and thread sanitizers.

#include <memory>
#include <vector>

#include "runtime/comm/communicator.h"

namespace tessera {

// The worlds of ranks 0 to n - 1, each to be handed to its thread.
// REQUIRES: 1 <= n <= 64, and memory for them.
std::vector<std::unique_ptr<CommWorld>> MakeThreadWorlds(
    int n, CommOptions options = {});

// The world of a job of one rank.
Result<std::unique_ptr<CommWorld>> MakeLoneWorld();

}  // namespace tessera
