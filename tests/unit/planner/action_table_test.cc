#include "planner/schedule/action_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string ErrorOf(std::string_view text) {
  const auto orders = ParseActionTable(text);
  return orders ? "" : orders.error().ToString();
}

TEST(ActionTable, ReadsActions) {
  EXPECT_EQ(*ParseAction("F0"), (Action{ActionKind::kForward, 0, 0}));
  EXPECT_EQ(*ParseAction("B12"), (Action{ActionKind::kBackward, 0, 12}));
  EXPECT_EQ(*ParseAction("I3.1"), (Action{ActionKind::kBackwardInput, 1, 3}));
  EXPECT_EQ(*ParseAction("W3.2"), (Action{ActionKind::kBackwardWeight, 2, 3}));
  for (const char* wrong :
       {"", "F", "0", "X0", "F-1", "F0.", "F0.x", "F0x", "F9999999999"}) {
    EXPECT_FALSE(ParseAction(wrong)) << wrong;
  }
}

TEST(ActionTable, ReadsFiles) {
  const auto orders = ParseActionTable(
      "# two stages\n"
      "F0 F1\tB0 B1   # the first\n"
      "\n"
      "F0 I0 F1 W0 B1");
  ASSERT_TRUE(orders.has_value()) << orders.error().ToString();
  ASSERT_EQ(orders->size(), 2u);
  EXPECT_EQ(ShapeOf(*orders), (PipelineShape{2, 1, 2}));
  EXPECT_THAT(orders->at(1),
              ElementsAre(Action{ActionKind::kForward, 0, 0},
                          Action{ActionKind::kBackwardInput, 0, 0},
                          Action{ActionKind::kForward, 0, 1},
                          Action{ActionKind::kBackwardWeight, 0, 0},
                          Action{ActionKind::kBackward, 0, 1}));
}

TEST(ActionTable, SaysWhatIsWrongAndWhere) {
  EXPECT_EQ(ErrorOf("\n# nothing\n"), "has no actions");
  EXPECT_EQ(ErrorOf("F0 B0\nF0 X0\n"),
            "line 2: 'X0' is no action: expected F, B, I or W and a "
            "microbatch, such as F0, or with a chunk F0.1");
  EXPECT_EQ(ErrorOf("F0 F0 B0"), "line 1: F0 (action 2) occurs twice");
  EXPECT_EQ(ErrorOf("F0 F1 B0"), "line 1: lacks B1");
  EXPECT_EQ(ErrorOf("F0 I0"), "line 1: lacks W0");
  EXPECT_EQ(ErrorOf("F0 B0\n\nB0 F0"),
            "line 3: B0 (action 1) comes before its forward");
  EXPECT_EQ(ErrorOf("F0 W0 I0"),
            "line 1: W0 (action 2) comes before the gradients of activations "
            "(I)");
  EXPECT_THAT(ErrorOf("F0 I0 B0 W0"), HasSubstr("B0 (action 3) is a whole"));
  EXPECT_THAT(ErrorOf("F0 B0 W0"), HasSubstr("W0 (action 3) is a part"));
  EXPECT_EQ(ErrorOf("F0.0 F0.1 B0.1 B0.0\nF0.0 F0.1 B0.1"),
            "line 2: lacks B0.0");
  // The first stage wants microbatch 1 back before it has sent 0.
  EXPECT_EQ(ErrorOf("F1 B1 F0 B0\nF0 F1 B0 B1"),
            "line 1: B1 (action 2) waits forever: the schedule deadlocks");
}

TEST(ActionTable, RowsPassTheCheckOfTables) {
  for (const PipelineShape& shape :
       {PipelineShape{3, 1, 5}, PipelineShape{2, 3, 4}}) {
    for (const PipelineSchedule* row : SchedulesFor(shape)) {
      EXPECT_TRUE(CheckOrders(OrdersOf(*row, shape), shape).empty())
          << row->name;
    }
  }
}

TEST(ActionTable, AFileThatIsNone) {
  const auto error = [](const std::string& path) {
    const auto orders = ReadActionTable(path);
    EXPECT_FALSE(orders.has_value());
    return orders ? Error{} : orders.error();
  };
  const std::string missing = ::testing::TempDir() + "no-such-schedule";
  EXPECT_EQ(error(missing),
            (Error{ErrorCode::kNotFound,
                   "cannot open: No such file or directory", missing}));
  EXPECT_EQ(error("/"), (Error{ErrorCode::kInvalidInput,
                               "cannot read: Is a directory", "/"}));
  EXPECT_EQ(error("/dev/zero"),
            InvalidInput("is a device, without an end", "/dev/zero"));
}

}  // namespace
}  // namespace tessera
