#include "profiler/profiler.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <numeric>
#include <string>

#include "costmodel/source/cost_source.h"
#include "planner/base/rng.h"
#include "planner/io/huggingface.h"
#include "planner/io/model_config.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/strategy.h"
#include "runtime/thread_pool.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kSamples = 5;
// A sample takes so long at least, where its runs are short; between one and
// four of Linux's default time slices of 3 ms (sysctl sched_base_slice_ns).
constexpr double kLongestSample = 12e-3;
constexpr double kShortestSample = 3e-3;
constexpr int64_t kMostRuns = 10'000;

constexpr std::array kPayloads = {1 << 10, 1 << 12, 1 << 14, 1 << 16,
                                  1 << 18, 1 << 20, 1 << 22, 1 << 24};
constexpr std::array kCollectives = {CommKind::kAllReduce, CommKind::kAllGather,
                                     CommKind::kReduceScatter,
                                     CommKind::kAllToAll, CommKind::kShift};

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::vector<int> Divisors(int n) {
  std::vector<int> divisors;
  for (int d = 1; d <= n; ++d) {
    if (n % d == 0) divisors.push_back(d);
  }
  return divisors;
}

// One exchange of a profile row, among this rank's subgroup of neighbours.
class PreparedExchange {
 public:
  static Result<std::unique_ptr<PreparedExchange>> Make(const ProfileKey& key,
                                                        CommWorld& world) {
    auto exchange = std::make_unique<PreparedExchange>();
    exchange->kind_ = KindOf(key.name);
    const int first = world.world_rank() / key.ranks * key.ranks;
    // Ranks that are left over watch.
    if (first + key.ranks > world.world_size()) return exchange;
    std::vector<int> ranks(static_cast<size_t>(key.ranks));
    std::iota(ranks.begin(), ranks.end(), first);
    TESSERA_TRY(exchange->group_, world.Group(ranks));
    const auto n = static_cast<int64_t>(key.ranks);
    exchange->count_ = key.payload.value / SizeOf(DType::kFloat32);
    const int64_t share = exchange->count_ / n;
    exchange->counts_.assign(ranks.size(), share);
    exchange->bytes_.assign(ranks.size(), share * SizeOf(DType::kFloat32));
    exchange->send_.resize(static_cast<size_t>(exchange->count_));
    exchange->receive_.resize(static_cast<size_t>(exchange->count_));
    // A shift's go to the rank before and come from the one behind.
    const auto self = static_cast<size_t>(exchange->group_->rank());
    exchange->shift_send_.assign(ranks.size(), 0);
    exchange->shift_receive_.assign(ranks.size(), 0);
    const int64_t all = exchange->count_ * SizeOf(DType::kFloat32);
    exchange->shift_send_[(self + ranks.size() - 1) % ranks.size()] = all;
    exchange->shift_receive_[(self + 1) % ranks.size()] = all;
    return exchange;
  }

  Result<void> Run() {
    if (group_ == nullptr) return {};
    const auto self = static_cast<size_t>(group_->rank());
    switch (kind_) {
      case CommKind::kAllReduce:
        return group_->AllReduce(send_.data(), count_, DType::kFloat32);
      case CommKind::kAllGather:
        return group_->AllGather(send_.data(), bytes_[self], receive_.data(),
                                 bytes_);
      case CommKind::kReduceScatter:
        return group_->ReduceScatter(send_.data(), receive_.data(), counts_,
                                     DType::kFloat32);
      case CommKind::kAllToAll:
        return group_->AllToAll(send_.data(), bytes_, receive_.data(), bytes_);
      case CommKind::kShift:
        return group_->AllToAll(send_.data(), shift_send_, receive_.data(),
                                shift_receive_);
      // Never timed: the exchanges with a root are priced analytically.
      case CommKind::kScatter:
      case CommKind::kBroadcast:
      case CommKind::kGather:
      case CommKind::kReduce:
      case CommKind::kRedistribute:
      case CommKind::kSendRecv:
        break;
    }
    // There and back: two messages.
    const int64_t bytes = count_ * SizeOf(DType::kFloat32);
    const int peer = 1 - group_->rank();
    if (self == 0) {
      TESSERA_RETURN_IF_ERROR(group_->Send(send_.data(), bytes, peer, 0));
      return group_->Recv(receive_.data(), bytes, peer, 0);
    }
    TESSERA_RETURN_IF_ERROR(group_->Recv(receive_.data(), bytes, peer, 0));
    return group_->Send(send_.data(), bytes, peer, 0);
  }

 private:
  static CommKind KindOf(std::string_view name) {
    for (const CommKind kind : kCollectives) {
      if (NameOf(kind) == name) return kind;
    }
    TESSERA_CHECK(name == NameOf(CommKind::kSendRecv)) << name;
    return CommKind::kSendRecv;
  }

  CommKind kind_ = CommKind::kAllReduce;
  Communicator* group_ = nullptr;
  int64_t count_ = 0;
  std::vector<int64_t> counts_;
  std::vector<int64_t> bytes_;
  std::vector<int64_t> shift_send_;
  std::vector<int64_t> shift_receive_;
  std::vector<float> send_;
  std::vector<float> receive_;
};

// Times cases on all ranks at once.
class Stopwatch {
 public:
  Stopwatch(Communicator& all, double sample_s)
      : all_(all), sample_s_(sample_s) {}

  Result<Measurement> Time(const std::function<Result<void>()>& run) {
    // The first run touches all memory; where that counts, once more.
    TESSERA_TRY(double once, Sample(run, 1));
    if (once < sample_s_) {
      TESSERA_TRY(once, Sample(run, 1));
    }
    const double wanted = sample_s_ / once;
    const auto runs = static_cast<int64_t>(
        std::clamp(wanted, 1.0, static_cast<double>(kMostRuns)));
    std::array<double, kSamples> samples = {};
    for (double& sample : samples) {
      TESSERA_TRY(sample, Sample(run, runs));
    }
    std::ranges::sort(samples);
    Measurement result;
    result.median_s = samples[kSamples / 2];
    result.spread =
        (samples[3 * kSamples / 4] - samples[kSamples / 4]) / result.median_s;
    result.samples = static_cast<int>(kSamples);
    return result;
  }

 private:
  // Seconds of one run: the mean over `runs` and over the ranks.
  Result<double> Sample(const std::function<Result<void>()>& run,
                        int64_t runs) {
    TESSERA_RETURN_IF_ERROR(all_.Barrier());
    const auto start = Clock::now();
    for (int64_t i = 0; i < runs; ++i) TESSERA_RETURN_IF_ERROR(run());
    double seconds = SecondsSince(start);
    TESSERA_RETURN_IF_ERROR(all_.AllReduce(&seconds, 1, DType::kFloat64));
    return std::max(seconds, 1e-9) / static_cast<double>(runs * all_.size());
  }

  Communicator& all_;
  const double sample_s_;
};

// A message's row holds what the sender is priced with; the receiver is priced
// as a copy (costmodel/price.h). What was timed is two messages with both.
void TakeCopiesFromMessages(ProfileDb& profile) {
  for (auto& [key, row] : profile.rows) {
    if (key.name != NameOf(CommKind::kSendRecv)) continue;
    const double message = row.median_s / 2;
    ProfileKey copy = key;
    copy.name = "copy";
    copy.ranks = 1;
    copy.rule = "n->n";
    copy.extents = {key.payload.value / SizeOf(DType::kFloat32)};
    copy.payload = {};
    const Measurement* copied = profile.Find(copy);
    row.median_s = std::max(
        message - (copied == nullptr ? 0 : copied->median_s), message / 4);
  }
}

// The runtime redistributes by the same call as it exchanges all to all.
void AddRedistributions(ProfileDb& profile) {
  const std::map<ProfileKey, Measurement> rows = profile.rows;
  for (const auto& [key, row] : rows) {
    if (key.name != NameOf(CommKind::kAllToAll)) continue;
    ProfileKey same = key;
    same.name = NameOf(CommKind::kRedistribute);
    profile.rows.emplace(std::move(same), row);
  }
}

struct Case {
  const ProfileKey* key = nullptr;
  const KernelCase* kernel = nullptr;  // null for an exchange
};

// Exchanges first, then the kernels. Of kernels that do the same work of the
// same rule in other shapes all but one come last, as interpolation does best
// without them; otherwise they are in no order, so that what there is no time
// for lies everywhere between what was timed.
std::vector<Case> InOrder(const ProfileCases& cases) {
  constexpr double kLikeWork = 1.1;  // as costmodel/source counts it
  std::vector<Case> order;
  for (const ProfileKey& key : cases.collectives) order.push_back({&key});
  std::vector<Case> kernels;
  for (const auto& [key, kernel] : cases.kernels) {
    kernels.push_back({&key, &kernel});
  }
  Rng rng(0);
  for (size_t i = kernels.size(); i > 1; --i) {
    std::swap(kernels[i - 1], kernels[rng.Below(static_cast<uint32_t>(i))]);
  }
  std::vector<Case> last;
  std::map<std::string, std::vector<double>> works;  // by kernel and rule
  for (const Case& kernel : kernels) {
    const ProfileKey& key = *kernel.key;
    const double work = WorkOf(key).value_or(0);
    std::vector<double>& known = works[key.name + " " + key.rule];
    const bool like = std::ranges::any_of(known, [&](double other) {
      return work <= other * kLikeWork && other <= work * kLikeWork;
    });
    (like ? last : order).push_back(kernel);
    if (!like) known.push_back(work);
  }
  order.insert(order.end(), last.begin(), last.end());
  return order;
}

JsonValue Number(double value) {
  JsonValue number;
  number.kind = JsonValue::Kind::kNumber;
  number.number = value;
  return number;
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

Result<void> AddCases(const Graph& graph, const Cluster& cluster,
                      std::span<const Plan> plans,
                      const TrainingOptions& options, ProfileCases& cases) {
  const Pricer pricer(graph, cluster, nullptr);
  for (const Plan& plan : plans) {
    TESSERA_RETURN_IF_ERROR(
        AddKernelCases(pricer, plan, options, cases.kernels));
  }
  return {};
}

void AddLadder(const Cluster& cluster, ProfileCases& cases) {
  const std::string& device = cluster.TypeOf(DeviceId(0)).name;
  const auto ranks = static_cast<int>(cluster.devices.size());
  for (const int payload : kPayloads) {
    for (const int n : Divisors(ranks)) {
      if (n == 1) continue;
      for (const CommKind kind : kCollectives) {
        cases.collectives.insert(CollectiveKey(kind, device, n, 1, {payload}));
      }
    }
    if (ranks > 1) {
      cases.collectives.insert(
          CollectiveKey(CommKind::kSendRecv, device, 2, 1, {payload}));
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

Result<std::vector<Graph>> TypicalGraphs() {
  std::vector<Graph> graphs;
  for (const ModelFamily& family : ModelFamilies()) {
    if (family.name != "gpt2" && family.name != "llama") continue;
    TESSERA_TRY(Graph graph, TypicalGraph(family));
    graphs.push_back(std::move(graph));
  }
  return graphs;
}

Result<ProfilerResult> Profile(const ProfileCases& cases, CommWorld& world,
                               const ProfilerOptions& options) {
  const auto start = Clock::now();
  std::vector<int> ranks(static_cast<size_t>(world.world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  TESSERA_TRY(Communicator* const all, world.Group(ranks));

  const std::vector<Case> order = InOrder(cases);
  // Behind the samples there is time for the first runs and for setting up.
  const double share =
      options.time_limit_s / static_cast<double>(order.size() * (kSamples + 4));
  Stopwatch stopwatch(*all, options.sample_s.value_or(std::clamp(
                                share, kShortestSample, kLongestSample)));
  ThreadPool threads(options.threads);
  ProfilerResult result;
  for (size_t i = 0; i < order.size(); ++i) {
    double elapsed = SecondsSince(start);
    TESSERA_RETURN_IF_ERROR(all->Broadcast(&elapsed, sizeof(elapsed), 0));
    if (elapsed >= options.time_limit_s) {
      result.left_out = order.size() - i;
      break;
    }
    const ProfileKey& key = *order[i].key;
    world.SetCurrentTask("profile " + key.name);
    Measurement row;
    if (order[i].kernel == nullptr) {
      TESSERA_TRY(const auto exchange, PreparedExchange::Make(key, world));
      TESSERA_TRY(row, stopwatch.Time([&] { return exchange->Run(); }));
    } else {
      PreparedKernel kernel(*order[i].kernel, threads);
      TESSERA_TRY(row, stopwatch.Time([&]() -> Result<void> {
        kernel.Run();
        return {};
      }));
    }
    result.profile.rows.emplace(key, row);
    if (options.progress) options.progress(i + 1, order.size());
  }
  TESSERA_RETURN_IF_ERROR(world.Flush());
  TakeCopiesFromMessages(result.profile);
  AddRedistributions(result.profile);
  result.profile.origin.ranks_at_once = world.world_size();
  return result;
}

}  // namespace tessera
