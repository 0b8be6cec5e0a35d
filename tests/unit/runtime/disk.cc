#include "tests/unit/runtime/disk.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace tessera {

// NOLINTBEGIN(cppcoreguidelines-avoid-non-const-global-variables)
std::atomic<unsigned> fsync_seconds = 0;
std::atomic<int> fsyncs_to_live = 0;
// NOLINTEND(cppcoreguidelines-avoid-non-const-global-variables)

}  // namespace tessera

extern "C" int fsync(int file) {
  sleep(tessera::fsync_seconds);
  const int result = static_cast<int>(syscall(SYS_fsync, file));
  if (tessera::fsyncs_to_live > 0 && --tessera::fsyncs_to_live == 0) {
    _exit(tessera::kKilled);
  }
  return result;
}
