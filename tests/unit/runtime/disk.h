#pragma once
// fsync in place of the C library's, for all tests of this binary.

#include <atomic>

namespace tessera {

// NOLINTBEGIN(cppcoreguidelines-avoid-non-const-global-variables)
// What it takes: a slow disk's.
extern std::atomic<unsigned> fsync_seconds;
// If positive: how many there are until one ends the process, with this status,
// as a kill would.
extern std::atomic<int> fsyncs_to_live;
// NOLINTEND(cppcoreguidelines-avoid-non-const-global-variables)
inline constexpr int kKilled = 9;

}  // namespace tessera
