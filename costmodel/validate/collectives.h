#pragma once
// Published sweeps of collectives, and what the model says of them.
//
// A table has the columns sweep_id, source, gpu, nodes, ranks, inter_link,
// collective, bytes, time_us_oop, busbw_oop and notes, perhaps gpus_per_node
// and intra_link; others are skipped. The words for GPU and links make the
// machine as those of a training run do (published_cluster.h); a row whose
// words do not is refused with the reason. Notes may say that the ring was
// asked for
// ("Ring", "Ring, Simple", "NCCL_NVLS_ENABLE=0"); else the model chooses.
//
// Medians of the absolute error of the time from 1 MB to 8 GB, by source and
// collective, over the published tables: docs/collectives.md.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "costmodel/collective/collective.h"
#include "planner/base/result.h"

namespace tessera {

struct PublishedCollective {
  std::string sweep, source;
  std::string gpu, intra_link, inter_link, notes;
  std::string kind;       // "all_reduce", "alltoall", ... as printed
  int nodes = 0;          // 0: not stated
  int gpus_per_node = 0;  // 0: not stated
  int ranks = 0;          // 0: not stated
  int64_t bytes = 0;
  double seconds = 0;  // printed, or from the bus bandwidth; 0 without either
  int line = 0;        // of the table
};

// Whether the table at `path` is one of collectives.
Result<bool> IsTableOfCollectives(const std::string& path);
Result<std::vector<PublishedCollective>> ReadPublishedCollectives(
    const std::string& path);

struct CollectivePrediction {
  const PublishedCollective* measured = nullptr;
  std::string refused;               // why there is no prediction
  std::string cluster;               // "2 x 8 H100-80GB"
  std::vector<std::string> assumed;  // what the row leaves out
  double seconds = 0;
  std::string_view algorithm, protocol;  // those chosen

  double Error() const {
    return (seconds - measured->seconds) / measured->seconds;
  }
};

// One for each row, in order; they refer to `rows`.
std::vector<CollectivePrediction> PredictCollectives(
    const std::vector<PublishedCollective>& rows);

// nccl-tests' bus bandwidth per byte and second of the payload: 2 (n - 1) / n
// for an all-reduce, (n - 1) / n where each rank holds 1/n of it, else 1.
double BusFactor(CommKind kind, int ranks);

}  // namespace tessera
