#include "planner/plan/evaluation.h"

#include <gtest/gtest.h>

#include <set>

namespace tessera {
namespace {

TEST(MemoryCategory, EachHasANameOfItsOwn) {
  std::set<std::string_view> names;
  for (int c = 0; c < kMemoryCategories; ++c) {
    const std::string_view name = NameOf(static_cast<MemoryCategory>(c));
    EXPECT_FALSE(name.empty()) << c;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
}

}  // namespace
}  // namespace tessera
