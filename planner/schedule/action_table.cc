#include "planner/schedule/action_table.h"

#include <algorithm>
#include <limits>
#include <map>
#include <sstream>

#include "planner/base/file.h"
#include "planner/base/whole_number.h"

namespace tessera {
namespace {

constexpr std::string_view kLetters = "FBIW";  // by ActionKind

// What a stage has done of one (chunk, microbatch).
struct Progress {
  bool forward = false;
  bool whole = false;
  bool input = false;
  bool weight = false;
};

// Why `action` cannot come next, or "".
std::string Misplaced(const Action& action, const Progress& done) {
  switch (action.kind) {
    case ActionKind::kForward:
      return done.forward ? "occurs twice" : "";
    case ActionKind::kBackward:
      if (done.whole) return "occurs twice";
      if (done.input) return "is a whole backward beside one in parts";
      return done.forward ? "" : "comes before its forward";
    case ActionKind::kBackwardInput:
      if (done.input) return "occurs twice";
      if (done.whole) return "is a part of a backward beside a whole one";
      return done.forward ? "" : "comes before its forward";
    case ActionKind::kBackwardWeight:
      if (done.weight) return "occurs twice";
      if (done.whole) return "is a part of a backward beside a whole one";
      return done.input ? "" : "comes before the gradients of activations (I)";
  }
  return "";
}

// What is missing of a (chunk, microbatch), or nothing.
std::optional<ActionKind> Missing(const Progress& done) {
  if (!done.forward) return ActionKind::kForward;
  if (done.input && !done.weight) return ActionKind::kBackwardWeight;
  if (!done.input && !done.whole) return ActionKind::kBackward;
  return std::nullopt;
}

// The first problem of one stage by itself.
std::optional<OrderProblem> CheckStage(int stage,
                                       const std::vector<Action>& order,
                                       const PipelineShape& shape) {
  std::map<std::pair<int, int>, Progress> progress;
  for (size_t i = 0; i < order.size(); ++i) {
    const Action& action = order[i];
    const auto fail = [&](const std::string& message) {
      return OrderProblem{stage, static_cast<int>(i), message};
    };
    if (action.chunk < 0 || action.chunk >= shape.chunks) {
      return fail("is of chunk " + std::to_string(action.chunk) + " of " +
                  std::to_string(shape.chunks));
    }
    if (action.microbatch < 0 || action.microbatch >= shape.microbatches) {
      return fail("is of microbatch " + std::to_string(action.microbatch) +
                  " of " + std::to_string(shape.microbatches));
    }
    Progress& done = progress[{action.chunk, action.microbatch}];
    if (auto why = Misplaced(action, done); !why.empty()) return fail(why);
    switch (action.kind) {
      case ActionKind::kForward:
        done.forward = true;
        break;
      case ActionKind::kBackward:
        done.whole = true;
        break;
      case ActionKind::kBackwardInput:
        done.input = true;
        break;
      case ActionKind::kBackwardWeight:
        done.weight = true;
        break;
    }
  }
  for (int c = 0; c < shape.chunks; ++c) {
    for (int m = 0; m < shape.microbatches; ++m) {
      if (const auto kind = Missing(progress[{c, m}])) {
        return OrderProblem{
            stage, -1, "lacks " + ToString(Action{*kind, c, m}, shape.chunks)};
      }
    }
  }
  return std::nullopt;
}

}  // namespace

std::vector<OrderProblem> CheckOrders(const StageOrders& orders,
                                      const PipelineShape& shape) {
  std::vector<OrderProblem> problems;
  for (size_t s = 0; s < orders.size(); ++s) {
    if (auto problem = CheckStage(static_cast<int>(s), orders[s], shape)) {
      problems.push_back(*problem);
    }
  }
  if (!problems.empty()) return problems;
  std::vector<size_t> done(orders.size(), 0);
  for (const StageAction& step : GlobalOrder(orders, shape)) {
    ++done[static_cast<size_t>(step.stage)];
  }
  for (size_t s = 0; s < orders.size(); ++s) {
    if (done[s] == orders[s].size()) continue;
    problems.push_back({static_cast<int>(s), static_cast<int>(done[s]),
                        "waits forever: the schedule deadlocks"});
  }
  return problems;
}

PipelineShape ShapeOf(const StageOrders& orders) {
  PipelineShape shape = {static_cast<int>(orders.size()), 1, 1};
  for (const std::vector<Action>& order : orders) {
    for (const Action& action : order) {
      shape.chunks = std::max(shape.chunks, action.chunk + 1);
      shape.microbatches = std::max(shape.microbatches, action.microbatch + 1);
    }
  }
  return shape;
}

Result<Action> ParseAction(std::string_view text) {
  const auto wrong = [&] {
    return InvalidInput("'" + std::string(text) +
                        "' is no action: expected F, B, I or W and a "
                        "microbatch, such as F0, or with a chunk F0.1");
  };
  // More would not be a step that anybody runs, and must not overflow.
  constexpr int kMost = 1 << 20;
  const auto number = [&](std::string_view digits, int& value) {
    value = ParseWhole<int>(digits).value_or(-1);
    return value >= 0 && value < kMost;
  };
  if (text.empty()) return wrong();
  const size_t kind = kLetters.find(text[0]);
  if (kind == std::string_view::npos) return wrong();
  Action action;
  action.kind = static_cast<ActionKind>(kind);
  const size_t point = text.find('.');
  if (!number(
          text.substr(1, point == std::string_view::npos ? point : point - 1),
          action.microbatch)) {
    return wrong();
  }
  if (point != std::string_view::npos &&
      !number(text.substr(point + 1), action.chunk)) {
    return wrong();
  }
  return action;
}

Result<StageOrders> ParseActionTable(std::string_view text) {
  StageOrders orders;
  std::vector<int> lines;  // of the stages
  int number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    line = line.substr(0, line.find('#'));
    std::istringstream tokens{std::string(line)};
    std::vector<Action> order;
    for (std::string token; tokens >> token;) {
      auto action = ParseAction(token);
      if (!action) return action.error().At("line " + std::to_string(number));
      order.push_back(*action);
    }
    if (order.empty()) continue;
    orders.push_back(std::move(order));
    lines.push_back(number);
  }
  if (orders.empty()) return InvalidInput("has no actions");
  const PipelineShape shape = ShapeOf(orders);
  const auto problems = CheckOrders(orders, shape);
  if (problems.empty()) return orders;
  const OrderProblem& problem = problems[0];
  const auto stage = static_cast<size_t>(problem.stage);
  std::string message = problem.message;
  if (problem.action >= 0) {
    const auto action = static_cast<size_t>(problem.action);
    message = ToString(orders[stage][action], shape.chunks) + " (action " +
              std::to_string(action + 1) + ") " + message;
  }
  return InvalidInput(message, "line " + std::to_string(lines[stage]));
}

Result<StageOrders> ReadActionTable(const std::string& path) {
  TESSERA_TRY(const std::string text, ReadFile(path));
  auto orders = ParseActionTable(text);
  if (!orders) return orders.error().At(path);
  return orders;
}

extern const PipelineSchedule kTable;
const PipelineSchedule kTable = {
    .name = "table",
    .summary = "the plan's own table of actions, from schedule=FILE",
    .most_chunks = std::numeric_limits<int>::max()};

}  // namespace tessera
