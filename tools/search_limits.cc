#include "tools/search_limits.h"

#include <algorithm>

#include "planner/base/threads.h"

namespace tessera {

SearchOptions SearchOptionsOf(const Options& options) {
  SearchOptions search;
  search.seed = options.seed;
  search.chains = options.chains;
  search.temperature = options.temperature;
  search.threads = ThreadCount(options.threads);
  search.proposals = options.proposals;
  search.time_limit = options.proposals ? 0 : kDefaultSearchTime;
  if (options.time_limit_s) {
    search.time_limit = std::max(*options.time_limit_s, kNoTime);
  }
  return search;
}

}  // namespace tessera
