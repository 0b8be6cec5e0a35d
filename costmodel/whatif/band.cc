#include "costmodel/whatif/band.h"

namespace tessera {
namespace {

// From the "mean over sources" of `tessera validate` on the published runs.
constexpr std::optional<ErrorBand> kStepTime = std::nullopt;

}  // namespace

std::optional<ErrorBand> StepTimeBand() {
  return kStepTime;
}

}  // namespace tessera
