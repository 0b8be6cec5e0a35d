#pragma once
// How a process learns which rank it is, and our own launcher of ranks.

#include <chrono>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "runtime/comm/store.h"

namespace tessera {

struct RankEnvironment {
  std::string
      launcher;  // who set it: "tessera" "torchrun" "mpirun" "pmi" "srun"
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // on this host
  int local_size = 1;
  std::string master_host;  // where rank 0's store listens
  int master_port = 0;
  std::string job_id;
  int listen_fd = -1;  // our launcher: the store's socket, for rank 0
  bool operator==(const RankEnvironment&) const = default;
};

// Returns the value of an environment variable, or null.
using GetEnv = std::function<const char*(const char* name)>;

// Reads, in this order, the variables of our launcher and torchrun (RANK and
// WORLD_SIZE, with MASTER_ADDR and MASTER_PORT), Open MPI
// (OMPI_COMM_WORLD_RANK), Hydra (PMI_RANK and MPI_LOCALNRANKS), Slurm
// (SLURM_PROCID, with any --mpi) and other PMI (PMI_RANK). Nothing when none is
// set: one process of its own. That holds too for the shell of salloc and the
// script of sbatch, which may see SLURM_NTASKS and even SLURM_PROCID but are no
// tasks of srun.
//
// MASTER_ADDR and MASTER_PORT always have the say. Without them the host is
// the first of Slurm's step or job, or, where all ranks are on this host,
// 127.0.0.1; the port is derived from the job's id.
//
// Errors: a variable that is no number, a rank outside the job or its host, a
// host without ranks or with more than the job's, a master that nobody named
// though ranks are on several hosts.
Result<std::optional<RankEnvironment>> DetectRankEnvironment(
    const GetEnv& get_env);
// Of this process.
Result<std::optional<RankEnvironment>> DetectRankEnvironment();

// What Store::Open needs to meet the ranks of `environment`.
StoreOptions StoreOptionsOf(const RankEnvironment& environment);

// "n[1-3,07],login" is n1, n2, n3, n07, login: Slurm's compact lists, with
// several brackets per name and leading zeros kept.
Result<std::vector<std::string>> ExpandNodeList(std::string_view list);

// What a job or a rank of it returns that ended because it was told to.
inline constexpr int kInterruptedExitCode = 130;

// One wish to end may come as several signals: whoever signals a whole group
// (a terminal, systemd, Slurm, GNU timeout) reaches the ranks, and so does what
// started them, which passes it on. Only what comes so much later than the
// first is a second wish.
inline constexpr std::chrono::seconds kOneInterrupt(1);

// Runs this very program `nproc` times with `arguments` (without the program's
// name) as the ranks of one job on this host and waits for them. Ranks find
// each other by DetectRankEnvironment; their standard input is empty.
//
// Returns the exit code: 0 if all ranks returned 0. When a rank fails, the
// others get 5 s to notice and end, then are killed; one line on standard error
// names the rank, how it ended and why, and the code is 1, or 2 where all ranks
// but those that were only told of it ended with 2 (bad input). SIGINT, SIGTERM
// and, unless it is ignored, SIGHUP are passed on, and ranks that end for it
// return kInterruptedExitCode; a second one, kOneInterrupt later, kills them.
// The code is then that, too, if none failed. One that comes before all ranks
// are started kills those that are. Ctrl-Z (SIGTSTP) stops the ranks too, until
// this process goes on.
// When this process is killed, so are the ranks.
// REQUIRES: no other threads, as for any fork.
Result<int> LaunchRanks(int nproc, std::span<const std::string> arguments);

// A rank's last word. Under our launcher it goes to the launcher, which prints
// the job's first cause only; false where this is no rank of our launcher.
bool TellLauncher(const Error& error);

// The same, or where it is not so to standard error, as "tessera: rank R:
// ERROR".
void ReportRankError(const Error& error);

}  // namespace tessera
