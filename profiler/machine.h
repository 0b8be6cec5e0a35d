#pragma once
// What a host says of itself: its GPUs as NVIDIA's driver knows them, where
// they and the network cards sit in the PCIe tree as Linux shows it, its
// processors and memory. Facts only; discover.h makes a cluster of them.

#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/base/units.h"

namespace tessera {

// A PCIe device or bridge and the link by which it hangs on the one above.
struct PciNode {
  std::string address;  // "0000:4b:00.0"
  // The best that both ends can do; 0 where nothing is said, as in virtual
  // machines.
  int generation = 0;  // 1 to 7: 2.5 to 128 GT/s a lane
  int lanes = 0;       // as trained
  bool operator==(const PciNode&) const = default;
};

struct PciPlace {
  std::string root;           // of the tree: "pci0000:48"
  std::vector<PciNode> path;  // from below the root; the device is the last
  int numa_node = -1;         // -1: not said
  std::string near_cpus;      // "0-31,64-95"; empty: not said
  bool operator==(const PciPlace&) const = default;
};

struct FoundGpu {
  std::string name;  // the driver's: "NVIDIA H200"
  Bytes memory;      // all of it
  PciPlace place;
  // Active NVLinks: to NVSwitches, and to each GPU of this host by its index.
  int switch_links = 0;
  std::vector<int> peer_links;
  // The NVLink domain of several hosts that it is in; empty where its
  // NVSwitches join this host's GPUs alone.
  std::string nvlink_domain = {};
  bool operator==(const FoundGpu&) const = default;
};

struct FoundNic {
  std::string name;         // "mlx5_0", "eth0"
  bool rdma = false;        // InfiniBand, RoCE, EFA; else plain Ethernet
  bool infiniband = false;  // its link layer
  double gigabits = 0;      // per second; 0: not said
  PciPlace place;
  bool operator==(const FoundNic&) const = default;
};

struct Machine {
  std::string host;  // its name
  std::string cpu;   // "AMD EPYC 9654 96-Core Processor"
  int cpus = 1;      // that this process may use
  int numa_nodes = 1;
  Bytes memory;                // all of it
  std::string driver;          // of the GPUs; empty where there is none
  std::vector<FoundGpu> gpus;  // in the driver's order, which is CUDA's with
                               // CUDA_DEVICE_ORDER=PCI_BUS_ID, but for those
                               // that are left out
  std::vector<FoundNic> nics;  // with a link, RDMA first, by name
  // Where the GPUs above are not those that there are, or that a program would
  // have; a sentence each.
  std::vector<std::string> warnings;
  bool operator==(const Machine&) const = default;
};

// All but the GPUs, from the files below `root` as Linux has them in "/"
// (sys/class/infiniband, sys/class/net, sys/devices, proc). Bridges' and other
// virtual network devices are left out, and Ethernet ports of RDMA cards, which
// are listed once. What a file does not say keeps its default.
Machine ReadMachine(const std::string& root = "");

// Of the text of proc/cpuinfo: the first processor's "model name". ARM's has
// none; then the machine's name in the text of proc/device-tree/model, which a
// server's firmware does not give, then the numbers of the core's maker and
// design (ARM's Main ID Register), else "unknown processor".
std::string ProcessorName(const std::string& cpuinfo,
                          const std::string& device_tree_model);

// Where the PCI device of `address` ("0000:4b:00.0", any case, with a domain of
// four or eight digits) sits, by root/sys/bus/pci/devices.
PciPlace FindPciPlace(const std::string& root, const std::string& address);

// Adds the GPUs that NVIDIA's management library `library` knows. No such
// library: no GPUs, no error. kUnavailable where it is there and fails; one of
// several GPUs that cannot be read is left out with a warning, and there is one
// where CUDA_VISIBLE_DEVICES names fewer, and where NVLink's fabric is not
// ready to say its domain.
Result<void> AddGpus(Machine& machine, const std::string& root = "",
                     const std::string& library = "libnvidia-ml.so.1");

}  // namespace tessera
