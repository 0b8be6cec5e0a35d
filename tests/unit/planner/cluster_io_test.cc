#include "planner/io/cluster_io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "planner/base/file.h"
#include "planner/topology/stacks.h"
#include "planner/topology/topologies.h"
#include "proto/cluster.pb.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

std::string WriteText(const std::string& name, const std::string& text) {
  const std::string path = TempPath(name);
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

// Two CPUs joined by a cable.
constexpr char kSmallJson[] = R"({
  "schema_version": 1,
  "name": "pair",
  "device_types": [{
    "name": "cpu", "memory_bytes": "1000",
    "peak_fp32_flops_per_second": 1e9,
    "memory_bandwidth_bytes_per_second": 1e9,
    "compute_efficiency": 0.5, "memory_efficiency": 0.5
  }],
  "link_types": [{"name": "cable", "bandwidth_bytes_per_second": 1e9}],
  "vertices": [{"kind": "VERTEX_KIND_DEVICE"}, {"kind": "VERTEX_KIND_DEVICE"}],
  "devices": [{"vertex": 0}, {"vertex": 1}],
  "links": [{"from_vertex": 0, "to_vertex": 1},
            {"from_vertex": 1, "to_vertex": 0}]
}
)";

std::string Replaced(std::string text, const std::string& from,
                     const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(ClusterIo, EveryPresetSurvivesEveryEncoding) {
  for (const Topology& topology : Topologies()) {
    for (const char* nodes : {":1", ":2"}) {
      const Cluster cluster = *MakeCluster(std::string(topology.name) + nodes);
      for (const char* ending :
           {".txtpb", ".textproto", ".pbtxt", ".json", ".pb"}) {
        const std::string path = TempPath(std::string("round_trip") + ending);
        ASSERT_TRUE(WriteCluster(path, cluster));
        const Result<Cluster> read = ReadCluster(path);
        ASSERT_TRUE(read) << read.error().ToString();
        EXPECT_EQ(*read, cluster) << cluster.name << ending;
        // Writing what was read gives the same bytes.
        const std::string bytes = *ReadFile(path);
        ASSERT_TRUE(WriteCluster(path, *read));
        EXPECT_EQ(*ReadFile(path), bytes) << cluster.name << ending;
      }
    }
  }
}

TEST(ClusterIo, HostsComeBack) {
  Cluster cluster = *MakeCluster("local-cpu:2");
  cluster.hosts.push_back({"a datasheet",
                           {1'000'001},
                           {1e6 + 2},
                           {1e6 + 3},
                           {1'000'004},
                           {1e6 + 5},
                           {1e6 + 6}});
  cluster.device_types[0].host = 1;
  for (const char* ending : {".txtpb", ".json", ".pb"}) {
    const std::string path = TempPath(std::string("host") + ending);
    ASSERT_TRUE(WriteCluster(path, cluster));
    const Result<Cluster> read = ReadCluster(path);
    ASSERT_TRUE(read) << read.error().ToString();
    EXPECT_EQ(*read, cluster) << ending;
  }
  // One host may stand where the list of them does.
  const std::string one = TempPath("one_host.json");
  ASSERT_TRUE(WriteCluster(one, *MakeCluster("local-cpu:2")));
  std::string text = *ReadFile(one);
  const size_t begin = text.find("[", text.find("\"host\": ["));
  ASSERT_NE(begin, std::string::npos);
  text[begin] = ' ';
  text[text.find("]", begin)] = ' ';
  EXPECT_EQ(*ReadCluster(WriteText("bare_host.json", text)),
            *MakeCluster("local-cpu:2"));
  // A storage that is not read at any rate, and none.
  const std::string path = TempPath("host.txtpb");
  const Result<Cluster> broken = ReadCluster(
      WriteText("host_broken.txtpb",
                Replaced(*ReadFile(path), "read_bytes_per_second: 1000005",
                         "read_bytes_per_second: 0")));
  ASSERT_FALSE(broken);
  EXPECT_THAT(broken.error().ToString(), HasSubstr("host[1].storage_read"));
  cluster.hosts.clear();
  cluster.device_types[0].host = 0;
  ASSERT_TRUE(WriteCluster(path, cluster));
  EXPECT_EQ(*ReadCluster(path), cluster);
}

TEST(ClusterIo, StacksComeBack) {
  Cluster cluster = *MakeCluster("local-cpu:2");
  for (const char* stack :
       {"tessera", "megatron-2021", "torchtitan-2024,keep-logits=never",
        "xla-2022,zero-bucket=5,fragmentation=0.5,gradient-copies=1"}) {
    cluster.stack = *ParseStack(stack);
    const std::string path = TempPath("stack.json");
    ASSERT_TRUE(WriteCluster(path, cluster));
    const auto back = ReadCluster(path);
    ASSERT_TRUE(back.has_value()) << back.error().ToString();
    EXPECT_EQ(back->stack, cluster.stack) << stack;
  }
}

TEST(ClusterIo, SlowPartsComeBack) {
  Cluster cluster = *MakeCluster("local-cpu:2");
  cluster.device_types[0].slowness = 1.5;
  cluster.link_types[0].slowness = 3;
  const std::string path = TempPath("slow.json");
  ASSERT_TRUE(WriteCluster(path, cluster));
  EXPECT_EQ(*ReadCluster(path), cluster);
  // Files of before have none.
  EXPECT_EQ(ReadCluster(WriteText("usual.json", kSmallJson))
                ->device_types[0]
                .slowness,
            1);
}

// Types of one name are those of one profile: they differ in nothing that it
// has, but may be slower than it was measured, and cost otherwise.
TEST(ClusterIo, TypesOfOneNameAreAlike) {
  Cluster cluster = *MakeCluster("dgx-a100-80gb:1");
  DeviceType& slow = cluster.device_types.emplace_back(cluster.device_types[0]);
  slow.source = "slow";
  slow.slowness = 1.5;
  slow.upkeep.price = 3;
  const std::string path = TempPath("alike.txtpb");
  ASSERT_TRUE(WriteCluster(path, cluster));
  EXPECT_EQ(*ReadCluster(path), cluster);
  cluster.device_types[1].memory = {1'000'000'000};
  ASSERT_TRUE(WriteCluster(path, cluster));
  EXPECT_EQ(ReadCluster(path).error().ToString(),
            path +
                ": device_types[1].name: 'a100-sxm4-80gb' is the name of "
                "device_types[0] too, which has other figures: expected "
                "another name");
  cluster.device_types[1].name = "small";
  const size_t links = cluster.link_types.size();
  cluster.link_types.push_back(cluster.link_types[0]);
  ASSERT_TRUE(WriteCluster(path, cluster));
  ASSERT_TRUE(ReadCluster(path));
  cluster.link_types[links].latency = Duration::FromSeconds(1e-3);
  ASSERT_TRUE(WriteCluster(path, cluster));
  EXPECT_THAT(ReadCluster(path).error().where,
              HasSubstr("link_types[" + std::to_string(links) + "].name"));
}

// Files that presets of unlike nodes are written to.
TEST(ClusterIo, MixturesComeBack) {
  int mixtures = 0;
  for (const Topology& a : Topologies()) {
    for (const Topology& b : Topologies()) {
      const auto cluster =
          MakeCluster(std::string(a.name) + ":1+" + std::string(b.name) + ":1");
      if (!cluster) continue;
      ++mixtures;
      const std::string path = TempPath("mixture.pb");
      ASSERT_TRUE(WriteCluster(path, *cluster));
      const auto back = ReadCluster(path);
      ASSERT_TRUE(back) << back.error().ToString();
      EXPECT_EQ(*back, *cluster);
    }
  }
  EXPECT_GT(mixtures, 0);
}

// Whether the file has a field of this path, with its units.
bool IsFieldPath(std::string_view path) {
  const google::protobuf::Descriptor* type = proto::Cluster::descriptor();
  const google::protobuf::FieldDescriptor* field = nullptr;
  while (!path.empty()) {
    const std::string_view part = path.substr(0, path.find('.'));
    path.remove_prefix(std::min(part.size() + 1, path.size()));
    const std::string_view name = part.substr(0, part.find('['));
    if (type == nullptr) return false;
    field = type->FindFieldByName(std::string(name));
    if (field == nullptr || field->is_repeated() != part.ends_with(']')) {
      return false;
    }
    type = field->message_type();
  }
  return field != nullptr;
}

// What is wrong is said by the names of the file. Each figure in turn is none;
// those that may be anything are not numbers, or have no bound.
TEST(ClusterIo, ErrorsNameFieldsOfTheFile) {
  const auto where = [](auto breaks) {
    Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
    breaks(cluster);
    const auto checked = CheckCluster(cluster);
    EXPECT_FALSE(checked);
    return checked ? "" : checked.error().where;
  };
  const auto first = [](Cluster& c) -> DeviceType& {
    return c.device_types[0];
  };
  const Duration late = {-1};
  const std::vector<std::pair<std::string, std::string>> places = {
      {where([&](Cluster& c) { first(c).name = ""; }), "device_types[0].name"},
      {where([&](Cluster& c) { first(c).memory = {}; }),
       "device_types[0].memory_bytes"},
      {where([&](Cluster& c) { first(c).peak_fp64 = {-1}; }),
       "device_types[0].peak_fp64_flops_per_second"},
      {where([&](Cluster& c) { first(c).peak_fp32 = {-1}; }),
       "device_types[0].peak_fp32_flops_per_second"},
      {where([&](Cluster& c) { first(c).peak_bf16 = {-1}; }),
       "device_types[0].peak_bf16_flops_per_second"},
      {where([&](Cluster& c) { first(c).peak_fp16 = {-1}; }),
       "device_types[0].peak_fp16_flops_per_second"},
      {where([&](Cluster& c) { first(c).peak_fp8 = {-1}; }),
       "device_types[0].peak_fp8_flops_per_second"},
      {where([&](Cluster& c) { first(c).peak_fp4 = {-1}; }),
       "device_types[0].peak_fp4_flops_per_second"},
      {where([&](Cluster& c) { first(c).memory_bandwidth = {}; }),
       "device_types[0].memory_bandwidth_bytes_per_second"},
      {where([&](Cluster& c) { first(c).compute_efficiency = 0; }),
       "device_types[0].compute_efficiency"},
      {where([&](Cluster& c) { first(c).memory_efficiency = 0; }),
       "device_types[0].memory_efficiency"},
      {where([&](Cluster& c) { first(c).sustained_rate = 2; }),
       "device_types[0].sustained_rate"},
      {where([&](Cluster& c) { first(c).launch_overhead = late; }),
       "device_types[0].launch_overhead_seconds"},
      {where([&](Cluster& c) { first(c).slowness = 0; }),
       "device_types[0].slowness"},
      {where([&](Cluster& c) { first(c).multiprocessors = -1; }),
       "device_types[0].multiprocessors"},
      {where([&](Cluster& c) { first(c).upkeep.price = -1; }),
       "device_types[0].upkeep.price_usd_per_hour"},
      {where([&](Cluster& c) { first(c).upkeep.power = -1; }),
       "device_types[0].upkeep.power_watts"},
      {where([&](Cluster& c) { first(c).upkeep.mtbf = -1; }),
       "device_types[0].upkeep.mtbf_seconds"},
      {where([](Cluster& c) { c.link_types[1].bandwidth = {}; }),
       "link_types[1].bandwidth_bytes_per_second"},
      {where([&](Cluster& c) { c.link_types[1].latency = late; }),
       "link_types[1].latency_seconds"},
      {where([&](Cluster& c) { c.link_types[1].start = late; }),
       "link_types[1].start_seconds"},
      {where([](Cluster& c) { c.link_types[1].in_switch_bandwidth = {-1}; }),
       "link_types[1].in_switch_bandwidth_bytes_per_second"},
      {where([](Cluster& c) { c.link_types[1].slowness = 0; }),
       "link_types[1].slowness"},
      {where([](Cluster& c) { c.hosts[0].memory = {}; }),
       "host[0].memory_bytes"},
      {where([](Cluster& c) { c.hosts[0].memory_bandwidth = {}; }),
       "host[0].memory_bandwidth_bytes_per_second"},
      {where([](Cluster& c) { c.hosts[0].device_link = {}; }),
       "host[0].device_link_bytes_per_second"},
      {where([](Cluster& c) { c.hosts[0].storage = {-1}; }),
       "host[0].storage_bytes"},
      {where([](Cluster& c) { c.hosts[0].storage_read = {}; }),
       "host[0].storage_read_bytes_per_second"},
      {where([](Cluster& c) { c.hosts[0].storage_write = {}; }),
       "host[0].storage_write_bytes_per_second"},
      {where([&](Cluster& c) { c.stack.host_per_operator = late; }),
       "stack.host_seconds_per_operator"},
      {where([](Cluster& c) { c.stack.logits_passes = -1; }),
       "stack.logits_passes"},
      {where([](Cluster& c) { c.stack.kernel_traffic = -1; }),
       "stack.kernel_traffic"},
      {where([](Cluster& c) { c.stack.optimizer_traffic = -1; }),
       "stack.optimizer_traffic"},
      {where([](Cluster& c) { c.stack.sustained = 0; }), "stack.sustained"},
      {where([](Cluster& c) { c.stack.sharded_bandwidth = {-1}; }),
       "stack.sharded_bytes_per_second"},
      {where([&](Cluster& c) { c.stack.host_per_shard = late; }),
       "stack.host_seconds_per_shard"},
      {where([](Cluster& c) { c.stack.tensor_exposed = 2; }),
       "stack.tensor_exposed"},
      {where([](Cluster& c) { c.stack.experts_exposed = 2; }),
       "stack.experts_exposed"},
      {where([](Cluster& c) { c.stack.memory.context = {-1}; }),
       "stack.memory.context_bytes"},
      {where([](Cluster& c) { c.stack.memory.zero_bucket = {-1}; }),
       "stack.memory.zero_bucket_bytes"},
      {where([](Cluster& c) { c.stack.memory.communicator = {-1}; }),
       "stack.memory.communicator_bytes"},
      {where([](Cluster& c) { c.stack.memory.fragmentation = -1; }),
       "stack.memory.fragmentation"},
      {where([](Cluster& c) { c.vertices[2].name = c.vertices[1].name; }),
       "vertices[2].name"},
      {where([](Cluster& c) { c.devices[2].type = 7; }),
       "devices[2].device_type"},
      {where([](Cluster& c) { c.devices[2].vertex = VertexId(-1); }),
       "devices[2].vertex"},
      {where([](Cluster& c) { c.devices[2].node = 5; }), "devices[2].node"},
      {where([](Cluster& c) { c.links[3].from = VertexId(-1); }),
       "links[3].from_vertex"},
      {where([](Cluster& c) { c.links[3].to = VertexId(-1); }),
       "links[3].to_vertex"},
      {where([](Cluster& c) { c.links[3].type = -1; }), "links[3].link_type"},
      {where([](Cluster& c) { c.links[3].to = c.links[3].from; }), "links[3]"},
  };
  for (const auto& [found, expected] : places) {
    EXPECT_EQ(found, expected);
    EXPECT_TRUE(IsFieldPath(found)) << found;
  }
}

TEST(ClusterIo, LoadsPathsAndPresets) {
  const std::string path = WriteText("small.json", kSmallJson);
  const Result<Cluster> from_file = LoadCluster(path);
  ASSERT_TRUE(from_file) << from_file.error().ToString();
  EXPECT_EQ(from_file->name, "pair");
  EXPECT_EQ(from_file->devices.size(), 2u);
  EXPECT_EQ(LoadCluster("dgx-h100:2")->devices.size(), 16u);
  EXPECT_THAT(LoadCluster("no-such-thing").error().message,
              HasSubstr("unknown cluster"));
  // What is there is no slip of a preset's name.
  const std::string other = WriteText("small.cfg", kSmallJson);
  for (const std::string& there : {other, other.substr(0, other.rfind('/'))}) {
    const Result<Cluster> cluster = LoadCluster(there);
    ASSERT_FALSE(cluster);
    EXPECT_EQ(cluster.error().ToString(),
              there +
                  ": no preset, and no cluster file by its ending: expected "
                  ".txtpb, .textproto, .pbtxt, .json or .pb");
  }
  // It has its numbers in it.
  EXPECT_EQ(LoadCluster(path + ":4").error().ToString(),
            path + ":4: a file lists its nodes: expected '" + path +
                "' alone, in 'tessera whatif' with --set nodes=N for others");
}

TEST(ClusterIo, NamesFilePlaceAndMistake) {
  const struct {
    std::string ending;
    std::string text;
    std::string where;
    std::string message;
  } cases[] = {
      {".json",
       Replaced(kSmallJson, "\"bandwidth_bytes_per_second\": 1e9",
                "\"bandwidth_bytes_per_second\": 0"),
       ".json: link_types[0].bandwidth_bytes_per_second", "must be positive"},
      {".json", Replaced(kSmallJson, "from_vertex", "from_vertx"),
       ".json:13:14",
       "unknown field 'from_vertx'; did you mean 'from_vertex'?"},
      {".json",
       Replaced(kSmallJson, "\"name\": \"pair\"", "\"schema_version\": 1"),
       ".json:3:3", "occurs twice"},
      {".json", std::string(kSmallJson).substr(0, 200),
       ".json:8:", "the file ends early"},
      {".json", "", ".json:1:1", "the file ends early"},
      {".json", "\x01\x02garbage", ".json:1:1", "expected '{'"},
      {".json", Replaced(kSmallJson, "\"pair\",", "\"pair\""), ".json:4:3",
       "expected ',' or '}'"},
      {".json", Replaced(kSmallJson, "\"1000\"", "\"many\""),
       ".json:5:36: device_types[0].memory_bytes",
       "is \"many\": expected a whole number of 64 bits"},
      {".json",
       Replaced(kSmallJson, "\"name\": \"cpu\"",
                "\"name\": \"cpu\", \"generation\": \"hoper\""),
       ".json: device_types[0].generation",
       "unknown generation 'hoper'; known: pascal, volta"},
      {".json", Replaced(kSmallJson, "\"schema_version\": 1,", ""), ".json",
       "schema_version is missing"},
      {".json",
       Replaced(kSmallJson, "\"schema_version\": 1", "\"schema_version\": 2"),
       ".json", "schema_version is 2: expected 1"},
      {".json",
       Replaced(kSmallJson, "{\"kind\": \"VERTEX_KIND_DEVICE\"}", "{}"),
       ".json: vertices[0].kind", "must be"},
      {".json", Replaced(kSmallJson, "\"vertex\": 1", "\"vertex\": 5"),
       ".json: devices[1].vertex", "is 5, must be in [0, 2)"},
      {".txtpb", "schema_version: 1\nnam: \"x\"\n",
       ".txtpb:2:", "did you mean 'name'?"},
      {".txtpb", "schema_version: 1\ndevice_types { name: \"x\"",
       ".txtpb:2:", "Expected identifier"},
      {".txtpb", "schema_version: 1\n", ".txtpb: devices", "must not be empty"},
      {".txtpb", "schema_version: 1\ndevices { node: 1 node: 2 }\n",
       ".txtpb:2:", "specified multiple times"},
      // Zeros, which protobuf takes for absent, at any depth.
      {".txtpb", "name: ''\nname: ''\nschema_version: 1\n", ".txtpb:2:1",
       "field 'name' occurs twice"},
      {".pbtxt",
       "# Comment\nschema_version: 1\nname: 'a' \"b\";\n"
       "device_types: [{memory_bytes: -1, upkeep <price_usd_per_hour: 0.f>},\n"
       "  {slowness: 1 upkeep {power_watts: 0 power_watts: 0}}]",
       ".pbtxt:5:39", "field 'power_watts' occurs twice"},
      {".textproto", "devices { device_type: 0 device_type: 0 }\n",
       ".textproto:1:26", "field 'device_type' occurs twice"},
      {".pb", "\xff\xff garbage", ".pb", "truncated or garbage"},
      {".pb", "", ".pb", "schema_version is missing"},
  };
  int number = 0;
  for (const auto& broken : cases) {
    const std::string path = WriteText(
        "bad" + std::to_string(number++) + broken.ending, broken.text);
    const Result<Cluster> cluster = ReadCluster(path);
    ASSERT_FALSE(cluster) << broken.message;
    const Error& error = cluster.error();
    EXPECT_EQ(error.code, ErrorCode::kInvalidInput) << error.ToString();
    EXPECT_THAT(error.where, ::testing::StartsWith(path));
    EXPECT_THAT(error.where, HasSubstr(broken.where)) << error.ToString();
    EXPECT_THAT(error.message, HasSubstr(broken.message));
    EXPECT_EQ(error.ToString().find('\n'), std::string::npos);
  }
}

// No prefix of a file may pass for the whole, nor crash the reader. A binary
// file cut between two fields is a smaller cluster, which validation refuses
// here: the links come last, and each is needed.
TEST(ClusterIo, EveryTruncationIsAnError) {
  const Cluster cluster = *ReadCluster(WriteText("whole.json", kSmallJson));
  for (const char* ending : {".txtpb", ".json", ".pb"}) {
    const std::string whole = TempPath(std::string("whole") + ending);
    ASSERT_TRUE(WriteCluster(whole, cluster));
    std::string bytes = *ReadFile(whole);
    while (!bytes.empty() && bytes.back() == '\n') bytes.pop_back();
    for (size_t size = 0; size < bytes.size(); ++size) {
      const std::string cut =
          WriteText(std::string("cut") + ending, bytes.substr(0, size));
      EXPECT_FALSE(ReadCluster(cut)) << ending << " cut to " << size;
    }
  }
}

TEST(ClusterIo, MissingFilesAndUnknownEndings) {
  const Result<Cluster> missing = ReadCluster(TempPath("missing.json"));
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_EQ(missing.error().where, TempPath("missing.json"));
  const Result<Cluster> ending = ReadCluster(TempPath("cluster.yaml"));
  ASSERT_FALSE(ending);
  EXPECT_THAT(ending.error().message,
              HasSubstr("expected .txtpb, .textproto, .pbtxt, .json or "
                        ".pb"));
}

}  // namespace
}  // namespace tessera
