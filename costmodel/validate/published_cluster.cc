#include "costmodel/validate/published_cluster.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <optional>

#include "costmodel/validate/words.h"
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
  std::array<std::string_view, 2> words;
  std::string_view device;  // of DeviceTypes
  Inside inside = Inside::kSwitch;
  std::string_view nvlink = "";  // of LinkTypes
  std::string_view pcie = "pcie4-x16";
  std::string_view nic = "ib-hdr";
  int gpus_per_nic = 1;
  std::string_view host = "dgx-a100-80gb";
};

constexpr std::array kGpuNames = {
    GpuName{{"gb300", ""},
            "gb300-288gb",
            Inside::kSwitch,
            "nvlink5-nvl72",
            "pcie5-x16",
            "ib-ndr",
            1,
            "gb200-nvl72"},
    GpuName{{"gb200", ""},
            "gb200-186gb",
            Inside::kSwitch,
            "nvlink5-nvl72",
            "pcie5-x16",
            "ib-ndr",
            1,
            "gb200-nvl72"},
    GpuName{{"b300", ""},
            "b300-sxm-288gb",
            Inside::kSwitch,
            "nvlink5",
            "pcie5-x16",
            "ib-ndr",
            1,
            "dgx-b200"},
    GpuName{{"b200", ""},
            "b200-sxm-180gb",
            Inside::kSwitch,
            "nvlink5",
            "pcie5-x16",
            "ib-ndr",
            1,
            "dgx-b200"},
    GpuName{{"h200", ""},
            "h200-sxm5-141gb",
            Inside::kSwitch,
            "nvlink4",
            "pcie5-x16",
            "ib-ndr",
            1,
            "dgx-h100"},
    GpuName{{"h800", ""},
            "h800-sxm5-80gb",
            Inside::kSwitch,
            "nvlink4-x8",
            "pcie5-x16",
            "ib-ndr",
            1,
            "dgx-h100"},
    GpuName{{"h100", "nvl"},
            "h100-nvl-94gb",
            Inside::kHost,
            "nvlink4",
            "pcie5-host",
            "ib-ndr",
            4,
            "dgx-h100"},
    GpuName{{"h100", "pcie"},
            "h100-pcie-80gb",
            Inside::kHost,
            "",
            "pcie5-host",
            "ib-ndr",
            4,
            "dgx-h100"},
    GpuName{{"h100", ""},
            "h100-sxm5-80gb",
            Inside::kSwitch,
            "nvlink4",
            "pcie5-x16",
            "ib-ndr",
            1,
            "dgx-h100"},
    GpuName{{"a800", "40"}, "a800-sxm4-40gb", Inside::kSwitch, "nvlink3-x8"},
    GpuName{{"a800", ""}, "a800-sxm4-80gb", Inside::kSwitch, "nvlink3-x8"},
    GpuName{{"a100", "pcie-40"},
            "a100-pcie-40gb",
            Inside::kHost,
            "",
            "pcie4-host",
            "ib-hdr",
            4},
    GpuName{{"a100", "pcie"},
            "a100-pcie-80gb",
            Inside::kHost,
            "",
            "pcie4-host",
            "ib-hdr",
            4},
    GpuName{{"a100", "40"}, "a100-sxm4-40gb", Inside::kSwitch, "nvlink3"},
    // Where the memory is not said: 80 GB, the usual one since 2021.
    GpuName{{"a100", ""}, "a100-sxm4-80gb", Inside::kSwitch, "nvlink3"},
    GpuName{{"a10g", ""},
            "a10g-24gb",
            Inside::kHost,
            "",
            "pcie4-host",
            "ena-100g",
            8,
            "g5.48xlarge"},
    GpuName{
        {"a40", ""}, "a40-48gb", Inside::kHost, "", "pcie4-host", "ib-hdr", 4},
    GpuName{{"l40s", ""},
            "l40s-48gb",
            Inside::kHost,
            "",
            "pcie4-host",
            "ib-hdr",
            4},
    GpuName{{"l4", ""},
            "l4-24gb",
            Inside::kHost,
            "",
            "pcie4-host",
            "ena-100g",
            8,
            "g6.48xlarge"},
    GpuName{{"4090", ""},
            "rtx-4090-24gb",
            Inside::kHost,
            "",
            "pcie4-host",
            "ethernet-10g",
            8},
    GpuName{{"3090", ""},
            "rtx-3090-24gb",
            Inside::kHost,
            "",
            "pcie4-host",
            "ethernet-10g",
            8},
    GpuName{{"titan rtx", ""},
            "titan-rtx-24gb",
            Inside::kHost,
            "nvlink2-x2",
            "pcie3-host",
            "ethernet-10g",
            2,
            "titan-rtx-pair"},
    GpuName{{"t4", ""},
            "t4-16gb",
            Inside::kHost,
            "",
            "pcie3-host",
            "ena-50g",
            4,
            "g4dn.12xlarge"},
    GpuName{{"v100", "32"},
            "v100-sxm2-32gb",
            Inside::kCubeMesh,
            "nvlink2",
            "pcie3-x16",
            "ib-edr",
            2,
            "dgx1-v100"},
    // Where the memory is not said: 16 GB, of the cloud's first instances.
    GpuName{{"v100", ""},
            "v100-sxm2-16gb",
            Inside::kCubeMesh,
            "nvlink2",
            "pcie3-x16",
            "ena-25g",
            8,
            "p3.16xlarge"},
    GpuName{{"p100", ""},
            "p100-sxm2-16gb",
            Inside::kHost,
            "nvlink1",
            "pcie3-host",
            "ib-edr",
            4,
            "p100-edr"},
};

Result<const GpuName*> GpuOf(const PublishedRun& run) {
  const std::string words = Lower(run.gpu);
  if (!Has(words, "not stated;")) {
    for (const GpuName& row : kGpuNames) {
      if (Has(words, row.words[0]) && Has(words, row.words[1])) return &row;
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
    NetworkName{"tcpx", "efa-100g", 200, 4, true},
    NetworkName{"gpudirect-tcp", "efa-100g", 200, 4, true},
    NetworkName{"xdr", "ib-xdr", 800},
    NetworkName{"ndr", "ib-ndr", 400},
    NetworkName{"cx-7", "ib-ndr", 400},
    NetworkName{"connectx-7", "ib-ndr", 400},
    NetworkName{"hdr100", "ib-hdr100", 100},
    NetworkName{"hdr", "ib-hdr", 200},
    NetworkName{"edr", "ib-edr", 100},
    NetworkName{"fdr", "ib-fdr", 54.5},
    // Jean Zay's V100 nodes have four cards.
    NetworkName{"omni-path", "omni-path-100", 100, 4},
    NetworkName{"opa", "omni-path-100", 100, 4},
    NetworkName{"infiniband", "ib-hdr", 0},
    NetworkName{"roce", "roce-200g", 0},
    NetworkName{"rdma", "ib-hdr", 0},
    NetworkName{"ena", "ena-25g", 25, 1, true},
    NetworkName{"ethernet", "ena-25g", 10, 1, true},
    NetworkName{"tcp", "ena-25g", 10, 1, true},
    // Only a rate.
    NetworkName{"gb/s", "ib-hdr", 0},
    NetworkName{"gbps", "ib-hdr", 0},
    NetworkName{"gbit", "ib-hdr", 0},
};

// A number and what stands behind it: "8" "x", "200" "gb/s", "4" "hcas".
struct Amount {
  double value = 0;
  std::string unit;
  size_t end = 0;
};

// Numbers that begin a word ("nvlink5" has none).
std::vector<Amount> AmountsIn(const std::string& text) {
  std::vector<Amount> found;
  for (size_t i = 0; i < text.size();) {
    const auto digit = [&](size_t at) {
      return at < text.size() &&
             std::isdigit(static_cast<unsigned char>(text[at])) != 0;
    };
    if (!digit(i)) {
      ++i;
      continue;
    }
    const bool begins =
        i == 0 || std::isalpha(static_cast<unsigned char>(text[i - 1])) == 0;
    Amount quantity;
    size_t end = i;
    while (digit(end) || (end < text.size() && digit(end + 1) &&
                          (text[end] == '.' || text[end] == ','))) {
      if (text[end] != ',') quantity.unit += text[end];
      ++end;
    }
    quantity.value = std::stod(quantity.unit);
    quantity.unit.clear();
    i = end;
    while (end < text.size() && text[end] == ' ') ++end;
    while (end < text.size() &&
           (std::isalpha(static_cast<unsigned char>(text[end])) != 0 ||
            text[end] == '/')) {
      quantity.unit += text[end++];
    }
    quantity.end = end;
    if (begins) found.push_back(std::move(quantity));
  }
  return found;
}

// Four V100 have two NVLinks to each other; others meet at the host. Network
// cards hang on a bridge of their own.
Cluster MakeHostNode(const GpuName& gpu, int nodes, int gpus, bool nvlink,
                     std::string_view nic, int cards) {
  Cluster cluster;
  cluster.host = HostOf(gpu.host);
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

// The nominal rates of the links that stand for networks; what of it is
// reached is in their bandwidths.
double NominalGbit(std::string_view link) {
  struct Rate {
    std::string_view link;
    double gbit;
  };
  constexpr std::array kRates = {
      Rate{"ib-fdr", 54.5},    Rate{"ib-edr", 100},
      Rate{"ib-hdr", 200},     Rate{"ib-ndr", 400},
      Rate{"ib-xdr", 800},     Rate{"ib-hdr100", 100},
      Rate{"roce-200g", 200},  Rate{"omni-path-100", 100},
      Rate{"ena-25g", 25},     Rate{"ena-50g", 50},
      Rate{"ena-100g", 100},   Rate{"efa-100g", 100},
      Rate{"efa-4x100g", 400}, Rate{"ethernet-10g", 10}};
  const auto* const row = std::ranges::find(kRates, link, &Rate::link);
  TESSERA_CHECK(row != kRates.end()) << link;
  return row->gbit;
}

// Cards at another rate than their kind's usual one.
void SetRate(Cluster& cluster, std::string_view link, double gbit) {
  const double nominal = NominalGbit(link);
  if (gbit == nominal) return;
  for (LinkType& type : cluster.link_types) {
    if (type.name != link) continue;
    type.bandwidth = {type.bandwidth.value * gbit / nominal};
    char text[64];
    std::snprintf(text, sizeof text, "%g Gb/s, reached as by ", gbit);
    type.source = text + type.source;
  }
}

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
      [&](const NetworkName& network) { return Has(text, network.word); });
  if (row == kNetworks.end()) return std::nullopt;
  int cards = 0;
  double rate = 0;
  for (const Amount& quantity : AmountsIn(text)) {
    const std::string& unit = quantity.unit;
    if (unit == "x" || unit == "hcas" || unit == "nics" || unit == "cards" ||
        unit == "ports" || unit == "rails") {
      cards = static_cast<int>(std::clamp(quantity.value, 1.0, 64.0));
    } else if (rate == 0 && (unit.starts_with("gb") || unit == "g")) {
      rate = quantity.value;
    } else if (rate == 0 && unit.starts_with("tb")) {
      rate = 1000 * quantity.value;
    }
  }
  const bool of_node =
      (Has(text, "per node") || row->rate_of_node) && cards == 0;
  if (cards == 0) cards = row->cards > 0 ? row->cards : gpus;
  NetworkWords network = {row->link, row->gbit, cards};
  if (rate > 0) network.gbit_per_card = of_node ? rate / cards : rate;
  if (network.gbit_per_card <= 0) return std::nullopt;
  return network;
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
    return CannotMap(
        std::to_string(gpus) + " GPUs in nodes of " + std::to_string(per_node),
        "gpus_per_node");
  }
  const int nodes = gpus / per_node;

  NetworkWords network = {gpu->nic, NominalGbit(gpu->nic),
                          std::max(1, per_node / gpu->gpus_per_nic)};
  if (nodes > 1) {
    if (const auto read = ReadNetwork(run.inter_link, per_node)) {
      network = *read;
    } else {
      assumptions.push_back("network: " + std::to_string(network.cards) +
                            " x " + std::string(network.link) + " in a node");
    }
  }
  if (run.intra_link.empty() && per_node > 1) {
    assumptions.push_back("GPUs of a node joined as in the vendor's system");
  }
  const std::string inside = Lower(run.intra_link);
  const bool nvlink =
      !gpu->nvlink.empty() && !Has(inside, "pcie") && !Has(inside, "no nvlink");
  Cluster cluster;
  if (gpu->inside == Inside::kCubeMesh && per_node == 8) {
    TESSERA_TRY(cluster, MakeCluster((gpu->device == "v100-sxm2-16gb"
                                          ? "p3.16xlarge:"
                                          : "dgx1-v100-32gb:") +
                                     std::to_string(nodes)));
    return cluster;
  }
  if (gpu->inside != Inside::kSwitch || !nvlink) {
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
    node.nvlink = gpu->nvlink;
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
