#pragma once
// The functions behind the rows of topologies.cc: one file per family.

#include <optional>

#include "planner/base/result.h"
#include "planner/ir/cluster.h"

namespace tessera {

#define TESSERA_TOPOLOGY(function) \
  Result<Cluster> function(int nodes, std::optional<int> gpus_per_node)

// dgx.cc
TESSERA_TOPOLOGY(MakeDgxA100With40GB);
TESSERA_TOPOLOGY(MakeDgxA100With80GB);
TESSERA_TOPOLOGY(MakeDgxH100);
TESSERA_TOPOLOGY(MakeDgxH200);
TESSERA_TOPOLOGY(MakeDgxB200);
TESSERA_TOPOLOGY(MakeGb200Nvl72);
TESSERA_TOPOLOGY(MakeDgxB300);
TESSERA_TOPOLOGY(MakeGb300Nvl72);
TESSERA_TOPOLOGY(MakeHgxA800);
TESSERA_TOPOLOGY(MakeHgxH800);
TESSERA_TOPOLOGY(MakeHgxH20);
// cube_mesh.cc
TESSERA_TOPOLOGY(MakeDgx1V100);
TESSERA_TOPOLOGY(MakeP3);
// aws.cc
TESSERA_TOPOLOGY(MakeP4d);
TESSERA_TOPOLOGY(MakeP5);
TESSERA_TOPOLOGY(MakeP5en);
TESSERA_TOPOLOGY(MakeP6B200);
// google.cc
TESSERA_TOPOLOGY(MakeA3High);
TESSERA_TOPOLOGY(MakeA3Mega);
// pcie.cc
TESSERA_TOPOLOGY(MakeTitanRtxPair);
TESSERA_TOPOLOGY(MakeTitanRtxPairWithoutNvLink);
TESSERA_TOPOLOGY(MakeG4dn);
TESSERA_TOPOLOGY(MakeG5);
TESSERA_TOPOLOGY(MakeG6);
TESSERA_TOPOLOGY(MakePcieA40);
TESSERA_TOPOLOGY(MakePcieA100);
TESSERA_TOPOLOGY(MakePcieH100);
TESSERA_TOPOLOGY(MakePcieL40s);
// flexflow.cc
TESSERA_TOPOLOGY(MakeP100Edr);
TESSERA_TOPOLOGY(MakeK80Fdr);
// local_cpu.cc
TESSERA_TOPOLOGY(MakeLocalCpu);

#undef TESSERA_TOPOLOGY

}  // namespace tessera
