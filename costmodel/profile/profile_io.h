#pragma once
// Profile files (proto/profile.proto), in every encoding of
// planner/io/proto_file_io.h.

#include <string>

#include "costmodel/profile/profile_db.h"
#include "planner/base/result.h"

namespace tessera {

// Errors of ReadProtoFile; kInvalidInput for two rows with one key, or for the
// first problem that Validate finds.
Result<ProfileDb> ReadProfile(const std::string& path);

// Rows in the order of their keys. REQUIRES: Validate(profile) is empty.
Result<void> WriteProfile(const std::string& path, const ProfileDb& profile);

}  // namespace tessera
