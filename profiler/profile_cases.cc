#include "profiler/profile_cases.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>

#include "costmodel/simulate/simulator.h"
#include "costmodel/source/cost_source.h"
#include "planner/io/huggingface.h"
#include "planner/io/model_config.h"
#include "planner/ir/cluster_lookup.h"
#include "planner/lower/lower.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/strategy.h"
#include "profiler/prepared_exchange.h"

namespace tessera {
namespace {

constexpr std::array kPayloads = {1 << 10, 1 << 12, 1 << 14, 1 << 16,
                                  1 << 18, 1 << 20, 1 << 22, 1 << 24};

std::vector<int> Divisors(int n) {
  std::vector<int> divisors;
  for (int d = 1; d <= n; ++d) {
    if (n % d == 0) divisors.push_back(d);
  }
  return divisors;
}

JsonValue Number(double value) {
  JsonValue number;
  number.kind = JsonValue::Kind::kNumber;
  number.number = value;
  return number;
}

bool HasEqualNodes(const Cluster& cluster) {
  const std::vector<int> first = FirstDevicesOfNodes(cluster);
  for (size_t node = 0; node + 1 < first.size(); ++node) {
    if (first[node + 1] - first[node] != first[1]) return false;
  }
  return true;
}

Result<Graph> TypicalGraph(const ModelFamily& family) {
  constexpr double kWidth = 256;
  constexpr double kHeads = 8;
  constexpr double kLayers = 4;
  constexpr double kVocabulary = 256;  // bytes
  constexpr double kPositions = 256;
  constexpr int64_t kSeqLen = 128;
  constexpr int64_t kBatch = 16;
  JsonValue values;
  values.kind = JsonValue::Kind::kObject;
  const auto set = [&](const char* key, double value) {
    values.fields[key] = Number(value);
  };
  const bool gpt2 = family.name == "gpt2";
  set("vocab_size", kVocabulary);
  set(gpt2 ? "n_embd" : "hidden_size", kWidth);
  set(gpt2 ? "n_head" : "num_attention_heads", kHeads);
  set(gpt2 ? "n_layer" : "num_hidden_layers", kLayers);
  set(gpt2 ? "n_positions" : "max_position_embeddings", kPositions);
  if (gpt2) {
    set("attn_pdrop", 0);
  } else {
    set("num_key_value_heads", kHeads / 2);
    set("intermediate_size", 2.75 * kWidth);  // 8/3, in multiples of the heads
    set("expert_capacity_factor", 1.25);      // where there are experts
  }
  ModelConfig config("typical " + std::string(family.name), std::move(values));
  ImportOptions options;
  options.global_batch = kBatch;
  options.seq_len = kSeqLen;
  options.dtype = DType::kFloat32;
  TESSERA_TRY(Graph forward, family.build(config, options));
  return Differentiate(std::move(forward));
}

}  // namespace

std::vector<Plan> UniformPlans(const Graph& graph, const Cluster& cluster,
                               std::span<const int> samples) {
  const GraphIndex index(graph);
  const auto ranks = static_cast<int>(cluster.devices.size());
  std::vector<Plan> plans;
  for (const int tp : Divisors(ranks)) {
    for (const int pp : Divisors(ranks / tp)) {
      const int replicas = ranks / tp / pp;
      for (const int ep : Divisors(index.has_experts ? replicas : 1)) {
        Strategy strategy;
        strategy.tp = tp;
        strategy.pp = pp;
        strategy.ep = ep;
        strategy.dp = replicas / ep;
        for (const int mbs : samples) {
          for (const bool sp : {false, true}) {
            for (const int zero : {0, 1}) {
              if ((sp && tp == 1) || (zero == 1 && replicas == 1)) continue;
              strategy.mbs = mbs;
              strategy.sp = sp;
              strategy.zero = zero;
              auto plan = PlanFromStrategy(index, cluster, strategy);
              if (plan) plans.push_back(*std::move(plan));
            }
          }
        }
      }
    }
  }
  return plans;
}

const Cluster& LadderCluster(const Gpu& gpu, const Cluster& hosts,
                             const Cluster& planned) {
  const bool joins = NvLinkMayJoinHosts(gpu) &&
                     planned.devices.size() == hosts.devices.size() &&
                     planned.num_nodes() < hosts.num_nodes() &&
                     HasEqualNodes(planned);
  return joins ? planned : hosts;
}

void AddLadder(const Cluster& cluster, ProfileCases& cases) {
  const std::string& device = cluster.TypeOf(DeviceId(0)).name;
  const auto ranks = static_cast<int>(cluster.devices.size());
  const int per_node = ranks / cluster.num_nodes();
  for (const int payload : kPayloads) {
    for (const int n : Divisors(ranks)) {
      if (n == 1) continue;
      // Neighbours that are on hosts of their own in every subgroup alike.
      const bool within = per_node % n == 0;
      if (!within && n % per_node != 0) continue;
      const int nodes = within ? 1 : n / per_node;
      for (const CommKind kind : kTimedCollectives) {
        if (SharesPayload(kind) && payload < n * SizeOf(DType::kFloat32)) {
          continue;
        }
        cases.collectives.try_emplace(
            CollectiveKey(kind, device, n, nodes, {payload}), 0);
      }
    }
    // The pairs of an odd number of ranks a node are not alike.
    const bool alike =
        cluster.num_nodes() == 1 || per_node == 1 || per_node % 2 == 0;
    if (ranks > 1 && alike) {
      cases.collectives.try_emplace(
          CollectiveKey(CommKind::kSendRecv, device, 2, per_node > 1 ? 1 : 2,
                        {payload}),
          0);
    }
    ProfileKey key;
    key.name = "copy";
    key.device = device;
    key.rule = "n->n";
    key.extents = {payload / SizeOf(DType::kFloat32)};
    KernelCase copy;
    const KernelCase::Buffer buffer = {key.dtype, key.extents, key.extents,
                                       KernelCase::Fill::kRandom};
    copy.operands = {buffer};
    copy.results = {buffer};
    cases.kernels.try_emplace(std::move(key), std::move(copy));
  }
}

namespace {

// The rungs that an exchange is interpolated between are worth its time.
void AddExchange(ProfileKey key, double seconds, ProfileCases& cases) {
  if (key.name == NameOf(CommKind::kRedistribute)) {
    key.name = NameOf(CommKind::kAllToAll);
  }
  const int64_t payload = key.payload.value;
  const auto* above = std::ranges::lower_bound(kPayloads, payload);
  if (above == kPayloads.end()) --above;
  const auto* below =
      *above > payload && above != kPayloads.begin() ? std::prev(above) : above;
  for (const auto* rung = below; rung <= above; ++rung) {
    key.payload = {*rung};
    const auto found = cases.collectives.find(key);
    if (found != cases.collectives.end()) found->second += seconds;
  }
}

// That of task `first` with the nodes that its kernel does, too; nothing where
// the plan has no task for one of them.
std::optional<KernelCase> FusedCase(const TaskGraph& tasks, size_t first,
                                    std::span<const FusedNode::Part> parts,
                                    const ProfileKey& key, const Graph& graph,
                                    const TrainingOptions& options) {
  const Task& task = tasks.tasks[first];
  std::vector<KernelCase> others;
  std::vector<const FusedKernel*> kernels;
  for (const FusedNode::Part& part : parts) {
    const auto other = std::find_if(
        tasks.tasks.begin() + static_cast<int64_t>(first), tasks.tasks.end(),
        [&](const Task& t) {
          return t.kind == TaskKind::kCompute && t.node == part.node &&
                 t.kernel == part.kernel->second;
        });
    if (other == tasks.tasks.end()) return std::nullopt;
    others.push_back(CaseOf(*other, tasks, graph, key, options));
    kernels.push_back(part.kernel);
  }
  return FusedCaseOf(CaseOf(task, tasks, graph, key, options), others, kernels);
}

}  // namespace

void AddCases(const Graph& graph, const Cluster& cluster,
              std::span<const Plan> plans, const TrainingOptions& options,
              ProfileCases& cases, bool fused) {
  const Pricer pricer(graph, cluster, nullptr);
  PricerOptions pricing = PricerOptionsOf(options);
  pricing.all_fused = fused;
  const Pricer fusing(graph, cluster, nullptr, pricing);
  for (const Plan& plan : plans) {
    const TaskGraph tasks = Lower(graph, cluster, plan, options);
    const std::vector<ProfileKey> keys = ProfileKeysOf(pricer, tasks);
    const std::vector<ProfileKey> fused_keys =
        fused ? ProfileKeysOf(fusing, tasks) : keys;
    const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
    for (size_t t = 0; t < keys.size(); ++t) {
      const Task& task = tasks.tasks[t];
      const DeviceGroup& group = tasks.group(task.group);
      const double seconds = costs[t].duration.seconds() *
                             static_cast<double>(group.devices.size());
      if (task.kind == TaskKind::kComm || task.kind == TaskKind::kSend) {
        AddExchange(keys[t], seconds, cases);
        continue;
      }
      const bool by_hosts_figures = task.kind == TaskKind::kCopy ||
                                    task.kind == TaskKind::kRecv ||
                                    OnHost(task, tasks.values);
      if (by_hosts_figures && !cluster.TypeOf(group.devices[0]).shared_memory) {
        continue;
      }
      const OpDef* op = OperatorOf(task.kernel);
      if (op != nullptr && OwnOpOf(*op) != nullptr) continue;  // has no kernel
      auto found = cases.kernels.find(keys[t]);
      if (found == cases.kernels.end()) {
        found =
            cases.kernels
                .emplace(keys[t], CaseOf(task, tasks, graph, keys[t], options))
                .first;
        found->second.run_s = costs[t].duration.seconds();
      }
      found->second.seconds += seconds;
      const ProfileKey& fused_key = fused_keys[t];
      if (fused_key == keys[t]) continue;
      auto with = cases.kernels.find(fused_key);
      if (with == cases.kernels.end()) {
        auto made = FusedCase(tasks, t, fusing.fusions().PartsOf(task),
                              fused_key, graph, options);
        if (!made) continue;
        with = cases.kernels.emplace(fused_key, *std::move(made)).first;
        with->second.run_s = costs[t].duration.seconds();
      }
      with->second.seconds += seconds;
    }
  }
}

Result<std::vector<Graph>> TypicalGraphs() {
  std::vector<Graph> graphs;
  for (const ModelFamily& family : ModelFamilies()) {
    if (family.name != "gpt2" && family.name != "llama") continue;
    TESSERA_TRY(Graph graph, TypicalGraph(family));
    graphs.push_back(std::move(graph));
  }
  return graphs;
}

}  // namespace tessera
