#include "costmodel/validate/measured_memory.h"

#include <algorithm>
#include <array>
#include <vector>

#include "costmodel/validate/words.h"
#include "planner/base/check.h"
#include "planner/plan/stages.h"

namespace tessera {
namespace {

constexpr double kGigabyte = 1e9;
constexpr double kGibibyte = 1 << 30;

struct MeasureRow {
  std::string_view word;  // of the source or the notes
  MemoryMeasure measure;
  double unit;
};
constexpr MeasureRow kMeasures[] = {
    // megatron/core/pipeline_parallel/zerobubble/runtime.py divides
    // torch.cuda.max_memory_allocated by 10^6.
    {"zero bubble", MemoryMeasure::kAllocated, kGigabyte},
    // Tables in GB, calibrated with nvidia-smi (experiments/tr3m-1B3.md).
    {"bigscience", MemoryMeasure::kDevice, kGigabyte},
    // alpa/util.py: GB = 1 << 30, of get_max_memory_allocated.
    {"alpa", MemoryMeasure::kAllocated, kGibibyte},
    // torchtitan/metrics.py prints the allocator's peak of reserved bytes.
    {"torchtitan", MemoryMeasure::kReserved, kGibibyte},
    // "Memory in use of all of the card", in GiB (its README files' "mem").
    {"flagperf", MemoryMeasure::kDevice, kGibibyte},
    {"max_memory_reserved", MemoryMeasure::kReserved, kGibibyte},
    {"max_memory_allocated", MemoryMeasure::kAllocated, kGibibyte},
    // It prints MiB.
    {"nvidia-smi", MemoryMeasure::kDevice, kGibibyte},
};

}  // namespace

std::string_view NameOf(MemoryMeasure measure) {
  constexpr std::array<std::string_view, 3> kNames = {"allocated", "reserved",
                                                      "device"};
  return kNames[static_cast<size_t>(measure)];
}

MeasuredMemory MeasuredMemoryOf(const PublishedRun& run) {
  const std::string words = Lower(run.source + " " + run.notes);
  // PyTorch's counters are what most print.
  MeasureRow found = {"", MemoryMeasure::kAllocated, kGibibyte};
  for (const MeasureRow& row : kMeasures) {
    if (!Has(words, row.word)) continue;
    found = row;
    break;
  }
  return {{static_cast<int64_t>(run.mem_gb * found.unit)}, found.measure};
}

Bytes CountedBy(MemoryMeasure measure, const MemoryUse& use) {
  const auto part = [&](MemoryCategory category) {
    return use.parts[static_cast<size_t>(category)];
  };
  switch (measure) {
    case MemoryMeasure::kAllocated:
      return use.total - part(MemoryCategory::kFramework) -
             part(MemoryCategory::kAllocator);
    case MemoryMeasure::kReserved:
      return use.total - part(MemoryCategory::kFramework);
    case MemoryMeasure::kDevice:
      break;
  }
  return use.total;
}

const MemoryUse& ReadBy(MemoryMeasure measure, const Cluster& cluster,
                        const Plan& plan, const Evaluation& evaluation) {
  const std::vector<DeviceSet> sets = DeviceSets(plan.groups);
  const MemoryUse* fullest = nullptr;
  for (size_t s = 0; s < sets.size(); ++s) {
    const bool read =
        measure != MemoryMeasure::kDevice ||
        std::ranges::any_of(sets[s].devices, [&](DeviceId device) {
          return cluster.devices[device.index()].node == 0;
        });
    const MemoryUse& use = evaluation.memory[s];
    if (read && (fullest == nullptr || use.total > fullest->total)) {
      fullest = &use;
    }
  }
  TESSERA_CHECK(fullest != nullptr) << "no device on the first host";
  return *fullest;
}

}  // namespace tessera
