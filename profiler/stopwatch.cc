#include "profiler/stopwatch.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <semaphore>
#include <utility>

#include "planner/base/threads.h"
#include "profiler/kernel_case.h"
#include "runtime/thread_pool.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

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

Result<double> OnHost(const std::function<Result<void>()>& run, int64_t runs) {
  const auto start = Clock::now();
  for (int64_t i = 0; i < runs; ++i) TESSERA_RETURN_IF_ERROR(run());
  return SecondsSince(start);
}

}  // namespace

// How samples are taken (profiler.h).
struct Stopwatch::Sampling {
  size_t samples = 0;
  // A sample takes so long at least, where its runs are short.
  double shortest_s = 0;
  double longest_s = 0;
  int64_t most_runs = 0;
};

// Between one and four of Linux's default time slices of 3 ms (sysctl
// sched_base_slice_ns).
const Stopwatch::Sampling Stopwatch::kOnHost = {
    .samples = 5, .shortest_s = 3e-3, .longest_s = 12e-3, .most_runs = 10'000};

// Marks are half a microsecond apart at least (CUDA's cudaEventElapsedTime), a
// queue of CUDA takes a thousand launches before it lets the host wait, and a
// kernel may be several.
const Stopwatch::Sampling Stopwatch::kOnQueue = {.samples = 20,
                                                 .shortest_s = 0.25e-3,
                                                 .longest_s = 1e-3,
                                                 .most_runs = kMostSets};

Bytes RotatedOnHost(const HostCache& cache, int cpus, int ranks, int threads) {
  constexpr int64_t kLeast = int64_t{8} << 20;
  const Bytes of_thread = CacheOfThread(cache, ranks * threads, cpus);
  return {std::max(kLeast, 2 * threads * of_thread.value)};
}

// Products in bf16 that keep a GPU's matrix units busy for some milliseconds.
class Stopwatch::Load {
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

Result<std::unique_ptr<Stopwatch>> Stopwatch::Make(
    RankDevice& device, Communicator& all, RankSums& sums,
    const ProfilerOptions& options, size_t cases) {
  const bool on_host = device.queues() == nullptr;
  const Sampling& sampling = on_host ? kOnHost : kOnQueue;
  // Behind the samples there is time for the first runs and for setting up.
  const double share =
      options.time_limit_s /
      static_cast<double>(std::max<size_t>(cases, 1) * (sampling.samples + 4));
  const double sample_s = options.sample_s.value_or(
      std::clamp(share, sampling.shortest_s, sampling.longest_s));
  const ThreadPool* const threads = device.threads();
  const Bytes rotated = options.rotated.value_or(
      on_host ? RotatedOnHost(ReadHostCache(),
                              options.cores.value_or(HostCores()), all.size(),
                              threads == nullptr ? 1 : threads->threads())
              : kRotatedOnQueue);
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

Stopwatch::Stopwatch(RankDevice& device, Communicator& all, RankSums& sums,
                     const Sampling& sampling, double sample_s, Bytes rotated)
    : device_(device),
      all_(all),
      sums_(sums),
      sampling_(sampling),
      sample_s_(sample_s),
      rotated_(rotated) {}

Stopwatch::~Stopwatch() {
  if (flushed_ != nullptr) device_.Free(flushed_);
}

double Stopwatch::SecondsOf(double run_s) const {
  return run_s * static_cast<double>(sampling_.samples + 1);
}

Result<Measurement> Stopwatch::Time(const Work& work, double left_s) {
  const bool gated = work.lone && device_.queues() != nullptr;
  // The first run touches all memory and loads what it needs; where that
  // counts, once more.
  TESSERA_TRY(double once, Sample(work, 1, /*gated=*/false));
  left_s -= once;
  const bool first_counts = once >= sample_s_ && !gated;
  if (!first_counts) {
    TESSERA_TRY(once, Sample(work, 1, gated));
    left_s -= once;
  }
  const auto runs = static_cast<int64_t>(std::clamp(
      sample_s_ / once, 1.0, static_cast<double>(sampling_.most_runs)));
  const double affordable = left_s / (once * static_cast<double>(runs));
  std::vector<double> samples(static_cast<size_t>(
      std::clamp(affordable, 1.0, static_cast<double>(sampling_.samples))));
  if (affordable < 1 && first_counts) {
    samples = {once};
  } else if (gated && load_ != nullptr) {
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

Result<double> Stopwatch::Sample(const Work& work, int64_t runs, bool gated) {
  TESSERA_RETURN_IF_ERROR(all_.Barrier());
  TESSERA_TRY(double seconds, device_.queues() == nullptr
                                  ? OnHost(work.run, runs)
                                  : OnQueue(work.run, runs, gated));
  TESSERA_TRY(seconds, sums_.Sum(work.takes_part ? seconds : 0));
  return std::max(seconds, 1e-9) / static_cast<double>(runs * work.ranks);
}

Result<void> Stopwatch::SampleUnderLoad(const Work& work, int64_t runs,
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

Result<double> Stopwatch::OnQueue(const std::function<Result<void>()>& run,
                                  int64_t runs, bool gated) {
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

}  // namespace tessera
