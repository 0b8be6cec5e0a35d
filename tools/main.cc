#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <exception>
#include <new>
#include <system_error>

#include "runtime/launch/launch.h"
#include "tools/verb.h"

namespace {

// What the standard library throws where the system refuses memory or a thread,
// on whichever thread that was: one line, and exit code 1.
[[noreturn]] void EndRefused() {
  using tessera::Error;
  using tessera::ErrorCode;
  const auto end = [](const char* message) {
    // There may be no memory for more words than these.
    static std::atomic_flag ending;
    if (ending.test_and_set()) pause();
    try {
      tessera::ReportRankError({ErrorCode::kUnavailable, message, ""});
    } catch (...) {
      for (const char* part : {"tessera: ", message, "\n"}) {
        if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
      }
    }
    _exit(1);
  };
  try {
    if (const auto thrown = std::current_exception()) {
      std::rethrow_exception(thrown);
    }
  } catch (const std::bad_alloc&) {
    end("out of memory: the system refuses more (ulimit -v?)");
  } catch (const std::system_error& error) {
    end(error.code() == std::errc::resource_unavailable_try_again
            ? "cannot start a thread: the system refuses more (ulimit -u?)"
            : error.what());
  } catch (...) {
  }
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  std::set_terminate(EndRefused);
  // Files that may not grow are errors like others (EFBIG). Ranks inherit it.
  std::signal(SIGXFSZ, SIG_IGN);
  return tessera::RunTessera({argv + 1, argv + argc});
}
