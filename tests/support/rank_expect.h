#pragma once
// Expectations in a function of one rank, which returns what it found wrong;
// empty if nothing. Ranks may be processes, so they hand back text instead of
// using gtest's macros.

#include "runtime/comm/text.h"

#define RANK_EXPECT(condition) \
  if (condition) {             \
  } else                       \
    return ::tessera::Text("line ", __LINE__, ": ", #condition)
#define RANK_EXPECT_OK(expression)          \
  if (const auto ok_ = (expression); ok_) { \
  } else                                    \
    return ::tessera::Text("line ", __LINE__, ": ", ok_.error().ToString())
