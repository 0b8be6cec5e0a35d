#include "tools/origin.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <filesystem>

#include "costmodel/profile/profile_io.h"
#include "planner/base/file.h"
#include "planner/base/threads.h"
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

// Held while a file is read and replaced. It is its folder's, since a file that
// is replaced is another one. A file system without locks has none.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path) {
    const auto folder = std::filesystem::path(ResolveLinks(path)).parent_path();
    fd_ = open(folder.empty() ? "." : folder.c_str(),
               O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    // Who holds it for longer than a profile takes wants it for something else.
    constexpr int kTries = 200;
    for (int i = 0; i < kTries && fd_ >= 0; ++i) {
      if (flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
      usleep(10'000);
    }
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock() {
    if (fd_ >= 0) close(fd_);
  }

 private:
  int fd_ = -1;
};

}  // namespace

std::string ThreadsText(int threads) {
  return std::to_string(threads) + (threads == 1 ? " thread" : " threads");
}

ProfileOrigin OriginOf(int ranks, int threads, const std::string& devices) {
  Machine machine = ReadMachine();
  ProfileOrigin origin;
  // All of the host's: a launcher may bind this process to other cores, or
  // fewer, than the next one.
  origin.host =
      machine.cpu + ", " + std::to_string(ReadHostCpus().online) + " cores";
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
  origin.threads = devices.empty() ? threads : 0;
  return origin;
}

Result<ProfileDb> ProfileToExtend(const std::string& path,
                                  const ProfileOrigin& here, bool again) {
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
  if (there.threads != 0 && here.threads != 0 &&
      there.threads != here.threads) {
    return InvalidInput(
        "was measured by ranks of " + ThreadsText(there.threads) +
            ", and these have " + ThreadsText(here.threads) +
            " (--threads): a profile of its own is needed (--profile takes "
            "several)",
        path);
  }
  if (there.libraries != here.libraries) {
    if (again) return ProfileDb{};
    return InvalidInput(
        "was measured with '" + there.libraries + "', and this is '" +
            here.libraries +
            "': a profile of its own is needed (--profile takes several), or "
            "one in its place ('tessera profile --again')",
        path);
  }
  return profile;
}

Result<ProfileDb> ExtendProfile(const std::string& path, const ProfileDb& known,
                                const ProfileDb& profile, bool again) {
  const FolderLock lock(path);
  TESSERA_TRY(ProfileDb all, ProfileToExtend(path, profile.origin, again));
  // Rows of unknown threads stay so.
  const bool unsaid = !all.rows.empty() && all.origin.threads == 0;
  all.origin = profile.origin;
  if (unsaid) all.origin.threads = 0;
  for (const auto& [key, row] : profile.rows) {
    const Measurement* const before = known.Find(key);
    if (before != nullptr && *before == row) {
      all.rows.emplace(key, row);
    } else {
      all.rows.insert_or_assign(key, row);
    }
  }
  TESSERA_RETURN_IF_ERROR(WriteProfile(path, all));
  return all;
}

}  // namespace tessera
