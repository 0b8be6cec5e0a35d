#include "planner/base/leftovers.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <fstream>
#include <optional>
#include <string>

#include "planner/base/file_descriptor.h"
#include "planner/base/whole_number.h"

namespace tessera {
namespace {

// The process that writes a file whose name ends in `suffix` behind the host's:
// "PID.N"; nothing for other names.
std::optional<pid_t> WriterOf(std::string_view suffix) {
  const size_t dot = suffix.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const auto process = ParseWhole<pid_t>(suffix.substr(0, dot));
  if (!process || *process <= 0 || !ParseWhole<int>(suffix.substr(dot + 1))) {
    return std::nullopt;
  }
  return process;
}

// Whether somebody holds the lock that a writer has on its file (Create);
// nothing where that cannot be seen. By it processes of another pid namespace
// on a host of this name are seen.
std::optional<bool> IsLocked(const std::string& path) {
  // On NFS such a lock is one of who may write.
  FileDescriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file.is_open()) {
    file = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  }
  if (!file.is_open()) return std::nullopt;
  if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0) return false;
  return errno == EWOULDBLOCK ? std::optional(true) : std::nullopt;
}

// Whether a process of this number has ended, though its parent may not have
// asked yet how it did, which takes some init processes a second or more.
bool HasEnded(pid_t process) {
  if (::kill(process, 0) != 0 && errno == ESRCH) return true;
  // proc(5): "PID (NAME) STATE ...", where a name may have all characters.
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string status;
  std::getline(file, status, '\0');
  const size_t name_end = status.rfind(") ");
  return name_end != std::string::npos && status[name_end + 2] == 'Z';
}

// Whether the process that wrote the file at `path` is gone. Containers that
// start anew give the same number to another, such as this one.
bool IsLeft(const std::string& path, pid_t process) {
  const std::optional<bool> locked = IsLocked(path);
  if (process == ::getpid()) return locked == false;
  const bool is_gone = HasEnded(process);
  return is_gone && locked != true;
}

}  // namespace

std::string PrefixBeside(const std::string& path) {
  char host[HOST_NAME_MAX + 1] = {};
  ::gethostname(host, HOST_NAME_MAX);
  return path + ".tmp." + host + ".";
}

std::vector<Leftover> LeftoversIn(
    const std::string& directory,
    const std::function<bool(std::string_view)>& wanted) {
  const std::string beside = PrefixBeside("");
  std::vector<Leftover> leftovers;
  std::error_code code;
  std::filesystem::directory_iterator entry(directory, code);
  const std::filesystem::directory_iterator end;
  for (; !code && entry != end; entry.increment(code)) {
    const std::string name = entry->path().filename();
    const size_t at = name.rfind(beside);
    if (at == std::string::npos || !wanted(name.substr(0, at))) continue;
    const auto process =
        WriterOf(std::string_view(name).substr(at + beside.size()));
    if (!process || !IsLeft(entry->path(), *process)) continue;
    leftovers.push_back({entry->path(), name.substr(0, at)});
  }
  return leftovers;
}

}  // namespace tessera
