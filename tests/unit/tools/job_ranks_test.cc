#include "tools/job_ranks.h"

#include <gtest/gtest.h>

#include "runtime/thread_pool.h"

namespace tessera {
namespace {

TEST(JobRanks, SharesTheCoresOfAHost) {
  Options options;
  EXPECT_EQ(ThreadsOf(options, 1), HostCores());
  EXPECT_EQ(ThreadsOf(options, 2 * HostCores()), 1);
  // Of a launcher that does not say how many there are.
  EXPECT_EQ(ThreadsOf(options, 0), HostCores());
  options.threads = 3;
  EXPECT_EQ(ThreadsOf(options, 2), 3);
}

TEST(JobRanks, TheLastRankIsOfThisHost) {
  const RankEnvironment last = LastRank(4);
  EXPECT_EQ(last.rank, 3);
  EXPECT_EQ(last.local_rank, 3);
  EXPECT_EQ(last.size, 4);
  EXPECT_EQ(last.local_size, 4);
}

}  // namespace
}  // namespace tessera
