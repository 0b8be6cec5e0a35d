#include "planner/io/cluster_io.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "planner/base/append.h"
#include "planner/base/format.h"
#include "planner/base/indexed.h"
#include "planner/io/proto_endings.h"
#include "planner/io/proto_field_io.h"
#include "planner/io/proto_file_io.h"
#include "planner/topology/topologies.h"
#include "proto/cluster.pb.h"

namespace tessera {
namespace {

// The vertex kinds in the order of the file's enum, from 1.
constexpr VertexKind kVertexKinds[] = {VertexKind::kDevice, VertexKind::kNic,
                                       VertexKind::kBridge,
                                       VertexKind::kSwitch};

proto::VertexKind ToProto(VertexKind kind) {
  int value = 1;
  for (VertexKind known : kVertexKinds) {
    if (known == kind) break;
    ++value;
  }
  return static_cast<proto::VertexKind>(value);
}

// Within the range of Duration, and a number.
Result<Duration> ToDuration(double seconds, const std::string& where) {
  if (!(std::abs(seconds) < 9e6)) {
    return InvalidInput(
        "is " + FormatNumber(seconds) + " s: expected less than 9e6 s", where);
  }
  return Duration::FromSeconds(seconds);
}

proto::Stack ToProto(const Stack& stack) {
  proto::Stack row;
  row.set_name(stack.name);
  row.set_source(stack.source);
  row.set_host_seconds_per_operator(stack.host_per_operator.seconds());
  row.set_overlaps(stack.overlaps);
  row.set_attention(static_cast<proto::StackAttention>(stack.attention));
  row.set_fuses_projections(stack.fuses_projections);
  row.set_fuses_elementwise(stack.fuses_elementwise);
  row.set_logits_passes(stack.logits_passes);
  row.set_kernel_traffic(stack.kernel_traffic);
  row.set_optimizer_traffic(stack.optimizer_traffic);
  row.set_sustained(stack.sustained);
  row.set_sharded_bytes_per_second(stack.sharded_bandwidth.value);
  row.set_host_seconds_per_shard(stack.host_per_shard.seconds());
  row.set_split_sends(static_cast<proto::SplitSends>(stack.split_sends));
  row.set_tensor_exposed(stack.tensor_exposed);
  row.set_experts_exposed(stack.experts_exposed);
  row.set_experts_once_per_host(stack.experts_once_per_host);
  row.set_products(static_cast<proto::ProductType>(stack.products));
  proto::StackMemory& memory = *row.mutable_memory();
  memory.set_dropout_masks(stack.memory.dropout_masks);
  memory.set_fp16_gradients(stack.memory.fp16_gradients);
  memory.set_bf16_gradients(stack.memory.bf16_gradients);
  memory.set_gradient_copies(stack.memory.gradient_copies);
  memory.set_whole_gradients(stack.memory.whole_gradients);
  memory.set_zero_bucket_bytes(stack.memory.zero_bucket.value);
  memory.set_logits(static_cast<proto::StackLogits>(stack.memory.logits));
  memory.set_context_bytes(stack.memory.context.value);
  memory.set_communicator_bytes(stack.memory.communicator.value);
  memory.set_fragmentation(stack.memory.fragmentation);
  return row;
}

proto::DeviceType ToProto(const DeviceType& type) {
  proto::DeviceType row;
  row.set_name(type.name);
  row.set_source(type.source);
  row.set_memory_bytes(type.memory.value);
  row.set_peak_fp64_flops_per_second(type.peak_fp64.value);
  row.set_peak_fp32_flops_per_second(type.peak_fp32.value);
  row.set_peak_bf16_flops_per_second(type.peak_bf16.value);
  row.set_peak_fp16_flops_per_second(type.peak_fp16.value);
  row.set_memory_bandwidth_bytes_per_second(type.memory_bandwidth.value);
  row.set_compute_efficiency(type.compute_efficiency);
  row.set_memory_efficiency(type.memory_efficiency);
  row.set_sustained_rate(type.sustained_rate);
  row.set_slowness(type.slowness);
  row.set_launch_overhead_seconds(type.launch_overhead.seconds());
  row.set_concurrent_streams(type.concurrent_streams);
  row.set_shared_memory(type.shared_memory);
  row.set_host(type.host);
  row.set_peak_fp8_flops_per_second(type.peak_fp8.value);
  row.set_peak_fp4_flops_per_second(type.peak_fp4.value);
  row.set_generation(std::string(NameOf(type.generation)));
  row.set_multiprocessors(type.multiprocessors);
  if (type.upkeep == Upkeep{}) return row;
  proto::Upkeep& upkeep = *row.mutable_upkeep();
  upkeep.set_source(type.upkeep.source);
  upkeep.set_price_usd_per_hour(type.upkeep.price);
  upkeep.set_power_watts(type.upkeep.power);
  upkeep.set_mtbf_seconds(type.upkeep.mtbf);
  return row;
}

proto::LinkType ToProto(const LinkType& type) {
  proto::LinkType row;
  row.set_name(type.name);
  row.set_source(type.source);
  row.set_bandwidth_bytes_per_second(type.bandwidth.value);
  row.set_latency_seconds(type.latency.seconds());
  row.set_start_seconds(type.start.seconds());
  row.set_in_switch_bandwidth_bytes_per_second(type.in_switch_bandwidth.value);
  row.set_slowness(type.slowness);
  return row;
}

proto::Host ToProto(const Host& host) {
  proto::Host row;
  row.set_source(host.source);
  row.set_memory_bytes(host.memory.value);
  row.set_memory_bandwidth_bytes_per_second(host.memory_bandwidth.value);
  row.set_device_link_bytes_per_second(host.device_link.value);
  row.set_storage_bytes(host.storage.value);
  row.set_storage_read_bytes_per_second(host.storage_read.value);
  row.set_storage_write_bytes_per_second(host.storage_write.value);
  return row;
}

proto::Cluster ToProto(const Cluster& cluster) {
  proto::Cluster out;
  out.set_schema_version(kSchemaVersion);
  out.set_name(cluster.name);
  out.set_collective(cluster.collective);
  for (const DeviceType& type : cluster.device_types) {
    *out.add_device_types() = ToProto(type);
  }
  for (const LinkType& type : cluster.link_types) {
    *out.add_link_types() = ToProto(type);
  }
  for (const Host& host : cluster.hosts) *out.add_host() = ToProto(host);
  if (cluster.stack != Stack()) *out.mutable_stack() = ToProto(cluster.stack);
  for (const Vertex& vertex : cluster.vertices) {
    proto::Vertex& row = *out.add_vertices();
    row.set_kind(ToProto(vertex.kind));
    row.set_name(vertex.name);
  }
  for (const Device& device : cluster.devices) {
    proto::Device& row = *out.add_devices();
    row.set_device_type(device.type);
    row.set_vertex(device.vertex.value);
    row.set_node(device.node);
  }
  for (const Link& link : cluster.links) {
    proto::Link& row = *out.add_links();
    row.set_from_vertex(link.from.value);
    row.set_to_vertex(link.to.value);
    row.set_link_type(link.type);
  }
  return out;
}

Result<DeviceType> FromProto(const proto::DeviceType& row,
                             const std::string& at) {
  DeviceType type;
  type.name = row.name();
  type.source = row.source();
  type.memory = {row.memory_bytes()};
  type.peak_fp64 = {row.peak_fp64_flops_per_second()};
  type.peak_fp32 = {row.peak_fp32_flops_per_second()};
  type.peak_bf16 = {row.peak_bf16_flops_per_second()};
  type.peak_fp16 = {row.peak_fp16_flops_per_second()};
  type.memory_bandwidth = {row.memory_bandwidth_bytes_per_second()};
  type.compute_efficiency = row.compute_efficiency();
  type.memory_efficiency = row.memory_efficiency();
  type.sustained_rate = row.sustained_rate();
  if (row.has_slowness()) type.slowness = row.slowness();
  TESSERA_TRY(type.launch_overhead,
              ToDuration(row.launch_overhead_seconds(),
                         at + ".launch_overhead_seconds"));
  type.concurrent_streams = row.concurrent_streams();
  type.shared_memory = row.shared_memory();
  type.host = row.host();
  type.peak_fp8 = {row.peak_fp8_flops_per_second()};
  type.peak_fp4 = {row.peak_fp4_flops_per_second()};
  auto generation = ParseGpuGeneration(row.generation());
  if (!generation) return generation.error().At(at + ".generation");
  type.generation = *generation;
  type.multiprocessors = row.multiprocessors();
  type.upkeep = {row.upkeep().source(), row.upkeep().price_usd_per_hour(),
                 row.upkeep().power_watts(), row.upkeep().mtbf_seconds()};
  return type;
}

Result<LinkType> FromProto(const proto::LinkType& row, const std::string& at) {
  LinkType type;
  type.name = row.name();
  type.source = row.source();
  type.bandwidth = {row.bandwidth_bytes_per_second()};
  TESSERA_TRY(type.latency,
              ToDuration(row.latency_seconds(), at + ".latency_seconds"));
  if (row.has_start_seconds()) {
    TESSERA_TRY(type.start,
                ToDuration(row.start_seconds(), at + ".start_seconds"));
  }
  type.in_switch_bandwidth = {row.in_switch_bandwidth_bytes_per_second()};
  if (row.has_slowness()) type.slowness = row.slowness();
  return type;
}

Host FromProto(const proto::Host& row) {
  return {row.source(),
          {row.memory_bytes()},
          {row.memory_bandwidth_bytes_per_second()},
          {row.device_link_bytes_per_second()},
          {row.storage_bytes()},
          {row.storage_read_bytes_per_second()},
          {row.storage_write_bytes_per_second()}};
}

// Of an enum of the file whose values are those of `Enum`, up to `last`.
template <typename Enum, typename ProtoEnum>
Result<Enum> ToEnum(ProtoEnum value, ProtoEnum last, std::string_view names,
                    const std::string& where) {
  if (value < 0 || value > last) {
    return InvalidInput("must be " + std::string(names), where);
  }
  return static_cast<Enum>(value);
}

Result<StackMemory> FromProto(const proto::StackMemory& row) {
  StackMemory memory;
  memory.dropout_masks = row.dropout_masks();
  memory.fp16_gradients = row.fp16_gradients();
  memory.bf16_gradients = row.bf16_gradients();
  memory.gradient_copies = row.gradient_copies();
  memory.whole_gradients = row.whole_gradients();
  memory.zero_bucket = {row.zero_bucket_bytes()};
  TESSERA_TRY(memory.logits,
              ToEnum<StackLogits>(row.logits(), proto::STACK_LOGITS_NEVER,
                                  "STACK_LOGITS_AS_VALUES, _FP32 or _NEVER",
                                  "stack.memory.logits"));
  memory.context = {row.context_bytes()};
  memory.communicator = {row.communicator_bytes()};
  memory.fragmentation = row.fragmentation();
  return memory;
}

Result<Stack> FromProto(const proto::Stack& row) {
  Stack stack;
  stack.name = row.name();
  stack.source = row.source();
  TESSERA_TRY(stack.host_per_operator,
              ToDuration(row.host_seconds_per_operator(),
                         "stack.host_seconds_per_operator"));
  stack.overlaps = row.overlaps();
  TESSERA_TRY(
      stack.attention,
      ToEnum<StackAttention>(row.attention(), proto::STACK_ATTENTION_UNFUSED,
                             "STACK_ATTENTION_FUSED, _FLASH_1 or _UNFUSED",
                             "stack.attention"));
  stack.fuses_projections = row.fuses_projections();
  stack.fuses_elementwise = row.fuses_elementwise();
  stack.logits_passes = row.logits_passes();
  stack.kernel_traffic = row.kernel_traffic();
  stack.optimizer_traffic = row.optimizer_traffic();
  stack.sustained = row.sustained();
  stack.sharded_bandwidth = {row.sharded_bytes_per_second()};
  TESSERA_TRY(stack.host_per_shard, ToDuration(row.host_seconds_per_shard(),
                                               "stack.host_seconds_per_shard"));
  TESSERA_TRY(stack.split_sends,
              ToEnum<SplitSends>(row.split_sends(), proto::SPLIT_SENDS_ALWAYS,
                                 "SPLIT_SENDS_NEVER, _FORWARD or _ALWAYS",
                                 "stack.split_sends"));
  stack.tensor_exposed = row.tensor_exposed();
  if (row.has_experts_exposed()) stack.experts_exposed = row.experts_exposed();
  stack.experts_once_per_host = row.experts_once_per_host();
  TESSERA_TRY(stack.products,
              ToEnum<ProductType>(row.products(), proto::PRODUCT_TYPE_FP4,
                                  "PRODUCT_TYPE_AS_VALUES, _FP8 or _FP4",
                                  "stack.products"));
  TESSERA_TRY(stack.memory, FromProto(row.memory()));
  return stack;
}

Result<Cluster> FromProto(const proto::Cluster& in) {
  Cluster out;
  out.name = in.name();
  out.collective = in.collective();
  for (int i = 0; i < in.device_types_size(); ++i) {
    TESSERA_TRY(DeviceType type,
                FromProto(in.device_types(i), Indexed("device_types", i)));
    out.device_types.push_back(std::move(type));
  }
  for (int i = 0; i < in.link_types_size(); ++i) {
    TESSERA_TRY(LinkType type,
                FromProto(in.link_types(i), Indexed("link_types", i)));
    out.link_types.push_back(std::move(type));
  }
  for (const proto::Host& host : in.host()) {
    out.hosts.push_back(FromProto(host));
  }
  if (in.has_stack()) {
    TESSERA_TRY(out.stack, FromProto(in.stack()));
  }
  for (int i = 0; i < in.vertices_size(); ++i) {
    const int kind = in.vertices(i).kind();
    if (kind < 1 || kind > static_cast<int>(std::size(kVertexKinds))) {
      return InvalidInput(
          "must be VERTEX_KIND_DEVICE, _NIC, _BRIDGE or _SWITCH",
          Indexed("vertices", i, "kind"));
    }
    out.vertices.push_back({kVertexKinds[kind - 1], in.vertices(i).name()});
  }
  for (const proto::Device& row : in.devices()) {
    out.devices.push_back(
        {row.device_type(), VertexId(row.vertex()), row.node()});
  }
  for (const proto::Link& row : in.links()) {
    out.links.push_back({VertexId(row.from_vertex()), VertexId(row.to_vertex()),
                         row.link_type()});
  }
  return out;
}

// The fields of the file whose names are not the struct's, or these with a
// unit.
struct Renamed {
  std::string_view message;
  std::string_view field;
  std::string_view in_file;
};
constexpr Renamed kRenamed[] = {
    {"Cluster", "hosts", "host"},
    {"Device", "type", "device_type"},
    {"Link", "from", "from_vertex"},
    {"Link", "to", "to_vertex"},
    {"Link", "type", "link_type"},
    {"Stack", "host_per_operator", "host_seconds_per_operator"},
    {"Stack", "host_per_shard", "host_seconds_per_shard"},
    {"Stack", "sharded_bandwidth", "sharded_bytes_per_second"},
};

const google::protobuf::FieldDescriptor* FieldInFile(
    const google::protobuf::Descriptor& type, const std::string& field) {
  for (const Renamed& row : kRenamed) {
    if (row.message == type.name() && row.field == field) {
      return type.FindFieldByName(std::string(row.in_file));
    }
  }
  for (const char* const unit :
       {"", "_bytes", "_bytes_per_second", "_flops_per_second", "_seconds",
        "_usd_per_hour", "_watts"}) {
    if (const auto* found = type.FindFieldByName(field + unit)) return found;
  }
  return nullptr;
}

// Validate() names the struct's fields: "link_types[1].bandwidth".
std::string AsInFile(std::string_view where) {
  const google::protobuf::Descriptor* type = proto::Cluster::descriptor();
  std::string in_file;
  while (!where.empty()) {
    const std::string_view part = where.substr(0, where.find('.'));
    where.remove_prefix(std::min(part.size() + 1, where.size()));
    const std::string_view name = part.substr(0, part.find('['));
    const auto* const field = FieldInFile(*type, std::string(name));
    TESSERA_CHECK(field != nullptr) << type->name() << " has no " << name;
    AppendTo(
        in_file, ".",
        std::string(field->name()) + std::string(part.substr(name.size())));
    type = field->message_type();
  }
  return in_file;
}

// What a profile's rows of a type's name are of, and what its figures say.
DeviceType Measured(DeviceType type) {
  type.source.clear();
  type.host = 0;
  type.slowness = 1;
  type.upkeep = {};
  return type;
}
LinkType Measured(LinkType type) {
  type.source.clear();
  type.bandwidth = {type.bandwidth.value * type.slowness};
  type.in_switch_bandwidth = {type.in_switch_bandwidth.value * type.slowness};
  type.slowness = 1;
  return type;
}

// Profiles and paths tell types by their names: two of one name are alike, but
// for what they cost and for devices that are slower than was measured.
template <typename Type>
Result<void> CheckNames(const std::vector<Type>& types,
                        std::string_view field) {
  for (size_t i = 0; i < types.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (types[i].name != types[j].name ||
          Measured(types[i]) == Measured(types[j])) {
        continue;
      }
      return InvalidInput("'" + types[i].name + "' is the name of " +
                              Indexed(field, j) +
                              " too, which has other figures: expected another "
                              "name",
                          Indexed(field, i, "name"));
    }
  }
  return {};
}

Result<Cluster> Checked(Result<Cluster> cluster) {
  if (!cluster) return cluster;
  TESSERA_RETURN_IF_ERROR(CheckCluster(*cluster));
  return cluster;
}

}  // namespace

Result<void> CheckCluster(const Cluster& cluster) {
  const std::vector<Error> errors = Validate(cluster);
  if (errors.empty()) return {};
  Error first = errors.front();
  first.where = AsInFile(first.where);
  if (errors.size() > 1) {
    first.message +=
        " (and " + std::to_string(errors.size() - 1) + " more problems)";
  }
  return first;
}

Result<Cluster> ReadCluster(const std::string& path) {
  proto::Cluster message;
  TESSERA_RETURN_IF_ERROR(ReadProtoFile(path, message));
  auto cluster = Checked(FromProto(message));
  if (!cluster) return cluster.error().At(path);
  for (const auto& checked : {CheckNames(cluster->device_types, "device_types"),
                              CheckNames(cluster->link_types, "link_types")}) {
    if (!checked) return checked.error().At(path);
  }
  return cluster;
}

Result<Cluster> WithFields(const Cluster& cluster,
                           std::span<const FieldValue> fields) {
  proto::Cluster message = ToProto(cluster);
  // Its fields are set one by one, the default stack's too.
  *message.mutable_stack() = ToProto(cluster.stack);
  for (const FieldValue& field : fields) {
    if (auto set = SetField(field.path, field.amount, message); !set) {
      return set.error().At(field.path);
    }
  }
  return Checked(FromProto(message));
}

std::vector<std::string> ClusterFieldPaths() {
  return FieldPaths(proto::Cluster());
}

Result<void> WriteCluster(const std::string& path, const Cluster& cluster) {
  const std::vector<Error> errors = Validate(cluster);
  TESSERA_CHECK(errors.empty()) << errors.front().ToString();
  return WriteProtoFile(path, ToProto(cluster));
}

Result<Cluster> LoadCluster(std::string_view spec_or_path) {
  const std::string path(spec_or_path);
  if (HasProtoFileEnding(path)) return ReadCluster(path);
  const size_t colon = path.rfind(':');
  if (colon != std::string::npos && HasProtoFileEnding(path.substr(0, colon))) {
    return InvalidInput(
        "a file lists its nodes: expected '" + path.substr(0, colon) +
            "' alone, in 'tessera whatif' with --set nodes=N for others",
        path);
  }
  auto preset = MakeCluster(spec_or_path);
  std::error_code unreadable;
  if (preset || !std::filesystem::exists(path, unreadable)) return preset;
  return InvalidInput(
      "no preset, and no cluster file by its ending: expected " +
          ProtoEndings(),
      path);
}

}  // namespace tessera
