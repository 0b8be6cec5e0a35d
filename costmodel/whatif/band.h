#pragma once
// How far off predictions are, against what was measured.

#include <string>
#include <string_view>

namespace tessera {

struct ErrorBand {
  double median = 0;  // of |predicted - measured| / measured
  double mean = 0;
  std::string source;
};

// Of step times without a profile, under a stack (Stack::name); of one that no
// published run had, that of all runs under their own.
ErrorBand StepTimeBand(std::string_view stack);

}  // namespace tessera
