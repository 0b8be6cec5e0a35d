#pragma once

#include <string>

#include "costmodel/profile/profile_db.h"
#include "planner/base/result.h"

namespace tessera {

// Of what is measured here and now, with `ranks` ranks at work. `devices` names
// what they compute on beside the host's cores; may be empty.
ProfileOrigin OriginOf(int ranks, const std::string& devices = "");

// The profile at `path`, for rows of `here` to join it; empty where there is
// none. kInvalidInput for one of another machine, or of another number of ranks
// at once.
Result<ProfileDb> ProfileToExtend(const std::string& path,
                                  const ProfileOrigin& here);

}  // namespace tessera
