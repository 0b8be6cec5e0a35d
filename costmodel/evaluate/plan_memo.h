#pragma once
// PlanMemo: what was found of whole plans.

#include <cstdint>
#include <functional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "planner/plan/evaluation.h"
#include "planner/plan/plan.h"

namespace tessera {

// Thread-safe; two threads that ask for the same new plan may both make it.
// Emptied when full: `most` counts what takes memory in the plans, some 70
// bytes each.
class PlanMemo {
 public:
  explicit PlanMemo(size_t most) : most_(most) {}

  Evaluation Get(const Plan& plan, const std::function<Evaluation()>& make);

 private:
  const size_t most_;
  std::shared_mutex mutex_;
  std::unordered_multimap<uint64_t, std::pair<Plan, Evaluation>> known_;
  size_t size_ = 0;
};

}  // namespace tessera
