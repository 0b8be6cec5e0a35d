#pragma once
// What `explain` and `diff` print alike.

#include <string>
#include <vector>

#include "planner/plan/describe.h"
#include "tools/json.h"

namespace tessera {

// "+3.1 %", "-0.4 %", "equal", "14.2 x": of `value` against `base`.
std::string ChangeText(double value, double base);

// Why no decisions are priced beside a plan of so many stages, which no uniform
// plan is near.
std::string NothingNearText(int stages);

Json ChangesJson(const std::vector<PlanDifference>& changes);

}  // namespace tessera
