#include "tools/job_ranks.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "planner/base/threads.h"
#include "runtime/comm/thread_world.h"
#include "runtime/launch/launch.h"
#include "tests/support/one_core.h"

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

// On one core of the host: a launcher that may have bound each of two ranks to
// one, and the one process that it has started, whose ranks are threads.
TEST(JobRanks, OnlyProcessesMayHaveCoresOfTheirOwn) {
  const HostCpus host = ReadHostCpus();
  if (CoresTogether(host, 1, false) < 2) GTEST_SKIP() << "of one core";
  testing::OnOneCore([] {
    EXPECT_EQ(CoresOf(2), 1);
    setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    for (const char* size : {"1", "2"}) {
      setenv("OMPI_COMM_WORLD_SIZE", size, 1);
      setenv("OMPI_COMM_WORLD_LOCAL_SIZE", size, 1);
      EXPECT_EQ(CoresOf(2), std::string(size) == "1" ? 1 : 2);
    }
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
      unsetenv(name);
    }
  });
}

// An error of rank 0's own, as of --trace, behind an interrupt of all: rank 1
// waits for it.
TEST(JobRanks, RankZeroHasTheLastWordHoweverItEnds) {
  const ListeningSocket socket = ListenOnLoopback().value();
  auto worlds = MakeThreadWorlds(2);
  std::vector<RankSeat> seats(2);
  for (int rank = 0; rank < 2; ++rank) {
    const auto r = static_cast<size_t>(rank);
    StoreOptions options;
    options.port = socket.port;
    options.rank = rank;
    options.size = 2;
    options.listen_fd = rank == 0 ? socket.fd : -1;
    seats[r].store = Store::Open(options).value();
    seats[r].world = std::move(worlds[r]);
  }
  std::promise<void> ended;
  auto end = ended.get_future();
  std::thread rank_1([&] {
    EndBehindRankZero(seats[1], kInterruptedExitCode);
    ended.set_value();
  });
  EXPECT_EQ(end.wait_for(std::chrono::milliseconds(50)),
            std::future_status::timeout);
  EndBehindRankZero(seats[0], InvalidInput("no such folder", "--trace"));
  EXPECT_EQ(end.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  rank_1.join();
  seats.pop_back();  // rank 0's store waits for it
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
