#include "costmodel/validate/measured_memory.h"

#include <array>

#include "costmodel/validate/words.h"

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
    {"max_memory_reserved", MemoryMeasure::kReserved, kGibibyte},
    {"max_memory_allocated", MemoryMeasure::kAllocated, kGibibyte},
    {"nvidia-smi", MemoryMeasure::kDevice, kGigabyte},
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

}  // namespace tessera
