#pragma once

#include <string>

#include "costmodel/profile/profile_db.h"
#include "planner/base/result.h"

namespace tessera {

// "2 threads".
std::string ThreadsText(int threads);

// Of what is measured here and now, with `ranks` ranks of so many threads at
// work. `devices` names what they compute on beside the host's cores; where it
// is not empty threads do not count.
ProfileOrigin OriginOf(int ranks, int threads, const std::string& devices = "");

// The profile at `path`, for rows of `here` to join it; empty where there is
// none. kInvalidInput for one of another machine, of another number of ranks at
// once or of their threads, or of other libraries; with `again` the last is as
// if there were none.
Result<ProfileDb> ProfileToExtend(const std::string& path,
                                  const ProfileOrigin& here,
                                  bool again = false);

// Writes what ProfileToExtend finds now, which another process may have
// extended, with the rows of `profile`: they replace the file's where they are
// not those that were `known` before. Returns what was written. Processes do so
// one after the other.
Result<ProfileDb> ExtendProfile(const std::string& path, const ProfileDb& known,
                                const ProfileDb& profile, bool again = false);

}  // namespace tessera
