#pragma once
// How a process learns which rank it is.

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "runtime/comm/store.h"

namespace tessera {

struct RankEnvironment {
  // Who set it: "tessera", "torchrun", "mpirun", "pmi" or "srun".
  std::string launcher;
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // on this host
  int local_size = 1;
  std::string master_host;  // where rank 0's store listens
  int master_port = 0;
  std::string job_id;
  int listen_fd = -1;  // our launcher: the store's socket, for rank 0
  // How long ranks may start apart.
  Duration start_time = StoreOptions().timeout;
  // Who started this host's ranks may have given each a GPU and cores of its
  // own: srun --gpus-per-task=1 and --cpus-per-task, mpirun --bind-to, also of
  // a script that sets RANK and WORLD_SIZE. torchrun's ranks and our own have
  // all that their host's launcher has.
  bool may_be_bound = false;
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
// How many ranks are on this host, and which of them this is, say the
// launcher's variables; beside RANK and WORLD_SIZE without LOCAL_WORLD_SIZE, as
// scripts set them, those of another launcher that counts the same rank and
// ranks. Where none says it all ranks are on this host, if that has rank 0 by a
// loopback address.
//
// Errors: torchrun's variables of several ranks without RANK or WORLD_SIZE, a
// variable that is no number or no time to start in, a rank outside the job or
// its host, a host without ranks or with more than the job's, a master that
// nobody named though ranks are on several hosts, or one on another host
// perhaps where no variable says how many ranks are on this one.
Result<std::optional<RankEnvironment>> DetectRankEnvironment(
    const GetEnv& get_env);
// Of this process.
Result<std::optional<RankEnvironment>> DetectRankEnvironment();

// The variables that say which rank it is: "RANK and WORLD_SIZE".
std::string VariablesOf(const RankEnvironment& environment);

// What Store::Open needs to meet the ranks of `environment`.
StoreOptions StoreOptionsOf(const RankEnvironment& environment);

// "n[1-3,07],login" is n1, n2, n3, n07, login: Slurm's compact lists, with
// several brackets per name and leading zeros kept.
Result<std::vector<std::string>> ExpandNodeList(std::string_view list);

// The variables that our own launcher sets beside torchrun's: the job's id, and
// the socket of the store that rank 0 is handed.
inline constexpr char kJobIdVariable[] = "TESSERA_JOB_ID";
inline constexpr char kStoreFdVariable[] = "TESSERA_STORE_FD";

// In seconds, how long ranks may start apart: for clusters that give hosts, or
// fetch images, one after the other.
inline constexpr char kStartTimeVariable[] = "TESSERA_START_TIMEOUT";

}  // namespace tessera
