#pragma once
// How far off predictions are, against what was measured.

#include <optional>
#include <string_view>

namespace tessera {

struct ErrorBand {
  double median = 0;  // of |predicted - measured| / measured
  double mean = 0;
  std::string_view source;
};

// Of step times without a profile; nothing until 'tessera validate' has been
// run on a table for it.
std::optional<ErrorBand> StepTimeBand();

}  // namespace tessera
