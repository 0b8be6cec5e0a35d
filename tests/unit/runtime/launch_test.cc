// LaunchRanks, with this very program as the ranks.

#include "runtime/launch/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>

#include "runtime/comm/peer_errors.h"
#include "runtime/comm/shm_world.h"
#include "runtime/comm/store.h"
#include "runtime/launch/rank_environment.h"

namespace tessera {
namespace {

using ::testing::MatchesRegex;

// LaunchRanks runs this very program: as a rank it runs only the test
// RankOfLaunchTest.Run, which does what this variable says.
constexpr const char* kRankDoes = "TESSERA_TEST_RANK_DOES";

struct Outcome {
  int code = 0;
  std::string standard_error;
};

Outcome Launch(int nproc, const std::string& what) {
  setenv(kRankDoes, what.c_str(), 1);
  const std::vector<std::string> arguments = {
      "--gtest_filter=RankOfLaunchTest.Run"};
  ::testing::internal::CaptureStderr();
  const auto code = LaunchRanks(nproc, arguments);
  Outcome outcome;
  outcome.standard_error = ::testing::internal::GetCapturedStderr();
  unsetenv(kRankDoes);
  EXPECT_TRUE(code) << code.error().ToString();
  outcome.code = code ? *code : -1;
  return outcome;
}

[[noreturn]] void Fail(const Error& error, int code) {
  ReportRankError(error);
  _exit(code);
}

bool IsStopped(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;  // "PID (NAME) STATE ..."
  std::getline(file, stat);
  return stat.find(") T ") != std::string::npos;
}

volatile sig_atomic_t signals_caught = 0;

// Ranks begin with it blocked.
void Unblock(int signal) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

TEST(RankOfLaunchTest, Run) {
  const char* value = getenv(kRankDoes);
  if (value == nullptr) return;  // runs only as a rank
  const std::string what = value;
  const auto environment = DetectRankEnvironment();
  if (!environment || !environment->has_value()) _exit(10);
  const int rank = (**environment).rank;
  if (what == "interrupt before a rank listens") {
    if (rank == 0) kill(getppid(), SIGTERM);
    usleep(500'000);
    signal(SIGTERM, [](int) { signals_caught = signals_caught + 1; });
    Unblock(SIGTERM);
    if (rank == 0) std::cerr << signals_caught << " caught" << std::endl;
    _exit(kInterruptedExitCode);
  }
  if (what != "one is told alone") Unblock(SIGTERM);
  if (what == "succeed") _exit(0);
  if (what == "exit silently" && rank == 1) _exit(3);
  if (what == "bad input") {
    if (rank == 0) Fail(InvalidInput("no such file", "plan.json"), 2);
    _exit(2);
  }
  if (what == "one fails, one is stuck") {
    if (rank == 0) Fail(InvalidInput("lost", "data"), 2);
    for (;;) pause();
  }
  if (what == "name another") {
    if (rank != 1) _exit(0);
    Fail(RankLeft(12, 1), 1);
  }
  // The launcher takes a signal within a tenth of a second.
  if (what == "interrupt twice at once") {
    signal(SIGTERM, [](int) { signals_caught = signals_caught + 1; });
    for (int i = 0; rank == 0 && i < 2; ++i) {
      kill(getppid(), SIGTERM);
      usleep(300'000);
    }
    while (signals_caught == 0) usleep(1000);
    usleep(700'000);
    if (rank == 0) std::cerr << signals_caught << " caught" << std::endl;
    _exit(kInterruptedExitCode);
  }
  if (what == "one is told alone") {
    if (rank == 1) {
      TellLauncher({ErrorCode::kInterrupted, "before it met the others", ""});
      _exit(kInterruptedExitCode);
    }
    signal(SIGTERM, [](int) { _exit(kInterruptedExitCode); });
    Unblock(SIGTERM);
    for (;;) pause();
  }
  if (what == "all are told alone") {
    usleep(200'000 * static_cast<useconds_t>(rank));
    _exit(kInterruptedExitCode);
  }
  if (what == "interrupt once more") {
    signal(SIGTERM, SIG_IGN);
    // On a slow machine two may come within a second, so that they are one.
    while (rank == 0) {
      kill(getppid(), SIGTERM);
      usleep(1'300'000);
    }
    for (;;) pause();
  }
  if (what == "interrupt one") signal(SIGTERM, rank == 0 ? SIG_DFL : SIG_IGN);
  auto store = Store::Open(StoreOptionsOf(**environment));
  if (!store) Fail(store.error(), 1);
  auto world = MakeShmWorld(rank, (**environment).size, **store);
  if (!world) Fail(world.error(), 1);
  store->reset();
  (*world)->SetCurrentTask("task." + std::to_string(rank));
  if (what == "be killed" && rank == 1) raise(SIGKILL);
  if (what.starts_with("abort") && rank == 1) {
    const Error error = InvalidInput("truncated", "tokens.bin");
    (*world)->Abort(error.ToString());
    usleep(20'000);  // the others may speak first
    Fail(error, what == "abort for bad input" ? 2 : 1);
  }
  if (what == "leave" && rank == 1) {
    world->reset();
    usleep(500'000);  // the others speak first
    Fail(InvalidInput("truncated", "tokens.bin"), 1);
  }
  const std::vector<int> ranks = {0, 1, 2};
  auto* group = (*world)->Group(ranks).value();
  if (what == "interrupt with one stopped" && rank < 2) {
    pid_t pid = getpid();
    if (rank == 1) {
      if (!group->Send(&pid, sizeof(pid), 0, 0)) _exit(11);
      raise(SIGSTOP);
    } else {
      if (!group->Recv(&pid, sizeof(pid), 1, 0)) _exit(11);
      while (!IsStopped(pid)) usleep(1000);
    }
  }
  if (what.starts_with("interrupt") && rank == 0) kill(getppid(), SIGTERM);
  for (;;) {
    const auto result = group->Barrier();
    if (!result) Fail(result.error(), 1);
  }
}

TEST(LaunchRanksTest, Success) {
  const Outcome outcome = Launch(3, "succeed");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.standard_error, "");
}

// Some programs that start others ignore it; then the system forgets how
// processes end. A launcher that never learns it ends by the alarm.
TEST(LaunchRanksTest, WhereSigchldIsIgnored) {
  const auto before = signal(SIGCHLD, SIG_IGN);
  alarm(60);
  const Outcome outcome = Launch(3, "be killed");
  EXPECT_EQ(Launch(2, "succeed").code, 0);
  alarm(0);
  EXPECT_EQ(signal(SIGCHLD, before), SIG_IGN);
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.standard_error,
              MatchesRegex("tessera: rank 1 \\(pid [0-9]+\\) was killed by "
                           "signal 9 \\(Killed\\) in task 'task.1'\n"));
}

TEST(LaunchRanksTest, AKilledRankIsNamedOnceWithItsTask) {
  const Outcome outcome = Launch(3, "be killed");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.standard_error,
              MatchesRegex("tessera: rank 1 \\(pid [0-9]+\\) was killed by "
                           "signal 9 \\(Killed\\) in task 'task.1'\n"));
}

TEST(LaunchRanksTest, AnAbortIsToldOnce) {
  const Outcome outcome = Launch(3, "abort");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(outcome.standard_error, "tessera: rank 1: tokens.bin: truncated\n");
}

TEST(LaunchRanksTest, WhoSpeaksLastMayBeTheCause) {
  const Outcome outcome = Launch(3, "leave");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(outcome.standard_error, "tessera: rank 1: tokens.bin: truncated\n");
}

// "rank 12 …" does not begin with the name of rank 1.
TEST(LaunchRanksTest, TheRankThatSpeaksIsNamed) {
  const Outcome outcome = Launch(2, "name another");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(outcome.standard_error,
            "tessera: rank 1: rank 12 has left the job, and rank 1 waits for "
            "it\n");
}

TEST(LaunchRanksTest, ASilentExitIsNamed) {
  const Outcome outcome = Launch(2, "exit silently");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.standard_error,
              MatchesRegex("tessera: rank 1 \\(pid [0-9]+\\) exited with code "
                           "3 without saying why\n"));
}

TEST(LaunchRanksTest, BadInputIsCode2) {
  const Outcome outcome = Launch(3, "bad input");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.standard_error,
            "tessera: rank 0: plan.json: no such file\n");
}

// Whose peers end with 1, as they are told of it.
TEST(LaunchRanksTest, BadInputOfOneRankIsCode2) {
  const Outcome outcome = Launch(3, "abort for bad input");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.standard_error, "tessera: rank 1: tokens.bin: truncated\n");
}

TEST(LaunchRanksTest, AStuckRankIsKilled) {
  const Outcome outcome = Launch(2, "one fails, one is stuck");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.standard_error, "tessera: rank 0: data: lost\n");
}

TEST(LaunchRanksTest, SigtermIsPassedOn) {
  EXPECT_EQ(Launch(3, "interrupt").code, kInterruptedExitCode);
}

// Whoever signals a whole group reaches the launcher twice.
TEST(LaunchRanksTest, ASignalThatComesTwiceAtOnceIsOne) {
  const Outcome outcome = Launch(2, "interrupt twice at once");
  EXPECT_EQ(outcome.code, kInterruptedExitCode);
  EXPECT_EQ(outcome.standard_error,
            "tessera: ending what is under way; again: at once\n1 caught\n");
}

TEST(LaunchRanksTest, ALaterSignalKills) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(Launch(2, "interrupt once more").code, kInterruptedExitCode);
  // Ranks that are not killed pause for ever.
  EXPECT_GT(std::chrono::steady_clock::now() - start, kOneInterrupt);
}

// Blocked, as it came between two ranks, or caught before them.
TEST(LaunchRanksTest, ASignalBeforeRanksAreStartedEndsTheJob) {
  const std::atomic<bool> told = true;
  for (const std::atomic<bool>* stop : {&told, {}}) {
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigprocmask(SIG_BLOCK, &term, nullptr);
    if (stop == nullptr) raise(SIGTERM);
    const auto code = LaunchRanks(3, {}, stop);
    Unblock(SIGTERM);
    ASSERT_FALSE(code);
    EXPECT_EQ(code.error().code, ErrorCode::kInterrupted);
    EXPECT_EQ(code.error().ToString(),
              "interrupted before all ranks were started");
  }
}

// A launcher that lets the others wait for it ends by the alarm.
TEST(LaunchRanksTest, ARankThatEndsAsToldEndsTheOthers) {
  alarm(60);
  const Outcome outcome = Launch(3, "one is told alone");
  alarm(0);
  EXPECT_EQ(outcome.code, kInterruptedExitCode);
  EXPECT_EQ(outcome.standard_error, "");
}

// Those that have met the others end together, each in its time: a signal more
// would kill them.
TEST(LaunchRanksTest, RanksThatEndAsToldAreLeftAlone) {
  const Outcome outcome = Launch(3, "all are told alone");
  EXPECT_EQ(outcome.code, kInterruptedExitCode);
  EXPECT_EQ(outcome.standard_error, "");
}

TEST(LaunchRanksTest, ARankThatDoesNotListenYetLearnsOfASignal) {
  const Outcome outcome = Launch(2, "interrupt before a rank listens");
  EXPECT_EQ(outcome.code, kInterruptedExitCode);
  EXPECT_EQ(outcome.standard_error,
            "tessera: ending what is under way; again: at once\n1 caught\n");
}

TEST(LaunchRanksTest, AStoppedRankIsWokenToEnd) {
  const auto start = std::chrono::steady_clock::now();
  const Outcome outcome = Launch(3, "interrupt with one stopped");
  EXPECT_EQ(outcome.code, kInterruptedExitCode);
  // One that is not woken is killed later.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

// Ranks that only saw another end as it was told to have not failed.
TEST(LaunchRanksTest, PeersOfAnInterruptedRankAreNoFailure) {
  const Outcome outcome = Launch(3, "interrupt one");
  EXPECT_EQ(outcome.code, kInterruptedExitCode);
  EXPECT_EQ(outcome.standard_error,
            "tessera: ending what is under way; again: at once\n");
}

}  // namespace
}  // namespace tessera
