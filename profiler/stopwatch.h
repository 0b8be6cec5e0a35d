#pragma once
// Times work on all ranks at once (profiler.h says how samples are taken).

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "planner/base/result.h"
#include "planner/base/units.h"
#include "profiler/host_cache.h"
#include "profiler/profiler.h"
#include "profiler/rank_sums.h"
#include "runtime/comm/communicator.h"
#include "runtime/device/device.h"

namespace tessera {

// Of what takes turns on the host on each of `ranks` ranks with `threads`
// threads: twice what their share of the last-level caches of `cpus` processors
// is, at least 8 MiB.
Bytes RotatedOnHost(const HostCache& cache, int cpus, int ranks, int threads);

// Twice the largest L2: A100 40 MB, H100 and H200 50 MB, B200 126 MB.
inline constexpr Bytes kRotatedOnQueue = {int64_t{256} << 20};

class Stopwatch {
 public:
  // For so many cases. All outlive it.
  static Result<std::unique_ptr<Stopwatch>> Make(RankDevice& device,
                                                 Communicator& all,
                                                 RankSums& sums,
                                                 const ProfilerOptions& options,
                                                 size_t cases);
  ~Stopwatch();
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

  // What so long a run takes to be timed, with all samples.
  double SecondsOf(double run_s) const;

  // Of fewer samples where the runs take longer than `left_s`, which all ranks
  // agree on: one at least, or a long first run alone.
  Result<Measurement> Time(const Work& work, double left_s);

 private:
  struct Sampling;
  class Load;

  Stopwatch(RankDevice& device, Communicator& all, RankSums& sums,
            const Sampling& sampling, double sample_s, Bytes rotated);

  // Seconds of one run: the mean over `runs` and over the ranks that take part.
  Result<double> Sample(const Work& work, int64_t runs, bool gated);
  // All samples without a pause between, in which the clocks would recover. The
  // host is ahead by the load, whose 96 MiB leave little of use in the caches.
  Result<void> SampleUnderLoad(const Work& work, int64_t runs,
                               std::vector<double>& samples);
  Result<double> OnQueue(const std::function<Result<void>()>& run, int64_t runs,
                         bool gated);

  static const Sampling kOnHost;
  static const Sampling kOnQueue;

  RankDevice& device_;
  Communicator& all_;
  RankSums& sums_;
  const Sampling& sampling_;
  const double sample_s_;
  const Bytes rotated_;
  // Of a device with queues: written before a sample, of as many bytes as are
  // rotated; and what runs before samples of one rank's own work, or null.
  void* flushed_ = nullptr;
  std::unique_ptr<Load> load_;
};

}  // namespace tessera
