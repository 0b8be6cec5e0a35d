#include "profiler/discover.h"

#include <unistd.h>

#include <cmath>
#include <iostream>

#include "planner/base/append.h"
#include "planner/base/format.h"
#include "planner/io/cluster_io.h"
#include "profiler/host_speed.h"
#include "profiler/machine.h"
#include "profiler/machine_io.h"
#include "runtime/launch/rank_environment.h"
#include "runtime/storage/file_tier.h"
#include "tools/inputs.h"
#include "tools/json.h"
#include "tools/share_cores.h"
#include "tools/text.h"
#include "tools/verb.h"

namespace tessera {
namespace {

// How long hosts wait for what the others found, and after how much of it they
// say for whom.
const auto kPeerTimeout = Duration::FromSeconds(60);
const auto kPatience = Duration::FromSeconds(2);

Result<Machine> ThisMachine(const Options& options) {
  Machine machine = ReadMachine();
  if (options.nproc == 0) TESSERA_RETURN_IF_ERROR(AddGpus(machine));
  return machine;
}

void TellWaiting(const std::string& who) {
  std::cerr << "tessera: waiting for " << who << std::endl;
}

// What `rank` found.
Result<std::string> FoundBy(int rank, Store& store) {
  const std::string who = "rank " + std::to_string(rank);
  const std::string key = "machine" + std::to_string(rank);
  bool late = false;
  auto found = store.Get(key, kPatience, who, late);
  if (!late) return found;
  TellWaiting(who);
  return store.Get(key, kPeerTimeout - kPatience, who);
}

// The machines of a job, one from the first rank of each host, on rank 0; on
// the others nothing.
Result<std::vector<Machine>> MachinesOfJob(const Machine& machine,
                                           const RankEnvironment& environment) {
  StoreOptions store_options = StoreOptionsOf(environment);
  store_options.waiting = TellWaiting;
  TESSERA_TRY(const auto store, Store::Open(store_options));
  if (environment.local_rank == 0) {
    TESSERA_RETURN_IF_ERROR(
        store->Set("machine" + std::to_string(environment.rank),
                   SerializeMachine(machine)));
  } else {
    TESSERA_RETURN_IF_ERROR(
        store->Set("machine" + std::to_string(environment.rank), ""));
  }
  std::vector<Machine> machines;
  if (environment.rank != 0) return machines;
  for (int rank = 0; rank < environment.size; ++rank) {
    TESSERA_TRY(const std::string found, FoundBy(rank, *store));
    if (found.empty()) continue;
    TESSERA_TRY(machines.emplace_back(), ParseMachine(found));
  }
  return machines;
}

std::string PcieText(const PciPlace& place) {
  if (place.path.empty() || place.path.back().lanes == 0) return "?";
  return "gen " + std::to_string(place.path.back().generation) + " x" +
         std::to_string(place.path.back().lanes);
}

std::string NvLinkText(const FoundGpu& gpu) {
  std::string text;
  if (gpu.switch_links > 0) text = std::to_string(gpu.switch_links) + " switch";
  for (size_t peer = 0; peer < gpu.peer_links.size(); ++peer) {
    if (gpu.peer_links[peer] == 0) continue;
    AppendTo(
        text, ", ",
        std::to_string(gpu.peer_links[peer]) + " to " + std::to_string(peer));
  }
  return text.empty() ? "none" : text;
}

std::string NumaText(const PciPlace& place) {
  return place.numa_node < 0 ? "?" : std::to_string(place.numa_node);
}

std::string CpusText(const PciPlace& place) {
  return place.near_cpus.empty() ? "?" : place.near_cpus;
}

std::string AddressText(const PciPlace& place) {
  return place.path.empty() ? "?" : place.path.back().address;
}

void Print(const Machine& machine) {
  std::cout << machine.host << ": " << machine.cpu << ", " << machine.cpus
            << " cores, " << FormatBytes(machine.memory);
  std::cout << (machine.driver.empty() ? "" : ", driver " + machine.driver)
            << "\n";
  if (!machine.gpus.empty()) {
    std::vector<std::vector<std::string>> table = {
        {"GPU", "memory", "PCI", "PCIe", "NUMA", "near cores", "NVLinks"}};
    for (const FoundGpu& gpu : machine.gpus) {
      table.push_back({gpu.name, FormatBytes(gpu.memory),
                       AddressText(gpu.place), PcieText(gpu.place),
                       NumaText(gpu.place), CpusText(gpu.place),
                       NvLinkText(gpu)});
    }
    std::cout << "\n" << FormatTable(table);
  }
  if (!machine.nics.empty()) {
    std::vector<std::vector<std::string>> table = {
        {"network card", "kind", "Gb/s", "PCI", "PCIe", "NUMA"}};
    for (const FoundNic& nic : machine.nics) {
      table.push_back({nic.name,
                       nic.infiniband ? "InfiniBand"
                       : nic.rdma     ? "RDMA"
                                      : "Ethernet",
                       nic.gigabits > 0 ? FormatNumber(nic.gigabits) : "?",
                       AddressText(nic.place), PcieText(nic.place),
                       NumaText(nic.place)});
    }
    std::cout << "\n" << FormatTable(table);
  }
  std::cout << "\n";
}

// --nodes hosts like this one, if it was given.
Result<void> Multiply(const Options& options, std::vector<Machine>& machines) {
  if (options.nodes > 0 && machines.size() > 1) {
    return InvalidInput("the job's hosts are counted already", "--nodes");
  }
  if (options.nodes > 0) {
    machines.resize(static_cast<size_t>(options.nodes), machines[0]);
  }
  if (machines.size() > 1 && machines[0].gpus.empty()) {
    return InvalidInput(
        "without GPUs only the ranks of one host can be planned for",
        machines[0].host);
  }
  return {};
}

Result<void> CheckOffloadDirectory(const Options& options) {
  if (options.offload_directory.empty()) return {};
  const auto file =
      FileTier::Open({.directory = options.offload_directory}, {});
  if (file) return {};
  return InvalidInput(file.error().ToString(), "--offload-dir");
}

Result<HostSpeed> Measure(const Options& options, const Machine& machine) {
  TESSERA_RETURN_IF_ERROR(CheckOffloadDirectory(options));
  if (isatty(STDERR_FILENO) != 0) {
    std::cerr << "measuring this host's memory"
              << (options.offload_directory.empty() ? "" : " and storage")
              << std::endl;
  }
  HostSpeed speed;
  speed.one_core = MeasureCopies(1);
  speed.all_cores = MeasureCopies(machine.cpus);
  if (!options.offload_directory.empty()) {
    const auto storage = MeasureStorage(options.offload_directory);
    if (!storage) return storage.error().At("--offload-dir");
    speed.storage = *storage;
  }
  return speed;
}

Result<Cluster> ClusterOf(const Options& options,
                          const std::vector<Machine>& machines,
                          const HostSpeed& speed) {
  if (!machines[0].gpus.empty()) return ClusterOfMachines(machines, speed);
  const int ranks = options.nproc > 0 ? options.nproc : machines[0].cpus;
  Cluster cluster = ClusterOfCores(machines[0], ranks, speed);
  ShareCores(cluster, machines[0].cpus, std::max(1, machines[0].cpus / ranks));
  return cluster;
}

std::string RateText(BytesPerSecond rate) {
  return FormatBytes({std::llround(rate.value)}) + "/s";
}

void PrintSpeed(const HostSpeed& speed) {
  std::cout << "copies: " << RateText(speed.one_core) << " by one core, "
            << RateText(speed.all_cores) << " by all\n";
  if (!speed.storage) return;
  std::cout << "storage" << (speed.storage->direct ? "" : " (buffered)") << ": "
            << RateText(speed.storage->read) << " read, "
            << RateText(speed.storage->write) << " written, "
            << FormatBytes(speed.storage->free) << " free\n";
}

Result<Json> JsonOf(const Options& options, const Cluster& cluster,
                    const std::vector<Machine>& machines,
                    const HostSpeed& speed) {
  Json hosts = Json::Array();
  for (const Machine& machine : machines) {
    TESSERA_TRY(std::string text, JsonOfMachine(machine));
    hosts.Append(Json::Raw(std::move(text)));
  }
  Json out = Json::Object(
      {{"cluster", cluster.name},
       {"devices", static_cast<int64_t>(cluster.devices.size())},
       {"nodes", cluster.num_nodes()},
       {"file", options.output},
       {"copy_bytes_per_second_one_core", speed.one_core.value},
       {"copy_bytes_per_second_all_cores", speed.all_cores.value}});
  if (speed.storage) {
    out.Set("storage_free_bytes", speed.storage->free.value);
    out.Set("storage_read_bytes_per_second", speed.storage->read.value);
    out.Set("storage_write_bytes_per_second", speed.storage->write.value);
    out.Set("storage_is_direct", speed.storage->direct);
  }
  out.Set("hosts", std::move(hosts));
  return out;
}

std::string Summary(const Options& options, const Cluster& cluster) {
  return cluster.name + ": " + std::to_string(cluster.devices.size()) +
         (cluster.devices.size() == 1 ? " device" : " devices") +
         (options.output.empty() ? "" : ": " + options.output);
}

// A preset, instead of this machine.
Result<int> WritePreset(const Options& options) {
  if (options.nodes > 0 || options.nproc > 0 ||
      !options.offload_directory.empty()) {
    return InvalidInput(
        "is of another cluster than this machine: expected no --nodes, "
        "--nproc or --offload-dir",
        "--cluster");
  }
  if (options.output.empty()) {
    return InvalidInput("expected a file to write the cluster to", "-o");
  }
  TESSERA_TRY(const Inputs inputs, ReadInputs(options));
  const Cluster& cluster = inputs.cluster;
  TESSERA_RETURN_IF_ERROR(WriteCluster(options.output, cluster));
  if (options.json) {
    std::cout << Json::Object(
                     {{"cluster", cluster.name},
                      {"devices", static_cast<int64_t>(cluster.devices.size())},
                      {"nodes", cluster.num_nodes()},
                      {"file", options.output}})
                     .ToString()
              << std::endl;
  } else {
    std::cout << Summary(options, cluster) << std::endl;
  }
  return 0;
}

}  // namespace

Result<int> RunDiscover(const Options& options) {
  if (!options.output.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckProtoOutput(options.output));
  }
  if (!options.cluster.empty()) return WritePreset(options);
  TESSERA_TRY(const Machine here, ThisMachine(options));
  std::vector<Machine> machines = {here};
  TESSERA_TRY(const std::optional<RankEnvironment> environment,
              DetectRankEnvironment());
  if (environment) {
    TESSERA_TRY(machines, MachinesOfJob(here, *environment));
    if (environment->rank != 0) return 0;
  }
  TESSERA_RETURN_IF_ERROR(Multiply(options, machines));
  TESSERA_TRY(const HostSpeed speed, Measure(options, here));
  TESSERA_TRY(const Cluster cluster, ClusterOf(options, machines, speed));
  if (!options.output.empty()) {
    TESSERA_RETURN_IF_ERROR(WriteCluster(options.output, cluster));
  }
  // Those of --nodes are one.
  const std::vector<Machine> unlike =
      options.nodes > 0 ? std::vector<Machine>{here} : machines;
  for (const Machine& machine : unlike) {
    for (const std::string& text : Assumptions(machine, machines.size())) {
      std::cerr << "tessera: warning: " << machine.host << ": " << text << "\n";
    }
  }
  for (const std::string& text : SplitDomains(unlike)) {
    std::cerr << "tessera: warning: " << text << "\n";
  }
  if (options.json) {
    TESSERA_TRY(const Json out, JsonOf(options, cluster, machines, speed));
    std::cout << out.ToString() << std::endl;
    return 0;
  }
  for (const Machine& machine : unlike) Print(machine);
  PrintSpeed(speed);
  std::cout << Summary(options, cluster) << std::endl;
  return 0;
}

}  // namespace tessera
