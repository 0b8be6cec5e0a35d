#pragma once

#include "costmodel/profile/profile_db.h"

namespace tessera {

// Of what is measured here and now, with `ranks` ranks at work. `devices` names
// what they compute on beside the host's cores; may be empty.
ProfileOrigin OriginOf(int ranks, const std::string& devices = "");

}  // namespace tessera
