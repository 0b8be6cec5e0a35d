#include "profiler/host_cache.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "profiler/host_speed.h"
#include "profiler/stopwatch.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

constexpr int64_t kMiB = 1 << 20;

// AMD's EPYC 9684X: 96 cores, of which eight share 96 MiB; and Intel's Xeon
// 6980P: 504 MiB of 128 cores.
constexpr HostCache kEpyc = {{96 * kMiB}, 8};
constexpr HostCache kXeon = {{504 * kMiB}, 128};

class HostCacheTest : public ::testing::Test {
 protected:
  void Add(int index, const std::string& level, const std::string& type,
           const std::string& size, const std::string& cpus) {
    const std::filesystem::path folder =
        root_ + "/sys/devices/system/cpu/cpu0/cache/index" +
        std::to_string(index);
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "level") << level << "\n";
    std::ofstream(folder / "type") << type << "\n";
    std::ofstream(folder / "size") << size << "\n";
    std::ofstream(folder / "shared_cpu_list") << cpus << "\n";
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  const std::string root_ = TempPath("host-cache");
};

TEST_F(HostCacheTest, IsThatOfTheLastLevel) {
  Add(0, "1", "Data", "48K", "0,64");
  Add(1, "1", "Instruction", "32K", "0,64");
  Add(2, "3", "Unified", "98304K", "0-7,64-71");
  Add(3, "2", "Unified", "1024K", "0,64");
  EXPECT_EQ(ReadHostCache(root_), (HostCache{{96 * kMiB}, 16}));
}

TEST_F(HostCacheTest, WhatIsNotSaidIsTakenForAnEpycs) {
  EXPECT_EQ(ReadHostCache(root_), (HostCache{{32 * kMiB}, 16}));
  Add(0, "3", "Unified", "much", "0-7");
  Add(1, "3", "Unified", "64M", "none");
  EXPECT_EQ(ReadHostCache(root_), (HostCache{{32 * kMiB}, 16}));
}

// Alone it has a whole one, and where threads are more than caches a share.
TEST_F(HostCacheTest, OfAThreadIsWhatOthersLeave) {
  EXPECT_EQ(CacheOfThread(kEpyc, 1, 96), Bytes{96 * kMiB});
  EXPECT_EQ(CacheOfThread(kEpyc, 12, 96), Bytes{96 * kMiB});
  EXPECT_EQ(CacheOfThread(kEpyc, 24, 96), Bytes{48 * kMiB});
  EXPECT_EQ(CacheOfThread(kEpyc, 96, 96), Bytes{12 * kMiB});
  EXPECT_EQ(CacheOfThread(kXeon, 128, 128), Bytes{504 * kMiB / 128});
  // A process that may use two of its processors.
  EXPECT_EQ(CacheOfThread(kEpyc, 1, 2), Bytes{96 * kMiB});
  EXPECT_EQ(CacheOfThread(kEpyc, 2, 2), Bytes{48 * kMiB});
}

// Twice what a rank has of the caches, of all ranks twice all of them.
TEST_F(HostCacheTest, KernelsTakeTurnsOverTwiceOfIt) {
  EXPECT_EQ(RotatedOnHost(kEpyc, 96, 1, 1), Bytes{192 * kMiB});
  EXPECT_EQ(RotatedOnHost(kEpyc, 96, 1, 96), Bytes{2 * 12 * 96 * kMiB});
  EXPECT_EQ(RotatedOnHost(kEpyc, 96, 96, 1), Bytes{24 * kMiB});
  EXPECT_EQ(RotatedOnHost(kXeon, 128, 128, 1), Bytes{8 * kMiB});
}

// From twice of it to as much elsewhere.
TEST_F(HostCacheTest, CopiesGoPastIt) {
  EXPECT_EQ(CopiedByEach(1, 128, kXeon), Bytes{2 * 504 * kMiB});
  EXPECT_EQ(CopiedByEach(1, 96, kEpyc), Bytes{192 * kMiB});
  EXPECT_EQ(CopiedByEach(96, 96, kEpyc), Bytes{24 * kMiB});
  EXPECT_EQ(CopiedByEach(1, 4, {{8 * kMiB}, 4}), Bytes{64 * kMiB});
}

}  // namespace
}  // namespace tessera
