// One run at a time writes a checkpoint.

#include "runtime/checkpoint_lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "tests/support/temp_path.h"

namespace tessera {
namespace {

class CheckpointLockTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  bool CanTake() const { return CheckpointLock::Take(path_).has_value(); }

  const std::string folder_ = TempPath("locked");
  const std::string path_ = folder_ + "/x";
};

TEST_F(CheckpointLockTest, IsOneHoldersAndLeavesNoFile) {
  {
    const auto lock = CheckpointLock::Take(path_);
    ASSERT_TRUE(lock.has_value());
    const auto other = CheckpointLock::Take(path_);
    ASSERT_FALSE(other.has_value());
    EXPECT_EQ(other.error().ToString(),
              path_ + ": another process writes it (and has locked '" + path_ +
                  ".lock')");
    EXPECT_TRUE(CheckpointLock::Take(folder_ + "/y").has_value());
    EXPECT_TRUE(std::filesystem::exists(path_ + ".lock"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
  EXPECT_TRUE(CanTake());
}

// Who removes the name makes way for another holder, whose name stays.
TEST_F(CheckpointLockTest, TakesNoOthersNameAway) {
  std::optional<Result<CheckpointLock>> lock(CheckpointLock::Take(path_));
  ASSERT_TRUE(lock->has_value());
  std::filesystem::remove(path_ + ".lock");
  const auto next = CheckpointLock::Take(path_);
  ASSERT_TRUE(next.has_value());
  lock.reset();
  EXPECT_TRUE(std::filesystem::exists(path_ + ".lock"));
  EXPECT_FALSE(CanTake());
}

TEST_F(CheckpointLockTest, IsThatOfTheFileThatALinkLeadsTo) {
  std::filesystem::create_symlink("disk", path_);
  const auto lock = CheckpointLock::Take(folder_ + "/disk");
  EXPECT_TRUE(lock.has_value());
  EXPECT_FALSE(CanTake());
}

TEST_F(CheckpointLockTest, WhoIsKilledLocksNobodyOut) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t holder = ::fork();
  if (holder == 0) {
    const auto lock = CheckpointLock::Take(path_);
    (void)!::write(ready[1], "", 1);
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_FALSE(CanTake());
  ::kill(holder, SIGKILL);
  ::waitpid(holder, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  EXPECT_TRUE(std::filesystem::exists(path_ + ".lock"));
  EXPECT_TRUE(CanTake());
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

// A file of this name that somebody else has written.
TEST_F(CheckpointLockTest, RemovesNoFileOfOthers) {
  std::ofstream(path_ + ".lock") << "theirs";
  EXPECT_TRUE(CanTake());
  EXPECT_EQ(std::filesystem::file_size(path_ + ".lock"), 6u);
}

TEST_F(CheckpointLockTest, WhereNoFileCanBeMadeNothingIsLocked) {
  const std::string longest = folder_ + "/" + std::string(255, 'x');
  const auto lock = CheckpointLock::Take(longest);
  EXPECT_TRUE(lock.has_value());
  EXPECT_TRUE(CheckpointLock::Take(longest).has_value());
}

}  // namespace
}  // namespace tessera
