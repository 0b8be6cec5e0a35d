#pragma once
// Evaluation: what a plan costs, as a value. The cost model makes it, the
// search compares it, reports print it.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/ids.h"
#include "planner/base/units.h"

namespace tessera {

// What a byte of a rank's memory holds.
enum class MemoryCategory : uint8_t {
  kParameter,
  kGradient,
  kOptimizer,
  kActivation,
  kCommunication,  // gathered, scattered and received copies
  kWorkspace,      // scratch of kernels
  kFramework,      // context of the driver, communicators' buffers
  kAllocator,      // blocks that the framework's allocator holds unused
};
inline constexpr int kMemoryCategories = 8;
std::string_view NameOf(MemoryCategory category);

// Peak bytes of one device by what they hold; the parts are taken at the
// moment of the peak, so they add up to `total`.
struct MemoryUse {
  Bytes total;
  std::array<Bytes, kMemoryCategories> parts = {};
  bool operator==(const MemoryUse&) const = default;
};

// Where the time of a step goes, of one group: the parts add up to the step.
struct Breakdown {
  Duration compute;    // forward and backward kernels
  Duration optimizer;  // optimizer kernels
  // Time in which a rank communicates and computes nothing, by kind.
  Duration all_reduce;
  Duration all_gather;
  Duration reduce_scatter;
  Duration all_to_all;  // and redistributions
  Duration send_recv;
  Duration copies;  // between memory tiers
  Duration idle;    // neither: the pipeline's bubble

  Duration total() const;
  bool operator==(const Breakdown&) const = default;
};

// Shares of the step's task time by where the figures come from; they add up
// to 1.
struct SourceShares {
  double measured = 0;
  double interpolated = 0;
  double analytical = 0;
  bool operator==(const SourceShares&) const = default;
};

// What each of some devices with equal shards keeps on each tier.
struct DeviceMemory {
  std::string group;  // a DeviceSet's name
  std::vector<DeviceId> devices;
  MemoryUse memory;
  MemoryUse host;
  MemoryUse file;
  bool operator==(const DeviceMemory&) const = default;
};

struct Evaluation {
  Duration step_time;
  Breakdown breakdown;  // of the bottleneck group
  // By DeviceSets of the plan's groups (planner/plan/stages.h): of the fullest
  // device.
  std::vector<MemoryUse> memory;
  // The same of what each keeps in its host's memory, and in its file; empty
  // where nothing leaves the devices.
  std::vector<MemoryUse> host_memory;
  std::vector<MemoryUse> file_memory;
  // Of each device, where that is worked out (Evaluator::Explain).
  std::vector<DeviceMemory> devices;
  // What devices send one another in a step, where that is worked out.
  Bytes moved;
  Bytes overflow;                       // of the fullest device, 0 if all fit
  std::vector<std::string> violations;  // why it cannot run; one line each
  SourceShares sources;
  // Whether it was found by simulating all tasks, which takes its time.
  bool simulated = false;

  bool feasible() const { return violations.empty(); }
  bool operator==(const Evaluation&) const = default;
};

}  // namespace tessera
