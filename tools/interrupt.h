#pragma once
// Ctrl-C, SIGTERM and SIGHUP as a wish that long work looks at.

#include <atomic>

namespace tessera {

// From the first call on SIGINT, SIGTERM and, unless it is ignored, SIGHUP set
// the flag that is returned, also one that was blocked until then; one that
// comes later than kOneInterrupt (runtime/launch/launch.h) after the first ends
// the process as if nobody had caught it.
const std::atomic<bool>& CatchInterrupts();
// That flag, while nothing may have been caught yet.
const std::atomic<bool>& Interrupted();

// Makes it an interrupt, too, that whoever reads the output ends (SIGPIPE), for
// work whose result lies elsewhere. REQUIRES: CatchInterrupts was called.
void InterruptWhenUnread();
// Whether it was one.
bool OutputIsUnread();

}  // namespace tessera
