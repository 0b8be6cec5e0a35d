#pragma once
// Operators that change how many places one dimension has (slices, padding,
// resampling).

#include "planner/ir/op.h"

namespace tessera {

// Whether the rule has one operand and one result that differ in one dimension,
// m of the operand and d of the result, neither of which can be split.
bool IsPlaces(const IndexRule& rule);

inline constexpr RuleForm kPlacesForm = {
    "one operand, in whose place m the result has d, as in 'bm!h->bd!h'",
    IsPlaces};

}  // namespace tessera
