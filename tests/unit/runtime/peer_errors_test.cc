// Whom an error names. What the worlds say is in comm_test.cc.

#include "runtime/comm/peer_errors.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/comm/text.h"

namespace tessera {
namespace {

TEST(PeerErrorsTest, TheRankToldOfIsReadFromTheMessage) {
  const std::vector<Error> errors = {
      RankAborted(12, "disk full"),
      RankLeft(12, 1),
      RankDied(12, 4711, "block.3"),
      RankHasNotCome(12, "waited"),
      RankWaitedTooLong(12, Duration::FromSeconds(3), "rank 1"),
      RankFailed(12, InvalidInput("no memory", "cudaMalloc"))};
  for (const Error& error : errors) {
    EXPECT_EQ(RankToldOf(error), 12) << error.message;
    EXPECT_EQ(RankToldOf(error.At("rank 1, barrier")), 12) << error.message;
    EXPECT_EQ(error.code, ErrorCode::kUnavailable) << error.message;
  }
  EXPECT_EQ(RankToldOf(StoreOfRankZero("head:1", "connection lost")), 0);
}

TEST(PeerErrorsTest, OtherErrorsTellOfNoRank) {
  const std::vector<int> group = {0, 1};
  const std::vector<Error> errors = {
      InvalidInput("truncated", "tokens.bin"),
      InvalidInput("truncated", "rank 1 aborted: disk full"),
      InvalidInput("rank 1"),
      InvalidInput("rank x aborted: "),
      InvalidInput("a rank 1 aborted: "),
      MessageSizesDiffer(1, 4, 7, 3),
      PartsDiffer(0, 4, 1, 3),
      CallsDiffer(0, {"barrier"}, 1, {"broadcast", 4}, group)};
  for (const Error& error : errors) {
    EXPECT_EQ(RankToldOf(error), std::nullopt) << error.ToString();
    EXPECT_EQ(error.code, ErrorCode::kInvalidInput) << error.ToString();
  }
}

TEST(PeerErrorsTest, OnlyTheDeadHaveATaskOfDeath) {
  EXPECT_EQ(TaskOfDead(RankDied(1, 4711, "a) died b")), "in task 'a) died b'");
  EXPECT_EQ(TaskOfDead(RankDied(1, 4711, "")), "before its first task");
  const Error died = RankDied(1, 4711, "block.3");
  EXPECT_EQ(TaskOfDead(RankAborted(2, died.message)), "");
  EXPECT_EQ(TaskOfDead(InvalidInput("truncated", died.message)), "");
}

TEST(PeerErrorsTest, AStallNamesWhoWaitsForWhom) {
  EXPECT_EQ(
      StallText(3, Duration::FromSeconds(30), Duration::FromSeconds(600),
                "rank 1 (in task 'block.3')"),
      "rank 3 has waited 30 s for rank 1 (in task 'block.3'); it gives up "
      "after 600 s");
}

// What NCCL or the device says names no rank.
TEST(PeerErrorsTest, AFailureIsToldToPeersWithItsRank) {
  const Error error = {ErrorCode::kUnavailable, "out of memory", "cudaMalloc"};
  EXPECT_EQ(RankFailed(3, error).message,
            "rank 3 failed: cudaMalloc: out of memory");
  EXPECT_EQ(
      RankFailed(3, {ErrorCode::kUnavailable, "rank 1: lost", ""}).message,
      "rank 3 failed: rank 1: lost");
  const Error interrupted = {ErrorCode::kInterrupted, "interrupted", ""};
  for (const Error& named :
       {RankAborted(1, "disk full"), PartsDiffer(0, 4, 1, 3), interrupted}) {
    EXPECT_EQ(RankFailed(3, named), named);
  }
}

TEST(PeerErrorsTest, CallsThatDifferInNeitherNameNorBytesSaySo) {
  const std::vector<int> group = {4, 5};
  EXPECT_EQ(
      CallsDiffer(4, {"broadcast", 8}, 5, {"barrier", 0}, group).message,
      "ranks disagree: rank 4 calls broadcast of 8 bytes in group {4,5}, rank "
      "5 barrier of 0 bytes");
  EXPECT_EQ(
      CallsDiffer(4, {"broadcast", 8}, 5, {"broadcast", 8}, group).message,
      "ranks disagree: rank 4 calls broadcast of 8 bytes in group {4,5}, rank "
      "5 broadcast of 8 bytes with other counts, element type or root");
}

TEST(PeerErrorsTest, AnErrorComesOutAsItWentIn) {
  for (const Error& error :
       {InvalidInput("bad"), RankAborted(3, "disk full"), Unavailable(""),
        Error{ErrorCode::kInterrupted, "interrupted", ""}}) {
    EXPECT_EQ(UnpackError(PackError(error)), error);
  }
  for (const std::string bytes : {"", "5text", "/text", "text"}) {
    EXPECT_EQ(UnpackError(bytes), std::nullopt) << bytes;
  }
  EXPECT_EQ(UnpackError(std::string(8, '\0')), std::nullopt);
}

}  // namespace
}  // namespace tessera
