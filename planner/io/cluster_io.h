#pragma once
// Clusters in files (proto/cluster.proto) and by name.

#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "planner/ir/cluster.h"

namespace tessera {

// Reads and validates. The error names the file and the first thing wrong in
// it, such as "cluster.txtpb: link_types[1].bandwidth_bytes_per_second".
Result<Cluster> ReadCluster(const std::string& path);

// Writes `path` as its ending says, atomically. REQUIRES: cluster is valid.
Result<void> WriteCluster(const std::string& path, const Cluster& cluster);

// A cluster file when `spec_or_path` ends like one (.txtpb, .json, .pb), else
// a preset such as "dgx-h200:1x1" (planner/topology/topologies.h).
Result<Cluster> LoadCluster(std::string_view spec_or_path);

}  // namespace tessera
