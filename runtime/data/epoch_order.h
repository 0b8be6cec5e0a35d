#pragma once
// Which samples of the data a run trains on, and in which order. The last may
// be held out for validation. An epoch goes through the others once, in an
// order that is a function of (seed, epoch): sample i of a run is one of epoch
// i div size. So the number of samples taken is all the state there is; a
// checkpoint holds it, and no split of the batch changes what is read. Plain
// values and pure functions.

#include <cstdint>
#include <string>
#include <string_view>

#include "planner/base/result.h"

namespace tessera {

struct EpochOrder {
  uint64_t seed = 0;
  int64_t size = 0;  // samples of an epoch; those held out are behind them

  // Of `all` samples ("images") of the file at `path`. kInvalidInput where
  // those held out leave none.
  static Result<EpochOrder> Of(uint64_t seed, int64_t all, int64_t held_out,
                               std::string_view samples,
                               const std::string& path);

  // The sample of the data that sample `sample` >= 0 of the run is, and the one
  // of the validation.
  int64_t Training(int64_t sample) const;
  int64_t Validation(int64_t sample) const { return size + sample; }
  // What is drawn for the epoch of a sample of the run.
  uint64_t KeyAt(int64_t sample) const;
};

}  // namespace tessera
