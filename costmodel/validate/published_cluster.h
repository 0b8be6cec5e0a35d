#pragma once
// The machine of a published run: a cluster from the words of its columns.

#include <string>
#include <vector>

#include "costmodel/validate/published_run.h"
#include "planner/base/result.h"
#include "planner/ir/cluster.h"

namespace tessera {

// GPUs by the words of the column, links by the words of theirs (the tables are
// in published_cluster.cc); the vendor's reference system where they are blank,
// which is added to `assumptions`. The stack is left as it is by default.
// kInfeasible, with the column, for what cannot be mapped.
Result<Cluster> ClusterOf(const PublishedRun& run,
                          std::vector<std::string>& assumptions);

// Its GPU, of DeviceTypes. Errors as ClusterOf.
Result<std::string_view> DeviceNameOf(const PublishedRun& run);

// The row's words for its network: what one card reaches by its nominal rate,
// and how many there are in a node. Rates and counts are read from the text
// ("8x HDR InfiniBand", "800 Gb/s per node", "EFA 3200 Gbps").
struct NetworkWords {
  std::string_view link;  // of LinkTypes, for latency and the share reached
  double gbit_per_card = 0;
  int cards = 0;
};
// `gpus`: in a node. Nothing for words that name no network.
std::optional<NetworkWords> ReadNetwork(const std::string& words, int gpus);

}  // namespace tessera
