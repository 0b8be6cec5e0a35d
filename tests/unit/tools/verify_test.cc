#include "tools/verify.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera {
namespace {

// A search's flags of what is trained, with their values; not those of how the
// plan is found, nor what is set beside them otherwise.
TEST(VerifyTest, WhatIsTrainedIsHandedOn) {
  EXPECT_EQ(
      TrainingArguments({"--model", "m", "--cluster", "local-cpu:2",
                         "--dtype=bf16", "--stochastic-rounding", "--proposals",
                         "50", "--lr=1e-3", "--clip", "1", "--json", "--data",
                         "d", "--threads", "2"}),
      (std::vector<std::string>{"--model", "m", "--stochastic-rounding",
                                "--lr=1e-3", "--clip", "1", "--data", "d"}));
}

}  // namespace
}  // namespace tessera
