#include "planner/plan/memory_tier.h"

#include <string>

namespace tessera {
namespace {

constexpr std::array<std::string_view, kMemoryTiers> kNames = {"device", "host",
                                                               "file"};

}  // namespace

std::string_view NameOf(MemoryTier tier) {
  return kNames[static_cast<size_t>(tier)];
}

Result<MemoryTier> FindMemoryTier(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<MemoryTier>(i);
  }
  return InvalidInput("is '" + std::string(name) +
                      "': expected device, host or file");
}

}  // namespace tessera
