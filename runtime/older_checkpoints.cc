#include "runtime/older_checkpoints.h"

#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <limits>
#include <optional>
#include <string_view>

#include "planner/base/file.h"
#include "planner/base/system_error.h"
#include "planner/base/whole_number.h"

namespace tessera {
namespace {

constexpr std::string_view kStep = ".step-";
constexpr std::string_view kBeside = ".new";  // of what becomes an older one

std::string OlderName(const std::string& target, int64_t step) {
  return target + std::string(kStep) + std::to_string(step);
}

// The step of the older name of `target` that a file in its folder has.
std::optional<int64_t> StepOf(const std::string& target,
                              const std::string& name) {
  const std::string prefix =
      std::filesystem::path(target).filename().string() + std::string(kStep);
  if (!name.starts_with(prefix)) return std::nullopt;
  const auto step =
      ParseWhole<int64_t>(std::string_view(name).substr(prefix.size()));
  if (step && *step >= 0 && OlderName(target, *step).ends_with(name)) {
    return step;
  }
  return std::nullopt;
}

// Calls f(name) of what is in the folder of `target`, as far as it can be read.
template <typename F>
void ForEachNameBeside(const std::string& target, F f) {
  std::error_code code;
  std::filesystem::directory_iterator entry(DirectoryOf(target), code);
  const std::filesystem::directory_iterator end;
  for (; !code && entry != end; entry.increment(code)) {
    f(entry->path().filename().string());
  }
}

}  // namespace

std::map<int64_t, std::string> OlderCheckpoints(const std::string& path) {
  const std::string target = ResolveLinks(path);
  std::map<int64_t, std::string> older;
  ForEachNameBeside(target, [&](const std::string& name) {
    if (const auto step = StepOf(target, name)) {
      older[*step] = OlderName(target, *step);
    }
  });
  return older;
}

bool IsNameOfOlder(const std::string& path, const std::string& name) {
  const std::string target = ResolveLinks(path);
  const std::filesystem::path file = ResolveLinks(name);
  if (!StepOf(target, file.filename())) return false;
  std::error_code code;
  return std::filesystem::equivalent(DirectoryOf(target), DirectoryOf(file),
                                     code);
}

Result<void> KeepAsOlder(const std::string& path, int64_t step) {
  const std::string target = ResolveLinks(path);
  const std::string older = OlderName(target, step);
  // One of the same step, of a run that was gone back behind, is replaced; the
  // same file, of a run that was killed before it had replaced `target`, stays.
  const std::string beside = older + std::string(kBeside);
  ::unlink(beside.c_str());
  const bool kept = ::link(target.c_str(), beside.c_str()) == 0 &&
                    ::rename(beside.c_str(), older.c_str()) == 0;
  const int error = kept ? 0 : errno;
  // It is still there between two names of one file, too (rename(2)).
  ::unlink(beside.c_str());
  if (error != 0) {
    return SystemError("cannot keep the checkpoint before", older, error);
  }
  SyncDirectoryOf(target);
  return {};
}

void RemoveOlder(const std::string& path, int64_t step, int keep) {
  // What a run has left that was killed within KeepAsOlder.
  const std::string target = ResolveLinks(path);
  ForEachNameBeside(target, [&](const std::string& name) {
    if (!name.ends_with(kBeside)) return;
    const auto left =
        StepOf(target, name.substr(0, name.size() - kBeside.size()));
    if (!left) return;
    ::unlink((OlderName(target, *left) + std::string(kBeside)).c_str());
  });
  auto older = OlderCheckpoints(path);
  while (std::ssize(older) > keep) {
    const auto last = std::prev(older.end());
    const auto least_of_use = last->first >= step ? last : older.begin();
    ::unlink(least_of_use->second.c_str());
    older.erase(least_of_use);
  }
}

std::string OlderText(const std::string& path) {
  const auto older = OlderCheckpoints(path);
  if (older.empty()) return "";
  return "; an older checkpoint is '" + older.rbegin()->second + "'";
}

Result<void> CheckCanKeepOlder(const std::string& path) {
  std::string file = ResolveLinks(path) + ".XXXXXX";
  const int fd = ::mkstemp(file.data());
  if (fd < 0) {
    return InvalidInput(
        std::string("cannot write beside it: ") + std::strerror(errno), path);
  }
  ::close(fd);
  const std::string other =
      OlderName(file, std::numeric_limits<int64_t>::max());
  const int error = ::link(file.c_str(), other.c_str()) == 0 ? 0 : errno;
  ::unlink(other.c_str());
  ::unlink(file.c_str());
  if (error == 0) return {};
  return InvalidInput(
      std::string("cannot give a file beside it a second name, as a hard "
                  "link: ") +
          std::strerror(error),
      path);
}

}  // namespace tessera
