#include "costmodel/validate/published_cluster.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>

#include "costmodel/validate/words.h"
#include "planner/base/format.h"
#include "planner/topology/fabric.h"
#include "planner/topology/hardware.h"
#include "planner/topology/nvswitch.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

// How the GPUs of a node are joined.
enum class Inside : uint8_t {
  kSwitch,    // NVSwitch
  kCubeMesh,  // V100: eight in DGX-1's mesh, four all to all by two links
  kHost,      // PCIe through the host; NVLink between pairs where there is one
};

// GPUs by words of the column; the first row whose words are all there. The
// rest is the vendor's reference system.
struct GpuName {
  // "40gb" is the memory of each, however it is written.
  std::array<std::string_view, 3> words;
  std::string_view device;  // of DeviceTypes
  Inside inside = Inside::kSwitch;
  std::string_view nvlink = "";  // of LinkTypes
  std::string_view pcie = "pcie4-x16";
  std::string_view nic = "ib-hdr";
  int gpus_per_nic = 1;
  std::string_view host = "dgx-a100-80gb";
};

// With ConnectX-8, whose PCIe switch is of generation 6.
constexpr GpuName WithXdr(GpuName gpu) {
  gpu.pcie = "pcie6-x16";
  gpu.nic = "ib-xdr";
  return gpu;
}
constexpr GpuName Rack(std::string_view word, std::string_view device) {
  return {{word},   device, Inside::kSwitch, "nvlink5-nvl72", "pcie5-x16",
          "ib-ndr", 1,      "gb200-nvl72"};
}
constexpr GpuName Hopper(std::array<std::string_view, 3> words,
                         std::string_view device,
                         std::string_view nvlink = "nvlink4") {
  return {words,    device, Inside::kSwitch, nvlink, "pcie5-x16",
          "ib-ndr", 1,      "dgx-h100"};
}
constexpr GpuName Blackwell(std::string_view word, std::string_view device) {
  return {{word},   device, Inside::kSwitch, "nvlink5", "pcie5-x16",
          "ib-ndr", 1,      "dgx-b200"};
}
constexpr GpuName Ampere(std::array<std::string_view, 3> words,
                         std::string_view device,
                         std::string_view nvlink = "nvlink3") {
  return {words, device, Inside::kSwitch, nvlink};
}
// A card in a server, four to a network card; `bridge`: NVLink of a pair.
constexpr GpuName Card(std::array<std::string_view, 3> words,
                       std::string_view device, std::string_view pcie,
                       std::string_view nic = "ib-hdr",
                       std::string_view bridge = "") {
  return {words, device, Inside::kHost, bridge, pcie, nic, 4};
}
// One in a workstation.
constexpr GpuName Desktop(std::array<std::string_view, 3> words,
                          std::string_view device, std::string_view pcie,
                          std::string_view bridge = "") {
  return {words, device, Inside::kHost, bridge, pcie, "ethernet-10g", 8};
}

constexpr std::array kGpuNames = {
    WithXdr(Rack("gb300", "gb300-288gb")),
    Rack("gb200", "gb200-186gb"),
    WithXdr(Blackwell("b300", "b300-sxm-288gb")),
    Blackwell("b200", "b200-sxm-180gb"),
    Hopper({"gh200", "144gb"}, "gh200-144gb"),
    Hopper({"gh200"}, "gh200-96gb"),
    Hopper({"h200"}, "h200-sxm5-141gb"),
    Hopper({"h800"}, "h800-sxm5-80gb", "nvlink4-x8"),
    Hopper({"h20"}, "h20-96gb"),
    Card({"h100", "nvl"}, "h100-nvl-94gb", "pcie5-host", "ib-ndr", "nvlink4"),
    Card({"h100", "pcie"}, "h100-pcie-80gb", "pcie5-host", "ib-ndr"),
    // The one that Meta has: HBM2e.
    Hopper({"h100", "96gb"}, "h100-sxm5-96gb"),
    Hopper({"h100", "hbm2e"}, "h100-sxm5-96gb"),
    Hopper({"h100"}, "h100-sxm5-80gb"),
    Card({"a800", "pcie"}, "a100-pcie-80gb", "pcie4-host"),
    Ampere({"a800", "40gb"}, "a800-sxm4-40gb", "nvlink3-x8"),
    Ampere({"a800"}, "a800-sxm4-80gb", "nvlink3-x8"),
    Card({"a100", "pcie", "40gb"}, "a100-pcie-40gb", "pcie4-host"),
    Card({"a100", "pcie"}, "a100-pcie-80gb", "pcie4-host"),
    Ampere({"a100", "40gb"}, "a100-sxm4-40gb"),
    // Where the memory is not said: 80 GB, the usual one since 2021.
    Ampere({"a100"}, "a100-sxm4-80gb"),
    GpuName{{"a10g"},
            "a10g-24gb",
            Inside::kHost,
            "",
            "pcie4-host",
            "ena-100g",
            8,
            "g5.48xlarge"},
    Card({"a10"}, "a10-24gb", "pcie4-host"),
    Card({"a30"}, "a30-24gb", "pcie4-host"),
    Card({"a40"}, "a40-48gb", "pcie4-host"),
    Card({"a6000"}, "rtx-a6000-48gb", "pcie4-host"),
    Card({"6000", "ada"}, "rtx-6000-ada-48gb", "pcie4-host"),
    Card({"rtx", "pro", "6000"}, "rtx-pro-6000-96gb", "pcie5-host", "ib-ndr"),
    Card({"l40s"}, "l40s-48gb", "pcie4-host"),
    Card({"l40"}, "l40-48gb", "pcie4-host"),
    GpuName{{"l4"},
            "l4-24gb",
            Inside::kHost,
            "",
            "pcie4-host",
            "ena-100g",
            8,
            "g6.48xlarge"},
    Desktop({"5090"}, "rtx-5090-32gb", "pcie5-host"),
    Desktop({"4090"}, "rtx-4090-24gb", "pcie4-host"),
    Desktop({"3090"}, "rtx-3090-24gb", "pcie4-host"),
    Desktop({"2080", "ti"}, "rtx-2080-ti-11gb", "pcie3-host"),
    Desktop({"1080", "ti"}, "gtx-1080-ti-11gb", "pcie3-host"),
    GpuName{{"titan rtx"},
            "titan-rtx-24gb",
            Inside::kHost,
            "nvlink2-x2",
            "pcie3-host",
            "ethernet-10g",
            2,
            "titan-rtx-pair"},
    Desktop({"titan v"}, "titan-v-12gb", "pcie3-host"),
    Desktop({"rtx", "8000"}, "quadro-rtx-8000-48gb", "pcie3-host",
            "nvlink2-x2"),
    Desktop({"rtx", "6000"}, "titan-rtx-24gb", "pcie3-host", "nvlink2-x2"),
    GpuName{{"t4"},
            "t4-16gb",
            Inside::kHost,
            "",
            "pcie3-host",
            "ena-50g",
            4,
            "g4dn.12xlarge"},
    Card({"v100s"}, "v100s-pcie-32gb", "pcie3-host", "ib-edr"),
    Card({"v100", "pcie", "32gb"}, "v100-pcie-32gb", "pcie3-host", "ib-edr"),
    Card({"v100", "pcie"}, "v100-pcie-16gb", "pcie3-host", "ib-edr"),
    GpuName{{"v100", "32gb"},
            "v100-sxm2-32gb",
            Inside::kCubeMesh,
            "nvlink2",
            "pcie3-x16",
            "ib-edr",
            2,
            "dgx1-v100"},
    // Where the memory is not said: 16 GB, of the cloud's first instances.
    GpuName{{"v100"},
            "v100-sxm2-16gb",
            Inside::kCubeMesh,
            "nvlink2",
            "pcie3-x16",
            "ena-25g",
            8,
            "p3.16xlarge"},
    Card({"p100", "pcie"}, "p100-pcie-16gb", "pcie3-host", "ib-edr"),
    GpuName{{"p100"},
            "p100-sxm2-16gb",
            Inside::kHost,
            "nvlink1",
            "pcie3-host",
            "ib-edr",
            4,
            "p100-edr"},
    Card({"p40"}, "p40-24gb", "pcie3-host", "ib-edr"),
    Card({"k80"}, "k80-gk210-12gb", "pcie3-host", "ib-fdr"),
};

// Systems by a word of the GPU's or the networks' columns: their GPU where the
// column has none, and their network.
struct SystemName {
  std::string_view word;
  std::string_view gpu;  // as in the column
  std::string_view nic;  // of LinkTypes
  int gpus_per_nic;
};

constexpr std::array kSystems = {
    SystemName{"p6e-gb300", "gb300", "efa-400g", 1},
    SystemName{"p6e-gb200", "gb200", "efa-400g", 1},
    SystemName{"p6-b300", "b300", "efa-2x400g", 1},
    SystemName{"p6-b200", "b200", "efa-400g", 1},
    SystemName{"p5en", "h200", "efa-2x200g", 1},
    SystemName{"p5e", "h200", "efa-2x200g", 1},
    SystemName{"p5", "h100", "efa-4x100g", 1},
    SystemName{"p4de", "a100-80gb", "efa-100g", 2},
    SystemName{"p4d", "a100-40gb", "efa-100g", 2},
    SystemName{"p3dn", "v100-32gb", "ena-100g", 8},
    SystemName{"p3", "v100-16gb", "ena-25g", 8},
    SystemName{"p2", "k80", "ena-25g", 8},
    SystemName{"g6e", "l40s", "ena-100g", 8},
    SystemName{"g6", "l4", "ena-100g", 8},
    SystemName{"g5", "a10g", "ena-100g", 8},
    SystemName{"g4dn", "t4", "ena-50g", 4},
    SystemName{"a4x-max", "gb300", "ib-xdr", 1},
    SystemName{"a4x", "gb200", "ib-ndr", 1},
    SystemName{"a4-highgpu", "b200", "roce-400g", 1},
    SystemName{"a4-high", "b200", "roce-400g", 1},
    SystemName{"a3-ultragpu", "h200", "roce-400g", 1},
    SystemName{"a3-ultra", "h200", "roce-400g", 1},
    SystemName{"a3 ultra", "h200", "roce-400g", 1},
    SystemName{"a3-megagpu", "h100", "tcpxo-200g", 1},
    SystemName{"a3-mega", "h100", "tcpxo-200g", 1},
    SystemName{"a3 mega", "h100", "tcpxo-200g", 1},
    SystemName{"a3-highgpu", "h100", "tcpx-200g", 2},
    SystemName{"a3-high", "h100", "tcpx-200g", 2},
    SystemName{"a3 high", "h100", "tcpx-200g", 2},
    SystemName{"a2-ultragpu", "a100-80gb", "ena-100g", 8},
    SystemName{"a2-highgpu", "a100-40gb", "ena-100g", 8},
    SystemName{"nd gb200", "gb200", "ib-ndr", 1},
    SystemName{"nd h200", "h200", "ib-ndr", 1},
    SystemName{"nd h100", "h100", "ib-ndr", 1},
    SystemName{"ndm a100", "a100-80gb", "ib-hdr", 1},
    SystemName{"nd a100", "a100-40gb", "ib-hdr", 1},
    SystemName{"nd96asr", "a100-40gb", "ib-hdr", 1},
    SystemName{"nd96amsr", "a100-80gb", "ib-hdr", 1},
    SystemName{"nd40rs", "v100-32gb", "ib-edr", 8},
    SystemName{"dgx-2", "v100-32gb", "ib-edr", 2},
    SystemName{"dgx2", "v100-32gb", "ib-edr", 2},
    SystemName{"dgx-1", "v100-32gb", "ib-edr", 2},
    SystemName{"dgx1", "v100-32gb", "ib-edr", 2},
};

// Where a row names no network, by its source.
struct SourceSystem {
  std::string_view word;  // of the source
  std::string_view system;
};
constexpr SourceSystem kSourceSystems[] = {
    // "All GPUs are A100s with 40GB of memory" (arXiv 2304.01373, table 5), and
    // the data lies on AWS's file system, "/fsx/pile" (EleutherAI/pythia,
    // models/*.yml): of AWS's instances p4d has such GPUs.
    {"pythia", "p4d"},
};

const SystemName* SystemOf(const PublishedRun& run) {
  std::string words = Lower(run.gpu + " " + run.inter_link);
  if (run.inter_link.empty()) {
    const std::string source = Lower(run.source);
    for (const SourceSystem& row : kSourceSystems) {
      if (Has(source, row.word)) words += " " + std::string(row.system);
    }
  }
  for (const SystemName& row : kSystems) {
    if (HasWord(words, row.word)) return &row;
  }
  return nullptr;
}

// "40gb", "40 GB", "40G", "40GiB"; not the 40 of "40x" or "40 GPUs".
bool HasMemory(const std::string& words, std::string_view memory) {
  const std::string number(memory.substr(0, memory.find("gb")));
  for (const char* unit : {"g", "gb", "gib", " g", " gb", " gib"}) {
    if (HasWord(words, number + unit)) return true;
  }
  return false;
}

const GpuName* GpuNamed(const std::string& words) {
  for (const GpuName& row : kGpuNames) {
    if (std::ranges::all_of(row.words, [&](std::string_view word) {
          return word.empty() || (word.ends_with("gb") ? HasMemory(words, word)
                                                       : HasWord(words, word));
        })) {
      return &row;
    }
  }
  return nullptr;
}

Result<const GpuName*> GpuOf(const PublishedRun& run) {
  const std::string words = Lower(run.gpu);
  if (!Has(words, "not stated;")) {
    if (const GpuName* gpu = GpuNamed(words)) return gpu;
    if (const SystemName* system = SystemOf(run)) {
      return GpuNamed(std::string(system->gpu));
    }
  }
  return CannotMap("no figures of '" + run.gpu + "'", "gpu");
}

// Networks by a word: the link whose latency and reached share stand for it,
// the nominal rate of a card where the text has none, cards of a node where it
// does not count them (0: one for each GPU), and whether a rate in the text is
// that of the node rather than of each card.
struct NetworkName {
  std::string_view word;
  std::string_view link;
  double gbit = 0;
  int cards = 0;
  bool rate_of_node = false;
};

constexpr std::array kNetworks = {
    NetworkName{"efa", "efa-4x100g", 400, 0, true},
    NetworkName{"efav", "efa-4x100g", 400, 0, true},  // and its version
    NetworkName{"tcpxo", "tcpxo-200g", 200, 8},
    NetworkName{"fastrak", "tcpxo-200g", 200, 8},
    NetworkName{"tcpx", "tcpx-200g", 200, 4, true},
    NetworkName{"gpudirect-tcp", "tcpx-200g", 200, 4, true},
    NetworkName{"xdr", "ib-xdr", 800},
    NetworkName{"quantum-x800", "ib-xdr", 800},
    NetworkName{"ndr200", "ib-ndr", 200},
    NetworkName{"ndr", "ib-ndr", 400},
    NetworkName{"quantum-2", "ib-ndr", 400},
    NetworkName{"quantum2", "ib-ndr", 400},
    NetworkName{"hdr100", "ib-hdr100", 100},
    NetworkName{"hdr-100", "ib-hdr100", 100},
    NetworkName{"hdr", "ib-hdr", 200},
    NetworkName{"edr", "ib-edr", 100},
    NetworkName{"fdr", "ib-fdr", 54.5},
    // What NCCL reaches of it: BigScience measured 54 Gb/s between 16 hosts of
    // V100 with four cards of 100 Gb/s each, and 40 between four hosts of A100
    // (all-reduce of 4 GB, bus bandwidth; tests/testdata/published/README.md).
    NetworkName{"omni-path", "omni-path-100", 54, 1},
    NetworkName{"omnipath", "omni-path-100", 54, 1},
    NetworkName{"opa", "omni-path-100", 54, 1},
    NetworkName{"spectrum-x", "roce-400g", 400},
    NetworkName{"slingshot", "roce-200g", 200},
    NetworkName{"roce", "roce-200g", 0},
    NetworkName{"rocev", "roce-200g", 0},
    NetworkName{"erdma", "roce-200g", 0},
    // Cards by their number, on either kind of network.
    NetworkName{"cx-8", "ib-xdr", 800},
    NetworkName{"cx8", "ib-xdr", 800},
    NetworkName{"connectx-8", "ib-xdr", 800},
    NetworkName{"cx-7", "ib-ndr", 400},
    NetworkName{"cx7", "ib-ndr", 400},
    NetworkName{"connectx-7", "ib-ndr", 400},
    NetworkName{"bluefield-3", "ib-ndr", 400},
    NetworkName{"cx-6", "ib-hdr", 200},
    NetworkName{"cx6", "ib-hdr", 200},
    NetworkName{"connectx-6", "ib-hdr", 200},
    NetworkName{"cx-5", "ib-edr", 100},
    NetworkName{"cx5", "ib-edr", 100},
    NetworkName{"connectx-5", "ib-edr", 100},
    NetworkName{"infiniband", "ib-hdr", 0},
    NetworkName{"ib", "ib-hdr", 0},
    NetworkName{"rdma", "ib-hdr", 0},
    NetworkName{"ena", "ena-25g", 25, 1, true},
    NetworkName{"ethernet", "ena-25g", 10, 1, true},
    NetworkName{"gbe", "ena-25g", 10, 1, true},
    NetworkName{"tcp", "ena-25g", 10, 1, true},
    // Only a rate.
    NetworkName{"gb/s", "ib-hdr", 0},
    NetworkName{"gbps", "ib-hdr", 0},
    NetworkName{"gbit", "ib-hdr", 0},
    NetworkName{"gb/sec", "ib-hdr", 0},
    NetworkName{"tbps", "ib-hdr", 0},
    NetworkName{"tb/s", "ib-hdr", 0},
    NetworkName{"tbit", "ib-hdr", 0},
    NetworkName{"tb/sec", "ib-hdr", 0},
};

// A number, infinite where a double holds none as large, and what stands behind
// it: "8" "x", "200" "Gb/s", "4" "HCAs".
struct NumberWithUnit {
  double value = 0;
  std::string unit;
};

double DecimalOf(const std::string& digits) {
  double value = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return error == std::errc::result_out_of_range
             ? std::numeric_limits<double>::infinity()
             : value;
}

// Numbers that begin a word ("nvlink5" has none). A multiplication sign is an
// x.
std::vector<NumberWithUnit> NumbersWithUnitsIn(std::string text) {
  constexpr std::string_view kTimes = "\u00d7";
  for (size_t at = text.find(kTimes); at != text.npos; at = text.find(kTimes)) {
    text.replace(at, kTimes.size(), "x");
  }
  std::vector<NumberWithUnit> found;
  for (size_t i = 0; i < text.size();) {
    const auto digit = [&](size_t at) {
      return at < text.size() &&
             std::isdigit(static_cast<unsigned char>(text[at])) != 0;
    };
    if (!digit(i)) {
      ++i;
      continue;
    }
    // Not "nvlink5"; but "8x200G".
    const bool counted =
        i >= 2 && (text[i - 1] == 'x' || text[i - 1] == 'X') && digit(i - 2);
    const bool begins =
        i == 0 || counted ||
        std::isalpha(static_cast<unsigned char>(text[i - 1])) == 0;
    std::string digits;
    size_t end = i;
    while (digit(end) || (end < text.size() && digit(end + 1) &&
                          (text[end] == '.' || text[end] == ','))) {
      if (text[end] != ',') digits += text[end];
      ++end;
    }
    NumberWithUnit quantity = {DecimalOf(digits), ""};
    i = end;
    while (end < text.size() && text[end] == ' ') ++end;
    while (end < text.size() &&
           (std::isalpha(static_cast<unsigned char>(text[end])) != 0 ||
            text[end] == '/')) {
      quantity.unit += text[end++];
    }
    if (begins) found.push_back(std::move(quantity));
  }
  return found;
}

// Gigabits a second of "200 Gb/s", "400G", "3.2 Tbps", "50 GB/s"; 0 for other
// units.
double GigabitsOf(const NumberWithUnit& quantity) {
  const std::string unit = Lower(quantity.unit);
  const double factor = unit.starts_with("tb") || unit == "t" ? 1000 : 1;
  if (!unit.starts_with("gb") && !unit.starts_with("tb") &&
      !unit.starts_with("gib") && unit != "g" && unit != "t") {
    return 0;
  }
  // Bytes are a capital B, alone: "GB/s", "GBps", "GiB/s", but not "Gbps",
  // "GbE" or "GBE".
  const size_t b = quantity.unit.find_first_of("bB");
  const bool bytes = b != std::string::npos && quantity.unit[b] == 'B' &&
                     unit.substr(b + 1, 1) != "e" &&
                     std::ranges::any_of(quantity.unit, [](char c) {
                       return std::islower(static_cast<unsigned char>(c)) != 0;
                     });
  return quantity.value * factor * (bytes ? 8 : 1);
}

// Four V100 have two NVLinks to each other; others meet at the host. Network
// cards hang on a bridge of their own.
Cluster MakeHostNode(const GpuName& gpu, int nodes, int gpus, bool nvlink,
                     std::string_view nic, int cards) {
  Cluster cluster;
  cluster.hosts = {HostOf(gpu.host)};
  const int device = UseDeviceType(cluster, gpu.device);
  const int pcie = UseLinkType(cluster, gpu.pcie);
  const bool mesh = gpu.inside == Inside::kCubeMesh;
  std::vector<std::vector<VertexId>> nics;
  for (int n = 0; n < nodes; ++n) {
    const VertexId cpu =
        AddVertex(cluster, VertexKind::kBridge, InNode(n, "cpu"));
    std::vector<VertexId> vertices;
    for (int g = 0; g < gpus; ++g) {
      const DeviceId id = AddDevice(cluster, device, n, InNode(n, "gpu", g));
      const VertexId vertex = cluster.devices[id.index()].vertex;
      Connect(cluster, vertex, cpu, pcie);
      for (size_t peer = 0; peer < vertices.size(); ++peer) {
        const bool pair = static_cast<int>(peer) == g - 1 && g % 2 == 1;
        if (!nvlink || (!mesh && !pair)) continue;
        Connect(cluster, vertices[peer], vertex,
                UseLinkType(cluster, mesh ? "nvlink2-x2" : gpu.nvlink));
      }
      vertices.push_back(vertex);
    }
    nics.emplace_back();
    for (int i = 0; i < cards; ++i) {
      nics.back().push_back(
          AddVertex(cluster, VertexKind::kNic, InNode(n, "nic", i)));
      Connect(cluster, nics.back().back(), cpu, pcie);
    }
  }
  ConnectRails(cluster, nics, nic);
  return cluster;
}

// Cards at another rate than their kind's usual one.
void SetRate(Cluster& cluster, std::string_view link, double gbit) {
  const double nominal = NominalGigabits(link);
  if (gbit == nominal) return;
  const std::string trunk = std::string(link) + "-trunk";
  for (LinkType& type : cluster.link_types) {
    if (type.name != link && type.name != trunk) continue;
    type.bandwidth = {type.bandwidth.value * gbit / nominal};
    char text[64];
    std::snprintf(text, sizeof text, "%g Gb/s, reached as by ", gbit);
    type.source = text + type.source;
  }
}

// Network links of a preset by those of another kind.
void ReplaceNetwork(Cluster& cluster, std::string_view of,
                    std::string_view link) {
  const LinkType& other = LinkTypeNamed(link);
  const std::string trunk = std::string(of) + "-trunk";
  for (LinkType& type : cluster.link_types) {
    if (type.name == of) {
      const double ratio = other.bandwidth.value / type.bandwidth.value;
      for (LinkType& wide : cluster.link_types) {
        if (wide.name != trunk) continue;
        wide.name = std::string(link) + "-trunk";
        wide.bandwidth = wide.bandwidth * ratio;
      }
      type = other;
      return;
    }
  }
}

// Whether the text says only that it does not say.
bool SaysNothing(const std::string& text) {
  return text.empty() || text == "-" || text == "?" || text == "n/a" ||
         Has(text, "not stated") || Has(text, "unknown") ||
         Has(text, "not specified") || Has(text, "unspecified");
}

bool HasRate(const std::string& words) {
  return std::ranges::any_of(
      NumbersWithUnitsIn(words),
      [](const NumberWithUnit& quantity) { return GigabitsOf(quantity) > 0; });
}

// Words that name no links stand for none.
Result<void> CheckLinkWords(const PublishedRun& run, const GpuName& gpu,
                            int nodes, int per_node) {
  const std::string between = Lower(run.inter_link);
  const bool rack = gpu.nvlink == "nvlink5-nvl72";
  const bool named =
      SaysNothing(between) || SystemOf(run) != nullptr || HasRate(between) ||
      Has(between, "dgx") || Has(between, "hgx") ||
      (rack && Has(between, "nvl")) ||
      std::ranges::any_of(kNetworks, [&](const NetworkName& network) {
        return HasWord(between, network.word);
      });
  if (nodes > 1 && !named) {
    return CannotMap("no figures of a network '" + run.inter_link + "'",
                     "inter_link");
  }
  const std::string inside = Lower(run.intra_link);
  static constexpr std::string_view kInside[] = {
      "nvl", "nvswitch", "pci", "sxm", "dgx",  "hgx", "nv1",
      "nv2", "nv4",      "nv6", "nv8", "host", "p2p"};
  if (per_node > 1 && !SaysNothing(inside) && !HasRate(run.intra_link) &&
      std::ranges::none_of(
          kInside, [&](std::string_view word) { return Has(inside, word); })) {
    return CannotMap("no figures of links '" + run.intra_link + "'",
                     "intra_link");
  }
  return {};
}

// Gb/s of a network card: from a tenth of Fast Ethernet to what no card has.
constexpr double kLeastGigabits = 0.01;
constexpr double kMostGigabits = 100'000;

// The most GPUs that share one NVLink domain of a rack.
int RackDomain(int gpus) {
  for (int domain = std::min(gpus, 72); domain > 1; --domain) {
    if (gpus % domain == 0 && (domain % 4 == 0 || domain == gpus)) {
      return domain;
    }
  }
  return 1;
}

}  // namespace

std::optional<NetworkWords> ReadNetwork(const std::string& words, int gpus) {
  const std::string text = Lower(words);
  const auto* const row = std::ranges::find_if(
      kNetworks,
      [&](const NetworkName& network) { return HasWord(text, network.word); });
  if (row == kNetworks.end()) return std::nullopt;
  int lanes = 0;  // "4X EDR" may be four cards or the lanes of one
  int counted = 0;
  double rate = 0;
  for (const NumberWithUnit& quantity : NumbersWithUnitsIn(words)) {
    const std::string unit = Lower(quantity.unit);
    const int count = static_cast<int>(std::clamp(quantity.value, 1.0, 64.0));
    if (unit == "x") {
      lanes = count;
    } else if (unit == "hcas" || unit == "nics" || unit == "cards" ||
               unit == "ports" || unit == "rails" || unit == "hca" ||
               unit == "nic" || unit == "card" || unit == "adapters") {
      counted = count;
    } else if (rate == 0) {
      rate = GigabitsOf(quantity);
    }
  }
  for (const std::string_view one :
       {"one card", "one nic", "single nic", "single card", "single-rail",
        "one hca", "single hca"}) {
    if (Has(text, one)) counted = 1;
  }
  if (Has(text, "dual-rail") || Has(text, "dual rail")) counted = 2;
  int cards = counted > 0 ? counted : lanes;
  bool of_node = row->rate_of_node;
  for (const std::string_view word :
       {"per node", "/node", "per host", "per instance", "per server",
        "aggregate", "in total"}) {
    of_node |= Has(text, word);
  }
  // Beside a number of cards it is the rate of each, but that no card is as
  // fast.
  of_node &= cards == 0;
  of_node |= rate > 1000;
  of_node &= !Has(text, "per gpu");
  if (cards == 0) cards = row->cards > 0 ? row->cards : gpus;
  NetworkWords network = {row->link, row->gbit, cards};
  if (rate > 0) network.gbit_per_card = of_node ? rate / cards : rate;
  if (network.gbit_per_card <= 0) return std::nullopt;
  return network;
}

Result<std::string_view> DeviceNameOf(const PublishedRun& run) {
  TESSERA_TRY(const GpuName* gpu, GpuOf(run));
  return gpu->device;
}

Result<Cluster> ClusterOf(const PublishedRun& run,
                          std::vector<std::string>& assumptions) {
  TESSERA_TRY(const GpuName* gpu, GpuOf(run));
  if (run.gpus < 1 || run.gpus > 65536) {
    return CannotMap("is " + std::to_string(run.gpus), "gpus");
  }
  const int gpus = static_cast<int>(run.gpus);
  int per_node = static_cast<int>(std::min<int64_t>(run.gpus_per_node, gpus));
  if (gpu->nvlink == "nvlink5-nvl72") {
    per_node = RackDomain(gpus);
  } else if (per_node == 0) {
    per_node = std::min(8, gpus);
    assumptions.push_back("8 GPUs in a node");
  }
  if (gpus % per_node != 0) {
    while (gpus % per_node != 0) --per_node;
    assumptions.push_back("nodes of " + std::to_string(per_node) +
                          ", which divide the GPUs");
  }
  const int nodes = gpus / per_node;

  NetworkWords network = {gpu->nic, NominalGigabits(gpu->nic),
                          std::max(1, per_node / gpu->gpus_per_nic)};
  const SystemName* system = SystemOf(run);
  if (system != nullptr) {
    network = {system->nic, NominalGigabits(system->nic),
               std::max(1, per_node / system->gpus_per_nic)};
  }
  TESSERA_RETURN_IF_ERROR(CheckLinkWords(run, *gpu, nodes, per_node));
  if (nodes > 1) {
    if (const auto read = ReadNetwork(run.inter_link, per_node)) {
      network = *read;
      if (!(network.gbit_per_card >= kLeastGigabits &&
            network.gbit_per_card <= kMostGigabits)) {
        return CannotMap("'" + run.inter_link + "' gives a card " +
                             FormatNumber(network.gbit_per_card) +
                             " Gb/s: expected 0.01 to 100000",
                         "inter_link");
      }
    } else {
      assumptions.push_back("network: " + std::to_string(network.cards) +
                            " x " + std::string(network.link) + " in a node");
    }
  }
  if (run.intra_link.empty() && per_node > 1) {
    assumptions.push_back("GPUs of a node joined as in the vendor's system");
  }
  const std::string inside = Lower(run.intra_link);
  const bool nvlink = !gpu->nvlink.empty() &&
                      (!Has(inside, "pcie") || Has(inside, "nvswitch")) &&
                      !Has(inside, "no nvlink");
  // DGX-2 has sixteen V100 on one NVSwitch.
  const bool on_switch = gpu->inside == Inside::kSwitch ||
                         (gpu->inside == Inside::kCubeMesh &&
                          (per_node > 8 || Has(inside, "nvswitch")));
  Cluster cluster;
  if (gpu->inside == Inside::kCubeMesh && per_node == 8 && nvlink &&
      !on_switch) {
    TESSERA_TRY(cluster, MakeCluster((network.cards == 1 ? "p3.16xlarge:"
                                                         : "dgx1-v100-32gb:") +
                                     std::to_string(nodes)));
    cluster.hosts = {HostOf(gpu->host)};
    cluster.device_types[0] = DeviceTypeNamed(gpu->device);
    // The preset has one card or four.
    network.gbit_per_card *= network.cards == 1 ? 1 : network.cards / 4.0;
    ReplaceNetwork(cluster, network.cards == 1 ? "ena-25g" : "ib-edr",
                   network.link);
  } else if (!on_switch || !nvlink) {
    cluster = MakeHostNode(*gpu, nodes, per_node, nvlink, network.link,
                           network.cards);
  } else {
    // Cards are shared out evenly: as many as divide the GPUs, with the rate
    // of all of them.
    int cards = std::min(network.cards, per_node);
    while (per_node % cards != 0) --cards;
    network.gbit_per_card *= static_cast<double>(network.cards) / cards;
    NvSwitchNode node;
    node.device = gpu->device;
    node.gpus = per_node;
    node.nvlink = gpu->inside == Inside::kCubeMesh ? "nvlink2-x6" : gpu->nvlink;
    node.pcie = gpu->pcie;
    node.gpus_per_nic = per_node / cards;
    node.gpus_per_pcie_switch = std::max(node.gpus_per_nic, 2);
    if (per_node % node.gpus_per_pcie_switch != 0 ||
        node.gpus_per_pcie_switch % node.gpus_per_nic != 0) {
      node.gpus_per_pcie_switch = node.gpus_per_nic;
    }
    node.nic = network.link;
    node.host = gpu->host;
    cluster = MakeNvSwitchCluster(node, nodes, std::nullopt);
  }
  SetRate(cluster, network.link, network.gbit_per_card);
  return cluster;
}

}  // namespace tessera
