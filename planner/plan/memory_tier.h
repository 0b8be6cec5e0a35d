#pragma once
// Where a stored layout lives: on its device, in the memory of the node's host,
// or in a file of the node's storage. The rank that has a shard on its device
// keeps it for itself on the other tiers, too.

#include <array>
#include <cstdint>
#include <string_view>

#include "planner/base/result.h"

namespace tessera {

enum class MemoryTier : uint8_t { kDevice, kHost, kFile };
inline constexpr int kMemoryTiers = 3;

// "device", "host", "file".
std::string_view NameOf(MemoryTier tier);
// "is 'disk': expected device, host or file".
Result<MemoryTier> FindMemoryTier(std::string_view name);

// A file is read and written in whole blocks of so many bytes, at multiples of
// it: what direct I/O asks of the devices of today (open(2), O_DIRECT).
inline constexpr int64_t kFileBlockBytes = 4096;

}  // namespace tessera
