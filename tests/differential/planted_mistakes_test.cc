// What the check of random plans is worth: it sees every mistake that is
// planted into a right task graph, wherever it is planted.

#include "tests/support/planted_mistakes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/plan_check.h"

namespace tessera {
namespace {

constexpr int kPlaces = 3;  // by mistake, each in another plan
constexpr int kModels = 40;
constexpr int kMostCases = 400;

TEST(PlantedMistakes, AreCaught) {
  PlanChecker checker;
  CaseGenerator generator(11, kModels, checker);
  const std::span<const PlantedMistake> mistakes = PlantedMistakes();
  std::vector<int> planted(mistakes.size(), 0);
  for (int i = 0; i < kMostCases; ++i) {
    const Case c = generator.Next();
    const Graph& graph = checker.ModelOf(c.graph).graph;
    bool tried = false;
    for (size_t m = 0; m < mistakes.size(); ++m) {
      if (planted[m] == kPlaces) continue;
      bool here = false;
      const std::string seen = checker.CheckTraining(c, [&](TaskGraph& tasks) {
        here = mistakes[m].plant(graph, tasks);
        return here;
      });
      if (!here) continue;
      tried = true;
      ++planted[m];
      EXPECT_NE(seen, "") << mistakes[m].name << " in " << ToText(c);
    }
    // Without a mistake there is nothing to see.
    if (tried) {
      EXPECT_EQ(checker.CheckTraining(c), "") << ToText(c);
    }
    if (std::all_of(planted.begin(), planted.end(),
                    [](int n) { return n == kPlaces; })) {
      break;
    }
  }
  for (size_t m = 0; m < mistakes.size(); ++m) {
    EXPECT_EQ(planted[m], kPlaces) << mistakes[m].name << " has no place";
  }
}

}  // namespace
}  // namespace tessera
