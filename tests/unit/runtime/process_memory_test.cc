#include "runtime/device/process_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "tests/support/temp_path.h"

namespace tessera {
namespace {

class GroupTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name) << text;
  }
  int64_t Room() const { return RoomInGroup(folder_).value; }

  const std::string folder_ = TempPath("group");
};

TEST_F(GroupTest, WithoutALimitThereIsAllRoom) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Room(), kMost);
  Write("memory.max", "max\n");
  Write("memory.current", "700\n");
  EXPECT_EQ(Room(), kMost);
}

// Pages of files are given back, those of shared memory ("file" has both) not.
TEST_F(GroupTest, FilesTakeNoRoom) {
  Write("memory.max", "1000\n");
  Write("memory.current", "900\n");
  EXPECT_EQ(Room(), 100);
  Write("memory.stat",
        "anon 300\nfile 600\nshmem 50\nactive_anon 10\ninactive_file 350\n"
        "active_file 200\n");
  EXPECT_EQ(Room(), 1000 - (900 - 350 - 200));
}

TEST_F(GroupTest, RoomIsFromNoneToTheLimit) {
  Write("memory.max", "1000\n");
  Write("memory.current", "1200\n");
  EXPECT_EQ(Room(), 0);
  // The files are not of one moment.
  Write("memory.stat", "inactive_file 1300\n");
  EXPECT_EQ(Room(), 1000);
}

}  // namespace
}  // namespace tessera
