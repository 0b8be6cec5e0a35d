#pragma once
// Files and folders of tests, which run beside each other.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace tessera {

// A folder of this process and those that it forks, removed when it exits.
class TempFolder {
 public:
  TempFolder() {
    if (mkdtemp(path_.data()) == nullptr) std::abort();
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    if (getpid() == owner_) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  const pid_t owner_ = getpid();
  std::string path_ = ::testing::TempDir() + "tessera.XXXXXX";
};

// The path of a file, or folder, that no other test has.
inline std::string TempPath(const std::string& name) {
  static const TempFolder folder;
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string own;
  if (test != nullptr) {
    own = std::string(test->test_suite_name()) + "." + test->name() + ".";
  }
  for (char& c : own) {
    if (c == '/') c = '-';
  }
  return folder.path() + "/" + own + name;
}

}  // namespace tessera
