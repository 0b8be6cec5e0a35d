#pragma once
// Cluster: a machine as a plain directed graph. Vertices are devices, NICs,
// bridges and switches; links join them, each with a latency and a bandwidth
// per direction. No routing, no cost: those are costmodel/link.
//
// Figures are kept in two small tables, one row per device type and per link
// type, each with the source of its numbers; devices and links refer to them.
// A plain value: copyable, comparable, no pointers inside.

#include <string>
#include <string_view>
#include <vector>

#include "planner/base/ids.h"
#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/ir/dtype.h"
#include "planner/ir/stack.h"

namespace tessera {

// Generation of a GPU's multiprocessors, for the analytical times of kernels:
// costmodel/source/kernel_time.h. kNone: a device that is not modelled so.
enum class GpuGeneration : uint8_t {
  kNone,
  kPascal,
  kVolta,
  kTuring,
  kAmpere,
  kAda,
  kHopper,
  kBlackwell,
};
inline constexpr int kGpuGenerations = 8;

// "pascal", "volta", ...; empty for kNone.
std::string_view NameOf(GpuGeneration generation);
Result<GpuGeneration> ParseGpuGeneration(std::string_view name);

// What a device takes while it runs; zero where that is not known.
struct Upkeep {
  std::string source;  // where the figures below come from
  double price = 0;    // USD per device-hour
  double power = 0;    // W
  double mtbf = 0;     // s; mean time between failures that end a job
  bool operator==(const Upkeep&) const = default;
};

struct DeviceType {
  std::string name;    // "a100-sxm4-80gb"
  std::string source;  // where the figures below come from
  Bytes memory;        // device memory usable by tensors and workspaces
  // Dense peak rate of matrix products per element type; zero when the device
  // cannot compute in that type.
  FlopsPerSecond peak_fp64;
  FlopsPerSecond peak_fp32;
  FlopsPerSecond peak_bf16;
  FlopsPerSecond peak_fp16;
  // Of products whose operands are rounded to 8 bits on the way in; no tensor
  // has such elements.
  FlopsPerSecond peak_fp8;
  FlopsPerSecond peak_fp4;          // the same with 4 bits
  BytesPerSecond memory_bandwidth;  // peak
  // Both set, or neither.
  GpuGeneration generation = GpuGeneration::kNone;
  int multiprocessors = 0;
  // Reachable fraction of the peaks by large kernels, for the analytical cost
  // source. In (0, 1].
  double compute_efficiency = 0;
  double memory_efficiency = 0;
  // What large products reach amid the load of whole steps of what they reach
  // after a pause, where the power limit lowers the clock. In (0, 1]; 0 where
  // it is not known: as the generation's others (costmodel/source/kernel_time).
  double sustained_rate = 0;
  Duration launch_overhead;  // floor of one kernel's time
  // How many times as long its kernels take as the figures here, or a profile's
  // rows of the type's name, say: of a straggler.
  double slowness = 1;
  // Whether communication runs beside compute. If false every task of a rank
  // shares one stream.
  bool concurrent_streams = true;
  // Whether the devices of a node have one memory in common, through which they
  // move their own bytes: the cores of a host.
  bool shared_memory = false;
  Upkeep upkeep;
  int host = 0;  // index into Cluster::hosts: of the nodes with such devices

  // Zero when the type is not supported.
  FlopsPerSecond Peak(DType dtype) const;
  bool operator==(const DeviceType&) const = default;
};

// What a node has beside its devices: where they may keep what they do not use.
// Its figures are shared by the devices of the node, who use it alike.
struct Host {
  std::string source;               // where the figures below come from
  Bytes memory;                     // usable by tensors
  BytesPerSecond memory_bandwidth;  // reached by streaming kernels
  // Of each device, per direction, while all devices copy.
  BytesPerSecond device_link;
  // Zero where the node has no storage to keep files on.
  Bytes storage;
  BytesPerSecond storage_read;
  BytesPerSecond storage_write;
  bool operator==(const Host&) const = default;
};

struct LinkType {
  std::string name;          // "nvlink3", "ib-hdr"
  std::string source;        // where the figures below come from
  BytesPerSecond bandwidth;  // per direction
  Duration latency;
  // What a collective over such links takes before its first step, the launch
  // of its kernel included: of all its links the longest.
  Duration start = Duration::FromSeconds(8e-6);
  // Reached by sums and copies that the switch at its end makes (NVLink SHARP);
  // zero where it makes none.
  BytesPerSecond in_switch_bandwidth = {};
  // How many times as much its bandwidths were when collectives were measured:
  // of links that have become slow since.
  double slowness = 1;
  bool operator==(const LinkType&) const = default;
};

enum class VertexKind : uint8_t { kDevice, kNic, kBridge, kSwitch };

struct Vertex {
  VertexKind kind = VertexKind::kDevice;
  std::string name;  // "node0.gpu3", "node0.nvswitch", "spine"
  bool operator==(const Vertex&) const = default;
};

struct Device {
  int type = 0;     // index into Cluster::device_types
  VertexId vertex;  // where it sits in the graph
  int node = 0;     // host number, 0-based: ranks of one node are contiguous
  bool operator==(const Device&) const = default;
};

struct Link {
  VertexId from;
  VertexId to;
  int type = 0;  // index into Cluster::link_types
  bool operator==(const Link&) const = default;
};

struct Cluster {
  std::string name;  // "dgx-a100-80gb:4"
  std::vector<DeviceType> device_types;
  std::vector<LinkType> link_types;
  std::vector<Vertex> vertices;
  std::vector<Device> devices;  // in rank order
  std::vector<Link> links;
  std::vector<Host> hosts;  // without them nothing leaves devices
  Stack stack;              // the software of every node
  // The algorithm, or ALGORITHM/PROTOCOL, by which collectives run where they
  // can ("ring", "ring/simple", "/ll"); the fastest where empty. Names:
  // costmodel/collective.
  std::string collective;

  const DeviceType& TypeOf(DeviceId device) const {
    return device_types[static_cast<size_t>(devices[device.index()].type)];
  }
  // REQUIRES: there are hosts.
  const Host& HostOf(DeviceId device) const {
    return hosts[static_cast<size_t>(TypeOf(device).host)];
  }
  // Whether every host has room for files.
  bool HasStorage() const;
  int num_nodes() const;
  bool operator==(const Cluster&) const = default;
};

// The first of bf16 and fp16 in which every device is faster than in fp32, or
// fp32.
DType DefaultDType(const Cluster& cluster);

// Adds `link` in both directions.
void Connect(Cluster& cluster, VertexId a, VertexId b, int link_type);
VertexId AddVertex(Cluster& cluster, VertexKind kind, std::string name);
DeviceId AddDevice(Cluster& cluster, int type, int node, std::string name);

// All that is wrong with `cluster`: no devices, indices out of range, figures
// out of their bounds, devices that cannot reach each other (said only where
// nothing else is wrong), nodes not contiguous. Empty when valid. Each error's
// `where` names the field, such as "link_types[1].bandwidth".
//
// Bounds lie far outside of any machine, so that all times are finite counts of
// picoseconds: peaks in [1e9, 1e21] operations/s (or 0), bandwidths in [1e6,
// 1e18] bytes/s, memory and storage up to 1e18 bytes, latencies up to 1 s,
// launches up to 10 ms, slowness in [1e-3, 1e6], efficiencies in (0, 1].
std::vector<Error> Validate(const Cluster& cluster);

}  // namespace tessera
