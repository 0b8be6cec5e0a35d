#include "runtime/launch/backend.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>

#include "planner/base/divide.h"
#include "planner/base/table.h"
#include "planner/topology/gpus.h"
#include "planner/topology/topologies.h"
#include "runtime/comm/loopback_world.h"
#include "runtime/comm/shm_world.h"
#include "runtime/comm/text.h"
#include "runtime/comm/thread_world.h"
#include "runtime/device/cpu_device.h"

#ifdef TESSERA_HAS_CUDA
#include "runtime/comm/job_failure.h"
#include "runtime/comm/nccl_world.h"
#include "runtime/device/cuda_device.h"
#endif

namespace tessera {
namespace {

constexpr char kShareGpu[] = "TESSERA_SHARE_GPU";

#ifdef TESSERA_HAS_CUDA
constexpr char kConnectionsVariable[] = "CUDA_DEVICE_MAX_CONNECTIONS";
// What CUDA has unless it is told: a step's streams are computation, copies to
// and from the host, and messages each way.
constexpr int kFewestConnections = 8;
#endif

// GPUs: no host has more (NVIDIA HGX-2: 16), and the systems of several hosts
// all do (GB200 NVL72).
constexpr int kMostOfAHost = 16;

// Stands in for a GPU that no table has.
constexpr char kUnknownGpuTopology[] = "dgx-h100";

#ifdef TESSERA_HAS_CUDA
// Threads that CUDA starts meanwhile inherit the mask: signals stay with the
// launcher's own thread, which waits for them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};
#endif

bool IsSet(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

#ifdef TESSERA_HAS_CUDA
// That environments made for others (Megatron-LM wants 1) take CUDA's streams
// their connections.
void WarnOfFewConnections() {
  const char* const set = std::getenv(kConnectionsVariable);
  if (set == nullptr || std::atoi(set) >= kFewestConnections) return;
  std::cerr << "tessera: warning: " << kConnectionsVariable << " is " << set
            << ": streams that share a connection wait for each other, and one "
               "that waits for a peer may wait for itself; unset it"
            << std::endl;
}

Result<std::unique_ptr<CudaDevice>> DeviceOfRank(
    const RankEnvironment& environment, int threads) {
  if (environment.rank == 0) WarnOfFewConnections();
  const HostRanks ranks = HostRanksOf(environment, CudaDeviceCount());
  TESSERA_TRY(const int ordinal, GpuOfRank(ranks));
  if (RanksPerGpu(ranks) > 1) {
    for (const Variable& variable : SharedGpuVariables(environment.rank)) {
      setenv(variable.name.c_str(), variable.value.c_str(), /*overwrite=*/0);
    }
  }
  return MakeCudaDevice(ordinal, threads);
}
#endif

}  // namespace

std::span<const Backend> Backends() {
  static constexpr Backend kTable[] = {
      {.name = "cpu",
       .summary = "the host's cores; ranks are processes with shared memory"},
      {.name = "cuda",
       .summary = "a GPU for each rank; ranks are processes and talk by NCCL",
       .gpu = true},
      {.name = "cuda-loopback",
       .summary = "all ranks on one GPU, as threads of one process, for checks",
       .gpu = true,
       .threads = true},
  };
  return kTable;
}

// ---- GPUs -------------------------------------------------------------------

Result<std::vector<Gpu>> VisibleGpus() {
#ifdef TESSERA_HAS_CUDA
  const SignalsBlocked blocked;
  const int count = CudaDeviceCount();
  if (count == 0) {
    return InvalidInput(
        "needs a GPU of NVIDIA and its driver: this process sees none");
  }
  std::vector<Gpu> gpus;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    TESSERA_TRY(const GpuProperties gpu, PropertiesOfGpu(ordinal));
    gpus.push_back({gpu.name, gpu.memory});
  }
  return gpus;
#else
  return InvalidInput(
      "this program was built without CUDA (cmake -DTESSERA_CUDA=ON)");
#endif
}

HostRanks HostRanksOf(const RankEnvironment& environment, int gpus) {
  return {.rank = environment.local_rank,
          .size = environment.local_size,
          .gpus = gpus,
          .may_be_bound = environment.may_be_bound,
          .share = IsSet(kShareGpu)};
}

int RanksPerGpu(const HostRanks& ranks) {
  if (!ranks.share) return 1;
  return DivideUp(ranks.size, ranks.gpus);
}

Result<int> GpuOfRank(const HostRanks& ranks) {
  if (ranks.share) return ranks.rank % ranks.gpus;
  if (ranks.gpus == 1 && ranks.may_be_bound) return 0;
  if (ranks.size <= ranks.gpus) return ranks.rank;
  return InvalidInput(
      Text(ranks.size, " ranks on this host, but a process sees ", ranks.gpus,
           ranks.gpus == 1 ? " GPU" : " GPUs", "; ", kShareGpu,
           "=1 lets ranks share a GPU, and so does --backend cuda-loopback"));
}

bool NvLinkMayJoinHosts(const Gpu& gpu) {
  const KnownGpu* const known = FindGpu(gpu.name);
  if (known == nullptr) return false;
  const auto topology = Find("cluster", Topologies(), known->topology);
  return topology && (*topology)->gpus_per_node > kMostOfAHost;
}

Result<Cluster> ClusterOfGpus(const Gpu& gpu, int ranks, int ranks_per_node,
                              int ranks_per_gpu, std::string* warning) {
  const KnownGpu* const known = FindGpu(gpu.name);
  if (known == nullptr) {
    *warning = "the figures of '" + gpu.name +
               "' are not known: its predicted times are an H100's "
               "(--cluster FILE)";
  }
  TESSERA_TRY(const Topology* const topology,
              Find("cluster", Topologies(),
                   known != nullptr ? known->topology : kUnknownGpuTopology));
  if (NvLinkMayJoinHosts(gpu) && ranks > ranks_per_node) {
    *warning = Text(
        "hosts of ", gpu.name,
        " may be joined by NVLink: its predicted times are of a node for each "
        "host (--cluster FILE, as 'tessera discover' finds it)");
  }
  // As many on a node as divide the ranks.
  int per_node = std::min(ranks_per_node, topology->gpus_per_node);
  while (ranks % per_node != 0) --per_node;
  TESSERA_TRY(
      Cluster cluster,
      MakeCluster(Text(topology->name, ":", ranks / per_node, "x", per_node)));
  cluster.name = Text(ranks, " x ", gpu.name);
  for (DeviceType& type : cluster.device_types) {
    type.memory = {gpu.memory.value / ranks_per_gpu};
  }
  return cluster;
}

std::vector<Variable> SharedGpuVariables(int rank) {
  return {{"NCCL_HOSTID", Text("tessera-rank-", rank)},
          {"NCCL_NET", "Socket"},
          {"NCCL_IB_DISABLE", "1"},
          {"NCCL_P2P_DISABLE", "1"},
          {"NCCL_SHM_DISABLE", "1"},
          {"NCCL_NVLS_ENABLE", "0"},
          {"NCCL_MNNVL_ENABLE", "0"},
          {"NCCL_RAS_ENABLE", "0"},
          // Ranks have the GPU by turns: what waits for a peer on it should
          // give way, and take little of it.
          {"NCCL_PROTO", "Simple"},
          {"NCCL_MAX_CTAS", "2"}};
}

// ---- Ranks ------------------------------------------------------------------

Result<RankSeat> JoinJob(const Backend& backend,
                         const RankEnvironment& environment, int threads,
                         const std::atomic<bool>* stop) {
  TESSERA_CHECK(!backend.threads) << backend.name;
  RankSeat seat;
  CommOptions options;
  options.stop = stop;
  options.stalled = [](const std::string& what) {
    std::cerr << "tessera: " << what << std::endl;
  };
  // Our own launcher knows that all have started.
  if (environment.launcher != "tessera") {
    options.waiting = [](const std::string& who) {
      std::cerr << "tessera: waiting for " << who << std::endl;
    };
  }
  StoreOptions store_options = StoreOptionsOf(environment);
  store_options.waiting = options.waiting;
  store_options.stop = stop;
  TESSERA_TRY(seat.store, Store::Open(store_options));
  if (!backend.gpu) {
    seat.device = std::make_unique<CpuDevice>(threads);
    TESSERA_TRY(seat.world, MakeShmWorld(environment.rank, environment.size,
                                         *seat.store, options));
    return seat;
  }
#ifdef TESSERA_HAS_CUDA
  auto device = DeviceOfRank(environment, threads);
  if (!device) {
    // The others would wait for this one in their first world.
    PublishFailure(*seat.store, NcclPrefix(1), environment.rank,
                   device.error());
    return device.error();
  }
  TESSERA_TRY(seat.world, MakeNcclWorld(environment.rank, environment.size,
                                        *seat.store, **device, options));
  seat.device = *std::move(device);
  return seat;
#else
  return VisibleGpus().error();
#endif
}

Result<std::vector<RankSeat>> MakeJob(const Backend& backend, int ranks,
                                      int threads) {
  TESSERA_CHECK(backend.threads || ranks == 1) << backend.name;
  std::vector<RankSeat> seats(static_cast<size_t>(ranks));
  if (!backend.gpu) {
    seats[0].device = std::make_unique<CpuDevice>(threads);
    TESSERA_TRY(seats[0].world, MakeLoneWorld());
    return seats;
  }
#ifdef TESSERA_HAS_CUDA
  std::vector<QueueDevice*> devices;
  for (RankSeat& seat : seats) {
    TESSERA_TRY(auto device, MakeCudaDevice(0, threads));
    devices.push_back(device.get());
    seat.device = std::move(device);
  }
  auto worlds = MakeLoopbackWorlds(devices);
  for (size_t r = 0; r < seats.size(); ++r) {
    seats[r].world = std::move(worlds[r]);
  }
  return seats;
#else
  return VisibleGpus().error();
#endif
}

}  // namespace tessera
