#include "profiler/discover.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>

#include "costmodel/link/router.h"
#include "planner/io/cluster_io.h"
#include "planner/topology/hardware.h"
#include "planner/topology/topologies.h"
#include "profiler/machine_io.h"
#include "tests/support/paths.h"
#include "tests/support/tiny_training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace fs = std::filesystem;

HostSpeed SomeSpeed() {
  HostSpeed speed;
  speed.one_core = {5e9};
  speed.all_cores = {40e9};
  return speed;
}

// Device `slot` of a PCIe switch: behind a root port, the switch's upstream
// port and a downstream port of its own.
PciPlace OnSwitch(int numa, int number, int slot, int generation) {
  const std::string bus = std::to_string(number);
  PciPlace place;
  place.root = "pci0000:" + bus + "0";
  place.path = {
      {"0000:" + bus + "0:01.0", generation, 16},
      {"0000:" + bus + "1:00.0", generation, 16},
      {"0000:" + bus + "2:0" + std::to_string(slot) + ".0", generation, 16},
      {"0000:" + bus + std::to_string(3 + slot) + ":00.0", generation, 16}};
  place.numa_node = numa;
  return place;
}

FoundNic InfiniBand(int number, double gigabits, PciPlace place) {
  return {"mlx5_" + std::to_string(number), true, true, gigabits,
          std::move(place)};
}

// As DGX A100 System User Guide (2020) has it: two GPUs and two cards on each
// of four PCIe 4 switches, two switches on each socket, twelve links to
// NVSwitches; two further cards for storage, of half the speed.
Machine DgxA100() {
  Machine machine;
  machine.host = "dgx";
  machine.cpu = "AMD EPYC 7742 64-Core Processor";
  machine.memory = {int64_t{2} << 40};
  machine.driver = "580.65";
  for (int g = 0; g < 8; ++g) {
    FoundGpu gpu;
    gpu.name = "NVIDIA A100-SXM4-80GB";
    gpu.memory = {int64_t{81251} << 20};  // nvidia-smi's MiB
    gpu.place = OnSwitch(g / 4, g / 2, g % 2, 4);
    gpu.switch_links = 12;
    gpu.peer_links.assign(8, 0);
    machine.gpus.push_back(gpu);
    machine.nics.push_back(
        InfiniBand(g, 200, OnSwitch(g / 4, g / 2, 2 + g % 2, 4)));
  }
  machine.nics.push_back(InfiniBand(8, 100, OnSwitch(0, 8, 0, 4)));
  machine.nics.push_back(InfiniBand(9, 100, OnSwitch(1, 9, 0, 4)));
  return machine;
}

// Every pair of devices is as far apart in both, link by link.
void ExpectSameDistances(const Cluster& found, const Cluster& preset) {
  ASSERT_EQ(found.devices.size(), preset.devices.size());
  const Router a(found);
  const Router b(preset);
  const auto links = [](const Cluster& cluster,
                        std::span<const RouteLink> route) {
    std::vector<std::pair<double, int64_t>> links;
    for (const auto& [id, share] : route) {
      const LinkType& type =
          cluster
              .link_types[static_cast<size_t>(cluster.links[id.index()].type)];
      links.emplace_back(type.bandwidth.value, type.latency.picoseconds);
    }
    return links;
  };
  for (int64_t from = 0; from < std::ssize(found.devices); ++from) {
    for (int64_t to = 0; to < std::ssize(found.devices); ++to) {
      const DeviceId s(from);
      const DeviceId t(to);
      EXPECT_EQ(links(found, a.Route(s, t)), links(preset, b.Route(s, t)))
          << from << " to " << to;
    }
  }
}

TEST(DiscoverTest, DgxA100IsItsPreset) {
  const Machine machines[] = {DgxA100(), DgxA100()};
  const Cluster cluster = ClusterOfMachines(machines, SomeSpeed()).value();
  EXPECT_THAT(Validate(cluster), IsEmpty());
  EXPECT_EQ(cluster.name, "16 x NVIDIA A100-SXM4-80GB on 2 hosts");
  const Cluster preset = MakeCluster("dgx-a100-80gb:2").value();
  ExpectSameDistances(cluster, preset);
  EXPECT_EQ(cluster.device_types, preset.device_types);
  // PCIe 4 at 25.2 GB/s, shared by the two GPUs of a switch.
  EXPECT_EQ(cluster.hosts[0].device_link, preset.hosts[0].device_link);
  // A copied byte is read and written.
  EXPECT_EQ(cluster.hosts[0].memory_bandwidth.value, 80e9);
  EXPECT_EQ(cluster.hosts[0].storage.value, 0);
}

// Host `number` of a GB200 NVL72: four GPUs with 18 links each and four cards.
Machine TrayOfNvl72(int number, const std::string& domain) {
  Machine machine;
  machine.host = "tray" + std::to_string(number);
  machine.memory = {int64_t{960} << 30};
  for (int g = 0; g < 4; ++g) {
    FoundGpu gpu;
    gpu.name = "NVIDIA GB200";
    gpu.memory = {int64_t{189471} << 20};
    gpu.place = OnSwitch(g / 2, g, 0, 6);
    gpu.switch_links = 18;
    gpu.peer_links.assign(4, 0);
    gpu.nvlink_domain = domain;
    machine.gpus.push_back(gpu);
    machine.nics.push_back(InfiniBand(g, 400, OnSwitch(g / 2, g, 1, 6)));
  }
  return machine;
}

// Of two trays that are a node each has a disk of its own, and not a file
// system on a network.
TEST(DiscoverTest, StorageOnANetworkIsOne) {
  const std::vector<Machine> machines = {TrayOfNvl72(0, "ab/1"),
                                         TrayOfNvl72(1, "ab/1")};
  HostSpeed speed = SomeSpeed();
  speed.storage = {.free = {1000}, .read = {30}, .write = {20}};
  for (const bool shared : {false, true}) {
    speed.storage->shared = shared;
    const Host host = ClusterOfMachines(machines, speed)->hosts[0];
    const int storages = shared ? 1 : 2;
    EXPECT_EQ(host.storage.value, storages * 1000);
    EXPECT_EQ(host.storage_read.value, storages * 30);
    EXPECT_EQ(host.storage_write.value, storages * 20);
  }
}

// A tray that stands between two of another domain makes two nodes of that one.
// 19 trays have more than the 72 GPUs of a GB200 NVL72.
TEST(DiscoverTest, ASplitDomainIsToldOf) {
  const auto split = [](const std::vector<std::string>& domains) {
    std::vector<Machine> machines;
    for (const std::string& domain : domains) {
      machines.push_back(
          TrayOfNvl72(static_cast<int>(machines.size()), domain));
    }
    return SplitDomains(machines);
  };
  EXPECT_THAT(split({"ab/1", "ab/1", "ab/2"}), IsEmpty());
  EXPECT_THAT(split({"", "ab/1", ""}), IsEmpty());
  EXPECT_THAT(split({"ab/1", "ab/2", "ab/1"}),
              ElementsAre(AllOf(HasSubstr("2 nodes"), HasSubstr("ab/1"))));
  EXPECT_THAT(split(std::vector<std::string>(18, "ab/1")), IsEmpty());
  EXPECT_THAT(split(std::vector<std::string>(19, "ab/1")),
              ElementsAre(HasSubstr("2 nodes")));
}

// Two trays of one NVLink domain and three of another, of which none shares a
// switch with the next domain's.
TEST(DiscoverTest, HostsOfAnNvLinkDomainAreOneNode) {
  std::vector<Machine> machines;
  for (int tray = 0; tray < 5; ++tray) {
    machines.push_back(TrayOfNvl72(tray, tray < 2 ? "ab/1" : "ab/2"));
  }
  const Cluster cluster = ClusterOfMachines(machines, SomeSpeed()).value();
  EXPECT_THAT(Validate(cluster), IsEmpty());
  ASSERT_EQ(cluster.devices.size(), 20u);
  EXPECT_EQ(cluster.num_nodes(), 2);
  EXPECT_EQ(cluster.devices[7].node, 0);
  EXPECT_EQ(cluster.devices[8].node, 1);
  // Within a domain there are two NVLinks between any two GPUs, and none
  // between domains.
  const Router router(cluster);
  const auto nvlinks = [&](int from, int to) {
    int count = 0;
    for (const auto& [id, share] : router.Route(DeviceId(from), DeviceId(to))) {
      const int type = cluster.links[id.index()].type;
      count +=
          cluster.link_types[static_cast<size_t>(type)].name == "nvlink5-nvl72"
              ? 1
              : 0;
    }
    return count;
  };
  EXPECT_EQ(nvlinks(0, 3), 2);
  EXPECT_EQ(nvlinks(0, 7), 2);
  EXPECT_EQ(nvlinks(8, 19), 2);
  EXPECT_EQ(nvlinks(7, 8), 0);
  // Of two hosts and of three.
  ASSERT_EQ(cluster.hosts.size(), 2u);
  EXPECT_EQ(cluster.HostOf(DeviceId(0)).memory.value, int64_t{2 * 960} << 30);
  EXPECT_EQ(cluster.HostOf(DeviceId(8)).memory.value, int64_t{3 * 960} << 30);
  EXPECT_EQ(cluster.HostOf(DeviceId(8)).memory_bandwidth.value, 3 * 80e9);
}

// As 19 hosts are by --nodes: a rack has 18.
TEST(DiscoverTest, ANodeHasNoMoreGpusThanItsSystem) {
  const std::vector<Machine> machines(19, TrayOfNvl72(0, "ab/1"));
  const Cluster cluster = ClusterOfMachines(machines, SomeSpeed()).value();
  EXPECT_THAT(Validate(cluster), IsEmpty());
  EXPECT_EQ(cluster.num_nodes(), 2);
  EXPECT_EQ(cluster.devices[71].node, 0);
  EXPECT_EQ(cluster.devices[72].node, 1);
}

// The mesh of a DGX-1V, as the whitepaper draws it.
TEST(DiscoverTest, CubeMeshHasItsNvLinks) {
  constexpr int kLinks[8][8] = {
      {0, 1, 1, 2, 2, 0, 0, 0}, {1, 0, 2, 1, 0, 2, 0, 0},
      {1, 2, 0, 2, 0, 0, 1, 0}, {2, 1, 2, 0, 0, 0, 0, 1},
      {2, 0, 0, 0, 0, 1, 1, 2}, {0, 2, 0, 0, 1, 0, 2, 1},
      {0, 0, 1, 0, 1, 2, 0, 2}, {0, 0, 0, 1, 2, 1, 2, 0}};
  Machine machine;
  machine.host = "dgx1";
  machine.memory = {int64_t{512} << 30};
  for (int g = 0; g < 8; ++g) {
    FoundGpu gpu;
    gpu.name = "Tesla V100-SXM2-32GB";
    gpu.memory = {int64_t{32510} << 20};
    gpu.place = OnSwitch(g / 4, g / 2, g % 2, 3);
    gpu.peer_links.assign(std::begin(kLinks[g]), std::end(kLinks[g]));
    machine.gpus.push_back(gpu);
  }
  const Cluster cluster = ClusterOfMachines({&machine, 1}, SomeSpeed()).value();
  EXPECT_THAT(Validate(cluster), IsEmpty());
  const Cluster preset = MakeCluster("dgx1-v100-32gb").value();
  const Router found(cluster);
  const Router known(preset);
  for (int64_t from = 0; from < 8; ++from) {
    for (int64_t to = 0; to < 8; ++to) {
      if (kLinks[from][to] == 0) continue;
      const auto route = found.Route(DeviceId(from), DeviceId(to));
      ASSERT_EQ(route.size(), 1u) << from << " to " << to;
      const auto bandwidth = [](const Cluster& of, LinkId id) {
        return of.link_types[static_cast<size_t>(of.links[id.index()].type)]
            .bandwidth.value;
      };
      EXPECT_EQ(
          bandwidth(cluster, route[0].link),
          bandwidth(preset, known.Route(DeviceId(from), DeviceId(to))[0].link));
    }
  }
}

TEST(DiscoverTest, LinksAreScaledFromTheNearestPreset) {
  Machine machine;
  machine.host = "box";
  machine.memory = {int64_t{64} << 30};
  for (int g = 0; g < 2; ++g) {
    FoundGpu gpu;
    gpu.name = "NVIDIA A100-SXM4-40GB";
    gpu.memory = {int64_t{40} << 30};
    gpu.place.root = "pci0000:00";
    gpu.place.path = {{"0000:0" + std::to_string(g + 1) + ":00.0", 2, 8}};
    gpu.peer_links = {g == 0 ? 0 : 4, g == 0 ? 4 : 0};
    machine.gpus.push_back(gpu);
  }
  FoundNic nic;
  nic.name = "eth0";
  nic.gigabits = 25;
  machine.nics.push_back(nic);
  const Machine machines[] = {machine, machine};
  const Cluster cluster = ClusterOfMachines(machines, SomeSpeed()).value();
  EXPECT_THAT(Validate(cluster), IsEmpty());
  const auto type = [&](std::string_view name) {
    for (const LinkType& row : cluster.link_types) {
      if (row.name == name) return row;
    }
    ADD_FAILURE() << "no " << name;
    return LinkType{};
  };
  // A quarter of PCIe 3 x16's 12.6 GB/s: half the rate, half the lanes.
  EXPECT_DOUBLE_EQ(type("pcie2-x8").bandwidth.value, 12.6e9 / 4);
  // 4 of 12 links; straight, so the latency of both halves.
  EXPECT_DOUBLE_EQ(type("nvlink3-direct-x4").bandwidth.value,
                   LinkTypeNamed("nvlink3").bandwidth.value / 3);
  EXPECT_EQ(type("nvlink3-direct-x4").latency,
            LinkTypeNamed("nvlink3").latency * 2);
  // 84 % of 25 Gb/s.
  EXPECT_DOUBLE_EQ(type("ethernet-25g").bandwidth.value, 0.84 * 25e9 / 8);
  EXPECT_DOUBLE_EQ(cluster.hosts[0].device_link.value, 12.6e9 / 4);
}

// A figure has one row: what the tables have is not scaled from another.
TEST(DiscoverTest, LinksOfTheTablesAreTheirs) {
  const auto types = [](int generation, const FoundNic& nic) {
    Machine machine;
    machine.host = "box";
    machine.memory = {int64_t{64} << 30};
    FoundGpu gpu;
    gpu.name = "NVIDIA A100-SXM4-40GB";
    gpu.memory = {int64_t{40} << 30};
    gpu.place.root = "pci0000:00";
    gpu.place.path = {{"0000:01:00.0", generation, 16}};
    gpu.peer_links = {0};
    machine.gpus = {gpu};
    machine.nics = {nic};
    const Machine machines[] = {machine, machine};
    const Cluster cluster = ClusterOfMachines(machines, SomeSpeed()).value();
    std::map<std::string, LinkType> types;
    for (const LinkType& type : cluster.link_types) types[type.name] = type;
    return types;
  };
  const FoundNic ethernet = {"eth0", false, false, 10, {}};
  for (int generation = 3; generation <= 6; ++generation) {
    const std::string name = "pcie" + std::to_string(generation) + "-x16";
    EXPECT_EQ(types(generation, ethernet).at(name), LinkTypeNamed(name));
  }
  // Twice the last row.
  EXPECT_DOUBLE_EQ(types(7, ethernet).at("pcie7-x16").bandwidth.value,
                   2 * LinkTypeNamed("pcie6-x16").bandwidth.value);
  EXPECT_EQ(types(5, ethernet).at("ethernet-10g"),
            LinkTypeNamed("ethernet-10g"));
  const FoundNic roce = {"mlx5_0", true, false, 200, {}};
  EXPECT_EQ(types(5, roce).at("roce-200g"), LinkTypeNamed("roce-200g"));
  const FoundNic efa = {"rdmap0", true, false, 400, {}};
  EXPECT_EQ(types(5, efa).at("efa-400g"), LinkTypeNamed("efa-400g"));
}

TEST(DiscoverTest, SaysWhatItCannotDo) {
  Machine machine = DgxA100();
  machine.gpus[3].name = "NVIDIA Z1";
  auto cluster = ClusterOfMachines({&machine, 1}, SomeSpeed());
  ASSERT_FALSE(cluster);
  EXPECT_EQ(cluster.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(cluster.error().ToString(), HasSubstr("'NVIDIA Z1'"));
  EXPECT_THAT(cluster.error().ToString(), HasSubstr("NVIDIA H200"));

  machine = DgxA100();
  machine.nics.resize(7);
  machine.host = "other";
  const Machine unlike[] = {DgxA100(), machine};
  cluster = ClusterOfMachines(unlike, SomeSpeed());
  ASSERT_FALSE(cluster);
  EXPECT_EQ(cluster.error().ToString(), "other: 7 network cards, but 8 on dgx");

  machine.nics.clear();
  const Machine alone[] = {machine, machine};
  EXPECT_EQ(ClusterOfMachines(alone, SomeSpeed()).error().ToString(),
            "other: no network card has a link");
  machine.gpus.clear();
  EXPECT_FALSE(ClusterOfMachines({&machine, 1}, SomeSpeed()));
}

TEST(DiscoverTest, WhatIsNotSaidIsAnAssumption) {
  Machine machine = DgxA100();
  EXPECT_THAT(Assumptions(machine, 2), IsEmpty());
  machine.gpus[1].place = {};
  machine.nics = {{"eth0", false, false, 0, {}}};
  EXPECT_THAT(Assumptions(machine, 2),
              ElementsAre(HasSubstr("GPU 1"), HasSubstr("eth0")));
  // Alone it needs no network.
  EXPECT_THAT(Assumptions(machine, 1), ElementsAre(HasSubstr("GPU 1")));
  machine.warnings = {"GPU 8 is left out"};
  EXPECT_THAT(Assumptions(machine, 1),
              ElementsAre("GPU 8 is left out", HasSubstr("GPU 1")));
}

TEST(DiscoverTest, CoresHaveTheHostsMemoryAndMeasuredCopies) {
  Machine machine;
  machine.host = "here";
  machine.memory = {int64_t{16} << 30};
  const Cluster cluster = ClusterOfCores(machine, 4, SomeSpeed());
  EXPECT_THAT(Validate(cluster), IsEmpty());
  EXPECT_EQ(cluster.devices.size(), 4u);
  EXPECT_EQ(cluster.device_types[0].memory.value, int64_t{4} << 30);
  for (const LinkType& type : cluster.link_types) {
    EXPECT_EQ(type.bandwidth.value, type.name == "shm-copy" ? 5e9 : 40e9);
  }
}

TEST(DiscoverTest, MachinesTravel) {
  Machine machine = DgxA100();
  machine.gpus[3].nvlink_domain = "ab/7";
  machine.warnings = {"GPU 8 is left out: lost"};
  EXPECT_EQ(ParseMachine(SerializeMachine(machine)).value(), machine);
  EXPECT_FALSE(ParseMachine("no machine"));
  EXPECT_FALSE(ParseMachine(""));
}

// A variable that is set, or null: not set, for a time.
class WithVariable {
 public:
  WithVariable(const char* name, const char* value) : name_(name) {
    if (const char* const before = std::getenv(name)) before_ = before;
    Set(value);
  }
  WithVariable(const WithVariable&) = delete;
  WithVariable& operator=(const WithVariable&) = delete;
  ~WithVariable() { Set(before_ ? before_->c_str() : nullptr); }

 private:
  void Set(const char* value) const {
    if (value == nullptr) {
      unsetenv(name_);
    } else {
      setenv(name_, value, /*overwrite=*/1);
    }
  }

  const char* const name_;
  std::optional<std::string> before_;
};

// A tree of files as Linux shows devices.
class SysTest : public ::testing::Test {
 protected:
  SysTest() : root_(TempPath("root")) { fs::remove_all(root_); }
  ~SysTest() override { fs::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const fs::path full = root_ + "/" + path;
    fs::create_directories(full.parent_path());
    std::ofstream(full) << text << "\n";
  }
  void LinkTo(const std::string& path, const std::string& target) {
    const fs::path full = root_ + "/" + path;
    fs::create_directories(full.parent_path());
    fs::create_directory_symlink(root_ + "/" + target, full);
  }
  // A PCI device at `path` below sys/devices.
  void AddPci(const std::string& path, const std::string& speed, int lanes) {
    const std::string device = "sys/devices/" + path;
    Write(device + "/max_link_speed", speed);
    Write(device + "/current_link_width", std::to_string(lanes));
    Write(device + "/numa_node", "1");
    Write(device + "/local_cpulist", "32-63");
    LinkTo("sys/bus/pci/devices/" + fs::path(path).filename().string(), device);
  }

  const std::string root_;

 private:
  // Who runs the tests may hide GPUs.
  const WithVariable all_visible_{"CUDA_VISIBLE_DEVICES", nullptr};
};

TEST_F(SysTest, FindsAPlaceInThePciTree) {
  AddPci("pci0000:48/0000:48:01.0", "16.0 GT/s PCIe", 16);
  AddPci("pci0000:48/0000:48:01.0/0000:49:00.0", "32.0 GT/s PCIe", 8);
  const PciPlace place = FindPciPlace(root_, "00000000:49:00.0");
  EXPECT_EQ(place.root, "pci0000:48");
  // The port is of generation 4, and so is the link.
  EXPECT_THAT(place.path, ElementsAre(PciNode{"0000:48:01.0", 4, 16},
                                      PciNode{"0000:49:00.0", 4, 8}));
  EXPECT_EQ(place.numa_node, 1);
  EXPECT_EQ(place.near_cpus, "32-63");
  // Where one of the two does not say, the other does.
  AddPci("pci0000:58/0000:58:01.0", "Unknown", 16);
  AddPci("pci0000:58/0000:58:01.0/0000:59:00.0", "32.0 GT/s PCIe", 8);
  AddPci("pci0000:58/0000:58:01.0/0000:59:00.0/0000:5a:00.0", "Unknown", 8);
  EXPECT_THAT(
      FindPciPlace(root_, "0000:5a:00.0").path,
      ElementsAre(PciNode{"0000:58:01.0", 0, 16}, PciNode{"0000:59:00.0", 5, 8},
                  PciNode{"0000:5a:00.0", 5, 8}));
  EXPECT_EQ(FindPciPlace(root_, "0000:77:00.0"), PciPlace{});
  EXPECT_EQ(FindPciPlace(root_, "../../etc"), PciPlace{});
}

TEST_F(SysTest, ReadsProcessorsMemoryAndCards) {
  Write("proc/sys/kernel/hostname", "node7");
  Write("proc/cpuinfo", "processor\t: 0\nmodel name\t: A CPU @ 2 GHz");
  Write("proc/meminfo", "MemTotal:       1024 kB\nMemFree:  1 kB");
  Write("sys/devices/system/node/node0/cpulist", "0-31");
  Write("sys/devices/system/node/node1/cpulist", "32-63");
  Write("sys/devices/system/node/power/control", "auto");

  // An InfiniBand card, its Ethernet twin, a plain card, one without a link, a
  // bridge without a device, an RDMA card that is down.
  AddPci("pci0000:10/0000:11:00.0", "32.0 GT/s PCIe", 16);
  const std::string mlx = "sys/devices/pci0000:10/0000:11:00.0";
  Write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE");
  Write("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)");
  Write("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand");
  LinkTo("sys/class/infiniband/mlx5_0/device", mlx);
  Write("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN");
  Write("sys/class/net/ib0/operstate", "up");
  LinkTo("sys/class/net/ib0/device", mlx);
  AddPci("pci0000:10/0000:12:00.0", "8.0 GT/s PCIe", 8);
  Write("sys/class/net/eth0/operstate", "up");
  Write("sys/class/net/eth0/speed", "25000");
  LinkTo("sys/class/net/eth0/device", "sys/devices/pci0000:10/0000:12:00.0");
  AddPci("pci0000:10/0000:13:00.0", "8.0 GT/s PCIe", 8);
  Write("sys/class/net/eth1/operstate", "down");
  LinkTo("sys/class/net/eth1/device", "sys/devices/pci0000:10/0000:13:00.0");
  Write("sys/class/net/docker0/operstate", "up");
  // In a virtual machine: behind a PCI device that says little.
  Write("sys/devices/pci0000:00/0000:00:03.0/virtio1/features", "0");
  Write("sys/devices/pci0000:00/0000:00:03.0/local_cpulist", "0-1");
  Write("sys/class/net/eth2/operstate", "up");
  Write("sys/class/net/eth2/speed", "-1");
  LinkTo("sys/class/net/eth2/device",
         "sys/devices/pci0000:00/0000:00:03.0/virtio1");

  const Machine machine = ReadMachine(root_);
  EXPECT_EQ(machine.host, "node7");
  EXPECT_EQ(machine.cpu, "A CPU @ 2 GHz");
  EXPECT_EQ(machine.memory.value, 1 << 20);
  EXPECT_EQ(machine.numa_nodes, 2);
  ASSERT_EQ(machine.nics.size(), 3u);
  EXPECT_EQ(machine.nics[0].name, "mlx5_0");
  EXPECT_TRUE(machine.nics[0].infiniband);
  EXPECT_EQ(machine.nics[0].gigabits, 400);
  EXPECT_THAT(machine.nics[0].place.path,
              ElementsAre(PciNode{"0000:11:00.0", 5, 16}));
  EXPECT_EQ(machine.nics[1].name, "eth0");
  EXPECT_FALSE(machine.nics[1].rdma);
  EXPECT_EQ(machine.nics[1].gigabits, 25);
  EXPECT_EQ(machine.nics[2].name, "eth2");
  EXPECT_EQ(machine.nics[2].gigabits, 0);
  EXPECT_EQ(machine.nics[2].place.near_cpus, "0-1");
}

// Texts as Linux has them: of an EPYC, of Graviton 2 (which is started by ACPI
// and has no device tree), and of a Raspberry Pi 4.
TEST(ProcessorName, IsWhatTheSystemSays) {
  EXPECT_EQ(ProcessorName("processor\t: 0\nmodel\t\t: 17\n"
                          "model name\t: AMD EPYC 9654 96-Core Processor\n",
                          ""),
            "AMD EPYC 9654 96-Core Processor");
  const std::string arm =
      "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd\n"
      "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\n"
      "CPU part\t: 0xd0c\nCPU revision\t: 1\n";
  EXPECT_EQ(ProcessorName(arm, ""), "CPU implementer 0x41, part 0xd0c");
  EXPECT_EQ(
      ProcessorName(arm, std::string("Raspberry Pi 4 Model B Rev 1.4\0", 31)),
      "Raspberry Pi 4 Model B Rev 1.4");
  EXPECT_EQ(ProcessorName("", ""), "unknown processor");
  EXPECT_EQ(ProcessorName("processor\t: 0\nisa\t: rv64imafdc\n", ""),
            "unknown processor");
}

TEST_F(SysTest, AnArmMachineHasItsDeviceTreesName) {
  Write("proc/cpuinfo", "CPU implementer\t: 0x41\nCPU part\t: 0xd0c");
  EXPECT_EQ(ReadMachine(root_).cpu, "CPU implementer 0x41, part 0xd0c");
  // The zero is behind it, and a line's end that Write adds.
  Write("proc/device-tree/model", std::string("A board\0", 8));
  EXPECT_EQ(ReadMachine(root_).cpu, "A board");
}

TEST_F(SysTest, AnEmptySystemIsNoError) {
  const Machine machine = ReadMachine(root_);
  EXPECT_EQ(machine.cpu, "unknown processor");
  EXPECT_THAT(machine.nics, IsEmpty());
  EXPECT_EQ(machine.memory.value, 0);
}

// A library with NVML's interface and two GPUs (tests/fake_nvml).
TEST_F(SysTest, GpusComeFromTheDriversLibrary) {
  AddPci("pci0000:48/0000:4a:00.0", "32.0 GT/s PCIe", 16);
  Machine machine;
  ASSERT_TRUE(AddGpus(machine, root_, TESSERA_FAKE_NVML));
  EXPECT_EQ(machine.driver, "580.65.06");
  ASSERT_EQ(machine.gpus.size(), 2u);
  EXPECT_EQ(machine.gpus[0].name, "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(machine.gpus[0].memory.value, int64_t{81559} << 20);
  EXPECT_EQ(machine.gpus[0].place.path.back(),
            (PciNode{"0000:4a:00.0", 5, 16}));
  EXPECT_THAT(machine.gpus[1].place.path, IsEmpty());
  // Links 0 and 1 to switches, 2 to the other GPU, 3 inactive.
  for (size_t g = 0; g < 2; ++g) {
    EXPECT_EQ(machine.gpus[g].switch_links, 2);
    EXPECT_EQ(machine.gpus[g].peer_links[1 - g], 1);
    EXPECT_EQ(machine.gpus[g].peer_links[g], 0);
  }
}

TEST_F(SysTest, AnIntegratedGpuHasTheHostsMemory) {
  Machine machine;
  machine.memory = {int64_t{128} << 30};
  const WithVariable integrated("TESSERA_FAKE_INTEGRATED", "1");
  const auto added = AddGpus(machine, root_, TESSERA_FAKE_NVML);
  ASSERT_TRUE(added) << added.error().ToString();
  ASSERT_EQ(machine.gpus.size(), 2u);
  EXPECT_EQ(machine.gpus[0].memory, machine.memory);
}

TEST_F(SysTest, ALostGpuIsLeftOut) {
  const WithVariable lost("TESSERA_FAKE_LOST", "1");
  Machine machine;
  ASSERT_TRUE(AddGpus(machine, root_, TESSERA_FAKE_NVML));
  ASSERT_EQ(machine.gpus.size(), 1u);
  // Its link to the other one goes nowhere.
  EXPECT_THAT(machine.gpus[0].peer_links, ElementsAre(0));
  EXPECT_THAT(machine.warnings,
              ElementsAre("GPU 0 is left out: nvmlDeviceGetHandleByIndex: GPU "
                          "is lost"));
  const WithVariable both("TESSERA_FAKE_LOST", "2");
  Machine none;
  EXPECT_FALSE(AddGpus(none, root_, TESSERA_FAKE_NVML));
}

TEST_F(SysTest, HiddenGpusAreAWarning) {
  const auto warnings = [&](const char* visible) {
    const WithVariable set("CUDA_VISIBLE_DEVICES", visible);
    Machine machine;
    EXPECT_TRUE(AddGpus(machine, root_, TESSERA_FAKE_NVML));
    EXPECT_EQ(machine.gpus.size(), 2u);
    return machine.warnings;
  };
  EXPECT_THAT(warnings("0,1"), IsEmpty());
  EXPECT_THAT(warnings("1"),
              ElementsAre("CUDA_VISIBLE_DEVICES is '1': a program here has 1 "
                          "of the 2 GPUs that are described"));
  EXPECT_THAT(warnings(""), ElementsAre(HasSubstr("has 0 of the 2")));
  EXPECT_THAT(warnings("-1"), ElementsAre(HasSubstr("has 0 of the 2")));
  // The rest is not looked at behind what is no GPU.
  for (const char* const visible : {"0,-1,1", "0,,1", "0,7,1"}) {
    EXPECT_THAT(warnings(visible), ElementsAre(HasSubstr("has 1 of the 2")))
        << visible;
  }
  EXPECT_THAT(warnings(",0,1"), ElementsAre(HasSubstr("has 0 of the 2")));
  EXPECT_THAT(warnings("GPU-8932f937,GPU-1a2b"), IsEmpty());
}

TEST_F(SysTest, AnNvLinkDomainOfHostsHasAName) {
  Machine machine;
  ASSERT_TRUE(AddGpus(machine, root_, TESSERA_FAKE_NVML));
  // NVSwitches of one host have no cluster.
  EXPECT_EQ(machine.gpus[1].nvlink_domain, "");
  const WithVariable fabric("TESSERA_FAKE_FABRIC", "1");
  Machine joined;
  ASSERT_TRUE(AddGpus(joined, root_, TESSERA_FAKE_NVML));
  EXPECT_EQ(joined.gpus[1].nvlink_domain, "ab000000000000000000000000000000/7");
  EXPECT_THAT(joined.warnings, IsEmpty());
}

TEST_F(SysTest, AFabricThatIsNotReadyIsAWarning) {
  const WithVariable fabric("TESSERA_FAKE_FABRIC", "late");
  Machine machine;
  ASSERT_TRUE(AddGpus(machine, root_, TESSERA_FAKE_NVML));
  EXPECT_EQ(machine.gpus[1].nvlink_domain, "");
  EXPECT_THAT(machine.warnings,
              ElementsAre("NVLink's fabric is not ready (2 of 2 GPUs are not "
                          "part of it): hosts that it joins are not known"));
}

TEST_F(SysTest, NoDriverIsNoGpus) {
  Machine machine;
  ASSERT_TRUE(AddGpus(machine, root_, "libtessera-none.so.1"));
  EXPECT_THAT(machine.gpus, IsEmpty());
}

TEST(HostSpeedTest, CopiesAndStorageHaveASpeed) {
  EXPECT_GT(MeasureCopies(1).value, 0);
  EXPECT_GT(MeasureCopies(3).value, 0);
  const auto storage = MeasureStorage(::testing::TempDir());
  ASSERT_TRUE(storage) << storage.error().ToString();
  EXPECT_GT(storage->read.value, 0);
  EXPECT_GT(storage->write.value, 0);
  EXPECT_GT(storage->free.value, 0);
  EXPECT_FALSE(MeasureStorage("/no/such/folder"));
  // Where nothing can be kept.
  const auto proc = MeasureStorage("/proc");
  ASSERT_FALSE(proc);
  EXPECT_EQ(proc.error(), InvalidInput("no space is free", "/proc"));
}

}  // namespace
}  // namespace tessera
