#pragma once
// What the ranks of a job compute on and how they talk to each other: the rows
// of `tessera run --backend`, and how a process becomes one of the ranks.

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/cluster.h"
#include "runtime/comm/communicator.h"
#include "runtime/comm/store.h"
#include "runtime/device/device.h"
#include "runtime/launch/rank_environment.h"

namespace tessera {

struct Backend {
  std::string_view name;
  std::string_view summary;
  bool gpu = false;      // computes on GPUs, not on the host's cores
  bool threads = false;  // all ranks are threads of one process
};
std::span<const Backend> Backends();

// ---- GPUs -------------------------------------------------------------------

struct Gpu {
  std::string name;  // "NVIDIA H200"
  Bytes memory;
};

// Those that this process can use. kInvalidInput where there are none, or this
// program was built without CUDA.
Result<std::vector<Gpu>> VisibleGpus();

// The ranks of one host that share its GPUs.
struct HostRanks {
  int rank = 0;  // of this host
  int size = 1;
  int gpus = 1;  // that the process sees
  // Each may have a GPU of its own, so that it sees one alone. (NCCL refuses
  // two ranks on one GPU.)
  bool may_be_bound = false;
  // Several ranks may share a GPU: TESSERA_SHARE_GPU=1, for functional tests.
  bool share = false;
};

// Ranks on one GPU, at most.
int RanksPerGpu(const HostRanks& ranks);
// The GPU of a rank: the n-th rank of the host has the n-th GPU, or with
// sharing the ranks are dealt out in turn. kInvalidInput where there are fewer
// GPUs than ranks.
Result<int> GpuOfRank(const HostRanks& ranks);

// Those of the rank that `environment` describes, whose process sees `gpus`.
HostRanks HostRanksOf(const RankEnvironment& environment, int gpus);

// Whether NVLink may join hosts of such GPUs to one node (GB200 NVL72).
bool NvLinkMayJoinHosts(const Gpu& gpu);

// How `ranks` ranks, `ranks_per_node` on each host, form a cluster of GPUs like
// `gpu`: the preset of that GPU's system with the memory that a rank has here.
// Of a GPU that no preset has, the figures are those of an H100, and `warning`
// says so, as it does where NVLink may join the hosts.
Result<Cluster> ClusterOfGpus(const Gpu& gpu, int ranks, int ranks_per_node,
                              int ranks_per_gpu, std::string* warning);

// What NCCL wants where several ranks share a GPU: it refuses two on one GPU of
// one host, so each is a host of its own to it, and messages go over TCP.
// (NCCL 2.28, src/init.cc and src/misc/utils.cc, getHostHash.)
struct Variable {
  std::string name;
  std::string value;
};
std::vector<Variable> SharedGpuVariables(int rank);

// ---- Ranks ------------------------------------------------------------------

// A rank's membership of its job. The world is destroyed first.
struct RankSeat {
  std::unique_ptr<Store> store;  // null for threads
  std::unique_ptr<RankDevice> device;
  std::unique_ptr<CommWorld> world;
};

// This process's, as `environment` has it: the ranks call it together.
// Its kernels on the host run on `threads`. `stop` outlives the seat
// (CommOptions::stop). REQUIRES: !backend.threads.
Result<RankSeat> JoinJob(const Backend& backend,
                         const RankEnvironment& environment, int threads,
                         const std::atomic<bool>* stop = nullptr);

// The seats of all ranks of a job of one process, each for a thread of its own.
// On GPUs they share the first. REQUIRES: backend.threads, or one rank.
Result<std::vector<RankSeat>> MakeJob(const Backend& backend, int ranks,
                                      int threads);

}  // namespace tessera
