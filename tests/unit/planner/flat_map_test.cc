#include "planner/base/flat_map.h"

#include <gtest/gtest.h>

#include <map>

#include "planner/base/rng.h"

namespace tessera {
namespace {

// All keys meet in few slots.
struct PoorHash {
  uint64_t operator()(int key) const { return static_cast<uint64_t>(key % 3); }
};

// Against std::map, with keys that come up several times.
TEST(FlatMap, IsAMap) {
  FlatMap<int, int, PoorHash> flat;
  std::map<int, int> map;
  Rng rng(7);
  EXPECT_FALSE(flat.contains(0));
  for (int i = 0; i < 500; ++i) {
    const int key = static_cast<int>(rng.Below(200));
    ASSERT_EQ(flat.contains(key), map.contains(key));
    if (rng.Below(2) == 0) {
      const auto [it, is_new] = flat.try_emplace(key, i);
      ASSERT_EQ(is_new, map.try_emplace(key, i).second);
      ASSERT_EQ(it->first, key);
    } else {
      flat[key] = map[key] = i;
    }
    ASSERT_EQ(flat.size(), map.size());
  }
  for (int key = 0; key < 200; ++key) {
    const auto known = map.find(key);
    if (known == map.end()) {
      EXPECT_EQ(flat.find(key), flat.end());
    } else {
      EXPECT_EQ(flat.at(key), known->second);
    }
  }
}

}  // namespace
}  // namespace tessera
