#include "runtime/descriptor_limit.h"

#include <sys/resource.h>

#include <algorithm>

namespace tessera {

void RaiseDescriptorLimit(int64_t wanted) {
  constexpr rlim_t kOthers = 256;  // a choice
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t all = static_cast<rlim_t>(wanted) + kOthers;
  if (limit.rlim_cur >= all) return;
  limit.rlim_cur = std::min(all, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);  // fails harmlessly
}

}  // namespace tessera
