#pragma once
// What the operating system says that this process holds (proc(5), status), and
// what there is.

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

}  // namespace tessera
