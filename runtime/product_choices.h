#pragma once
// The algorithms of matrix products, the same on all ranks: replicas compute
// the same product, and have to get the same bits. All ranks of a job call
// these together.

#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "runtime/comm/host_messages.h"
#include "runtime/device/product_tuner.h"

namespace tessera {

// The choices that rank 0 has read from a file, if any, are everyone's. Errors
// name `path`.
Result<void> ShareProducts(std::string choices, std::string_view path,
                           ProductTuner& tuner, HostMessages all);

// Of each product that a rank names as untuned the lowest such rank times the
// algorithms, and all adopt what it chooses. Where that fails, as without the
// memory for it, all go on without a choice. REQUIRES: the work of all ranks
// has ended.
Result<void> AgreeOnProducts(const std::vector<MatMulKey>& untuned,
                             ProductTuner& tuner, HostMessages all);

}  // namespace tessera
