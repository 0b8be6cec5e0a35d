#include "planner/plan/idle_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "planner/io/importer.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Graph Gpt2Tiny() {
  ImportOptions options;
  options.global_batch = 8;
  options.seq_len = 64;
  return *Differentiate(*ImportModel(ExamplePath("models/gpt2-tiny"), options));
}

struct Dropped {
  Strategy strategy;
  std::vector<std::string> notes;
};
Dropped On(const std::string& cluster, const std::string& text) {
  const Graph graph = Gpt2Tiny();
  const GraphIndex index(graph);
  Dropped dropped;
  dropped.strategy = WithoutIdleKeys(index, *MakeCluster(cluster),
                                     *ReadStrategy(text), dropped.notes);
  return dropped;
}

TEST(IdleKeys, AreDroppedWhereTheyHaveNoEffect) {
  const Dropped one = On("local-cpu:2", "tp=2,zero=1,zero-group=node,sp=1");
  EXPECT_EQ(one.strategy, *ParseStrategy("tp=2,sp=1"));
  EXPECT_THAT(
      one.notes,
      ElementsAre("without zero=1, which has no effect: no weight has copies "
                  "to cut where dp, cp and ep are 1",
                  "without zero-group=node, which has no effect: needs zero=1, "
                  "2 or 3"));
  const Dropped two = On("local-cpu:4", "tp=2,zero=1,zero-group=node,sp=1");
  EXPECT_EQ(two.strategy, *ParseStrategy("tp=2,zero=1,zero-group=node,sp=1"));
  EXPECT_THAT(two.notes, IsEmpty());
}

// What a zero-group leaves whole.
TEST(IdleKeys, AreThoseOfACutOverOneRank) {
  const Dropped alone = On("local-cpu:4", "zero=3,zero-group=1");
  EXPECT_EQ(alone.strategy, Strategy());
  EXPECT_THAT(alone.notes,
              ElementsAre("without zero=3, which has no effect: zero-group=1 "
                          "has no other rank",
                          "without zero-group=1, which has no effect: needs "
                          "zero=1, 2 or 3"));
  const Dropped apart = On("dgx-a100-80gb:4x1", "zero=1,zero-group=node");
  EXPECT_EQ(apart.strategy, Strategy());
  EXPECT_THAT(apart.notes[0],
              HasSubstr("zero-group=node finds no two copies on one node"));
  // The copies of a tensor rank are on another host each.
  EXPECT_EQ(On("dgx-a100-80gb:2x2", "tp=2,zero=1,zero-group=node").strategy,
            *ParseStrategy("tp=2"));
  const char* kept = "zero=1,zero-group=node";
  EXPECT_EQ(On("dgx-a100-80gb:2x2", kept).strategy, *ParseStrategy(kept));
}

// What is left is a strategy that ParseStrategy takes and that has a plan.
TEST(IdleKeys, OfEachKind) {
  const Graph graph = Gpt2Tiny();
  const GraphIndex index(graph);
  const Cluster cluster = *MakeCluster("local-cpu:2");
  for (const char* text :
       {"sp=1", "cp-kind=ring", "cp-balance=zigzag", "etp=2", "tp=2,etp=1",
        "zero-group=2", "prefetch=2", "balance=speed", "tp=2,dp-kind=rooted",
        "recompute=none:1", "tp=2,bucket=1MB",
        "tp=2,zero=3,prefetch=2,bucket=1MB",
        "zero=3,zero-group=1,prefetch=2"}) {
    EXPECT_FALSE(ParseStrategy(text) &&
                 Complete(index, cluster, *ParseStrategy(text)))
        << text;
    std::vector<std::string> notes;
    const Strategy left =
        WithoutIdleKeys(index, cluster, *ReadStrategy(text), notes);
    EXPECT_FALSE(notes.empty()) << text;
    EXPECT_FALSE(FirstIdleKey(left)) << text;
    EXPECT_TRUE(PlanFromStrategy(index, cluster, left)) << text;
  }
}

TEST(IdleKeys, WhatCannotBeStays) {
  // Experts to split, gradients on a host that does not step, more ranks than
  // there are.
  EXPECT_EQ(On("local-cpu:2", "ep=2").strategy.ep, 2);
  const Dropped gradients = On("local-cpu:2", "offload=gradients:host");
  EXPECT_EQ(gradients.strategy.gradient_tier, MemoryTier::kHost);
  EXPECT_THAT(gradients.notes, IsEmpty());
  EXPECT_EQ(On("local-cpu:2", "tp=4,zero=1").strategy,
            *ReadStrategy("tp=4,zero=1"));
}

}  // namespace
}  // namespace tessera
