#include "planner/io/model_config.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(GraphName, IsThatOfTheFileUnlessAllAreCalledSo) {
  EXPECT_EQ(GraphName("/models/gpt2/config.json"), "gpt2");
  EXPECT_EQ(GraphName("/models/mixtral-2-layers.json"), "mixtral-2-layers");
  EXPECT_EQ(GraphName("zoo:llama-3-8b"), "llama-3-8b");
}

}  // namespace
}  // namespace tessera
