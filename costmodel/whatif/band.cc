#include "costmodel/whatif/band.h"

namespace tessera {
namespace {

// The "mean over sources" of `tessera validate` on the published runs, each
// with the stack that it ran on (docs/validation.md; November 2026).
constexpr std::optional<ErrorBand> kStepTime = ErrorBand{
    0.078, 0.087, "tessera validate, published runs under their own stacks"};

}  // namespace

std::optional<ErrorBand> StepTimeBand() {
  return kStepTime;
}

}  // namespace tessera
