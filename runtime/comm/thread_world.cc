#include "runtime/comm/thread_world.h"

#include "planner/base/check.h"
#include "runtime/comm/region_world.h"

namespace tessera {

std::vector<std::unique_ptr<CommWorld>> MakeThreadWorlds(int n,
                                                         CommOptions options) {
  TESSERA_CHECK(n >= 1 && n <= kMaxRegionRanks) << n;
  const std::shared_ptr<Region> region = Region::MakePrivate(n).value();
  std::vector<std::unique_ptr<CommWorld>> worlds;
  for (int rank = 0; rank < n; ++rank) {
    worlds.push_back(std::make_unique<RegionWorld>(region, rank, options));
  }
  return worlds;
}

Result<std::unique_ptr<CommWorld>> MakeLoneWorld() {
  TESSERA_TRY(auto region, Region::MakePrivate(1));
  return std::unique_ptr<CommWorld>(
      std::make_unique<RegionWorld>(std::move(region), 0, CommOptions()));
}

}  // namespace tessera
