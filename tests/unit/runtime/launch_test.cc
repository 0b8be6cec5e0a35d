// Which rank a process is, by the variables of each launcher.

#include "runtime/launch/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>

#include "runtime/comm/peer_errors.h"
#include "runtime/comm/shm_world.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using Variables = std::map<std::string, std::string>;

Result<std::optional<RankEnvironment>> Detect(const Variables& variables) {
  return DetectRankEnvironment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(DetectRankEnvironmentTest, NothingIsOneProcess) {
  EXPECT_EQ(Detect({}).value(), std::nullopt);
  EXPECT_EQ(Detect({{"RANK", "3"}}).value(), std::nullopt);
}

TEST(DetectRankEnvironmentTest, OurLauncherHandsRankZeroTheSocket) {
  Variables variables = {{"RANK", "0"},
                         {"WORLD_SIZE", "2"},
                         {"LOCAL_RANK", "0"},
                         {"LOCAL_WORLD_SIZE", "2"},
                         {"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", "4567"},
                         {"TESSERA_JOB_ID", "j"},
                         {"TESSERA_STORE_FD", "5"}};
  RankEnvironment expected{"tessera", 0, 2, 0, 2, "127.0.0.1", 4567, "j", 5};
  EXPECT_EQ(Detect(variables).value(), expected);
  variables["RANK"] = variables["LOCAL_RANK"] = "1";
  expected.rank = expected.local_rank = 1;
  expected.listen_fd = -1;
  EXPECT_EQ(Detect(variables).value(), expected);
}

TEST(DetectRankEnvironmentTest, Torchrun) {
  Variables variables = {{"RANK", "5"},
                         {"WORLD_SIZE", "8"},
                         {"LOCAL_RANK", "1"},
                         {"LOCAL_WORLD_SIZE", "4"},
                         {"MASTER_ADDR", "head"},
                         {"MASTER_PORT", "29500"},
                         {"TORCHELASTIC_RUN_ID", "run"}};
  const RankEnvironment expected{"torchrun", 5,     8,     1, 4,
                                 "head",     29500, "run", -1};
  EXPECT_EQ(Detect(variables).value(), expected);
  // torchrun itself listens on 29500.
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(Detect(variables).value()->master_port, 29501);
}

TEST(DetectRankEnvironmentTest, OpenMpiOnOneHostNeedsNoMaster) {
  const auto found = Detect({{"OMPI_COMM_WORLD_RANK", "2"},
                             {"OMPI_COMM_WORLD_SIZE", "4"},
                             {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                             {"PMIX_NAMESPACE", "123"}})
                         .value();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->launcher, "mpirun");
  EXPECT_EQ(found->rank, 2);
  EXPECT_EQ(found->size, 4);
  EXPECT_EQ(found->master_host, "127.0.0.1");
  EXPECT_GE(found->master_port, 20000);
  EXPECT_LT(found->master_port, 30000);
}

TEST(DetectRankEnvironmentTest, OpenMpiOnManyHostsNeedsTheMaster) {
  Variables variables = {{"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  const auto lost = Detect(variables);
  ASSERT_FALSE(lost);
  EXPECT_THAT(lost.error().message, HasSubstr("MASTER_ADDR"));
  variables["MASTER_ADDR"] = "10.0.0.1";
  variables["MASTER_PORT"] = "99";
  EXPECT_EQ(Detect(variables).value()->master_host, "10.0.0.1");
  EXPECT_EQ(Detect(variables).value()->master_port, 99);
}

TEST(DetectRankEnvironmentTest, RankComesBeforeMpiBeforeSlurm) {
  Variables variables = {{"RANK", "1"},
                         {"WORLD_SIZE", "2"},
                         {"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", "29500"},
                         {"OMPI_COMM_WORLD_RANK", "3"},
                         {"OMPI_COMM_WORLD_SIZE", "8"},
                         {"PMI_RANK", "4"},
                         {"PMI_SIZE", "8"},
                         {"MPI_LOCALNRANKS", "8"},
                         {"SLURM_PROCID", "5"},
                         {"SLURM_NTASKS", "8"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_NODELIST", "n1"}};
  EXPECT_EQ(Detect(variables).value()->rank, 1);
  variables.erase("RANK");
  EXPECT_EQ(Detect(variables).value()->rank, 3);
  variables.erase("OMPI_COMM_WORLD_RANK");
  EXPECT_EQ(Detect(variables).value()->rank, 4);
  variables.erase("PMI_RANK");
  EXPECT_EQ(Detect(variables).value()->rank, 5);
}

TEST(DetectRankEnvironmentTest, RanksWithoutAnAddressAreAnError) {
  // Each would wait for peers on a port of its own.
  Variables variables = {{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  const auto found = Detect(variables);
  ASSERT_FALSE(found.has_value());
  EXPECT_NE(found.error().message.find("MASTER_ADDR"), std::string::npos);
  variables["WORLD_SIZE"] = "1";
  EXPECT_TRUE(Detect(variables).has_value());
}

TEST(DetectRankEnvironmentTest, SlurmsMasterIsTheFirstHost) {
  const auto found = Detect({{"SLURM_PROCID", "9"},
                             {"SLURM_NTASKS", "16"},
                             {"SLURM_LOCALID", "1"},
                             {"SLURM_STEP_ID", "2"},
                             {"SLURM_JOB_ID", "77"},
                             {"SLURM_TASKS_PER_NODE", "8(x2)"},
                             {"SLURM_NODELIST", "gpu[07-08]"}})
                         .value();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->launcher, "srun");
  EXPECT_EQ(found->rank, 9);
  EXPECT_EQ(found->local_rank, 1);
  EXPECT_EQ(found->local_size, 8);
  EXPECT_EQ(found->master_host, "gpu07");
  EXPECT_EQ(found->job_id, "77.2");
}

// The third task of "srun --mpi=pmi2 -N2 -n4", whose PMI does not tell what is
// on the node; Slurm does.
TEST(DetectRankEnvironmentTest, SrunWithPmi) {
  Variables variables = {{"PMI_RANK", "2"},
                         {"PMI_SIZE", "4"},
                         {"PMI_JOBID", "77.0"},
                         {"SLURM_PROCID", "2"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_NODEID", "1"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_JOB_ID", "77"},
                         {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                         {"SLURM_STEP_NODELIST", "gpu[07-08]"}};
  const auto found = Detect(variables).value();
  RankEnvironment expected{"srun", 2, 4, 0, 2, "gpu07", found->master_port,
                           "77.0", -1};
  EXPECT_EQ(found, expected);
  // Cray's PMI (--mpi=cray_shasta) does.
  variables["PMI_LOCAL_RANK"] = "0";
  variables["PMI_LOCAL_SIZE"] = "2";
  EXPECT_EQ(Detect(variables).value(), expected);
  // The last task, on the other node than the first.
  variables["PMI_RANK"] = variables["SLURM_PROCID"] = "3";
  variables["PMI_LOCAL_RANK"] = variables["SLURM_LOCALID"] = "1";
  expected.rank = 3;
  expected.local_rank = 1;
  EXPECT_EQ(Detect(variables).value(), expected);
}

// Rank 3 of 4 of Hydra's mpiexec, which has srun start a proxy on each of two
// nodes; ranks inherit what Slurm tells the proxy.
TEST(DetectRankEnvironmentTest, RanksOfAProxyThatSrunStarted) {
  Variables variables = {{"PMI_RANK", "3"},
                         {"PMI_SIZE", "4"},
                         {"MPI_LOCALRANKID", "1"},
                         {"MPI_LOCALNRANKS", "2"},
                         {"SLURM_PROCID", "1"},
                         {"SLURM_NTASKS", "2"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                         {"SLURM_STEP_NODELIST", "gpu[07-08]"},
                         {"MASTER_ADDR", "gpu07"},
                         {"MASTER_PORT", "99"}};
  const RankEnvironment expected{"pmi", 3, 4, 1, 2, "gpu07", 99, "", -1};
  EXPECT_EQ(Detect(variables).value(), expected);
  // Of another launcher, with the variables of PALS.
  variables.erase("MPI_LOCALRANKID");
  variables.erase("MPI_LOCALNRANKS");
  variables["PMI_LOCAL_RANK"] = "1";
  variables["PMI_LOCAL_SIZE"] = "2";
  EXPECT_EQ(Detect(variables).value(), expected);
}

TEST(DetectRankEnvironmentTest, PmiOnManyHostsNeedsTheMaster) {
  const Variables pals = {{"PMI_RANK", "3"},
                          {"PMI_SIZE", "4"},
                          {"PMI_LOCAL_RANK", "1"},
                          {"PMI_LOCAL_SIZE", "2"}};
  const auto lost = Detect(pals);
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error().ToString(),
            "environment: the 4 ranks are on several hosts (2 on this one), "
            "and MASTER_ADDR, the host of rank 0, is not set");
  // Without a word on hosts there is one.
  const auto alone = Detect({{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}}).value();
  EXPECT_EQ(alone->local_rank, 3);
  EXPECT_EQ(alone->local_size, 4);
  EXPECT_EQ(alone->master_host, "127.0.0.1");
}

// Tasks are 4, 4 and 3 on nodes 0, 1 and 2.
TEST(DetectRankEnvironmentTest, SlurmTellsTheTasksOfEachNode) {
  Variables variables = {{"SLURM_PROCID", "8"},
                         {"SLURM_NTASKS", "11"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"},
                         {"SLURM_STEP_NODELIST", "n[1-3]"}};
  for (const auto& [node, size] :
       {std::pair("0", 4), std::pair("1", 4), std::pair("2", 3)}) {
    variables["SLURM_NODEID"] = node;
    EXPECT_EQ(Detect(variables).value()->local_size, size) << node;
  }
  variables["SLURM_NODEID"] = "3";
  for (const char* counts : {"4(x2),3", "4(x", "4(x0),4", "4(x9", "x", ","}) {
    variables["SLURM_STEP_TASKS_PER_NODE"] = counts;
    const auto bad = Detect(variables);
    ASSERT_FALSE(bad) << counts;
    EXPECT_EQ(bad.error().ToString(),
              std::string("environment variable SLURM_STEP_TASKS_PER_NODE: "
                          "expected the tasks on each node, as in '4(x2),3', "
                          "with node 3, got '") +
                  counts + "'");
  }
}

TEST(DetectRankEnvironmentTest, ShellsAndScriptsOfSlurmAreNoRanks) {
  // salloc, a shell on the login node.
  EXPECT_EQ(Detect({{"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "7"}}).value(),
            std::nullopt);
  // salloc, a shell in the interactive step on the first node.
  EXPECT_EQ(Detect({{"SLURM_NTASKS", "8"},
                    {"SLURM_PROCID", "0"},
                    {"SLURM_STEP_ID", "4294967290"}})
                .value(),
            std::nullopt);
  // The script of sbatch.
  EXPECT_EQ(Detect({{"SLURM_NTASKS", "8"},
                    {"SLURM_PROCID", "0"},
                    {"ENVIRONMENT", "BATCH"}})
                .value(),
            std::nullopt);
}

TEST(DetectRankEnvironmentTest, BadNumbersNameTheirVariable) {
  const auto bad = Detect({{"RANK", "two"}, {"WORLD_SIZE", "4"}});
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().ToString(),
            "environment variable RANK: expected a number, got 'two'");
  EXPECT_FALSE(Detect({{"RANK", "4"}, {"WORLD_SIZE", "4"}}));
  EXPECT_FALSE(Detect({{"RANK", "-1"}, {"WORLD_SIZE", "4"}}));
  EXPECT_FALSE(Detect({{"RANK", "0"}, {"WORLD_SIZE", ""}}));
  EXPECT_FALSE(
      Detect({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", "70000"}}));
}

// Each of these would be a division by it, or another rank's GPU.
TEST(DetectRankEnvironmentTest, RanksThatDoNotFitTheirHostNameTheVariable) {
  const auto torchrun = [](const char* local_rank, const char* local_size) {
    return Detect({{"RANK", "1"},
                   {"WORLD_SIZE", "4"},
                   {"LOCAL_RANK", local_rank},
                   {"LOCAL_WORLD_SIZE", local_size},
                   {"MASTER_ADDR", "head"},
                   {"MASTER_PORT", "29500"}});
  };
  EXPECT_TRUE(torchrun("3", "4"));
  for (const char* size : {"0", "5"}) {
    const auto bad = torchrun("0", size);
    ASSERT_FALSE(bad) << size;
    EXPECT_EQ(bad.error().ToString(),
              std::string("environment variable LOCAL_WORLD_SIZE: expected 1 "
                          "to 4 ranks (WORLD_SIZE) on this host, got ") +
                  size);
  }
  const auto beyond = torchrun("2", "2");
  ASSERT_FALSE(beyond);
  EXPECT_EQ(beyond.error().ToString(),
            "environment variable LOCAL_RANK: expected a rank below the 2 of "
            "this host, got 2");
  const auto slurm = Detect({{"SLURM_PROCID", "0"},
                             {"SLURM_NTASKS", "2"},
                             {"SLURM_STEP_ID", "0"},
                             {"SLURM_TASKS_PER_NODE", "0"}});
  ASSERT_FALSE(slurm);
  EXPECT_EQ(slurm.error().ToString(),
            "environment variable SLURM_TASKS_PER_NODE: expected 1 to 2 ranks "
            "(SLURM_NTASKS) on this host, got 0");
  EXPECT_FALSE(Detect({{"OMPI_COMM_WORLD_RANK", "0"},
                       {"OMPI_COMM_WORLD_SIZE", "2"},
                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "0"}}));
}

TEST(ExpandNodeListTest, Forms) {
  EXPECT_THAT(ExpandNodeList("n1").value(), ElementsAre("n1"));
  EXPECT_THAT(ExpandNodeList("a,b-2,c").value(), ElementsAre("a", "b-2", "c"));
  EXPECT_THAT(ExpandNodeList("n[1-3]").value(), ElementsAre("n1", "n2", "n3"));
  EXPECT_THAT(ExpandNodeList("n[1-2,07],login").value(),
              ElementsAre("n1", "n2", "n07", "login"));
  EXPECT_THAT(ExpandNodeList("n[098-101]").value(),
              ElementsAre("n098", "n099", "n100", "n101"));
  EXPECT_THAT(ExpandNodeList("r[1-2]n[8,9]-ib").value(),
              ElementsAre("r1n8-ib", "r1n9-ib", "r2n8-ib", "r2n9-ib"));
}

TEST(ExpandNodeListTest, Errors) {
  for (const char* list : {"", "n[1-", "n[3-1]", "n[a]", "n[]", "a,,b", "n[-1]",
                           "n[1-999999999]", "n[1,]", "n[1-99999][1-99999]"}) {
    EXPECT_FALSE(ExpandNodeList(list)) << list;
  }
}

// ---- LaunchRanks ------------------------------------------------------------

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

TEST(RankOfLaunchTest, Run) {
  const char* value = getenv(kRankDoes);
  if (value == nullptr) return;  // runs only as a rank
  const std::string what = value;
  const auto environment = DetectRankEnvironment();
  if (!environment || !environment->has_value()) _exit(10);
  const int rank = (**environment).rank;
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

TEST(LaunchRanksTest, ASignalBeforeRanksAreStartedEndsTheJob) {
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  sigprocmask(SIG_BLOCK, &term, nullptr);
  raise(SIGTERM);
  const Outcome outcome = Launch(3, "succeed");
  sigprocmask(SIG_UNBLOCK, &term, nullptr);
  EXPECT_EQ(outcome.code, kInterruptedExitCode);
  EXPECT_EQ(outcome.standard_error,
            "tessera: interrupted before all ranks were started\n");
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
