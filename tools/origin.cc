#include "tools/origin.h"

#include <ctime>
#include <filesystem>

#include "costmodel/profile/profile_io.h"
#include "profiler/machine.h"

namespace tessera {
namespace {

std::string Today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  gmtime_r(&now, &utc);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", &utc);
  return text;
}

}  // namespace

ProfileOrigin OriginOf(int ranks, const std::string& devices) {
  Machine machine = ReadMachine();
  ProfileOrigin origin;
  origin.host = machine.cpu + ", " + std::to_string(machine.cpus) + " cores";
  origin.date = Today();
  origin.libraries = "tessera's kernels, compiled by GCC " __VERSION__;
  if (!devices.empty()) {
    origin.host += ", " + devices;
    // A driver that cannot be asked is left out.
    static_cast<void>(AddGpus(machine));
    if (!machine.driver.empty())
      origin.libraries += ", driver " + machine.driver;
  }
  origin.ranks_at_once = ranks;
  return origin;
}

Result<ProfileDb> ProfileToExtend(const std::string& path,
                                  const ProfileOrigin& here) {
  std::error_code unreadable;
  const auto status = std::filesystem::status(path, unreadable);
  if (status.type() == std::filesystem::file_type::not_found) {
    return ProfileDb{};
  }
  TESSERA_TRY(ProfileDb profile, ReadProfile(path));
  const ProfileOrigin& there = profile.origin;
  if (there.host != here.host) {
    return InvalidInput("is of '" + there.host + "', and this is '" +
                            here.host + "': one profile is of one machine",
                        path);
  }
  if (there.ranks_at_once != here.ranks_at_once) {
    return InvalidInput(
        "was measured by " + std::to_string(there.ranks_at_once) +
            " ranks at once, and these are " +
            std::to_string(here.ranks_at_once) +
            ": a profile of its own is needed (--profile takes several)",
        path);
  }
  return profile;
}

}  // namespace tessera
