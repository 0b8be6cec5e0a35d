#include "planner/base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/support/temp_path.h"

namespace {

struct WrittenBack {
  off_t begin = 0;
  bool waited = false;
  bool operator==(const WrittenBack&) const = default;
};
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables)
std::vector<WrittenBack> written_back;
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables)
int write_back_error = 0;

}  // namespace

// In place of the C library's, to see it called.
extern "C" int sync_file_range(int file, off_t begin, off_t bytes,
                               unsigned flags) {
  written_back.push_back({begin, (flags & SYNC_FILE_RANGE_WAIT_AFTER) != 0});
  errno = write_back_error;
  return write_back_error != 0
             ? -1
             : static_cast<int>(
                   syscall(SYS_sync_file_range, file, begin, bytes, flags));
}

namespace tessera {
namespace {

namespace fs = std::filesystem;

Result<void> Write(AtomicFile& file, std::string_view text) {
  return file.Write(std::as_bytes(std::span(text)));
}

class FileTest : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directory(folder_); }
  void TearDown() override { fs::remove_all(folder_); }

  std::set<std::string> Names() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      names.insert(entry.path().filename());
    }
    return names;
  }

  const std::string folder_ = TempPath("folder");
  const std::string path_ = folder_ + "/file";
};

TEST_F(FileTest, ReplacesNothingWhereItIsToBeNew) {
  {
    auto first = AtomicFile::Create(path_);
    auto second = AtomicFile::Create(path_);
    ASSERT_TRUE(first.has_value() && second.has_value());
    ASSERT_TRUE(Write(*first, "first"));
    ASSERT_TRUE(Write(*second, "second"));
    ASSERT_TRUE(first->CommitNew());
    const auto late = second->CommitNew();
    ASSERT_FALSE(late.has_value());
    EXPECT_EQ(late.error().ToString(), path_ + ": is there already");
  }
  EXPECT_EQ(*ReadFile(path_), "first");
  EXPECT_EQ(Names(), std::set<std::string>{"file"});
}

TEST_F(FileTest, IsThereOnceItIsWhole) {
  ASSERT_TRUE(WriteFileAtomically(path_, "before"));
  auto file = AtomicFile::Create(path_);
  ASSERT_TRUE(file.has_value());
  ASSERT_TRUE(Write(*file, "one, "));
  ASSERT_TRUE(Write(*file, "two"));
  EXPECT_EQ(*ReadFile(path_), "before");
  ASSERT_TRUE(file->Commit());
  EXPECT_EQ(*ReadFile(path_), "one, two");
  EXPECT_EQ(Names(), std::set<std::string>{"file"});
}

TEST_F(FileTest, IsInPlaceBehindItsCommitAlone) {
  ASSERT_TRUE(WriteFileAtomically(path_, "before"));
  {
    auto file = AtomicFile::Create(path_);
    ASSERT_TRUE(file.has_value());
    ASSERT_TRUE(Write(*file, "flushed"));
    ASSERT_TRUE(file->Flush());
    EXPECT_EQ(*ReadFile(path_), "before");
    EXPECT_EQ(Names().size(), 2U);
  }
  EXPECT_EQ(*ReadFile(path_), "before");
  EXPECT_EQ(Names(), std::set<std::string>{"file"});
  auto file = AtomicFile::Create(path_);
  ASSERT_TRUE(file.has_value());
  ASSERT_TRUE(Write(*file, "flushed"));
  ASSERT_TRUE(file->Flush());
  ASSERT_TRUE(file->Commit());
  EXPECT_EQ(*ReadFile(path_), "flushed");
}

// The disk has all but what was written last before Flush waits for it.
TEST_F(FileTest, IsWrittenBackAsItGrows) {
  constexpr int64_t kPiece = AtomicFile::kWriteBackBytes;
  written_back.clear();
  {
    auto file = AtomicFile::Create(path_);
    ASSERT_TRUE(file.has_value());
    const std::string bytes(kPiece / 2, 'x');
    ASSERT_TRUE(Write(*file, bytes));
    EXPECT_EQ(written_back.size(), 0U);
    ASSERT_TRUE(Write(*file, bytes + "x"));
    EXPECT_EQ(written_back, (std::vector<WrittenBack>{{0, false}}));
    ASSERT_TRUE(Write(*file, bytes + bytes));
    EXPECT_EQ(written_back, (std::vector<WrittenBack>{
                                {0, false}, {kPiece, false}, {0, true}}));
    // A disk that is full or broken; what cannot do it is no error.
    write_back_error = EINVAL;
    EXPECT_TRUE(Write(*file, bytes + bytes));
    write_back_error = EIO;
    const auto broken = Write(*file, bytes + bytes);
    write_back_error = 0;
    ASSERT_FALSE(broken.has_value());
    EXPECT_EQ(broken.error().ToString(),
              path_ + ": cannot write: Input/output error");
  }
  EXPECT_EQ(Names(), std::set<std::string>());
}

TEST_F(FileTest, UnfinishedOnesVanish) {
  ASSERT_TRUE(WriteFileAtomically(path_, "before"));
  {
    auto file = AtomicFile::Create(path_);
    ASSERT_TRUE(file.has_value());
    ASSERT_TRUE(Write(*file, "half"));
    EXPECT_EQ(Names().size(), 2U);
    const AtomicFile moved = *std::move(file);
    EXPECT_EQ(Names().size(), 2U);
  }
  EXPECT_EQ(*ReadFile(path_), "before");
  EXPECT_EQ(Names(), std::set<std::string>{"file"});
}

// No process has the largest number; 1 is one that runs. Of other hosts'
// processes nothing is known.
TEST_F(FileTest, WhatKilledWritersLeftVanishes) {
  char host[HOST_NAME_MAX + 1] = {};
  ASSERT_EQ(::gethostname(host, HOST_NAME_MAX), 0);
  const std::string here = std::string(".tmp.") + host;
  const std::set<std::string> kept = {
      "file" + here + ".1.0",           "file" + here + ".2147483647",
      "file" + here + ".2147483647.x",  "file" + here + ".x.0",
      "file" + here + "x.2147483647.0", "file" + here + ".x.2147483647.0",
      "file.tmp.2147483647.0",          "other" + here + ".2147483647.0"};
  for (const std::string& name : kept) {
    std::ofstream(folder_ + "/" + name) << "something else";
  }
  std::ofstream(path_ + here + ".2147483647.12") << "half";
  ASSERT_TRUE(AtomicFile::Create(path_));
  EXPECT_EQ(Names(), kept);
}

// A child that has ended is there until its parent, this process, waits for it.
TEST_F(FileTest, WhatAWriterLeftVanishesBeforeItsParentLooks) {
  const pid_t writer = ::fork();
  if (writer == 0) {
    auto file = AtomicFile::Create(path_);
    ::_exit(file.has_value() ? 0 : 1);
  }
  siginfo_t ended = {};
  ASSERT_EQ(
      ::waitid(P_PID, static_cast<id_t>(writer), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(ended.si_status, 0);
  EXPECT_EQ(Names().size(), 1U);
  ASSERT_TRUE(AtomicFile::Create(path_));
  EXPECT_EQ(Names(), std::set<std::string>());
  ::waitpid(writer, nullptr, 0);
}

// Of a process that this one cannot see, in a container of the host's name.
TEST_F(FileTest, WhatIsBeingWrittenStays) {
  auto created = AtomicFile::Create(path_);
  ASSERT_TRUE(created.has_value());
  std::optional<AtomicFile> file = *std::move(created);
  const std::string written = *Names().begin();
  char host[HOST_NAME_MAX + 1] = {};
  ASSERT_EQ(::gethostname(host, HOST_NAME_MAX), 0);
  const std::string far = std::string("file.tmp.") + host + ".2147483647.0";
  fs::rename(folder_ + "/" + written, folder_ + "/" + far);
  const auto create = [&] { ASSERT_TRUE(AtomicFile::Create(path_)); };
  create();
  EXPECT_EQ(Names(), std::set<std::string>{far});
  ASSERT_TRUE(file->Flush());
  create();
  EXPECT_EQ(Names(), std::set<std::string>{far});
  // As of a target that may not be written; root may all the same.
  fs::permissions(folder_ + "/" + far, fs::perms::owner_read);
  create();
  EXPECT_EQ(Names(), std::set<std::string>{far});
  file.reset();
  create();
  EXPECT_EQ(Names(), std::set<std::string>());
}

TEST_F(FileTest, LinksAreFollowed) {
  const std::string far = TempPath("far");
  fs::create_directory(far);
  ASSERT_TRUE(WriteFileAtomically(far + "/file", "before"));
  // To a file of another folder, by way of another link, and to none yet.
  fs::create_symlink(far + "/file", folder_ + "/link");
  fs::create_symlink("link", folder_ + "/again");
  fs::create_symlink("../" + fs::path(far).filename().string() + "/new",
                     folder_ + "/dangling");
  for (const auto& [link, target] :
       {std::pair("link", "file"), {"again", "file"}, {"dangling", "new"}}) {
    SCOPED_TRACE(link);
    const std::string at = folder_ + "/" + link;
    EXPECT_EQ(fs::weakly_canonical(ResolveLinks(at)),
              fs::weakly_canonical(far + "/" + target));
    auto file = AtomicFile::Create(at);
    ASSERT_TRUE(file.has_value());
    // On the file system of what is replaced.
    EXPECT_EQ(Names(), (std::set<std::string>{"again", "dangling", "link"}));
    ASSERT_TRUE(Write(*file, link));
    ASSERT_TRUE(file->Commit());
    EXPECT_TRUE(fs::is_symlink(at));
    EXPECT_EQ(*ReadFile(far + "/" + target), link);
  }
  fs::remove_all(far);
}

TEST_F(FileTest, PipesAreWrittenInPlace) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const std::string path = "/dev/fd/" + std::to_string(ends[1]);
  fs::create_symlink(path, path_);
  for (const std::string& name : {path, path_}) {
    EXPECT_EQ(ResolveLinks(name), name);
    const Result<void> written = WriteFileAtomically(name, "text");
    ASSERT_TRUE(written) << written.error().ToString();
    char read[8];
    EXPECT_EQ(::read(ends[0], read, sizeof(read)), 4);
    EXPECT_EQ(std::string(read, 4), "text");
  }
  ::close(ends[0]);
  ::close(ends[1]);
}

// Whatever the process gives new ones.
TEST_F(FileTest, ReplacedOnesKeepTheirMode) {
  const mode_t mask = ::umask(022);
  ASSERT_TRUE(WriteFileAtomically(path_, "before"));
  const auto mode = [&] { return fs::status(path_).permissions(); };
  EXPECT_EQ(mode(), fs::perms(0644));
  for (const auto other : {fs::perms(0600), fs::perms(0664)}) {
    fs::permissions(path_, other);
    ASSERT_TRUE(WriteFileAtomically(path_, "after"));
    EXPECT_EQ(mode(), other);
  }
  ::umask(mask);
}

TEST_F(FileTest, FailedWritesLeaveNothingBehind) {
  EXPECT_EQ(WriteFileAtomically(folder_ + "/none/file", "x").error().code,
            ErrorCode::kNotFound);
  const Result<void> directory = WriteFileAtomically(folder_, "x");
  ASSERT_FALSE(directory);
  EXPECT_EQ(directory.error().ToString(),
            folder_ + ": cannot write: Is a directory");
  // /dev/full takes no byte and is no regular file.
  if (fs::exists("/dev/full")) {
    const Result<void> full = WriteFileAtomically("/dev/full", "x");
    ASSERT_FALSE(full);
    EXPECT_EQ(full.error().code, ErrorCode::kUnavailable);
  }
  EXPECT_EQ(Names(), std::set<std::string>{});
  EXPECT_FALSE(ReadFile(folder_));
}

}  // namespace
}  // namespace tessera
