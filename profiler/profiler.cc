#include "profiler/profiler.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <semaphore>
#include <string>
#include <tuple>

#include "costmodel/simulate/simulator.h"
#include "costmodel/source/cost_source.h"
#include "planner/io/huggingface.h"
#include "planner/io/model_config.h"
#include "planner/lower/lower.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/strategy.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// How samples are taken (profiler.h).
struct Sampling {
  size_t samples = 0;
  // A sample takes so long at least, where its runs are short.
  double shortest_s = 0;
  double longest_s = 0;
  int64_t most_runs = 0;
  int64_t rotated_bytes = 0;
};

// Between one and four of Linux's default time slices of 3 ms (sysctl
// sched_base_slice_ns). Server CPUs of 2020 to 2025 have 1 to 4 MiB of
// last-level cache a core (AMD EPYC 7003: 4 MiB; Intel Xeon 8380: 1.5 MiB), and
// several ranks may share a core: twice the largest.
constexpr Sampling kOnHost = {.samples = 5,
                              .shortest_s = 3e-3,
                              .longest_s = 12e-3,
                              .most_runs = 10'000,
                              .rotated_bytes = int64_t{8} << 20};

// Marks are half a microsecond apart at least (CUDA's cudaEventElapsedTime), a
// queue of CUDA takes a thousand launches before it lets the host wait, and a
// kernel may be several. L2 caches: A100 40 MB, H100 and H200 50 MB, B200
// 126 MB.
constexpr Sampling kOnQueue = {.samples = 20,
                               .shortest_s = 0.25e-3,
                               .longest_s = 1e-3,
                               .most_runs = kMostSets,
                               .rotated_bytes = int64_t{256} << 20};

constexpr double kSaveInterval = 2;  // seconds

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

// One exchange of a profile row, among this rank's subgroup of neighbours; its
// runs take turns over sets of buffers, as those of a kernel.
class PreparedExchange {
 public:
  static Result<std::unique_ptr<PreparedExchange>> Make(const ProfileKey& key,
                                                        RankDevice& device,
                                                        CommWorld& world,
                                                        Bytes rotated) {
    std::unique_ptr<PreparedExchange> exchange(new PreparedExchange(device));
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
    const int64_t one = AlignedBytes(key.payload.value);
    exchange->sets_ = SetsInTurn(rotated, 2 * one);
    const Bytes all_sets = {exchange->sets_ * 2 * one};
    TESSERA_TRY(exchange->memory_,
                device.Allocate(all_sets, MemoryCategory::kCommunication));
    device.Zero(exchange->memory_, all_sets);
    exchange->buffer_bytes_ = one;
    if (exchange->kind_ == CommKind::kSendRecv) {
      const ChannelEnd ends[] = {kThere, kBack};
      const std::vector<int64_t> sizes[] = {{key.payload.value},
                                            {key.payload.value}};
      TESSERA_RETURN_IF_ERROR(exchange->group_->OpenChannels(ends, sizes));
    }
    // A shift's go to the rank before and come from the one behind.
    const auto self = static_cast<size_t>(exchange->group_->rank());
    exchange->shift_send_.assign(ranks.size(), 0);
    exchange->shift_receive_.assign(ranks.size(), 0);
    const int64_t all = exchange->count_ * SizeOf(DType::kFloat32);
    exchange->shift_send_[(self + ranks.size() - 1) % ranks.size()] = all;
    exchange->shift_receive_[(self + 1) % ranks.size()] = all;
    return exchange;
  }

  ~PreparedExchange() {
    if (memory_ != nullptr) device_.Free(memory_);
  }
  PreparedExchange(const PreparedExchange&) = delete;
  PreparedExchange& operator=(const PreparedExchange&) = delete;

  // False of a rank that is left over.
  bool takes_part() const { return group_ != nullptr; }

  Result<void> Run() {
    if (group_ == nullptr) return {};
    const auto self = static_cast<size_t>(group_->rank());
    std::byte* const send =
        static_cast<std::byte*>(memory_) + next_ * 2 * buffer_bytes_;
    std::byte* const receive = send + buffer_bytes_;
    next_ = (next_ + 1) % sets_;
    switch (kind_) {
      case CommKind::kAllReduce:
        return group_->AllReduce(send, count_, DType::kFloat32);
      case CommKind::kAllGather:
        return group_->AllGather(send, bytes_[self], receive, bytes_);
      case CommKind::kReduceScatter:
        return group_->ReduceScatter(send, receive, counts_, DType::kFloat32);
      case CommKind::kAllToAll:
        return group_->AllToAll(send, bytes_, receive, bytes_);
      case CommKind::kShift:
        return group_->AllToAll(send, shift_send_, receive, shift_receive_);
      // Never timed: the exchanges with a root are priced analytically.
      case CommKind::kScatter:
      case CommKind::kBroadcast:
      case CommKind::kGather:
      case CommKind::kReduce:
      case CommKind::kRedistribute:
      case CommKind::kSendRecv:
        break;
    }
    // There and back, as stages send: two messages.
    const int64_t bytes = count_ * SizeOf(DType::kFloat32);
    if (self == 0) {
      TESSERA_RETURN_IF_ERROR(group_->SendInTurn(send, bytes, kThere));
      return group_->RecvInTurn(receive, bytes, kBack);
    }
    TESSERA_RETURN_IF_ERROR(group_->RecvInTurn(receive, bytes, kThere));
    return group_->SendInTurn(send, bytes, kBack);
  }

 private:
  explicit PreparedExchange(RankDevice& device) : device_(device) {}

  static CommKind KindOf(std::string_view name) {
    for (const CommKind kind : kCollectives) {
      if (NameOf(kind) == name) return kind;
    }
    TESSERA_CHECK(name == NameOf(CommKind::kSendRecv)) << name;
    return CommKind::kSendRecv;
  }

  static constexpr ChannelEnd kThere = {.channel = 0, .from = 0, .to = 1};
  static constexpr ChannelEnd kBack = {.channel = 0, .from = 1, .to = 0};

  RankDevice& device_;
  CommKind kind_ = CommKind::kAllReduce;
  Communicator* group_ = nullptr;
  int64_t count_ = 0;
  std::vector<int64_t> counts_;
  std::vector<int64_t> bytes_;
  std::vector<int64_t> shift_send_;
  std::vector<int64_t> shift_receive_;
  void* memory_ = nullptr;    // of all sets: what is sent and what is received
  int64_t buffer_bytes_ = 0;  // of each of these
  int64_t sets_ = 0;
  int64_t next_ = 0;
};

// Sums over all ranks of numbers of the host, by way of device memory.
class Sums {
 public:
  static Result<std::unique_ptr<Sums>> Make(RankDevice& device,
                                            Communicator& all) {
    std::unique_ptr<Sums> sums(new Sums(device, all));
    TESSERA_TRY(sums->memory_,
                device.Allocate({kMost * SizeOf(DType::kFloat64)},
                                MemoryCategory::kCommunication));
    return sums;
  }
  ~Sums() {
    if (memory_ != nullptr) device_.Free(memory_);
  }
  Sums(const Sums&) = delete;
  Sums& operator=(const Sums&) = delete;

  Result<void> Sum(std::span<double> numbers) {
    constexpr auto kStep = static_cast<size_t>(kMost);
    for (size_t i = 0; i < numbers.size(); i += kStep) {
      const auto some = numbers.subspan(i, std::min(kStep, numbers.size() - i));
      const Bytes bytes = {static_cast<int64_t>(some.size_bytes())};
      device_.Write(memory_, some.data(), bytes);
      TESSERA_RETURN_IF_ERROR(
          all_.AllReduce(memory_, std::ssize(some), DType::kFloat64));
      device_.Read(some.data(), memory_, bytes);
      TESSERA_RETURN_IF_ERROR(device_.Synchronize());
    }
    return {};
  }
  Result<double> Sum(double number) {
    TESSERA_RETURN_IF_ERROR(Sum({&number, 1}));
    return number;
  }

 private:
  static constexpr int64_t kMost = 1024;
  Sums(RankDevice& device, Communicator& all) : device_(device), all_(all) {}

  RankDevice& device_;
  Communicator& all_;
  void* memory_ = nullptr;
};

// Holds up a queue until it is opened, or for so long that nothing it could
// depend on can be under way.
class Gate {
 public:
  explicit Gate(QueueDevice& device) {
    device.EnqueueOnHost([opened = opened_]() -> Result<void> {
      constexpr auto kLongest = std::chrono::milliseconds(200);
      static_cast<void>(opened->try_acquire_for(kLongest));
      return {};
    });
  }
  void Open() { opened_->release(); }

 private:
  std::shared_ptr<std::binary_semaphore> opened_ =
      std::make_shared<std::binary_semaphore>(0);
};

// Products in bf16 that keep a GPU's matrix units busy for some milliseconds.
class Load {
 public:
  static Result<std::unique_ptr<Load>> Make(RankDevice& device) {
    std::unique_ptr<Load> load(new Load());
    TESSERA_TRY(load->product_,
                PreparedKernel::Make(load->case_, device, Bytes{0}));
    QueueDevice& queue = *device.queues();
    double seconds = 0;
    for (int i = 0; i < 2; ++i) {  // the first one loads what it needs
      queue.Mark(0);
      load->product_->Run();
      queue.Mark(1);
      TESSERA_RETURN_IF_ERROR(queue.Synchronize());
      TESSERA_TRY(const Duration once, queue.Between(0, 1));
      seconds = once.seconds();
    }
    // A choice: as a few layers' products take.
    constexpr double kLoadSeconds = 5e-3;
    load->runs_ = static_cast<int>(
        std::clamp(kLoadSeconds / std::max(seconds, 1e-6), 1.0, 100.0));
    return load;
  }

  void Run() {
    for (int i = 0; i < runs_; ++i) product_->Run();
  }

 private:
  Load() {
    constexpr int64_t kSide = 4096;
    const KernelCase::Buffer matrix = {
        DType::kBFloat16, {kSide, kSide}, {kSide, kSide}};
    case_.kernel = "linear";
    case_.rule = IndexRule::Parse("bi,oi->bo").value();
    case_.operands = {matrix, matrix};
    case_.results = {matrix};
  }

  KernelCase case_;
  std::unique_ptr<PreparedKernel> product_;
  int runs_ = 0;
};

// Times cases on all ranks at once.
class Stopwatch {
 public:
  // For so many cases. All outlive it.
  static Result<std::unique_ptr<Stopwatch>> Make(RankDevice& device,
                                                 Communicator& all, Sums& sums,
                                                 const ProfilerOptions& options,
                                                 size_t cases) {
    const bool on_host = device.queues() == nullptr;
    const Sampling& sampling = on_host ? kOnHost : kOnQueue;
    // Behind the samples there is time for the first runs and for setting up.
    const double share =
        options.time_limit_s / static_cast<double>(std::max<size_t>(cases, 1) *
                                                   (sampling.samples + 4));
    const double sample_s = options.sample_s.value_or(
        std::clamp(share, sampling.shortest_s, sampling.longest_s));
    const Bytes rotated =
        options.rotated.value_or(Bytes{sampling.rotated_bytes});
    std::unique_ptr<Stopwatch> stopwatch(
        new Stopwatch(device, all, sums, sampling, sample_s, rotated));
    if (on_host) return stopwatch;
    TESSERA_TRY(stopwatch->flushed_,
                device.Allocate(rotated, MemoryCategory::kActivation));
    if (options.under_load) {
      TESSERA_TRY(stopwatch->load_, Load::Make(device));
    }
    return stopwatch;
  }
  ~Stopwatch() {
    if (flushed_ != nullptr) device_.Free(flushed_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // Of the buffers of a kernel that take turns.
  Bytes rotated() const { return rotated_; }

  // What ranks time.
  struct Work {
    std::function<Result<void>()> run;
    // Runs need nothing of the host once they are enqueued.
    bool lone = false;
    // This rank does it, as do `ranks` of all; the others watch.
    bool takes_part = true;
    int ranks = 0;
  };

  Result<Measurement> Time(const Work& work) {
    const bool gated = work.lone && device_.queues() != nullptr;
    // The first run touches all memory and loads what it needs; where that
    // counts, once more.
    TESSERA_TRY(double once, Sample(work, 1, /*gated=*/false));
    if (once < sample_s_ || gated) {
      TESSERA_TRY(once, Sample(work, 1, gated));
    }
    const auto runs = static_cast<int64_t>(std::clamp(
        sample_s_ / once, 1.0, static_cast<double>(sampling_.most_runs)));
    std::vector<double> samples(sampling_.samples);
    if (gated && load_ != nullptr) {
      TESSERA_RETURN_IF_ERROR(SampleUnderLoad(work, runs, samples));
    } else {
      for (double& sample : samples) {
        TESSERA_TRY(sample, Sample(work, runs, gated));
      }
    }
    std::ranges::sort(samples);
    Measurement result;
    result.median_s = samples[samples.size() / 2];
    result.spread =
        (samples[3 * samples.size() / 4] - samples[samples.size() / 4]) /
        result.median_s;
    result.samples = static_cast<int>(samples.size());
    return result;
  }

 private:
  Stopwatch(RankDevice& device, Communicator& all, Sums& sums,
            const Sampling& sampling, double sample_s, Bytes rotated)
      : device_(device),
        all_(all),
        sums_(sums),
        sampling_(sampling),
        sample_s_(sample_s),
        rotated_(rotated) {}

  // Seconds of one run: the mean over `runs` and over the ranks that take part.
  Result<double> Sample(const Work& work, int64_t runs, bool gated) {
    TESSERA_RETURN_IF_ERROR(all_.Barrier());
    TESSERA_TRY(double seconds, device_.queues() == nullptr
                                    ? OnHost(work.run, runs)
                                    : OnQueue(work.run, runs, gated));
    TESSERA_TRY(seconds, sums_.Sum(work.takes_part ? seconds : 0));
    return std::max(seconds, 1e-9) / static_cast<double>(runs * work.ranks);
  }

  // All samples without a pause between, in which the clocks would recover. The
  // host is ahead by the load, whose 96 MiB leave little of use in the caches.
  Result<void> SampleUnderLoad(const Work& work, int64_t runs,
                               std::vector<double>& samples) {
    TESSERA_RETURN_IF_ERROR(all_.Barrier());
    QueueDevice& queue = *device_.queues();
    constexpr int kUntilClocksSettle = 10;
    for (int i = 0; i < kUntilClocksSettle; ++i) load_->Run();
    const auto count = static_cast<int>(samples.size());
    for (int i = 0; i < count; ++i) {
      load_->Run();
      queue.Mark(2 * i);
      for (int64_t j = 0; j < runs; ++j) TESSERA_RETURN_IF_ERROR(work.run());
      queue.Mark(2 * i + 1);
    }
    TESSERA_RETURN_IF_ERROR(queue.Synchronize());
    for (int i = 0; i < count; ++i) {
      TESSERA_TRY(const Duration took, queue.Between(2 * i, 2 * i + 1));
      samples[static_cast<size_t>(i)] = work.takes_part ? took.seconds() : 0;
    }
    TESSERA_RETURN_IF_ERROR(sums_.Sum(samples));
    for (double& sample : samples) {
      sample = std::max(sample, 1e-9) / static_cast<double>(runs * work.ranks);
    }
    return {};
  }

  static Result<double> OnHost(const std::function<Result<void>()>& run,
                               int64_t runs) {
    const auto start = Clock::now();
    for (int64_t i = 0; i < runs; ++i) TESSERA_RETURN_IF_ERROR(run());
    return SecondsSince(start);
  }

  Result<double> OnQueue(const std::function<Result<void>()>& run, int64_t runs,
                         bool gated) {
    constexpr int kFirst = 0;
    constexpr int kSecond = 1;
    QueueDevice& queue = *device_.queues();
    queue.Zero(flushed_, rotated_);
    std::optional<Gate> gate;
    if (gated) gate.emplace(queue);
    queue.Mark(kFirst);
    Result<void> enqueued;
    for (int64_t i = 0; i < runs && enqueued; ++i) enqueued = run();
    queue.Mark(kSecond);
    if (gate) gate->Open();
    TESSERA_RETURN_IF_ERROR(enqueued);
    TESSERA_RETURN_IF_ERROR(queue.Synchronize());
    TESSERA_TRY(const Duration duration, queue.Between(kFirst, kSecond));
    return duration.seconds();
  }

  RankDevice& device_;
  Communicator& all_;
  Sums& sums_;
  const Sampling& sampling_;
  const double sample_s_;
  const Bytes rotated_;
  // Of a device with queues: written before a sample, of as many bytes as are
  // rotated; and what runs before samples of one rank's own work, or null.
  void* flushed_ = nullptr;
  std::unique_ptr<Load> load_;
};

struct Case {
  const ProfileKey* key = nullptr;
  const KernelCase* kernel = nullptr;  // null for an exchange
  double seconds = 0;                  // predicted
};

// That of the copy which a message's row is made with.
ProfileKey CopyOfMessage(const ProfileKey& message) {
  ProfileKey copy = message;
  copy.name = "copy";
  copy.ranks = 1;
  copy.nodes = 1;
  copy.rule = "n->n";
  copy.extents = {message.payload.value / SizeOf(DType::kFloat32)};
  copy.payload = {};
  return copy;
}

std::vector<Case> AllCases(const ProfileCases& cases) {
  std::vector<Case> all;
  for (const auto& [key, seconds] : cases.collectives) {
    all.push_back({&key, nullptr, seconds});
  }
  for (const auto& [key, kernel] : cases.kernels) {
    all.push_back({&key, &kernel, kernel.seconds});
  }
  return all;
}

// The places in `all` of what is not `known`, in the order of Profile's
// comment.
std::vector<size_t> InOrder(std::span<const Case> all, const ProfileDb& known) {
  constexpr double kLikeWork = 1.1;  // as costmodel/source counts it
  std::vector<size_t> by_seconds(all.size());
  std::iota(by_seconds.begin(), by_seconds.end(), size_t{0});
  std::ranges::stable_sort(by_seconds, std::greater(),
                           [&](size_t i) { return all[i].seconds; });

  using Family = std::tuple<std::string, DType, std::string>;
  std::map<Family, std::vector<double>> works;  // by kernel, type and rule
  const auto works_of = [&](const ProfileKey& key) -> std::vector<double>& {
    return works[{key.name, key.dtype, key.rule}];
  };
  for (const auto& [key, row] : known.rows) {
    if (!key.rule.empty()) works_of(key).push_back(WorkOf(key).value_or(0));
  }
  std::array<std::vector<size_t>, 3> classes;
  std::map<ProfileKey, size_t> places;
  for (const size_t i : by_seconds) {
    const Case& c = all[i];
    if (known.Find(*c.key) != nullptr) continue;
    places.emplace(*c.key, i);
    if (c.seconds <= 0 || c.kernel == nullptr) {
      classes[c.seconds <= 0 ? 2 : 0].push_back(i);
      continue;
    }
    const double work = WorkOf(*c.key).value_or(0);
    std::vector<double>& others = works_of(*c.key);
    const bool like = std::ranges::any_of(others, [&](double other) {
      return work <= other * kLikeWork && other <= work * kLikeWork;
    });
    classes[like ? 1 : 0].push_back(i);
    if (!like) others.push_back(work);
  }

  std::vector<size_t> order;
  std::vector<bool> placed(all.size());
  const auto place = [&](size_t i) {
    if (!placed[i]) order.push_back(i);
    placed[i] = true;
  };
  for (const std::vector<size_t>& some : classes) {
    for (const size_t i : some) {
      if (all[i].key->name == NameOf(CommKind::kSendRecv)) {
        const auto copy = places.find(CopyOfMessage(*all[i].key));
        if (copy != places.end()) place(copy->second);
      }
      place(i);
    }
  }
  return order;
}

// Adds a row that was just measured, and what it says of others. On the host a
// message's row holds what the sender is priced with; the receiver is priced as
// a copy (costmodel/price.h). What was timed is two messages with both. On
// other devices the sender's time is all.
void AddRow(const ProfileKey& key, Measurement row, bool on_host,
            ProfileDb& profile) {
  if (key.name == NameOf(CommKind::kSendRecv)) {
    const double message = row.median_s / 2;
    const Measurement* copied =
        on_host ? profile.Find(CopyOfMessage(key)) : nullptr;
    row.median_s = std::max(
        message - (copied == nullptr ? 0 : copied->median_s), message / 4);
  }
  // The runtime redistributes by the same call as it exchanges all to all.
  if (key.name == NameOf(CommKind::kAllToAll)) {
    ProfileKey same = key;
    same.name = NameOf(CommKind::kRedistribute);
    profile.rows.insert_or_assign(std::move(same), row);
  }
  profile.rows.insert_or_assign(key, row);
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
      for (const CommKind kind : kCollectives) {
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

namespace {

Result<void> CheckKernels(const ProfileCases& cases, const RankDevice& device) {
  for (const auto& [key, kernel] : cases.kernels) {
    if (HasKernel(device, kernel)) continue;
    return device.FindKernel(kernel.kernel).error();
  }
  return {};
}

// What is measured, in this order: rank 0 says it, by places in all cases, from
// 1.
Result<std::vector<Case>> AgreedOrder(const ProfileCases& cases,
                                      const ProfilerOptions& options,
                                      bool first_rank, Sums& sums) {
  const std::vector<Case> all = AllCases(cases);
  std::vector<double> said(all.size());
  if (first_rank) {
    const ProfileDb none;
    const std::vector<size_t> places =
        InOrder(all, options.again ? none : options.known);
    for (size_t i = 0; i < places.size(); ++i) {
      said[i] = static_cast<double>(places[i]) + 1;
    }
  }
  TESSERA_RETURN_IF_ERROR(sums.Sum(said));
  std::vector<Case> order;
  for (const double place : said) {
    if (place > 0) order.push_back(all[static_cast<size_t>(place) - 1]);
  }
  return order;
}

// Why no further case is begun, on all ranks alike.
struct Ending {
  bool time_is_up = false;  // rank 0's
  bool interrupted = false;
};

Result<Ending> AgreedEnding(double elapsed, const ProfilerOptions& options,
                            bool first_rank, Sums& sums) {
  std::array<double, 2> ranks = {
      first_rank && elapsed >= options.time_limit_s ? 1.0 : 0.0,
      options.stop != nullptr && *options.stop ? 1.0 : 0.0};
  TESSERA_RETURN_IF_ERROR(sums.Sum(ranks));
  return Ending{ranks[0] > 0, ranks[1] > 0};
}

// Nothing where it does not fit into the memory of a rank.
Result<std::optional<Measurement>> TimeCase(const Case& timed,
                                            RankDevice& device,
                                            CommWorld& world, Sums& sums,
                                            Stopwatch& stopwatch) {
  const int all = world.world_size();
  if (timed.kernel == nullptr) {
    const int ranks = timed.key->ranks;
    TESSERA_TRY(
        const auto exchange,
        PreparedExchange::Make(*timed.key, device, world, stopwatch.rotated()));
    TESSERA_TRY(Measurement row,
                stopwatch.Time({.run = [&] { return exchange->Run(); },
                                .takes_part = exchange->takes_part(),
                                .ranks = all / ranks * ranks}));
    return std::optional(row);
  }
  auto kernel =
      PreparedKernel::Make(*timed.kernel, device, stopwatch.rotated());
  TESSERA_TRY(const double without, sums.Sum(kernel ? 0.0 : 1.0));
  if (without > 0) return std::optional<Measurement>();
  TESSERA_TRY(Measurement row, stopwatch.Time({.run = [&]() -> Result<void> {
                                                 (*kernel)->Run();
                                                 return {};
                                               },
                                               .lone = true,
                                               .ranks = all}));
  return std::optional(row);
}

}  // namespace

Result<ProfilerResult> Profile(const ProfileCases& cases, RankDevice& device,
                               CommWorld& world,
                               const ProfilerOptions& options) {
  const auto start = Clock::now();
  TESSERA_RETURN_IF_ERROR(CheckKernels(cases, device));
  std::vector<int> ranks(static_cast<size_t>(world.world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  TESSERA_TRY(Communicator* const all, world.Group(ranks));
  TESSERA_TRY(const auto sums, Sums::Make(device, *all));
  const bool first = world.world_rank() == 0;
  TESSERA_TRY(const std::vector<Case> order,
              AgreedOrder(cases, options, first, *sums));
  TESSERA_TRY(const auto stopwatch,
              Stopwatch::Make(device, *all, *sums, options, order.size()));

  ProfilerResult result;
  result.profile = options.known;
  result.profile.origin.ranks_at_once = world.world_size();
  double saved = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const double elapsed = SecondsSince(start);
    TESSERA_TRY(const Ending ending,
                AgreedEnding(elapsed, options, first, *sums));
    if (ending.time_is_up || ending.interrupted) {
      result.left_out = order.size() - i;
      result.interrupted = ending.interrupted;
      break;
    }
    if (first && options.save && elapsed - saved >= kSaveInterval) {
      TESSERA_RETURN_IF_ERROR(options.save(result.profile));
      saved = elapsed;
    }
    const ProfileKey& key = *order[i].key;
    world.SetCurrentTask("profile " + key.name);
    TESSERA_TRY(const std::optional<Measurement> row,
                TimeCase(order[i], device, world, *sums, *stopwatch));
    if (!row) {
      ++result.too_large;
      continue;
    }
    AddRow(key, *row, /*on_host=*/device.queues() == nullptr, result.profile);
    ++result.measured;
    if (options.progress) options.progress(i + 1, order.size());
  }
  TESSERA_RETURN_IF_ERROR(world.Flush());
  if (first && options.save && result.interrupted) {
    TESSERA_RETURN_IF_ERROR(options.save(result.profile));
  }
  return result;
}

}  // namespace tessera
