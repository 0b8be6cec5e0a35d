#include "costmodel/validate/replay.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>

#include "planner/io/huggingface.h"
#include "planner/io/model_config.h"
#include "planner/topology/fabric.h"
#include "planner/topology/hardware.h"
#include "planner/topology/nvswitch.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

using Words = std::vector<std::string>;

bool Has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

Error CannotMap(std::string what, std::string_view column) {
  return {ErrorCode::kInfeasible, std::move(what), std::string(column)};
}

// ---- Machines ---------------------------------------------------------------

// How the GPUs of a node are joined.
enum class Inside : uint8_t { kSwitch, kCubeMesh, kPairMesh, kPcie };

// GPUs by words of the column; the first row whose words are all there. The
// reference system is that of the vendor, where links are blank.
struct GpuName {
  std::array<std::string_view, 2> words;
  std::string_view device;  // of DeviceTypes
  Inside inside = Inside::kSwitch;
  std::string_view nvlink;  // of LinkTypes
  std::string_view pcie = "pcie4-x16";
  std::string_view nic = "ib-hdr";
  int gpus_per_nic = 1;
  std::string_view host = "dgx-a100-80gb";
};

constexpr std::array kGpuNames = {
    GpuName{{"GB200", ""},
            "gb200-186gb",
            Inside::kSwitch,
            "nvlink5-nvl72",
            "pcie5-x16",
            "ib-ndr",
            1,
            "gb200-nvl72"},
    GpuName{{"B200", ""},
            "b200-sxm-180gb",
            Inside::kSwitch,
            "nvlink5",
            "pcie5-x16",
            "ib-ndr",
            1,
            "dgx-b200"},
    GpuName{{"H200", ""},
            "h200-sxm5-141gb",
            Inside::kSwitch,
            "nvlink4",
            "pcie5-x16",
            "ib-ndr",
            1,
            "dgx-h100"},
    GpuName{{"H100", "80GB"},
            "h100-sxm5-80gb",
            Inside::kSwitch,
            "nvlink4",
            "pcie5-x16",
            "ib-ndr",
            1,
            "dgx-h100"},
    GpuName{{"A100", "40GB"}, "a100-sxm4-40gb", Inside::kSwitch, "nvlink3"},
    GpuName{{"A100", "80GB"}, "a100-sxm4-80gb", Inside::kSwitch, "nvlink3"},
    // Of vTrain: 80 GB (its paper).
    GpuName{{"A100", ""}, "a100-sxm4-80gb", Inside::kSwitch, "nvlink3"},
    GpuName{{"V100", "32GB"},
            "v100-sxm2-32gb",
            Inside::kCubeMesh,
            "nvlink2",
            "pcie3-x16",
            "ib-edr",
            2,
            "dgx1-v100"},
    GpuName{{"V100", "16GB"},
            "v100-sxm2-16gb",
            Inside::kCubeMesh,
            "nvlink2",
            "pcie3-x16",
            "ena-25g",
            8,
            "p3.16xlarge"},
    GpuName{{"TITAN RTX", ""},
            "titan-rtx-24gb",
            Inside::kPcie,
            "nvlink2-x2",
            "pcie3-host",
            "ethernet-10g",
            2,
            "titan-rtx-pair"},
};

// Networks by words of the column: the rate of all cards of a node together.
struct NetworkName {
  std::string_view words;
  std::string_view nic;  // of LinkTypes
  int nics_per_node;     // 0: one for each GPU
};

constexpr std::array kNetworks = {
    NetworkName{"800 Gb/s per node", "ib-hdr", 4},
    NetworkName{"1600 Gbps per node RoCE", "ib-hdr", 8},
    NetworkName{"8x HDR", "ib-hdr", 8},
    NetworkName{"HDR InfiniBand, 8 HCAs", "ib-hdr", 8},
    // Jean Zay's V100 nodes have four Omni-Path cards of 100 Gb/s.
    NetworkName{"Omni-Path", "ib-edr", 4},
    NetworkName{"4x 100 Gb/s", "ib-edr", 4},
    NetworkName{"25 Gb/s Ethernet", "ena-25g", 1},
    NetworkName{"400 Gb/s per node", "ib-edr", 4},
};

Result<const GpuName*> GpuOf(const PublishedRun& run) {
  if (!Has(run.gpu, "not stated")) {
    for (const GpuName& row : kGpuNames) {
      if (Has(run.gpu, row.words[0]) && Has(run.gpu, row.words[1])) return &row;
    }
  }
  return CannotMap("no figures of '" + run.gpu + "'", "gpu");
}

// Every GPU of the node to each other by two NVLinks, as four V100 have it;
// cards on a bridge of their own.
Cluster MakePairMesh(const GpuName& gpu, int nodes, int gpus,
                     std::string_view nic, int nics_per_node, bool nvlink) {
  Cluster cluster;
  cluster.host = HostOf(gpu.host);
  const int device = UseDeviceType(cluster, gpu.device);
  const int pcie = UseLinkType(cluster, gpu.pcie);
  std::vector<std::vector<VertexId>> nics;
  for (int n = 0; n < nodes; ++n) {
    const VertexId cpu =
        AddVertex(cluster, VertexKind::kBridge, InNode(n, "cpu"));
    std::vector<VertexId> vertices;
    for (int g = 0; g < gpus; ++g) {
      const DeviceId id = AddDevice(cluster, device, n, InNode(n, "gpu", g));
      const VertexId vertex = cluster.devices[id.index()].vertex;
      Connect(cluster, vertex, cpu, pcie);
      for (const VertexId peer : vertices) {
        if (nvlink) {
          Connect(cluster, peer, vertex, UseLinkType(cluster, "nvlink2-x2"));
        }
      }
      vertices.push_back(vertex);
    }
    nics.emplace_back();
    for (int i = 0; i < nics_per_node; ++i) {
      nics.back().push_back(
          AddVertex(cluster, VertexKind::kNic, InNode(n, "nic", i)));
      Connect(cluster, nics.back().back(), cpu, pcie);
    }
  }
  ConnectRails(cluster, nics, nic);
  return cluster;
}

// ---- Words ------------------------------------------------------------------

std::string Lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  return text;
}

// The number that a text is; nothing for words.
std::optional<int64_t> NumberIn(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

void Set(JsonValue& config, std::string_view key, double number) {
  JsonValue value;
  value.kind = JsonValue::Kind::kNumber;
  value.number = number;
  config.fields[std::string(key)] = value;
}

}  // namespace

Result<Cluster> ClusterOf(const PublishedRun& run, Words& assumptions) {
  TESSERA_TRY(const GpuName* gpu, GpuOf(run));
  if (run.gpus < 1 || run.gpus > 65536) {
    return CannotMap("is " + std::to_string(run.gpus), "gpus");
  }
  int per_node = static_cast<int>(run.gpus_per_node);
  if (per_node == 0) {
    per_node = 8;
    assumptions.push_back("8 GPUs in a node");
  }
  per_node = std::min<int>(per_node, static_cast<int>(run.gpus));
  if (run.gpus % per_node != 0) {
    return CannotMap(std::to_string(run.gpus) + " GPUs in nodes of " +
                         std::to_string(per_node),
                     "gpus_per_node");
  }
  const int nodes = static_cast<int>(run.gpus) / per_node;

  std::string_view nic = gpu->nic;
  int nics = std::max(1, per_node / gpu->gpus_per_nic);
  if (nodes > 1) {
    const auto found = std::ranges::find_if(
        kNetworks,
        [&](const NetworkName& row) { return Has(run.inter_link, row.words); });
    if (found != kNetworks.end()) {
      nic = found->nic;
      if (found->nics_per_node > 0) nics = found->nics_per_node;
    } else if (run.inter_link.empty() || Has(run.inter_link, "not stated")) {
      assumptions.push_back("network: " + std::to_string(nics) + " x " +
                            std::string(nic) + " in a node");
    } else {
      return CannotMap("no figures of '" + run.inter_link + "'", "inter_link");
    }
  }
  if (run.intra_link.empty() && per_node > 1) {
    assumptions.push_back("GPUs of a node joined as in the vendor's system");
  }
  const bool nvlink = !Has(run.intra_link, "PCIe");
  if (gpu->inside == Inside::kCubeMesh && per_node == 8) {
    return MakeCluster(
        (gpu->device == "v100-sxm2-16gb" ? "p3.16xlarge:" : "dgx1-v100-32gb:") +
        std::to_string(nodes));
  }
  if (gpu->inside == Inside::kPcie && per_node == 2) {
    return MakeCluster(nvlink ? "titan-rtx-pair" : "titan-rtx-pair-nonvlink");
  }
  if (gpu->inside != Inside::kSwitch || !nvlink) {
    return MakePairMesh(*gpu, nodes, per_node, nic, nics,
                        nvlink && gpu->inside != Inside::kPcie);
  }
  if (per_node % nics != 0 && nics % per_node != 0) nics = per_node;
  NvSwitchNode node;
  node.device = gpu->device;
  node.gpus = per_node;
  node.nvlink = gpu->nvlink;
  node.pcie = gpu->pcie;
  node.gpus_per_nic = std::max(1, per_node / nics);
  node.gpus_per_pcie_switch = std::max(node.gpus_per_nic, 2);
  if (per_node % node.gpus_per_pcie_switch != 0) {
    node.gpus_per_pcie_switch = node.gpus_per_nic;
  }
  node.nic = nic;
  node.host = gpu->host;
  return MakeNvSwitchCluster(node, nodes, std::nullopt);
}

Result<Strategy> StrategyOf(const PublishedRun& run, Words& assumptions) {
  Strategy strategy;
  const auto degree = [&](int64_t value) {
    return static_cast<int>(std::max<int64_t>(1, value));
  };
  strategy.tp = degree(run.tp);
  strategy.pp = degree(run.pp);
  strategy.vp = degree(run.vp);
  strategy.cp = degree(run.cp);
  strategy.ep = degree(run.ep);
  strategy.mbs = degree(run.micro_batch);
  const int model = strategy.tp * strategy.pp * strategy.cp * strategy.ep;
  if (run.gpus % model != 0) {
    return CannotMap(std::to_string(run.gpus) + " GPUs are not a multiple of " +
                         std::to_string(model) + " = tp pp cp ep",
                     "gpus");
  }
  strategy.dp = static_cast<int>(run.gpus) / model;
  strategy.sp = run.seq_parallel == "yes" && strategy.tp > 1;
  if (strategy.vp > 1) strategy.schedule = "interleaved";

  const std::string zero = Lower(run.zero_stage);
  if (zero.empty()) {
    assumptions.push_back("ZeRO stage 0");
  } else if (zero.starts_with("fsdp")) {
    strategy.zero = 3;
  } else if (zero[0] >= '0' && zero[0] <= '3') {
    strategy.zero = zero[0] - '0';
  } else if (Has(zero, "zero-2")) {
    strategy.zero = 2;
  } else {
    return CannotMap("'" + run.zero_stage + "'", "zero_stage");
  }
  if (Has(zero, "offload")) strategy.optimizer_tier = MemoryTier::kHost;
  if (Has(zero, "hsdp")) strategy.zero_group = Strategy::kWithinNode;
  // What replicas there are not cannot be cut.
  if (strategy.dp * strategy.cp * strategy.ep == 1) {
    strategy.zero = 0;
    strategy.zero_group = 0;
  }

  const std::string recompute = Lower(run.recompute);
  if (recompute == "full") {
    strategy.recompute = RecomputeLevel::kFull;
  } else if (recompute.starts_with("selective")) {
    strategy.recompute = RecomputeLevel::kSelective;
  } else if (recompute.empty()) {
    assumptions.push_back("no recompute");
  } else if (recompute != "none") {
    return CannotMap("'" + run.recompute + "'", "recompute");
  }
  return strategy;
}

Result<Graph> GraphOf(const PublishedRun& run, Words& assumptions) {
  const std::string precision = Lower(run.precision);
  ImportOptions options;
  options.global_batch = run.global_batch;
  options.seq_len = run.seq;
  if (precision.empty()) {
    options.dtype = DType::kBFloat16;
    assumptions.push_back("bf16");
  } else if (Has(precision, "fp8") || Has(precision, "mxfp") ||
             Has(precision, "nvfp")) {
    return CannotMap("'" + run.precision + "' is not modelled", "precision");
  } else if (Has(precision, "bf16")) {
    options.dtype = DType::kBFloat16;
  } else if (Has(precision, "fp16")) {
    options.dtype = DType::kFloat16;
    if (precision.starts_with("fp32")) options.dtype = DType::kFloat32;
  } else {
    options.dtype = DType::kFloat32;
  }

  const auto kv_heads =
      run.kv_heads.empty() ? std::optional(run.heads) : NumberIn(run.kv_heads);
  if (!kv_heads) return CannotMap("'" + run.kv_heads + "'", "kv_heads");
  const bool gated = Lower(run.ffn_kind).starts_with("swiglu");
  std::optional<int64_t> ffn = NumberIn(run.ffn);
  if (run.ffn.empty()) {
    ffn = 4 * run.hidden;
    assumptions.push_back("ffn of 4 hidden");
  }
  if (!ffn) return CannotMap("'" + run.ffn + "'", "ffn");
  int64_t vocab = run.vocab;
  if (vocab == 0) {
    // GPT-2's, padded to a multiple of 128 as Megatron does.
    vocab = 50304;
    assumptions.push_back("vocabulary of 50304");
  }

  JsonValue json;
  json.kind = JsonValue::Kind::kObject;
  if (gated || run.experts > 0) {
    Set(json, "hidden_size", static_cast<double>(run.hidden));
    Set(json, "num_hidden_layers", static_cast<double>(run.layers));
    Set(json, "num_attention_heads", static_cast<double>(run.heads));
    Set(json, "num_key_value_heads", static_cast<double>(*kv_heads));
    Set(json, "intermediate_size", static_cast<double>(*ffn));
    Set(json, "vocab_size", static_cast<double>(vocab));
    Set(json, "max_position_embeddings", static_cast<double>(run.seq));
    if (run.experts > 0) {
      Set(json, "num_local_experts", static_cast<double>(run.experts));
      Set(json, "num_experts_per_tok",
          static_cast<double>(std::max<int64_t>(1, run.topk)));
    }
  } else {
    Set(json, "n_embd", static_cast<double>(run.hidden));
    Set(json, "n_layer", static_cast<double>(run.layers));
    Set(json, "n_head", static_cast<double>(run.heads));
    Set(json, "n_inner", static_cast<double>(*ffn));
    Set(json, "vocab_size", static_cast<double>(vocab));
    Set(json, "n_positions", static_cast<double>(run.seq));
    for (const char* key : {"embd_pdrop", "resid_pdrop", "attn_pdrop"}) {
      Set(json, key, 0);
    }
    if (*kv_heads != run.heads) {
      return CannotMap("grouped heads without SwiGLU", "kv_heads");
    }
  }
  ModelConfig config("line " + std::to_string(run.line), std::move(json));
  TESSERA_TRY(const Graph graph, run.experts > 0 ? BuildMixtral(config, options)
                                 : gated         ? BuildLlama(config, options)
                                                 : BuildGpt2(config, options));
  return Differentiate(graph);
}

}  // namespace tessera
