#pragma once
// What a run keeps of its checkpoints before the newest: that is the file at
// `path`, and each before it beside that, as "PATH.step-N" by the step behind
// which it was written. Where `path` is a link they are beside the file that it
// leads to. At any time `path` is a whole checkpoint, also for who kills the
// run or takes its power.

#include <cstdint>
#include <map>
#include <string>

#include "planner/base/result.h"

namespace tessera {

// By step. None where the folder cannot be read.
std::map<int64_t, std::string> OlderCheckpoints(const std::string& path);

// Whether `name` is that of one, whether or not it is there.
bool IsNameOfOlder(const std::string& path, const std::string& name);

// Gives the file at `path`, of `step`, its older name too, which is on the disk
// on return: then it may be replaced.
Result<void> KeepAsOlder(const std::string& path, int64_t step);

// Removes all but `keep` of those before the one at `path`, of `step`: first
// those of no earlier step, which a run has left that was gone back behind,
// then the oldest. What cannot be removed stays for the next call.
void RemoveOlder(const std::string& path, int64_t step, int keep);

// "; an older checkpoint is 'PATH.step-N'", of the highest step; empty: there
// is none.
std::string OlderText(const std::string& path);

// That a file beside `path` may have two names: not every file system has hard
// links. REQUIRES: files can be made there.
Result<void> CheckCanKeepOlder(const std::string& path);

}  // namespace tessera
