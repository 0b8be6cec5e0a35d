// Which rank a process is, by the variables of each launcher.

#include "runtime/launch/rank_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
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

TEST(DetectRankEnvironmentTest, WhatTorchrunsVariablesLackIsNamed) {
  const auto message = [](Variables more) {
    more.insert({{"RANK", "0"}, {"WORLD_SIZE", "2"}});
    const auto found = Detect(more);
    return found ? "" : found.error().message;
  };
  const std::string set = "RANK and WORLD_SIZE are set (rank 0 of 2), but not ";
  EXPECT_EQ(message({}), set + "MASTER_ADDR and MASTER_PORT");
  EXPECT_EQ(message({{"MASTER_ADDR", "127.0.0.1"}}), set + "MASTER_PORT");
  EXPECT_EQ(message({{"MASTER_PORT", "4567"}}), set + "MASTER_ADDR");
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

TEST(DetectRankEnvironmentTest, OneOfSeveralWithoutARankIsAnError) {
  const Variables alone = {{"WORLD_SIZE", "4"}};
  EXPECT_EQ(Detect(alone).value(), std::nullopt);
  for (const char* name : {"LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    Variables variables = alone;
    variables[name] = "1";
    const auto found = Detect(variables);
    ASSERT_FALSE(found.has_value()) << name;
    EXPECT_EQ(found.error().ToString(),
              "environment variable RANK: is not set, but WORLD_SIZE (4) and " +
                  std::string(name) +
                  " are: expected which of the 4 ranks this is");
    variables["WORLD_SIZE"] = "1";
    EXPECT_EQ(Detect(variables).value(), std::nullopt);
  }
  // A script of sbatch, which tells its srun where they meet; but no rank.
  Variables script = {{"WORLD_SIZE", "4"},
                      {"MASTER_ADDR", "n1"},
                      {"MASTER_PORT", "29500"},
                      {"SLURM_JOB_ID", "1"}};
  EXPECT_EQ(Detect(script).value(), std::nullopt);
  script["LOCAL_RANK"] = "1";
  EXPECT_FALSE(Detect(script).has_value());
}

TEST(DetectRankEnvironmentTest, ARankOfUnknownManyIsAnError) {
  const Variables alone = {{"RANK", "0"}};
  EXPECT_EQ(Detect(alone).value(), std::nullopt);
  for (const char* name : {"LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    Variables variables = alone;
    variables[name] = "1";
    const auto found = Detect(variables);
    ASSERT_FALSE(found.has_value()) << name;
    EXPECT_EQ(found.error().ToString(),
              "environment variable WORLD_SIZE: is not set, but RANK (0) and " +
                  std::string(name) +
                  " are: expected how many ranks there are");
    variables["RANK"] = "first";  // somebody else's
    EXPECT_EQ(Detect(variables).value(), std::nullopt);
  }
}

TEST(VariablesOfTest, AreThoseOfTheLauncher) {
  RankEnvironment environment;
  for (const auto& [launcher, variables] :
       {std::pair("tessera", "RANK and WORLD_SIZE"),
        std::pair("torchrun", "RANK and WORLD_SIZE"),
        std::pair("mpirun", "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE"),
        std::pair("pmi", "PMI_RANK and PMI_SIZE"),
        std::pair("srun", "SLURM_PROCID and SLURM_NTASKS")}) {
    environment.launcher = launcher;
    EXPECT_EQ(VariablesOf(environment), variables);
  }
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

// A script that sets RANK and WORLD_SIZE alone, for two hosts of 8 ranks.
TEST(DetectRankEnvironmentTest, WhoStartedAScriptTellsOfTheHost) {
  const Variables alone = {{"RANK", "9"},
                           {"WORLD_SIZE", "16"},
                           {"MASTER_ADDR", "n1"},
                           {"MASTER_PORT", "29500"}};
  const std::string expected =
      "environment variable LOCAL_WORLD_SIZE: is not set, and rank 0 may be on "
      "another host (MASTER_ADDR 'n1'): expected how many of the 16 ranks are "
      "on this one";
  EXPECT_EQ(Detect(alone).error().ToString(), expected);
  Variables variables = alone;
  variables["MASTER_ADDR"] = "localhost";
  EXPECT_EQ(Detect(variables).value()->local_size, 16);

  Variables slurm = alone;
  for (const auto& [name, value] :
       Variables{{"SLURM_PROCID", "9"},
                 {"SLURM_NTASKS", "16"},
                 {"SLURM_LOCALID", "4"},
                 {"SLURM_NODEID", "1"},
                 {"PMI_RANK", "9"},
                 {"PMI_SIZE", "16"},
                 {"SLURM_STEP_TASKS_PER_NODE", "8(x2)"}}) {
    slurm[name] = value;
  }
  const auto task = Detect(slurm).value();
  EXPECT_EQ(task->launcher, "torchrun");
  EXPECT_EQ(task->local_rank, 4);
  EXPECT_EQ(task->local_size, 8);
  EXPECT_TRUE(task->may_be_bound);  // srun --gpus-per-task=1 --cpus-per-task=8
  slurm["SLURM_LOCALID"] = "8";
  EXPECT_EQ(Detect(slurm).error().ToString(),
            "environment variable SLURM_LOCALID: expected a rank below the 8 "
            "of this host, got 8");
  slurm["LOCAL_RANK"] = "5";
  EXPECT_EQ(Detect(slurm).value()->local_rank, 5);
  // A task for each host, which starts the ranks there.
  slurm["SLURM_PROCID"] = slurm["PMI_RANK"] = "1";
  slurm["SLURM_NTASKS"] = slurm["PMI_SIZE"] = "2";
  EXPECT_EQ(Detect(slurm).error().ToString(), expected);

  Variables mpi = alone;
  mpi["OMPI_COMM_WORLD_RANK"] = "9";
  mpi["OMPI_COMM_WORLD_SIZE"] = "16";
  mpi["OMPI_COMM_WORLD_LOCAL_SIZE"] = "8";
  EXPECT_EQ(Detect(mpi).value()->local_rank, 9 % 8);
  EXPECT_EQ(Detect(mpi).value()->local_size, 8);
  EXPECT_TRUE(Detect(mpi).value()->may_be_bound);
  // torchrun under mpirun: its ranks share what it has.
  mpi["LOCAL_WORLD_SIZE"] = "8";
  EXPECT_FALSE(Detect(mpi).value()->may_be_bound);
}

TEST(DetectRankEnvironmentTest, SaysHowFarApartRanksMayStart) {
  Variables variables = {{"OMPI_COMM_WORLD_RANK", "0"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_EQ(StoreOptionsOf(*Detect(variables).value()).timeout,
            StoreOptions().timeout);
  variables["TESSERA_START_TIMEOUT"] = "1800";
  EXPECT_EQ(StoreOptionsOf(*Detect(variables).value()).timeout,
            Duration::FromSeconds(1800));
  variables["TESSERA_START_TIMEOUT"] = "2147483647";
  EXPECT_GT(StoreOptionsOf(*Detect(variables).value()).timeout,
            Duration::FromSeconds(1800));
  variables["TESSERA_START_TIMEOUT"] = "soon";
  EXPECT_EQ(
      Detect(variables).error().ToString(),
      "environment variable TESSERA_START_TIMEOUT: expected a number, got "
      "'soon'");
  variables["TESSERA_START_TIMEOUT"] = "0";
  EXPECT_EQ(Detect(variables).error().ToString(),
            "environment variable TESSERA_START_TIMEOUT: expected seconds, at "
            "least 1, got 0");
}

TEST(StoreOptionsOfTest, SayWhetherThereAreSeveralHosts) {
  RankEnvironment environment;
  environment.size = environment.local_size = 4;
  EXPECT_FALSE(StoreOptionsOf(environment).several_hosts);
  environment.local_size = 2;
  EXPECT_TRUE(StoreOptionsOf(environment).several_hosts);
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
  expected.may_be_bound = true;
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
  RankEnvironment expected{"pmi", 3, 4, 1, 2, "gpu07", 99, "", -1};
  expected.may_be_bound = true;
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
  EXPECT_EQ(
      Detect({{"RANK", "4"}, {"WORLD_SIZE", "4"}}).error().ToString(),
      "environment variable RANK: expected a rank below the 4 of WORLD_SIZE, "
      "got 4");
  EXPECT_EQ(Detect({{"RANK", "0"}, {"WORLD_SIZE", "0"}}).error().ToString(),
            "environment variable WORLD_SIZE: expected at least 1 rank, got 0");
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

}  // namespace
}  // namespace tessera
