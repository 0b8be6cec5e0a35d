#include "tools/run_memory.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "costmodel/memory/peak_memory.h"
#include "costmodel/whatif/predict.h"
#include "planner/base/file.h"
#include "planner/base/format.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "runtime/device/process_memory.h"
#include "runtime/storage/file_tier.h"

namespace tessera {
namespace {

// The folder of offload=...:file:DIR, if there is one.
std::string StrategyDirectory(const Options& options) {
  if (!options.strategy) return "";
  // Read before.
  const auto strategy = ParseStrategy(*options.strategy);
  return strategy ? strategy->offload_directory : "";
}

// What made it so, for messages.
std::string OffloadDirectorySource(const Options& options) {
  if (!options.offload_directory.empty()) return "--offload-dir";
  return StrategyDirectory(options).empty() ? "TMPDIR" : "--strategy";
}

Error OutOfMemory(const std::string& what, Bytes needed, Bytes there,
                  const std::string& largest, const std::string& where) {
  return {ErrorCode::kInfeasible,
          "out of memory: " + what + " " + FormatBytes(needed) + " of " +
              FormatBytes(there) + "; at the peak a rank holds " + largest,
          where};
}

// That the disk has room for a file of so many bytes, beside that which it
// replaces.
Result<void> CheckRoom(double bytes, const std::string& path,
                       std::string_view flag) {
  const std::filesystem::path folder =
      std::filesystem::path(ResolveLinks(path)).parent_path();
  const Bytes free = FreeBytesOf(folder.empty() ? "." : folder.string());
  if (bytes <= static_cast<double>(free.value)) return {};
  return InvalidInput("no room for '" + path + "': it takes " +
                          FormatBytes({static_cast<int64_t>(bytes)}) + " of " +
                          FormatBytes(free) + " that are free",
                      std::string(flag));
}

}  // namespace

std::string OffloadDirectory(const Options& options) {
  if (!options.offload_directory.empty()) return options.offload_directory;
  if (const std::string named = StrategyDirectory(options); !named.empty()) {
    return named;
  }
  const char* const folder = std::getenv("TMPDIR");
  return folder != nullptr && *folder != '\0' ? folder : "/tmp";
}

Result<void> CheckOffloadDirectory(const Options& options, const Plan& plan) {
  if (options.offload_directory.empty()) return {};
  if (!Uses(plan, MemoryTier::kFile)) {
    return InvalidInput(
        "has no effect: the plan keeps nothing in files (offload=...:file)",
        "--offload-dir");
  }
  if (const std::string named = StrategyDirectory(options); !named.empty()) {
    return InvalidInput("the strategy names the folder '" + named + "'",
                        "--offload-dir");
  }
  return {};
}

Result<void> CheckMemory(const Options& options, const Inputs& inputs,
                         const std::optional<GpuShare>& gpu, const Plan& plan,
                         const TaskGraph& tasks) {
  const Cluster& cluster = inputs.cluster;
  const std::vector<DeviceSet> sets = DeviceSets(plan.groups);
  const auto device_peaks = PeakMemory(tasks);
  const auto host_peaks = PeakMemory(tasks, MemoryTier::kHost);
  const auto files = PeakMemory(tasks, MemoryTier::kFile);
  // What the fullest rank holds of a tier, if anything.
  const auto largest = [&](const std::vector<MemoryUse>& peaks,
                           MemoryTier tier) {
    const auto fullest = std::ranges::max_element(
        peaks, {}, [](const MemoryUse& use) { return use.total; });
    const auto& set = sets[static_cast<size_t>(fullest - peaks.begin())];
    return LargestAtPeakText(tasks, inputs.graph, set, tier);
  };

  Bytes memory;  // of this machine
  Bytes storage;
  std::vector<Bytes> hosts(static_cast<size_t>(cluster.num_nodes()));
  for (size_t s = 0; s < sets.size(); ++s) {
    for (DeviceId device : sets[s].devices) {
      const DeviceType& type = cluster.TypeOf(device);
      const Bytes needed = device_peaks[s].total;
      const Bytes room =
          gpu ? std::min(gpu->memory(), type.memory) : type.memory;
      if ((gpu || !options.cluster.empty()) && needed > room) {
        return OutOfMemory("a rank needs", needed, room,
                           LargestAtPeakText(tasks, inputs.graph, sets[s]),
                           "group " + sets[s].name);
      }
      Bytes& host =
          hosts[static_cast<size_t>(cluster.devices[device.index()].node)];
      host += host_peaks[s].total;
      if (type.shared_memory) host += needed;
      if (!gpu) memory += needed + host_peaks[s].total;
      storage += files[s].total;
    }
  }
  const Bytes host = *std::ranges::max_element(hosts);
  if (!options.cluster.empty() && cluster.host && host > cluster.host->memory) {
    return OutOfMemory("a node's host needs", host, cluster.host->memory,
                       largest(host_peaks, MemoryTier::kHost),
                       "cluster " + cluster.name);
  }
  if (gpu) memory = host;
  if (const Bytes free = AvailableMemory(); memory > free) {
    std::string held = largest(device_peaks, MemoryTier::kDevice);
    const std::string offloaded = largest(host_peaks, MemoryTier::kHost);
    if (!offloaded.empty()) held += ", and offloaded " + offloaded;
    return OutOfMemory("the ranks need", memory, free, held, "this machine");
  }
  if (storage == Bytes{}) return {};
  const std::string directory = OffloadDirectory(options);
  if (const auto file = FileTier::Open({.directory = directory}, {}); !file) {
    return InvalidInput(file.error().ToString(),
                        OffloadDirectorySource(options));
  }
  if (const Bytes free = FreeBytesOf(directory); storage > free) {
    return OutOfMemory("the ranks' files need", storage, free,
                       largest(files, MemoryTier::kFile),
                       OffloadDirectorySource(options) + " " + directory);
  }
  return {};
}

Result<void> CheckMemoryOfOneRank(const Graph& graph, const Plan& plan,
                                  const TaskGraph& tasks) {
  const Bytes needed = PeakMemory(tasks)[0].total;
  const Bytes free = AvailableMemory();
  if (needed <= free) return {};
  const std::vector<DeviceSet> sets = DeviceSets(plan.groups);
  return OutOfMemory("one rank of the CPU needs", needed, free,
                     LargestAtPeakText(tasks, graph, sets[0]), "--check");
}

Result<void> CheckRoomToSave(const Options& options, const Graph& graph) {
  if (!options.save.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckRoom(CheckpointBytes(graph, options.training),
                                      options.save, "--save"));
  }
  if (options.export_folder.empty()) return {};
  return CheckRoom(
      static_cast<double>(ParameterCount(graph)) * SizeOf(graph.dtype),
      options.export_folder, "--export");
}

}  // namespace tessera
