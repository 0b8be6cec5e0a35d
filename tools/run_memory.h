#pragma once
// Whether what a run keeps has room, and where that of its files lies.

#include <optional>
#include <string>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/plan.h"
#include "tools/gpu_share.h"
#include "tools/inputs.h"
#include "tools/options.h"

namespace tessera {

// A folder with room for files of offloaded state.
std::string OffloadDirectory(const Options& options);
// An error for an --offload-dir that the plan has no use for, or that the
// strategy has a say against.
Result<void> CheckOffloadDirectory(const Options& options, const Plan& plan);

// Out of memory is known before the first step: on the devices and nodes of the
// cluster that was asked for, on the GPU, if ranks have one, and on this
// machine, where so many ranks run (`ranks_here`), all or those of a host. What
// files of offloaded state take of the storage that rank 0 has them on: its
// host's, or all where hosts share it (IsOnNetwork).
Result<Bytes> CheckMemory(const Options& options, const Inputs& inputs,
                          const std::optional<GpuShare>& gpu, int ranks_here,
                          const Plan& plan, const TaskGraph& tasks);
// The same of the one rank of the CPU of --check.
Result<void> CheckMemoryOfOneRank(const Graph& graph, const Plan& plan,
                                  const TaskGraph& tasks);

// That disks have room for what --save, so many times, and --export will write,
// beside the files that they replace and those of offloaded state.
Result<void> CheckRoomToSave(const Options& options,
                             const PublishedLayout& layout, const Graph& graph,
                             int64_t saves, Bytes offloaded);

}  // namespace tessera
