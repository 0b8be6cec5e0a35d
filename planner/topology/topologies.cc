#include "planner/topology/topologies.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/table.h"
#include "planner/base/whole_number.h"
#include "planner/topology/mixture.h"
#include "planner/topology/networks.h"
#include "planner/topology/rows.h"
#include "planner/topology/upkeep.h"

namespace tessera {
namespace {

constexpr std::array kTopologies = {
    Topology{"dgx-a100-40gb", "8 A100 40 GB, NVSwitch, 8 x 200 Gb/s HDR", 8, 8,
             "ib-hdr", MakeDgxA100With40GB},
    Topology{"dgx-a100-80gb", "8 A100 80 GB, NVSwitch, 8 x 200 Gb/s HDR", 8, 8,
             "ib-hdr", MakeDgxA100With80GB},
    Topology{"dgx-h100", "8 H100 80 GB, NVSwitch, 8 x 400 Gb/s NDR", 8, 8,
             "ib-ndr", MakeDgxH100},
    Topology{"dgx-h200", "8 H200 141 GB, NVSwitch, 8 x 400 Gb/s NDR", 8, 8,
             "ib-ndr", MakeDgxH200},
    Topology{"dgx-b200", "8 B200 180 GB, NVSwitch, 8 x 400 Gb/s NDR", 8, 8,
             "ib-ndr", MakeDgxB200},
    Topology{"gb200-nvl72",
             "a rack of 72 GB200 on one NVLink domain; NODES "
             "counts racks",
             72, 72, "ib-ndr", MakeGb200Nvl72},
    Topology{"dgx-b300", "8 B300 288 GB, NVSwitch, 8 x 800 Gb/s XDR", 8, 8,
             "ib-xdr", MakeDgxB300},
    Topology{"gb300-nvl72",
             "a rack of 72 GB300 on one NVLink domain; NODES "
             "counts racks",
             72, 72, "ib-xdr", MakeGb300Nvl72},
    Topology{"hgx-a800",
             "8 A800 80 GB, NVSwitch of 8 links, 8 x 200 Gb/s "
             "HDR",
             8, 8, "ib-hdr", MakeHgxA800},
    Topology{"hgx-h800",
             "8 H800 80 GB, NVSwitch of 8 links, 8 x 400 Gb/s "
             "NDR",
             8, 8, "ib-ndr", MakeHgxH800},
    Topology{"hgx-h20", "8 H20 96 GB, NVSwitch, 8 x 400 Gb/s NDR", 8, 8,
             "ib-ndr", MakeHgxH20},
    Topology{"dgx1-v100-32gb",
             "8 V100 32 GB, hybrid cube mesh, 4 x 100 Gb/s "
             "EDR",
             8, 4, "ib-edr", MakeDgx1V100},
    Topology{"p3.16xlarge", "8 V100 16 GB, hybrid cube mesh, one 25 Gb/s NIC",
             8, 1, "ena-25g", MakeP3},
    Topology{"p4d.24xlarge", "8 A100 40 GB, NVSwitch, 4 x 100 Gb/s EFA", 8, 4,
             "efa-100g", MakeP4d},
    Topology{"p5.48xlarge", "8 H100 80 GB, NVSwitch, 32 x 100 Gb/s EFA", 8, 8,
             "efa-4x100g", MakeP5},
    Topology{"p5en.48xlarge", "8 H200 141 GB, NVSwitch, 16 x 200 Gb/s EFA", 8,
             8, "efa-2x200g", MakeP5en},
    Topology{"p6-b200.48xlarge", "8 B200 180 GB, NVSwitch, 8 x 400 Gb/s EFA", 8,
             8, "efa-400g", MakeP6B200},
    Topology{"a3-high", "8 H100 80 GB, NVSwitch, 4 x 200 Gb/s TCPX", 8, 4,
             "tcpx-200g", MakeA3High},
    Topology{"a3-mega", "8 H100 80 GB, NVSwitch, 8 x 200 Gb/s TCPXO", 8, 8,
             "tcpxo-200g", MakeA3Mega},
    Topology{"g4dn.12xlarge", "4 T4 on PCIe 3, one 50 Gb/s NIC", 4, 1,
             "ena-50g", MakeG4dn},
    Topology{"g5.48xlarge", "8 A10G on PCIe 4, one 100 Gb/s NIC", 8, 1,
             "ena-100g", MakeG5},
    Topology{"g6.48xlarge", "8 L4 on PCIe 4, one 100 Gb/s NIC", 8, 1,
             "ena-100g", MakeG6},
    Topology{"pcie-a40", "8 A40 on PCIe 4, one 100 Gb/s NIC", 8, 1, "ib-edr",
             MakePcieA40},
    Topology{"pcie-a100", "8 A100 80 GB on PCIe 4, one 100 Gb/s NIC", 8, 1,
             "ib-edr", MakePcieA100},
    Topology{"pcie-h100", "8 H100 80 GB on PCIe, one 100 Gb/s NIC", 8, 1,
             "ib-edr", MakePcieH100},
    Topology{"pcie-l40s", "8 L40S on PCIe 4, one 100 Gb/s NIC", 8, 1, "ib-edr",
             MakePcieL40s},
    Topology{"titan-rtx-pair", "2 TITAN RTX with an NVLink bridge", 2, 1,
             "ethernet-10g", MakeTitanRtxPair},
    Topology{"titan-rtx-pair-nonvlink",
             "2 TITAN RTX on PCIe 3 through the "
             "host",
             2, 1, "ethernet-10g", MakeTitanRtxPairWithoutNvLink},
    Topology{"p100-edr", "4 P100 with NVLink, 100 Gb/s EDR (FlexFlow's)", 4, 1,
             "ib-edr", MakeP100Edr},
    Topology{"k80-fdr", "4 K80 on PCIe switches, 56 Gb/s FDR (FlexFlow's)", 4,
             1, "ib-fdr", MakeK80Fdr},
    Topology{"local-cpu", "ranks on the cores of this host; NODES counts ranks",
             0, 0, "", MakeLocalCpu},
};

Result<int> ParseCount(std::string_view text, std::string_view what, int max,
                       std::string_view spec) {
  const auto value = ParseWhole<int>(text);
  if (!value || *value < 1 || *value > max) {
    return InvalidInput("expected " + std::string(what) + " in [1, " +
                            std::to_string(max) + "], is '" +
                            std::string(text) + "'",
                        "cluster '" + std::string(spec) + "'");
  }
  return *value;
}

// NAME[:NODES[xGPUS]].
Result<ClusterPart> MakePart(std::string_view spec) {
  const size_t colon = spec.find(':');
  TESSERA_TRY(const Topology* topology,
              Find("cluster", Topologies(), spec.substr(0, colon)));
  int nodes = 1;
  std::optional<int> gpus;
  if (colon != std::string_view::npos) {
    const std::string_view counts = spec.substr(colon + 1);
    const size_t x = counts.find('x');
    TESSERA_TRY(nodes, ParseCount(counts.substr(0, x), "a number of nodes",
                                  kMostNodes, spec));
    if (x != std::string_view::npos) {
      if (topology->gpus_per_node == 0) {
        return InvalidInput("takes a number of ranks only, as in '" +
                                std::string(topology->name) + ":4'",
                            "cluster '" + std::string(spec) + "'");
      }
      TESSERA_TRY(gpus, ParseCount(counts.substr(x + 1), "GPUs per node",
                                   topology->gpus_per_node, spec));
    }
  }
  TESSERA_TRY(Cluster cluster, topology->make(nodes, gpus));
  cluster.name = std::string(topology->name) + ":" + std::to_string(nodes);
  SetUpkeep(topology->name, cluster);
  if (gpus.has_value()) cluster.name += "x" + std::to_string(*gpus);
  return ClusterPart{topology, std::move(cluster)};
}

}  // namespace

std::span<const Topology> Topologies() {
  return kTopologies;
}

Result<Cluster> MakeCluster(std::string_view whole) {
  const size_t at = whole.find('@');
  std::string_view specs = whole.substr(0, at);
  std::vector<ClusterPart> parts;
  for (bool more = true; more;) {
    const size_t plus = specs.find('+');
    TESSERA_TRY(ClusterPart part, MakePart(specs.substr(0, plus)));
    parts.push_back(std::move(part));
    more = plus != std::string_view::npos;
    if (more) specs.remove_prefix(plus + 1);
  }
  const auto fail = [&](std::string message) {
    return InvalidInput(std::move(message),
                        "cluster '" + std::string(whole) + "'");
  };
  const bool mixed = parts.size() > 1;
  if (mixed || at != std::string_view::npos) {
    for (const ClusterPart& part : parts) {
      if (part.topology->nics_per_node > 0) continue;
      return fail(mixed ? std::string(part.topology->name) +
                              " has no network to join other nodes by"
                        : "has no network");
    }
  }
  if (mixed && at != std::string_view::npos) {
    return fail("unlike nodes are joined by rails: expected no network");
  }
  if (mixed) {
    int nodes = 0;
    for (const ClusterPart& part : parts) nodes += part.nodes.num_nodes();
    if (nodes > kMostNodes) {
      return fail("expected at most " + std::to_string(kMostNodes) +
                  " nodes, is " + std::to_string(nodes));
    }
    return MixtureOf(parts);
  }
  Cluster cluster = std::move(parts.front().nodes);
  if (at == std::string_view::npos) return cluster;
  TESSERA_TRY(cluster, WithNetwork(std::move(cluster), whole.substr(at + 1)));
  cluster.name += std::string(whole.substr(at));
  return cluster;
}

}  // namespace tessera
