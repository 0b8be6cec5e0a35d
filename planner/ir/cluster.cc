#include "planner/ir/cluster.h"

#include <cmath>
#include <cstdio>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "planner/base/indexed.h"

namespace tessera {
namespace {

bool InRange(int64_t index, size_t size) {
  return index >= 0 && static_cast<size_t>(index) < size;
}

// Bounds far outside of any machine, within which times of steps can be counted
// in picoseconds.
constexpr double kLeastBandwidth = 1e6;  // bytes/s
constexpr double kMostBandwidth = 1e18;
constexpr double kLeastPeak = 1e9;  // operations/s
constexpr double kMostPeak = 1e21;
constexpr double kMostBytes = 1e18;
constexpr double kLongestLatency = 1;  // s
constexpr double kLongestLaunch = 0.01;
constexpr double kLeastSlowness = 1e-3;
constexpr double kMostSlowness = 1e6;
constexpr double kMostPasses = 100;  // over values, of a stack's kernels
constexpr double kMostFragmentation = 10;
constexpr int kMostProcessors = 1 << 20;

std::string Short(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

// Collects errors; one function for each kind of mistake.
struct Problems {
  std::vector<Error> errors;

  void Add(const std::string& where, std::string message) {
    errors.push_back(InvalidInput(std::move(message), where));
  }
  void RequireAtMost(double value, double most, const std::string& where) {
    if (value > most) {
      Add(where, "must be at most " + Short(most) + ", is " + Short(value));
    }
  }
  void RequireNotNegative(double value, const std::string& where) {
    if (!(value >= 0)) Add(where, "must not be negative, is " + Short(value));
  }
  // In [0, most].
  void RequireUpTo(double most, double value, const std::string& where) {
    RequireNotNegative(value, where);
    RequireAtMost(value, most, where);
  }
  void RequireFinite(double value, const std::string& where) {
    RequireNotNegative(value, where);
    if (std::isinf(value)) Add(where, "must be finite");
  }
  void RequirePositiveBytes(Bytes bytes, const std::string& where) {
    const auto value = static_cast<double>(bytes.value);
    if (!(value > 0)) Add(where, "must be positive, is " + Short(value));
    RequireAtMost(value, kMostBytes, where);
  }
  void RequireBytes(Bytes bytes, const std::string& where) {
    RequireUpTo(kMostBytes, static_cast<double>(bytes.value), where);
  }
  void RequireBandwidth(BytesPerSecond bandwidth, const std::string& where) {
    const double value = bandwidth.value;
    if (!(value > 0)) {
      Add(where, "must be positive, is " + Short(value));
    } else if (value < kLeastBandwidth) {
      Add(where, "must be at least " + Short(kLeastBandwidth) + ", is " +
                     Short(value));
    }
    RequireAtMost(value, kMostBandwidth, where);
  }
  void RequirePeak(FlopsPerSecond peak, const std::string& where) {
    if (!(peak.value >= 0 && peak.value <= kMostPeak) ||
        (peak.value > 0 && peak.value < kLeastPeak)) {
      Add(where, "must be 0 or in [" + Short(kLeastPeak) + ", " +
                     Short(kMostPeak) + "], is " + Short(peak.value));
    }
  }
  void RequireLatency(Duration latency, const std::string& where) {
    RequireUpTo(kLongestLatency, latency.seconds(), where);
  }
  void RequireSlowness(double value, const std::string& where) {
    if (!(value >= kLeastSlowness && value <= kMostSlowness)) {
      Add(where, "must be in [" + Short(kLeastSlowness) + ", " +
                     Short(kMostSlowness) + "], is " + Short(value));
    }
  }
  void RequireFraction(double value, const std::string& where) {
    if (!(value > 0 && value <= 1)) {
      Add(where, "must be in (0, 1], is " + Short(value));
    }
  }
  void RequireShare(double value, const std::string& where) {
    if (!(value >= 0 && value <= 1)) {
      Add(where, "must be in [0, 1], is " + Short(value));
    }
  }
  void RequireIndex(int64_t index, size_t size, const std::string& where) {
    if (!InRange(index, size)) {
      Add(where, "is " + std::to_string(index) + ", must be in [0, " +
                     std::to_string(size) + ")");
    }
  }
};

void CheckDeviceType(const DeviceType& type, const std::string& at,
                     Problems& problems) {
  if (type.name.empty()) {
    problems.Add(at + ".name", "is empty: profiles have times by it");
  }
  problems.RequirePositiveBytes(type.memory, at + ".memory");
  const FlopsPerSecond peaks[] = {type.peak_fp64, type.peak_fp32,
                                  type.peak_bf16, type.peak_fp16,
                                  type.peak_fp8,  type.peak_fp4};
  const char* const names[] = {".peak_fp64", ".peak_fp32", ".peak_bf16",
                               ".peak_fp16", ".peak_fp8",  ".peak_fp4"};
  bool computes = false;
  for (size_t i = 0; i < std::size(peaks); ++i) {
    problems.RequirePeak(peaks[i], at + names[i]);
    computes |= peaks[i].value > 0;
  }
  if (!computes) {
    problems.Add(at, "one of the peaks must be positive, all are zero");
  }
  problems.RequireBandwidth(type.memory_bandwidth, at + ".memory_bandwidth");
  problems.RequireFraction(type.compute_efficiency, at + ".compute_efficiency");
  problems.RequireFraction(type.memory_efficiency, at + ".memory_efficiency");
  if (type.sustained_rate != 0) {
    problems.RequireFraction(type.sustained_rate, at + ".sustained_rate");
  }
  problems.RequireUpTo(kLongestLaunch, type.launch_overhead.seconds(),
                       at + ".launch_overhead");
  problems.RequireSlowness(type.slowness, at + ".slowness");
  if (type.multiprocessors < 0 || type.multiprocessors > kMostProcessors) {
    problems.Add(at + ".multiprocessors",
                 "must be in [0, " + std::to_string(kMostProcessors) +
                     "], is " + std::to_string(type.multiprocessors));
  } else if ((type.generation == GpuGeneration::kNone) !=
             (type.multiprocessors == 0)) {
    problems.Add(at + ".multiprocessors",
                 "must be given where generation is, and only there");
  }
  problems.RequireFinite(type.upkeep.price, at + ".upkeep.price");
  problems.RequireFinite(type.upkeep.power, at + ".upkeep.power");
  problems.RequireFinite(type.upkeep.mtbf, at + ".upkeep.mtbf");
}

void CheckLinkType(const LinkType& type, const std::string& at,
                   Problems& problems) {
  problems.RequireBandwidth(type.bandwidth, at + ".bandwidth");
  problems.RequireLatency(type.latency, at + ".latency");
  problems.RequireLatency(type.start, at + ".start");
  if (type.in_switch_bandwidth.value != 0) {
    problems.RequireBandwidth(type.in_switch_bandwidth,
                              at + ".in_switch_bandwidth");
  }
  problems.RequireSlowness(type.slowness, at + ".slowness");
}

void CheckStack(const Stack& stack, Problems& problems) {
  problems.RequireLatency(stack.host_per_operator, "stack.host_per_operator");
  problems.RequireUpTo(kMostPasses, stack.logits_passes, "stack.logits_passes");
  problems.RequireUpTo(kMostPasses, stack.kernel_traffic,
                       "stack.kernel_traffic");
  problems.RequireUpTo(kMostPasses, stack.optimizer_traffic,
                       "stack.optimizer_traffic");
  problems.RequireFraction(stack.sustained, "stack.sustained");
  problems.RequireUpTo(kMostBandwidth, stack.sharded_bandwidth.value,
                       "stack.sharded_bandwidth");
  problems.RequireLatency(stack.host_per_shard, "stack.host_per_shard");
  problems.RequireShare(stack.tensor_exposed, "stack.tensor_exposed");
  problems.RequireShare(stack.experts_exposed, "stack.experts_exposed");
  problems.RequireBytes(stack.memory.context, "stack.memory.context");
  problems.RequireBytes(stack.memory.zero_bucket, "stack.memory.zero_bucket");
  problems.RequireBytes(stack.memory.communicator, "stack.memory.communicator");
  problems.RequireUpTo(kMostFragmentation, stack.memory.fragmentation,
                       "stack.memory.fragmentation");
}

void CheckHost(const Host& host, const std::string& at, Problems& problems) {
  problems.RequirePositiveBytes(host.memory, at + ".memory");
  problems.RequireBandwidth(host.memory_bandwidth, at + ".memory_bandwidth");
  problems.RequireBandwidth(host.device_link, at + ".device_link");
  problems.RequireBytes(host.storage, at + ".storage");
  // Files are read and written where their room is not known, too.
  for (const auto& [rate, where] :
       {std::pair{host.storage_read, ".storage_read"},
        std::pair{host.storage_write, ".storage_write"}}) {
    if (host.storage > Bytes{} || rate.value != 0) {
      problems.RequireBandwidth(rate, at + where);
    }
  }
}

void CheckDevices(const Cluster& cluster, Problems& problems) {
  if (cluster.devices.empty()) problems.Add("devices", "must not be empty");
  std::vector<int> device_at(cluster.vertices.size(), -1);
  int node = 0;
  for (size_t i = 0; i < cluster.devices.size(); ++i) {
    const Device& device = cluster.devices[i];
    const std::string at = Indexed("devices", i);
    problems.RequireIndex(device.type, cluster.device_types.size(),
                          at + ".type");
    problems.RequireIndex(device.vertex.value, cluster.vertices.size(),
                          at + ".vertex");
    if (InRange(device.vertex.value, cluster.vertices.size())) {
      const size_t vertex = device.vertex.index();
      if (cluster.vertices[vertex].kind != VertexKind::kDevice) {
        problems.Add(at + ".vertex",
                     "vertex " + std::to_string(vertex) + " is not a device");
      }
      if (device_at[vertex] >= 0) {
        problems.Add(at + ".vertex", "vertex " + std::to_string(vertex) +
                                         " already is device " +
                                         std::to_string(device_at[vertex]));
      }
      device_at[vertex] = static_cast<int>(i);
    }
    const bool continues = device.node == node;
    const bool starts_next = i > 0 && device.node == node + 1;
    if (!continues && !starts_next) {
      problems.Add(at + ".node",
                   "is " + std::to_string(device.node) +
                       ": nodes count up from 0 and the ranks of one node "
                       "are contiguous");
    }
    const auto host_of = [&](const Device& of) {
      return cluster.device_types[static_cast<size_t>(of.type)].host;
    };
    if (problems.errors.empty() && continues && i > 0 &&
        host_of(device) != host_of(cluster.devices[i - 1])) {
      problems.Add(at + ".type", "has another host than " +
                                     Indexed("devices", i - 1) +
                                     ", which is of the same node");
    }
    node = device.node;
  }
  std::unordered_map<std::string_view, size_t> named;
  for (size_t v = 0; v < cluster.vertices.size(); ++v) {
    const Vertex& vertex = cluster.vertices[v];
    if (vertex.kind == VertexKind::kDevice && device_at[v] < 0) {
      problems.Add(Indexed("vertices", v), "is a device that no rank uses");
    }
    if (vertex.name.empty()) continue;
    const auto [first, is_new] = named.try_emplace(vertex.name, v);
    if (is_new) continue;
    problems.Add(Indexed("vertices", v, "name"),
                 "'" + vertex.name + "' is the name of vertex " +
                     std::to_string(first->second) + ", too");
  }
}

void CheckLinks(const Cluster& cluster, Problems& problems) {
  for (size_t i = 0; i < cluster.links.size(); ++i) {
    const Link& link = cluster.links[i];
    const std::string at = Indexed("links", i);
    problems.RequireIndex(link.from.value, cluster.vertices.size(),
                          at + ".from");
    problems.RequireIndex(link.to.value, cluster.vertices.size(), at + ".to");
    problems.RequireIndex(link.type, cluster.link_types.size(), at + ".type");
    if (link.from == link.to) problems.Add(at, "joins a vertex to itself");
  }
}

// The vertices that `start` reaches along `edges`.
std::vector<bool> Reached(const std::vector<std::vector<size_t>>& edges,
                          size_t start) {
  std::vector<bool> reached(edges.size(), false);
  std::vector<size_t> open = {start};
  reached[start] = true;
  while (!open.empty()) {
    const size_t vertex = open.back();
    open.pop_back();
    for (size_t next : edges[vertex]) {
      if (reached[next]) continue;
      reached[next] = true;
      open.push_back(next);
    }
  }
  return reached;
}

// All devices reach each other when device 0 reaches all and all reach it.
// REQUIRES: indices are in range.
void CheckConnected(const Cluster& cluster, Problems& problems) {
  std::vector<std::vector<size_t>> forward(cluster.vertices.size());
  std::vector<std::vector<size_t>> backward(cluster.vertices.size());
  for (const Link& link : cluster.links) {
    forward[link.from.index()].push_back(link.to.index());
    backward[link.to.index()].push_back(link.from.index());
  }
  const auto name_of = [&](size_t i) {
    const size_t vertex = cluster.devices[i].vertex.index();
    const std::string& name = cluster.vertices[vertex].name;
    return name.empty() ? "device " + std::to_string(i) : "'" + name + "'";
  };
  const size_t first = cluster.devices.front().vertex.index();
  const std::vector<bool> from_first = Reached(forward, first);
  const std::vector<bool> to_first = Reached(backward, first);
  for (size_t i = 0; i < cluster.devices.size(); ++i) {
    const size_t vertex = cluster.devices[i].vertex.index();
    if (!from_first[vertex]) {
      problems.Add(Indexed("devices", i),
                   name_of(i) + " cannot be reached from " + name_of(0));
    }
    if (!to_first[vertex]) {
      problems.Add(Indexed("devices", i),
                   name_of(i) + " cannot reach " + name_of(0));
    }
  }
}

// In the order of GpuGeneration.
constexpr std::string_view kGenerationNames[kGpuGenerations] = {
    "", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"};

}  // namespace

std::string_view NameOf(GpuGeneration generation) {
  return kGenerationNames[static_cast<size_t>(generation)];
}

Result<GpuGeneration> ParseGpuGeneration(std::string_view name) {
  std::string known;
  for (int g = 0; g < kGpuGenerations; ++g) {
    if (kGenerationNames[g] == name) return static_cast<GpuGeneration>(g);
    if (g > 0) known.append(g > 1 ? ", " : "").append(kGenerationNames[g]);
  }
  return InvalidInput("unknown generation '" + std::string(name) +
                      "'; known: " + known);
}

FlopsPerSecond DeviceType::Peak(DType dtype) const {
  switch (dtype) {
    case DType::kFloat64:
      return peak_fp64;
    case DType::kFloat32:
      return peak_fp32;
    case DType::kBFloat16:
      return peak_bf16;
    case DType::kFloat16:
      return peak_fp16;
    case DType::kInt32:
      return {};
  }
  return {};
}

bool Cluster::HasStorage() const {
  return !hosts.empty() && std::ranges::all_of(hosts, [](const Host& host) {
    return host.storage > Bytes{};
  });
}

int Cluster::num_nodes() const {
  return devices.empty() ? 0 : devices.back().node + 1;
}

DType DefaultDType(const Cluster& cluster) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    bool all = true;
    for (const DeviceType& type : cluster.device_types) {
      all = all && type.Peak(dtype).value > type.peak_fp32.value;
    }
    if (all) return dtype;
  }
  return DType::kFloat32;
}

void Connect(Cluster& cluster, VertexId a, VertexId b, int link_type) {
  cluster.links.push_back({a, b, link_type});
  cluster.links.push_back({b, a, link_type});
}

VertexId AddVertex(Cluster& cluster, VertexKind kind, std::string name) {
  cluster.vertices.push_back({kind, std::move(name)});
  return VertexId(static_cast<int64_t>(cluster.vertices.size()) - 1);
}

DeviceId AddDevice(Cluster& cluster, int type, int node, std::string name) {
  const VertexId vertex =
      AddVertex(cluster, VertexKind::kDevice, std::move(name));
  cluster.devices.push_back({type, vertex, node});
  return DeviceId(static_cast<int64_t>(cluster.devices.size()) - 1);
}

std::vector<Error> Validate(const Cluster& cluster) {
  Problems problems;
  for (size_t i = 0; i < cluster.device_types.size(); ++i) {
    const DeviceType& type = cluster.device_types[i];
    CheckDeviceType(type, Indexed("device_types", i), problems);
    const std::string host = Indexed("device_types", i) + ".host";
    if (!cluster.hosts.empty()) {
      problems.RequireIndex(type.host, cluster.hosts.size(), host);
    } else if (type.host != 0) {
      problems.Add(host, "is " + std::to_string(type.host) +
                             ", but there are no figures of hosts");
    }
  }
  for (size_t i = 0; i < cluster.link_types.size(); ++i) {
    CheckLinkType(cluster.link_types[i], Indexed("link_types", i), problems);
  }
  for (size_t i = 0; i < cluster.hosts.size(); ++i) {
    CheckHost(cluster.hosts[i], Indexed("hosts", i), problems);
  }
  CheckStack(cluster.stack, problems);
  CheckDevices(cluster, problems);
  CheckLinks(cluster, problems);
  if (problems.errors.empty()) CheckConnected(cluster, problems);
  return std::move(problems.errors);
}

}  // namespace tessera
