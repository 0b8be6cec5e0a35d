#include "planner/base/fnv1a.h"

#include <gtest/gtest.h>

#include <array>

namespace tessera {
namespace {

// The test vectors of the algorithm's authors.
static_assert(Fnv1a().value() == 0xcbf29ce484222325ULL);
static_assert(Fnv1a().Add("a").value() == 0xaf63dc4c8601ec8cULL);
static_assert(Fnv1a().Add("foobar").value() == 0x85944171f73967e8ULL);

TEST(Fnv1aTest, WordsAreTheirBytesFromTheLowest) {
  // 'a' is 0x61; seven bytes of zero come behind it.
  EXPECT_EQ(Fnv1a().Add(uint64_t{0x61}).value(),
            Fnv1a().Add(std::string_view("a\0\0\0\0\0\0\0", 8)).value());
  EXPECT_EQ(Fnv1a().AddAll(std::array{0x61, -1}).value(),
            Fnv1a().Add(uint64_t{0x61}).Add(~uint64_t{0}).value());
  EXPECT_EQ(Fnv1a().Add("foo").Add("bar").value(),
            Fnv1a().Add("foobar").value());
}

}  // namespace
}  // namespace tessera
