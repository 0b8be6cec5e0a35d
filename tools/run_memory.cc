#include "tools/run_memory.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <span>
#include <vector>

#include "costmodel/memory/peak_memory.h"
#include "costmodel/whatif/predict.h"
#include "costmodel/whatif/scenario.h"
#include "planner/base/file.h"
#include "planner/base/format.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "runtime/device/process_memory.h"
#include "runtime/older_checkpoints.h"
#include "runtime/placement.h"
#include "runtime/published_files.h"
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

// Whether --set says how much memory the devices ("device_types"), or the
// nodes' hosts ("host"), have.
bool SetsMemoryOf(std::string_view owner, const Options& options) {
  return std::ranges::any_of(options.set, [&](const std::string& setting) {
    const std::string path = FilePathOf(setting.substr(0, setting.find('=')));
    return path.starts_with(owner) && path.ends_with(".memory");
  });
}

Error OutOfMemory(const std::string& what, Bytes needed, Bytes there,
                  const std::string& largest, const std::string& where) {
  return {ErrorCode::kInfeasible,
          "out of memory: " + what + " " + FormatBytes(needed) + " of " +
              FormatBytes(there) + "; at the peak a rank holds " + largest,
          where};
}

Bytes Sum(const std::vector<Bytes>& all) {
  return std::accumulate(all.begin(), all.end(), Bytes{});
}

// By how many checkpoints there are more, of at most `most`, when `saves` have
// been written.
int64_t MoreCheckpoints(const Options& options, int64_t saves, int64_t most) {
  std::error_code code;
  int64_t there = 0;
  if (std::filesystem::exists(options.save, code)) {
    there = std::min<int64_t>(options.keep_checkpoints,
                              1 + std::ssize(OlderCheckpoints(options.save)));
  }
  return std::min(saves, most - there);
}

// What a flag has a run keep on a disk, beside what that replaces there.
struct Kept {
  std::string flag;
  std::string path;  // of files, or of the folder that they are in
  double bytes = 0;
};

// The folder whose disk it is on; one that is to be made may be on that of
// another folder.
std::string FolderOf(const std::string& path) {
  const std::filesystem::path target = ResolveLinks(path);
  std::error_code code;
  // A folder may be a disk's first one.
  if (std::filesystem::is_directory(target, code)) return target.string();
  const std::string folder = target.parent_path().string();
  return folder.empty() ? "." : folder;
}

bool OnOneDisk(const std::string& one, const std::string& other) {
  struct stat of_one = {};
  struct stat of_other = {};
  return ::stat(one.c_str(), &of_one) == 0 &&
         ::stat(other.c_str(), &of_other) == 0 &&
         of_one.st_dev == of_other.st_dev;
}

// That its disk has room for `kept`, which is of so many files, beside what of
// `others` is there at the same time.
Result<void> CheckRoom(const Kept& kept, int64_t files,
                       std::span<const Kept> others) {
  const std::string folder = FolderOf(kept.path);
  const auto text = [](double bytes) {
    return FormatBytes({static_cast<int64_t>(bytes)});
  };
  double bytes = kept.bytes;
  std::string beside;
  for (const Kept& other : others) {
    if (other.bytes == 0 || !OnOneDisk(folder, FolderOf(other.path))) continue;
    bytes += other.bytes;
    beside += (beside.empty() ? " beside " : " and ") + text(other.bytes) +
              " of " + other.flag;
  }
  const Bytes free = FreeBytesOf(folder);
  if (kept.bytes == 0 || bytes <= static_cast<double>(free.value)) return {};
  const std::string take =
      files == 1 ? "it takes " : std::to_string(files) + " of it take ";
  return InvalidInput("no room for '" + kept.path + "': " + take +
                          text(kept.bytes) + beside + " of " +
                          FormatBytes(free) + " that are free",
                      kept.flag);
}

// What --export writes: the tensors, and of each a line of the file's header
// (its name, type, shape and place). What is trained as one may be several.
double ExportBytes(const PublishedLayout& layout, const Graph& graph) {
  constexpr int64_t kHeaderBytes = 96;
  int64_t bytes = 0;
  for (const PublishedTensor& tensor : PublishedTensors(layout, graph)) {
    bytes += ElementsOf(WholeBox(tensor.shape)) * SizeOf(graph.dtype) +
             std::ssize(tensor.name) + kHeaderBytes;
  }
  return static_cast<double>(bytes);
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

Result<Bytes> CheckMemory(const Options& options, const Inputs& inputs,
                          const std::optional<GpuShare>& gpu, int ranks_here,
                          const Plan& plan, const TaskGraph& tasks) {
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

  // Else the cluster's memory is not one that was asked for.
  const bool of_devices =
      !options.cluster.empty() || SetsMemoryOf("device_types", options);
  const bool of_hosts =
      !options.cluster.empty() || SetsMemoryOf("host", options);
  const bool one_host = ranks_here == std::ssize(cluster.devices);
  Bytes memory;  // of this machine
  // A host may be several nodes, and a node several hosts.
  const auto host_of = [&](DeviceId device) {
    return device.index() / static_cast<size_t>(ranks_here);
  };
  std::vector<Bytes> hosts(
      host_of(DeviceId(static_cast<int>(cluster.devices.size()) - 1)) + 1);
  std::vector<Bytes> disks(hosts.size());
  std::vector<Bytes> nodes(static_cast<size_t>(cluster.num_nodes()));
  std::vector<std::optional<Bytes>> rooms(nodes.size());  // in their memory
  for (size_t s = 0; s < sets.size(); ++s) {
    for (DeviceId device : sets[s].devices) {
      const DeviceType& type = cluster.TypeOf(device);
      const Bytes needed = device_peaks[s].total;
      const Bytes room =
          gpu ? std::min(gpu->memory(), type.memory) : type.memory;
      if ((gpu || of_devices) && needed > room) {
        return OutOfMemory("a rank needs", needed, room,
                           LargestAtPeakText(tasks, inputs.graph, sets[s]),
                           "group " + sets[s].name);
      }
      const auto node =
          static_cast<size_t>(cluster.devices[device.index()].node);
      const size_t host = host_of(device);
      Bytes kept = host_peaks[s].total;
      if (type.shared_memory) kept += needed;
      hosts[host] += kept;
      nodes[node] += kept;
      disks[host] += files[s].total;
      if (!cluster.hosts.empty()) rooms[node] = cluster.HostOf(device).memory;
      if (!gpu) memory += needed + host_peaks[s].total;
    }
  }
  const Bytes host = *std::ranges::max_element(hosts);
  for (size_t node = 0; node < nodes.size() && of_hosts; ++node) {
    if (!rooms[node] || nodes[node] <= *rooms[node]) continue;
    // Devices that share it may hold all of it.
    const std::string offloaded = largest(host_peaks, MemoryTier::kHost);
    return OutOfMemory("a node's host needs", nodes[node], *rooms[node],
                       offloaded.empty()
                           ? largest(device_peaks, MemoryTier::kDevice)
                           : offloaded,
                       "cluster " + cluster.name);
  }
  if (gpu) memory = one_host ? Sum(hosts) : host;
  if (const Bytes free = AvailableMemory(); memory > free) {
    std::string held = largest(device_peaks, MemoryTier::kDevice);
    const std::string offloaded = largest(host_peaks, MemoryTier::kHost);
    if (!offloaded.empty()) held += ", and offloaded " + offloaded;
    return OutOfMemory("the ranks need", memory, free, held, "this machine");
  }
  if (Sum(disks) == Bytes{}) return Bytes{};
  const std::string directory = OffloadDirectory(options);
  const bool together = one_host || IsOnNetwork(directory);
  const Bytes storage =
      together ? Sum(disks) : *std::ranges::max_element(disks);
  if (const auto file = FileTier::Open({.directory = directory}, {}); !file) {
    return InvalidInput(file.error().ToString(),
                        OffloadDirectorySource(options));
  }
  if (const Bytes free = FreeBytesOf(directory); storage > free) {
    return Error{
        ErrorCode::kInfeasible,
        "no room in '" + directory + "': the " +
            (together ? "ranks' files" : "files of a host's ranks") + " need " +
            FormatBytes(storage) + " of " + FormatBytes(free) +
            " that are free; --offload-dir DIR is another folder" +
            (StrategyDirectory(options).empty()
                 ? ""
                 : ", where the strategy names none (offload=...:file)") +
            "; at the peak a rank holds " + largest(files, MemoryTier::kFile),
        OffloadDirectorySource(options)};
  }
  return together ? storage : disks[0];
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

Result<void> CheckRoomToSave(const Options& options,
                             const PublishedLayout& layout, const Graph& graph,
                             int64_t saves, Bytes offloaded) {
  std::vector<Kept> others;
  others.push_back({OffloadDirectorySource(options), OffloadDirectory(options),
                    static_cast<double>(offloaded.value)});
  if (!options.save.empty()) {
    const double bytes = CheckpointBytes(graph, options.training);
    // Those that are kept, and the one that takes the oldest's place, which is
    // gone when weights are exported.
    const int64_t kept = options.keep_checkpoints;
    const int64_t files = MoreCheckpoints(options, saves, kept + 1);
    TESSERA_RETURN_IF_ERROR(
        CheckRoom({"--save", options.save, static_cast<double>(files) * bytes},
                  files, others));
    const int64_t then = MoreCheckpoints(options, saves, kept);
    others.push_back(
        {"--save", options.save, static_cast<double>(then) * bytes});
  }
  if (options.export_folder.empty()) return {};
  return CheckRoom(
      {"--export", options.export_folder, ExportBytes(layout, graph)}, 1,
      others);
}

}  // namespace tessera
