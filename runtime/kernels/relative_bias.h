#pragma once
// The buckets of distances whose biases T5's attention learns (Raffel et al.
// 2020, section 2.1; transformers' T5Attention._relative_position_bucket).

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runtime/kernels/kernel.h"

namespace tessera {

// The bucket of a key that is `distance` away from its query, on the side where
// it is, and which buckets that side has. Distances up to half of a side's
// buckets have one each; the others share buckets that widen with the
// logarithm, the last one from max_distance on.
struct RelativeBuckets {
  // By distance, up to max_distance, from which on all are alike.
  std::vector<int32_t> of_distance;
  // Where keys behind the query, if they are seen, have their buckets.
  int32_t behind = 0;
  // A causal mask: keys behind the query have the bucket of distance 0.
  bool causal = false;

  int32_t Of(int32_t query, int32_t key) const {
    const int64_t distance = int64_t{key} - query;
    const int64_t far = static_cast<int64_t>(of_distance.size()) - 1;
    if (distance <= 0) {
      return of_distance[static_cast<size_t>(std::min(-distance, far))];
    }
    if (causal) return of_distance[0];
    return behind + of_distance[static_cast<size_t>(std::min(distance, far))];
  }
};

// By the attributes "causal" and "max_distance" of the call.
RelativeBuckets RelativeBucketsOf(const KernelCall& call, int64_t buckets);

}  // namespace tessera
