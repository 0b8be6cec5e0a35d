// Which collectives are worked out once. What they do: executor_test.cc.

#include "runtime/reshard_exec.h"

#include <gtest/gtest.h>

#include <array>

#include "runtime/comm/thread_world.h"

namespace tessera {
namespace {

// Rows of a matrix from one member to two, by which of them has how many.
CollectivePart Scattered(int64_t rows_of_first, DType dtype = DType::kFloat32) {
  const Placement whole = WholeBlock({{0, 4}, {0, 3}});
  const Placement none = WholeBlock({{0, 0}, {0, 3}});
  return {dtype,
          {whole, none},
          {WholeBlock({{0, rows_of_first}, {0, 3}}),
           WholeBlock({{rows_of_first, 4}, {0, 3}})}};
}

TEST(CollectiveMaker, EqualCollectivesAreMadeOnce) {
  const auto worlds = MakeThreadWorlds(2);
  constexpr std::array kOrder = {0, 1}, kOther = {1, 0};
  Communicator& group = *worlds[0]->Group(kOrder).value();
  Communicator& other = *worlds[0]->Group(kOther).value();
  CollectiveMaker maker;
  const auto first = maker.Make(CommKind::kScatter, group, {Scattered(1)});
  EXPECT_EQ(maker.Make(CommKind::kScatter, group, {Scattered(1)}), first);
  EXPECT_EQ(&first->group(), &group);
  // All that they differ in.
  EXPECT_NE(maker.Make(CommKind::kRedistribute, group, {Scattered(1)}), first);
  EXPECT_NE(maker.Make(CommKind::kScatter, other, {Scattered(1)}), first);
  EXPECT_NE(maker.Make(CommKind::kScatter, group, {Scattered(2)}), first);
  EXPECT_NE(
      maker.Make(CommKind::kScatter, group, {Scattered(1, DType::kFloat64)}),
      first);
  EXPECT_NE(maker.Make(CommKind::kScatter, group, {Scattered(1), Scattered(1)}),
            first);
  // And those in between are still there.
  EXPECT_EQ(maker.Make(CommKind::kScatter, group, {Scattered(1)}), first);
}

// To rank 0, of a matrix that both have, and of one that each has half of.
TEST(CollectiveTest, OneOfSeveralReplicasSends) {
  const auto worlds = MakeThreadWorlds(2);
  constexpr std::array kOrder = {0, 1};
  const Placement whole = WholeBlock({{0, 4}, {0, 3}});
  const Placement none = WholeBlock({{0, 0}, {0, 3}});
  const CollectivePart replicas{DType::kFloat32, {whole, whole}, {whole, none}};
  const CollectivePart halves{
      DType::kFloat32,
      {WholeBlock({{0, 2}, {0, 3}}), WholeBlock({{2, 4}, {0, 3}})},
      {whole, none}};
  for (const auto& world : worlds) {
    Communicator& group = *world->Group(kOrder).value();
    const bool first = world->world_rank() == 0;
    EXPECT_EQ(Collective(CommKind::kGather, group, {&replicas, 1}).sends(),
              first);
    EXPECT_TRUE(Collective(CommKind::kGather, group, {&halves, 1}).sends());
  }
}

}  // namespace
}  // namespace tessera
