#pragma once
// Files that an AtomicFile wrote whose process was killed.

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// What the names of this host's files beside `path` begin with; the process and
// a number follow: "PATH.tmp.HOST.PID.N".
std::string PrefixBeside(const std::string& path);

struct Leftover {
  std::filesystem::path path;
  std::string name;  // that it was to take in its directory
};

// What processes of this host that are no more have left in a directory of
// files whose names are `wanted`. Whether the processes of others run cannot be
// seen from here.
std::vector<Leftover> LeftoversIn(
    const std::string& directory,
    const std::function<bool(std::string_view)>& wanted);

}  // namespace tessera
