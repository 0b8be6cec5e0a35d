#include "runtime/data/epoch_order.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace tessera {
namespace {

TEST(EpochOrder, AnEpochHasEverySampleOnce) {
  for (const int64_t size : {1, 2, 3, 7, 64, 100}) {
    const EpochOrder order{5, size};
    std::vector<int64_t> first;
    std::vector<int64_t> second;
    for (int64_t i = 0; i < size; ++i) {
      first.push_back(order.Training(i));
      second.push_back(order.Training(size + i));
    }
    for (const auto& epoch : {first, second}) {
      const std::set<int64_t> seen(epoch.begin(), epoch.end());
      EXPECT_EQ(std::ssize(seen), size);
      EXPECT_EQ(*seen.begin(), 0);
      EXPECT_EQ(*seen.rbegin(), size - 1);
    }
  }
}

// Of two orders of a thousand one place is alike by chance.
TEST(EpochOrder, IsAnotherForEachEpochAndSeed) {
  const EpochOrder order{5, 1000};
  const EpochOrder other{6, 1000};
  int in_epoch = 0;
  int in_other = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    in_epoch += order.Training(i) == order.Training(1000 + i) ? 1 : 0;
    in_other += order.Training(i) == other.Training(i) ? 1 : 0;
  }
  EXPECT_LT(in_epoch, 10);
  EXPECT_LT(in_other, 10);
}

// A run that goes on from a checkpoint reads what it would have read.
TEST(EpochOrder, IsTheSameInEveryVersion) {
  const EpochOrder order{7, 10};
  std::vector<int64_t> drawn;
  for (int64_t i = 0; i < 20; ++i) drawn.push_back(order.Training(i));
  EXPECT_EQ(drawn, (std::vector<int64_t>{4, 3, 5, 0, 9, 8, 1, 2, 6, 7,
                                         2, 5, 0, 7, 8, 3, 6, 1, 9, 4}));
}

TEST(EpochOrder, TheLastAreHeldOut) {
  const EpochOrder order = EpochOrder::Of(1, 7, 2, "rows", "f").value();
  EXPECT_EQ(order.size, 5);
  EXPECT_EQ(order.Validation(0), 5);
  EXPECT_EQ(order.Validation(1), 6);
  EXPECT_EQ(EpochOrder::Of(1, 2, 2, "rows", "f").error().ToString(),
            "f: holds 2 rows: --validate-batches holds 2 out, and none is left "
            "to train on");
}

}  // namespace
}  // namespace tessera
