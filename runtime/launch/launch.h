#pragma once
// Our own launcher of the ranks of a job on this host.

#include <atomic>
#include <chrono>
#include <span>
#include <string>

#include "planner/base/result.h"

namespace tessera {

// What a job or a rank of it returns that ended because it was told to.
inline constexpr int kInterruptedExitCode = 130;

// One wish to end may come as several signals: whoever signals a whole group
// (a terminal, systemd, Slurm, GNU timeout) reaches the ranks, and so does what
// started them, which passes it on. Only what comes so much later than the
// first is a second wish.
inline constexpr std::chrono::seconds kOneInterrupt(1);

// Runs this very program `nproc` times with `arguments` (without the program's
// name) as the ranks of one job on this host and waits for them. Ranks find
// each other by DetectRankEnvironment
// (runtime/launch/rank_environment.h); their standard input is empty.
//
// Returns the exit code: 0 if all ranks returned 0. When a rank fails, the
// others get 5 s to notice and end, then are killed; one line on standard error
// names the rank, how it ended and why, and the code is 1, or 2 where all ranks
// but those that were only told of it ended with 2 (bad input). SIGINT, SIGTERM
// and, unless it is ignored, SIGHUP are passed on, and ranks that end for it
// return kInterruptedExitCode; a second one, kOneInterrupt later, kills them.
// The code is then that, too, if none failed. Where one ends so that was told
// alone, and says it (TellLauncher), since the others would wait for it, they
// are told, too. A signal that comes before all ranks are started kills those
// that are, and so does `stop`, unless it is null, which a handler of this
// process has set before: kInterrupted. Ctrl-Z (SIGTSTP) stops the ranks too,
// until this process goes on. When this process is killed, so are the ranks.
//
// Ranks begin with these signals blocked, so that one which comes before they
// can tell how they end waits until they unblock it.
// REQUIRES: no other threads, as for any fork.
Result<int> LaunchRanks(int nproc, std::span<const std::string> arguments,
                        const std::atomic<bool>* stop = nullptr);

// A rank's last word. Under our launcher it goes to the launcher, which prints
// the job's first cause only; false where this is no rank of our launcher.
bool TellLauncher(const Error& error);

// The same, or where it is not so to standard error, as "tessera: rank R:
// ERROR".
void ReportRankError(const Error& error);

}  // namespace tessera
