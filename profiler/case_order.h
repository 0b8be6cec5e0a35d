#pragma once
// What is timed first.

#include <cstddef>
#include <span>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "profiler/profile_cases.h"

namespace tessera {

// One of the cases that there are to profile, which outlive it.
struct TimedCase {
  const ProfileKey* key = nullptr;
  const KernelCase* kernel = nullptr;  // null for an exchange
  double seconds = 0;                  // predicted
  double run_s = 0;                    // predicted of a kernel's run
};

std::vector<TimedCase> AllCases(const ProfileCases& cases);

// The places in `all` of what is not `known`, in the order of Profile's comment
// (profiler.h).
std::vector<size_t> InOrder(std::span<const TimedCase> all,
                            const ProfileDb& known);

// That of the copy which a message's row is made with.
ProfileKey CopyOfMessage(const ProfileKey& message);

}  // namespace tessera
