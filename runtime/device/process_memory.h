#pragma once
// What the operating system says that this process holds (proc(5), status), and
// what there is.

#include <string>

#include "planner/base/units.h"

namespace tessera {

// Resident now: VmRSS. Zero where the system does not say.
Bytes ResidentBytes();

// The most that was resident: VmHWM, since the last ResetPeakResident where the
// system allows it, otherwise since the process began.
Bytes PeakResidentBytes();
void ResetPeakResident();

// What processes may still take without swapping: MemAvailable of
// /proc/meminfo, or less where the control group's limit is nearer. Where the
// system does not say, the most that there can be.
Bytes AvailableMemory();
// What the control group whose files (version 2) are in `folder` leaves its
// processes: its limit less what is used, but for the files' pages among that,
// which are given back where memory is short. The most that there can be where
// it has no limit.
Bytes RoomInGroup(const std::string& folder);

}  // namespace tessera
