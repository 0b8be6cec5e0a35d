#include "planner/base/threads.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/support/one_core.h"

namespace tessera {
namespace {

TEST(ThreadsTest, CoresAreThoseThatTheProcessMayRunOn) {
  testing::OnOneCore([] {
    EXPECT_EQ(HostCores(), 1);
    EXPECT_EQ(ThreadCount(0), 1);
    EXPECT_EQ(ReadHostCpus().online, sysconf(_SC_NPROCESSORS_ONLN));
  });
}

TEST(ThreadsTest, AContainerMayHaveTheTimeOfSomeCores) {
  EXPECT_EQ(QuotaOf("800000 100000"), 8);
  EXPECT_EQ(QuotaOf("250000 100000"), 3);  // 2.5
  EXPECT_EQ(QuotaOf("10000 100000"), 1);
  for (const char* none : {"max 100000", "", "100000", "0 0", "-1 100000"}) {
    EXPECT_EQ(QuotaOf(none), 0) << none;
  }
}

TEST(ThreadsTest, ALauncherMayHaveDividedTheCores) {
  // 4 of 128 cores in a container, which 2 ranks share; each of 2 ranks bound
  // to 4 of them; 2 ranks that a launcher could bind and did not; more ranks
  // bound to 4 than there are cores for.
  EXPECT_EQ(CoresTogether({4, 128}, 2, /*bound=*/false), 4);
  EXPECT_EQ(CoresTogether({4, 128}, 2, /*bound=*/true), 2 * 4);
  EXPECT_EQ(CoresTogether({128, 128}, 2, /*bound=*/true), 128);
  EXPECT_EQ(CoresTogether({4, 128}, 64, /*bound=*/true), 128);
}

// The time of 8 of 128 cores is of all processes of a container, however many
// its cpuset has; of 4 cores there is none beyond theirs.
TEST(ThreadsTest, ProcessesShareTheTimeOfTheirContainer) {
  for (const bool bound : {false, true}) {
    EXPECT_EQ(CoresTogether({128, 128, 8}, 1, bound), 8);
    EXPECT_EQ(CoresTogether({128, 128, 8}, 8, bound), 8);
  }
  EXPECT_EQ(CoresTogether({4, 128, 8}, 1, /*bound=*/true), 4);
  EXPECT_EQ(CoresTogether({4, 128, 8}, 4, /*bound=*/true), 8);
}

}  // namespace
}  // namespace tessera
