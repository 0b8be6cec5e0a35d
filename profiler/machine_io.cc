#include "profiler/machine_io.h"

#include "planner/io/proto_file_io.h"
#include "proto/machine.pb.h"

namespace tessera {
namespace {

void ToProto(const PciPlace& place, proto::PciPlace& out) {
  out.set_root(place.root);
  for (const PciNode& node : place.path) {
    proto::PciNode& row = *out.add_path();
    row.set_address(node.address);
    row.set_generation(node.generation);
    row.set_lanes(node.lanes);
  }
  out.set_numa_node(place.numa_node);
  out.set_near_cpus(place.near_cpus);
}

proto::Machine ToProto(const Machine& machine) {
  proto::Machine out;
  out.set_schema_version(kSchemaVersion);
  out.set_host(machine.host);
  out.set_cpu(machine.cpu);
  out.set_cpus(machine.cpus);
  out.set_numa_nodes(machine.numa_nodes);
  out.set_memory_bytes(machine.memory.value);
  out.set_driver(machine.driver);
  for (const FoundGpu& gpu : machine.gpus) {
    proto::FoundGpu& row = *out.add_gpus();
    row.set_name(gpu.name);
    row.set_memory_bytes(gpu.memory.value);
    ToProto(gpu.place, *row.mutable_place());
    row.set_switch_links(gpu.switch_links);
    for (const int links : gpu.peer_links) row.add_peer_links(links);
    row.set_nvlink_domain(gpu.nvlink_domain);
  }
  for (const FoundNic& nic : machine.nics) {
    proto::FoundNic& row = *out.add_nics();
    row.set_name(nic.name);
    row.set_rdma(nic.rdma);
    row.set_infiniband(nic.infiniband);
    row.set_gigabits_per_second(nic.gigabits);
    ToProto(nic.place, *row.mutable_place());
  }
  for (const std::string& text : machine.warnings) out.add_warnings(text);
  return out;
}

PciPlace FromProto(const proto::PciPlace& in) {
  PciPlace place;
  place.root = in.root();
  for (const proto::PciNode& node : in.path()) {
    place.path.push_back({node.address(), node.generation(), node.lanes()});
  }
  place.numa_node = in.numa_node();
  place.near_cpus = in.near_cpus();
  return place;
}

Machine FromProto(const proto::Machine& in) {
  Machine machine;
  machine.host = in.host();
  machine.cpu = in.cpu();
  machine.cpus = in.cpus();
  machine.numa_nodes = in.numa_nodes();
  machine.memory = {in.memory_bytes()};
  machine.driver = in.driver();
  for (const proto::FoundGpu& row : in.gpus()) {
    machine.gpus.push_back({row.name(),
                            {row.memory_bytes()},
                            FromProto(row.place()),
                            row.switch_links(),
                            {row.peer_links().begin(), row.peer_links().end()},
                            row.nvlink_domain()});
  }
  for (const proto::FoundNic& row : in.nics()) {
    machine.nics.push_back({row.name(), row.rdma(), row.infiniband(),
                            row.gigabits_per_second(), FromProto(row.place())});
  }
  machine.warnings.assign(in.warnings().begin(), in.warnings().end());
  return machine;
}

}  // namespace

std::string SerializeMachine(const Machine& machine) {
  return ToProto(machine).SerializeAsString();
}

Result<Machine> ParseMachine(std::string_view bytes) {
  proto::Machine message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) ||
      message.schema_version() != kSchemaVersion) {
    return InvalidInput("is no machine of this version");
  }
  return FromProto(message);
}

Result<std::string> JsonOfMachine(const Machine& machine) {
  TESSERA_TRY(std::string text, JsonOf(ToProto(machine)));
  while (text.ends_with('\n')) text.pop_back();
  return text;
}

}  // namespace tessera
