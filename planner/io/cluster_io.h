#pragma once
// Clusters in files (proto/cluster.proto) and by name.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/amount.h"
#include "planner/base/result.h"
#include "planner/ir/cluster.h"

namespace tessera {

// Reads and validates. The error names the file and the first thing wrong in
// it, such as "cluster.txtpb: link_types[1].bandwidth_bytes_per_second".
Result<Cluster> ReadCluster(const std::string& path);

// Writes `path` as its ending says, atomically. REQUIRES: cluster is valid.
Result<void> WriteCluster(const std::string& path, const Cluster& cluster);

// A field of the file by its path, "device_types[0].memory_bytes", all
// "device_types[*].memory_bytes", or "link_types[ib-hdr].latency_seconds" by
// name; units at the end of a name may be left out.
struct FieldValue {
  std::string path;
  Amount amount;
};

// `cluster` with these set, one after the other; validated. Errors name the
// path, with the near names where there is none like it.
Result<Cluster> WithFields(const Cluster& cluster,
                           std::span<const FieldValue> fields);
// All paths, units left out.
std::vector<std::string> ClusterFieldPaths();

// The first thing that is wrong with `cluster`, and how many more there are.
// `where` is the field of the file, "link_types[1].bandwidth_bytes_per_second".
Result<void> CheckCluster(const Cluster& cluster);

// A cluster file when `spec_or_path` ends like one (proto_endings.h), else a
// preset such as "dgx-h200:1x1" (planner/topology/topologies.h). Of a file that
// ends otherwise the error names the endings.
Result<Cluster> LoadCluster(std::string_view spec_or_path);

}  // namespace tessera
