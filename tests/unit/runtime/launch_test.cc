// Which rank a process is, by the variables of each launcher.

#include "runtime/launch/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <map>

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
    if (rank == 0) Fail(InvalidInput("lost", "data"), 1);
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
  if (what == "abort" && rank == 1) {
    const Error error = InvalidInput("truncated", "tokens.bin");
    (*world)->Abort(error.ToString());
    usleep(20'000);  // the others may speak first
    Fail(error, 1);
  }
  if (what.starts_with("interrupt") && rank == 0) kill(getppid(), SIGTERM);
  const std::vector<int> ranks = {0, 1, 2};
  auto* group = (*world)->Group(ranks).value();
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

TEST(LaunchRanksTest, AStuckRankIsKilled) {
  const Outcome outcome = Launch(2, "one fails, one is stuck");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(outcome.standard_error, "tessera: rank 0: data: lost\n");
}

TEST(LaunchRanksTest, SigtermIsPassedOn) {
  EXPECT_EQ(Launch(3, "interrupt").code, kInterruptedExitCode);
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
