#include "costmodel/whatif/band.h"

#include <algorithm>
#include <iterator>

namespace tessera {
namespace {

struct BandRow {
  std::string_view stack;
  int sources;
  double median;
  double mean;
};

// `tessera validate` on the published runs: of each source the median and the
// mean error, and of these the mean over the sources of a stack
// (docs/validation.md; November 2026).
constexpr BandRow kRows[] = {
    {"megatron-2021", 10, 0.091, 0.099},
    {"megatron-core-2024", 13, 0.084, 0.087},
    {"torchtitan-2024", 1, 0.070, 0.086},
    {"pytorch-fsdp-2023", 3, 0.047, 0.067},
    {"pytorch-eager-2022", 3, 0.137, 0.160},
    {"xla-2022", 2, 0.029, 0.035},
};
constexpr double kMedian = 0.078;
constexpr double kMean = 0.087;

// Of GPT-2 and Llama on one H200 with its profile
// (tests/bench/results/h200-2026-11-27.json).
constexpr double kGpuMedian = 0.038;
constexpr double kGpuMean = 0.032;

// Of 17 strategies on 2 and 4 ranks of a host of two cores, each with the
// profile of that many (tests/bench/results/2026-11-27-cpu-predictions.json):
// what ranks that take turns on the cores wait for one another no profile has.
constexpr double kCoresMedian = 0.143;
constexpr double kCoresMean = 0.157;
// The same without a profile, as cores that are assumed.
constexpr double kAssumedCoresMedian = 0.338;
constexpr double kAssumedCoresMean = 0.390;

}  // namespace

ErrorBand StepTimeBand(std::string_view stack) {
  const auto* const row = std::ranges::find(kRows, stack, &BandRow::stack);
  if (row == std::end(kRows)) {
    return {kMedian, kMean,
            "tessera validate, published runs under their own stacks"};
  }
  return {row->median, row->mean,
          "tessera validate, published runs under " + std::string(stack) +
              ", " + std::to_string(row->sources) +
              (row->sources == 1 ? " source" : " sources")};
}

ErrorBand StepTimeBand(const Cluster& cluster, const SourceShares& sources) {
  const bool profiled = sources.measured + sources.interpolated >= 0.5;
  const bool cores = std::ranges::all_of(
      cluster.device_types, [](const auto& t) { return t.shared_memory; });
  if (cores && profiled) {
    return {kCoresMedian, kCoresMean,
            "tessera run with a profile, on a host of two cores"};
  }
  if (cores) {
    return {kAssumedCoresMedian, kAssumedCoresMean,
            "tessera run without a profile, on a host of two cores"};
  }
  if (!profiled) return StepTimeBand(cluster.stack.name);
  return {kGpuMedian, kGpuMean, "tessera run with a profile, on an H200"};
}

}  // namespace tessera
