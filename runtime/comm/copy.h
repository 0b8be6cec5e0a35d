#pragma once
// Copies of bytes between staging and the user's memory. `to` and `from` do
// not overlap, unless they are equal.

#include <cstdint>

namespace tessera {

// Leaves `to` in the cache, for a peer to read.
void CopyToCache(void* to, const void* from, int64_t bytes);

// Writes `to` past the cache: for large results that are read much later.
// Spares reading the overwritten lines from memory.
void CopyPastCache(void* to, const void* from, int64_t bytes);

}  // namespace tessera
