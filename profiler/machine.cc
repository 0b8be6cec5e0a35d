#include "profiler/machine.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "planner/base/threads.h"
#include "profiler/first_line.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// The number that a file begins with.
double NumberIn(const fs::path& path, double otherwise) {
  const std::string line = FirstLine(path);
  double value = 0;
  const auto [end, error] =
      std::from_chars(line.data(), line.data() + line.size(), value);
  return error == std::errc() ? value : otherwise;
}

std::string TextOf(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// What stands behind "NAME:" in a text of such lines.
std::string ValueIn(const std::string& text, std::string_view name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name)) continue;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    if (begin != std::string::npos) return line.substr(begin);
  }
  return "";
}

// The entries of a folder, by name; none where there is no such folder, and
// those so far where it goes away meanwhile.
std::vector<fs::path> EntriesOf(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end;
       at.increment(error)) {
    entries.push_back(at->path());
  }
  std::ranges::sort(entries);
  return entries;
}

// "0000:4b:00.0": a domain, a bus, a device and a function.
bool IsPciAddress(const std::string& text) {
  return text.size() == 12 && text[4] == ':' && text[7] == ':' &&
         text[10] == '.';
}

// PCI Express base specification: gigatransfers a second of each generation.
int GenerationOf(double gigatransfers) {
  constexpr std::array kRates = {2.5, 5.0, 8.0, 16.0, 32.0, 64.0, 128.0};
  int generation = 0;
  for (const double rate : kRates) {
    if (gigatransfers >= rate) ++generation;
  }
  return generation;
}

PciNode ReadPciNode(const fs::path& device, const fs::path& above) {
  PciNode node;
  node.address = device.filename();
  // The present speed falls when the device idles; the width does not.
  const int own = GenerationOf(NumberIn(device / "max_link_speed", 0));
  const int port = GenerationOf(NumberIn(above / "max_link_speed", 0));
  // Of the two the slower; one that does not say is not what limits.
  node.generation =
      std::min(own, port) == 0 ? std::max(own, port) : std::min(own, port);
  // 255 is what Linux shows where nothing is said.
  const double lanes = NumberIn(device / "current_link_width", 0);
  node.lanes = lanes > 64 ? 0 : static_cast<int>(lanes);
  return node;
}

// `device` is a folder of sys/devices, links resolved.
PciPlace PlaceOf(const fs::path& device) {
  PciPlace place;
  fs::path at;
  for (const fs::path& part : device) {
    const fs::path above = at;
    at /= part;
    const std::string name = part;
    if (name.starts_with("pci")) {
      place.root = name;
    } else if (IsPciAddress(name)) {
      place.path.push_back(ReadPciNode(at, above));
    }
  }
  place.numa_node = static_cast<int>(NumberIn(device / "numa_node", -1));
  place.near_cpus = FirstLine(device / "local_cpulist");
  return place;
}

// Where the device behind a folder of sys/class sits; nothing for virtual ones.
PciPlace PlaceOfClassDevice(const fs::path& entry) {
  std::error_code error;
  const fs::path device = fs::canonical(entry / "device", error);
  if (error) return {};
  PciPlace place = PlaceOf(device);
  // A virtual machine's card hangs on its PCI device as "virtio0".
  if (!place.path.empty() && place.near_cpus.empty()) {
    fs::path pci = device;
    while (!IsPciAddress(pci.filename())) pci = pci.parent_path();
    place.near_cpus = FirstLine(pci / "local_cpulist");
    place.numa_node = static_cast<int>(NumberIn(pci / "numa_node", -1));
  }
  return place;
}

std::vector<FoundNic> ReadNics(const fs::path& root) {
  std::vector<FoundNic> nics;
  std::set<std::string> rdma_addresses;
  for (const fs::path& entry : EntriesOf(root / "sys/class/infiniband")) {
    FoundNic nic;
    nic.name = entry.filename();
    nic.rdma = true;
    nic.place = PlaceOfClassDevice(entry);
    if (!nic.place.path.empty()) {
      rdma_addresses.insert(nic.place.path.back().address);
    }
    bool active = false;
    for (const fs::path& port : EntriesOf(entry / "ports")) {
      // "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand" or "Ethernet".
      if (!FirstLine(port / "state").starts_with("4")) continue;
      active = true;
      nic.gigabits += NumberIn(port / "rate", 0);
      nic.infiniband = FirstLine(port / "link_layer") == "InfiniBand";
    }
    if (active) nics.push_back(std::move(nic));
  }
  for (const fs::path& entry : EntriesOf(root / "sys/class/net")) {
    FoundNic nic;
    nic.name = entry.filename();
    nic.place = PlaceOfClassDevice(entry);
    if (nic.place.path.empty() ||
        rdma_addresses.contains(nic.place.path.back().address) ||
        FirstLine(entry / "operstate") == "down") {
      continue;
    }
    // Megabits; -1 where the card does not say.
    nic.gigabits = std::max(0.0, NumberIn(entry / "speed", 0) / 1000);
    nics.push_back(std::move(nic));
  }
  return nics;
}

}  // namespace

PciPlace FindPciPlace(const std::string& root, const std::string& address) {
  std::string name = address;
  std::ranges::transform(name, name.begin(),
                         [](unsigned char c) { return std::tolower(c); });
  if (name.size() == 16) name = name.substr(4);  // a domain of eight digits
  std::error_code error;
  const fs::path device =
      fs::canonical(fs::path(root + "/sys/bus/pci/devices") / name, error);
  if (error) return {};
  return PlaceOf(device);
}

std::string ProcessorName(const std::string& cpuinfo,
                          const std::string& device_tree_model) {
  std::string name = ValueIn(cpuinfo, "model name");
  if (!name.empty()) return name;
  // The file ends in a zero.
  name = device_tree_model.substr(0, device_tree_model.find('\0'));
  if (!name.empty()) return name;
  const std::string implementer = ValueIn(cpuinfo, "CPU implementer");
  const std::string part = ValueIn(cpuinfo, "CPU part");
  if (implementer.empty() || part.empty()) return "unknown processor";
  return "CPU implementer " + implementer + ", part " + part;
}

Machine ReadMachine(const std::string& root) {
  const fs::path base = root + "/";
  Machine machine;
  machine.host = FirstLine(base / "proc/sys/kernel/hostname");
  machine.cpu = ProcessorName(TextOf(base / "proc/cpuinfo"),
                              TextOf(base / "proc/device-tree/model"));
  machine.cpus = HostCores();
  // "MemTotal:       24689932 kB", which are KiB.
  const std::string memory = ValueIn(TextOf(base / "proc/meminfo"), "MemTotal");
  int64_t kib = 0;
  std::from_chars(memory.data(), memory.data() + memory.size(), kib);
  machine.memory = {kib * 1024};
  int nodes = 0;
  for (const fs::path& entry : EntriesOf(base / "sys/devices/system/node")) {
    const std::string name = entry.filename();
    if (name.starts_with("node") && name.size() > 4 &&
        std::ranges::all_of(name.substr(4), [](unsigned char c) {
          return std::isdigit(c) != 0;
        })) {
      ++nodes;
    }
  }
  machine.numa_nodes = std::max(1, nodes);
  machine.nics = ReadNics(base);
  return machine;
}

}  // namespace tessera
