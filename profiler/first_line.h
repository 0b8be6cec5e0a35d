#pragma once
// What the system says of itself in files of a line.

#include <filesystem>
#include <fstream>
#include <string>

namespace tessera {

// The first line of a file; empty where it cannot be read, as that of a device
// whose driver refuses.
inline std::string FirstLine(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace tessera
