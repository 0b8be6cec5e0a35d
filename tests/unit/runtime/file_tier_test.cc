#include "runtime/storage/file_tier.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/io_uring.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <thread>

#include "planner/base/rng.h"
#include "runtime/device/cpu_device.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

FileTierOptions OptionsIn(const std::string& folder,
                          const std::tuple<bool, bool, bool>& ways) {
  const auto [nameless, direct, ring] = ways;
  return {.directory = folder,
          .nameless = nameless,
          .direct = direct,
          .ring = ring};
}

// Whether the file system takes O_DIRECT, and whether the kernel has io_uring
// with reads and writes (5.6) and permits it: asked of them, not of FileTier.
bool HasDirect(const std::string& folder) {
  const std::string path = folder + "/direct";
  const int fd = open(path.c_str(), O_CREAT | O_RDWR | O_DIRECT, 0600);
  unlink(path.c_str());
  if (fd >= 0) close(fd);
  return fd >= 0;
}

bool HasRing() {
  io_uring_params params = {};
  const auto fd = static_cast<int>(syscall(__NR_io_uring_setup, 1, &params));
  if (fd >= 0) close(fd);
  return fd >= 0 && (params.features & IORING_FEAT_RW_CUR_POS) != 0;
}

// Without a name from the beginning or not, direct or not, with io_uring or
// without; skipped where the machine lacks one of them.
class FileTierTest
    : public ::testing::TestWithParam<std::tuple<bool, bool, bool>> {
 protected:
  void SetUp() override {
    const auto [nameless, direct, ring] = GetParam();
    if (direct && !HasDirect(::testing::TempDir())) {
      GTEST_SKIP() << "no direct I/O here";
    }
    if (ring && !HasRing()) GTEST_SKIP() << "no io_uring here";
  }

  std::unique_ptr<FileTier> Open(Bytes length) const {
    auto tier =
        FileTier::Open(OptionsIn(::testing::TempDir(), GetParam()), length);
    TESSERA_CHECK(tier.has_value()) << tier.error().ToString();
    return *std::move(tier);
  }

  // Memory as FileTier wants it, filled with numbers that follow from `seed`.
  std::byte* Filled(int64_t bytes, uint64_t seed) {
    auto* const data = static_cast<std::byte*>(
        memory_.Allocate({bytes}, MemoryCategory::kOptimizer).value());
    for (int64_t i = 0; i < bytes; ++i) {
      data[i] = static_cast<std::byte>(Mix64(seed + static_cast<uint64_t>(i)));
    }
    return data;
  }

  CpuDevice memory_{1, true, kFileBlockBytes};
};

TEST_P(FileTierTest, IsAsAskedFor) {
  const auto [nameless, direct, ring] = GetParam();
  const auto tier = Open({12288});
  EXPECT_EQ(tier->length().value, 12288);
  EXPECT_EQ(tier->direct(), direct);
  EXPECT_EQ(tier->has_ring(), ring);
}

TEST_P(FileTierTest, OddSizesComeBack) {
  std::vector<FileTier::Transfer> out;
  std::vector<FileTier::Transfer> in;
  int64_t offset = 0;
  for (int64_t bytes :
       {int64_t{1}, int64_t{4095}, int64_t{4096}, int64_t{4097},
        FileTier::kRequestBytes - 1, 3 * FileTier::kRequestBytes + 12345}) {
    out.push_back({offset, Filled(bytes, 7), bytes});
    in.push_back({offset, Filled(bytes, 8), bytes});
    offset += (bytes + 4095) / 4096 * 4096;
  }
  const auto tier = Open({offset});
  ASSERT_TRUE(tier->Write(out).has_value());
  ASSERT_TRUE(tier->Read(in).has_value());
  for (size_t i = 0; i < in.size(); ++i) {
    EXPECT_EQ(
        std::memcmp(in[i].data, out[i].data, static_cast<size_t>(in[i].bytes)),
        0)
        << in[i].bytes;
  }
}

TEST_P(FileTierTest, DroppingTheCacheKeepsWhatWasWritten) {
  constexpr int64_t kBytes = 3 * FileTier::kRequestBytes;
  const FileTier::Transfer out = {0, Filled(kBytes, 7), kBytes};
  const FileTier::Transfer in = {0, Filled(kBytes, 8), kBytes};
  const auto tier = Open({kBytes});
  ASSERT_TRUE(tier->Write({&out, 1}).has_value());
  const auto dropped = tier->DropCached();
  ASSERT_TRUE(dropped) << dropped.error().ToString();
  ASSERT_TRUE(tier->Read({&in, 1}).has_value());
  EXPECT_EQ(std::memcmp(in.data, out.data, kBytes), 0);
}

// More requests than are in flight at once.
TEST_P(FileTierTest, ManyAtOnceInBothDirections) {
  constexpr int kExtents = 5 * FileTier::kDepth;
  const auto tier = Open({2 * kExtents * 8192});
  std::vector<FileTier::Transfer> first;
  std::vector<FileTier::Transfer> second;
  for (int i = 0; i < kExtents; ++i) {
    first.push_back(
        {2 * i * int64_t{8192}, Filled(8192, static_cast<uint64_t>(i)), 8192});
    second.push_back({(2 * i + 1) * int64_t{8192},
                      Filled(8192, static_cast<uint64_t>(1000 + i)), 8192});
  }
  ASSERT_TRUE(tier->Write(first).has_value());
  auto read = first;
  for (auto& transfer : read) transfer.data = Filled(8192, 99);
  // One thread reads what was written while another writes the rest.
  std::thread writer([&] { EXPECT_TRUE(tier->Write(second).has_value()); });
  EXPECT_TRUE(tier->Read(read).has_value());
  writer.join();
  for (size_t i = 0; i < read.size(); ++i) {
    EXPECT_EQ(std::memcmp(read[i].data, first[i].data, 8192), 0) << i;
  }
}

TEST_P(FileTierTest, LeavesNoName) {
  const std::string folder = TempPath("folder");
  std::filesystem::create_directories(folder);
  const auto tier =
      FileTier::Open(OptionsIn(folder, GetParam()), {8192}).value();
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
}

// More than any storage has is refused at once, with the folder and the bytes.
TEST_P(FileTierTest, WhatDoesNotFitIsRefused) {
  const int64_t much = int64_t{1} << 60;
  const auto tier =
      FileTier::Open(OptionsIn(::testing::TempDir(), GetParam()), {much});
  ASSERT_FALSE(tier.has_value());
  EXPECT_THAT(tier.error().ToString(), HasSubstr(::testing::TempDir()));
  EXPECT_THAT(tier.error().message,
              HasSubstr("cannot reserve 1152921504606846976 bytes for the "
                        "offload file: "));
}

// A file that may not grow beyond 1 MiB: what is refused is said with its
// place, and a write that the limit cuts short goes on to its end before it
// fails.
TEST_P(FileTierTest, AFullStorageIsAnError) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const auto tier = Open({4 << 20});
    const rlimit limit{1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &limit);
    const auto longer =
        FileTier::Open(OptionsIn(::testing::TempDir(), GetParam()), {2 << 20});
    if (longer || longer.error().message.find(
                      "cannot reserve 2097152 bytes for the offload file: File "
                      "too large") == std::string::npos) {
      _exit(1);
    }
    // Two requests, of which one lies within the limit.
    const FileTier::Transfer both{0, Filled(2 << 20, 1), 2 << 20};
    const auto written = tier->Write({&both, 1});
    if (written ||
        written.error().message.find("cannot write 1048576 bytes at offset "
                                     "1048576 of the offload file: File too "
                                     "large") == std::string::npos) {
      _exit(2);
    }
    const FileTier::Transfer half{0, Filled(1 << 20, 2), 1 << 20};
    _exit(tier->Read({&half, 1}).has_value() ? 0 : 3);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// A limit inside of a request: the kernel writes up to it, and the error names
// what is left.
TEST_P(FileTierTest, AShortWriteGoesOn) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const auto tier = Open({1 << 20});
    const rlimit limit{512 << 10, 512 << 10};
    setrlimit(RLIMIT_FSIZE, &limit);
    const FileTier::Transfer transfer{0, Filled(1 << 20, 1), 1 << 20};
    const auto written = tier->Write({&transfer, 1});
    _exit(!written && written.error().message.find(
                          "cannot write 524288 bytes at offset 524288 of the "
                          "offload file: File too large") != std::string::npos
              ? 0
              : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_P(FileTierTest, AnUnknownFolderIsAnError) {
  const auto tier =
      FileTier::Open(OptionsIn("/nowhere/at/all", GetParam()), {});
  ASSERT_FALSE(tier.has_value());
  EXPECT_THAT(tier.error().ToString(),
              HasSubstr("/nowhere/at/all: cannot make a file for offloading: "
                        "No such file or directory"));
}

std::string NameOf(
    const ::testing::TestParamInfo<std::tuple<bool, bool, bool>>& info) {
  const auto [nameless, direct, ring] = info.param;
  return std::string(nameless ? "nameless_" : "named_") +
         (direct ? "direct_" : "buffered_") + (ring ? "ring" : "calls");
}

INSTANTIATE_TEST_SUITE_P(Ways, FileTierTest,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Bool(),
                                            ::testing::Bool()),
                         NameOf);

// Types as statfs(2) lists them.
TEST(IsOnNetworkTest, TellsByTheFileSystem) {
  EXPECT_TRUE(IsOfNetwork(0x6969));      // NFS
  EXPECT_TRUE(IsOfNetwork(0x0bd00bd0));  // Lustre
  EXPECT_TRUE(IsOfNetwork(0xff534d42));  // CIFS
  EXPECT_TRUE(IsOfNetwork(static_cast<int32_t>(0xff534d42)));
  EXPECT_FALSE(IsOfNetwork(0xef53));      // ext4
  EXPECT_FALSE(IsOfNetwork(0x01021994));  // tmpfs
  EXPECT_FALSE(IsOnNetwork("/proc"));
  EXPECT_FALSE(IsOnNetwork("/no such folder"));
}

}  // namespace
}  // namespace tessera
