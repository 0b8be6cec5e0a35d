#pragma once
// How many files and sockets a process may have open.

#include <cstdint>

namespace tessera {

// Takes, of what the system gives to who asks, as many as `wanted` and some for
// all else. Where it gives less, what opens a file says so. Thread-safe.
void RaiseDescriptorLimit(int64_t wanted);

}  // namespace tessera
