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

}  // namespace tessera
