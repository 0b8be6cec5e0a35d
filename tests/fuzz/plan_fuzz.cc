// tessera_plan_fuzz: checks as many random plans as one likes.
//
//   --plans N    how many (1000)
//   --seed S     of the sequence (1)
//   --models M   how many models the plans share (N / 20, at least 20)
//   --rows TEXT  only plans that exercise a row whose name has TEXT in it
//   --one CASE   checks this case alone, and says what it is
//   --draw N     draws N plans and checks none, for the counts alone
//   --searched N checks N plans that short searches return instead
//
// Prints a failing case as it was drawn and shrunk, each as an argument for
// --one, and in the end how often each row and pair of rows was exercised, and
// in how many plans each operator was and had each of its factors split. A case
// that ends the process is a failure like others: cases run in a child that is
// replaced. Exit code 1 if any failed.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "planner/plan/describe.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/plan_check.h"
#include "tests/support/searched_plans.h"

namespace tessera {
namespace {

// Check(c), in a process of its own.
std::string CheckInChild(const Case& c) {
  int pipe_ends[2];
  TESSERA_CHECK(pipe(pipe_ends) == 0);
  std::fflush(stdout);
  const pid_t child = fork();
  TESSERA_CHECK(child >= 0);
  if (child == 0) {
    close(pipe_ends[0]);
    PlanChecker checker;
    const std::string wrong = checker.Check(c);
    const ssize_t written = write(pipe_ends[1], wrong.data(), wrong.size());
    _exit(written == static_cast<ssize_t>(wrong.size()) ? 0 : 3);
  }
  close(pipe_ends[1]);
  std::string wrong;
  char buffer[512];
  for (ssize_t n = 0; (n = read(pipe_ends[0], buffer, sizeof(buffer))) > 0;) {
    wrong.append(buffer, static_cast<size_t>(n));
  }
  close(pipe_ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) {
    return "ends by signal " + std::to_string(WTERMSIG(status));
  }
  return wrong;
}

void Report(const Case& c, const std::string& wrong) {
  std::printf("FAILED %s\n  --one '%s'\n", wrong.c_str(), ToText(c).c_str());
  std::fflush(stdout);
  const Case smallest =
      Shrink(c, [](const Case& x) { return !CheckInChild(x).empty(); });
  std::printf("  shrunk: %s\n  --one '%s'\n", CheckInChild(smallest).c_str(),
              ToText(smallest).c_str());
  std::fflush(stdout);
}

int CheckOne(const std::string& text) {
  const auto c = ParseCase(text);
  if (!c) {
    std::fprintf(stderr, "%s\n", c.error().ToString().c_str());
    return 2;
  }
  PlanChecker checker;
  const auto plan = checker.ValidPlan(*c);
  if (!plan) {
    std::printf("no valid plan\n");
    return 2;
  }
  const auto& model = checker.ModelOf(c->graph);
  const Cluster cluster = MakeCluster(plan->cluster_name).value();
  std::printf("%s\n", Describe(model.graph, cluster, *plan).c_str());
  const RowSet rows = RowsOf(model.index, *plan);
  for (size_t i = 0; i < PlacementRows().size(); ++i) {
    if ((rows >> i & 1) == 0) continue;
    std::printf("  %s\n", std::string(PlacementRows()[i].name).c_str());
  }
  const std::string wrong = CheckInChild(*c);
  std::printf("%s\n", wrong.empty() ? "holds" : wrong.c_str());
  return wrong.empty() ? 0 : 1;
}

// By operator, in how many plans it is, and in how many each factor of a node
// of it is split.
class Splits {
 public:
  void Add(const Graph& graph, const Plan& plan) {
    std::map<std::string_view, std::set<char>> in;
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      const Node& node = graph.nodes[n];
      std::set<char>& split = in[node.op->name];
      const OpPlacement placed = PlacementOf(graph, plan, NodeId(n));
      for (size_t f = 0; f < node.rule.factors.size(); ++f) {
        if (placed.axes[f] != 0) split.insert(node.rule.factors[f].letter);
      }
    }
    for (const auto& [op, letters] : in) {
      ++counts_[op].plans;
      for (const char letter : letters) ++counts_[op].split[letter];
    }
  }

  void Print() const {
    for (const auto& [op, count] : counts_) {
      std::printf("operator %s in %lld plans", std::string(op).c_str(),
                  static_cast<long long>(count.plans));
      for (const auto& [letter, plans] : count.split) {
        std::printf(" %c:%lld", letter, static_cast<long long>(plans));
      }
      std::printf("\n");
    }
  }

 private:
  struct Count {
    int64_t plans = 0;
    std::map<char, int64_t> split;
  };
  std::map<std::string_view, Count> counts_;
};

// Runs cases [first, plans) of a sequence in a child, which tells each case
// before and each verdict after it; returns how many cases began.
class Sequence {
 public:
  Sequence(uint64_t seed, int models, RowSet wanted)
      : generator_(seed, models, checker_), wanted_(wanted) {}

  // The number of failures among `plans` cases.
  int Run(int plans) {
    int failures = 0;
    for (int i = 0; i < plans;) {
      // The child has the checker's models; what it learns is lost with it.
      const int batch = std::min(kBatch, plans - i);
      std::vector<Case> cases;
      for (int k = 0; k < batch; ++k) cases.push_back(Next());
      failures += RunBatch(cases);
      i += batch;
      std::printf("%d plans, %d failures\n", i, failures);
      std::fflush(stdout);
    }
    return failures;
  }

  // Counts plans, and checks none.
  void Draw(int plans) {
    for (int i = 0; i < plans; ++i) Next();
  }

  const Coverage& coverage() const { return generator_.coverage(); }
  const Splits& splits() const { return splits_; }

 private:
  static constexpr int kBatch = 250;

  Case Next() {
    const Case drawn = generator_.Next(wanted_);
    splits_.Add(checker_.ModelOf(drawn.graph).graph,
                *checker_.ValidPlan(drawn));
    return drawn;
  }

  int RunBatch(const std::vector<Case>& cases) {
    int failures = 0;
    for (const Case& c : cases) checker_.SerialOf(c.graph);
    for (size_t next = 0; next < cases.size();) {
      std::string wrong;
      next = RunUntilFailure(cases, next, wrong);
      if (wrong.empty()) break;
      ++failures;
      if (failures <= kMostReports) Report(cases[next], wrong);
      ++next;
    }
    return failures;
  }

  // The first case from `first` on that fails, or the number of cases.
  size_t RunUntilFailure(const std::vector<Case>& cases, size_t first,
                         std::string& wrong) {
    int pipe_ends[2];
    TESSERA_CHECK(pipe(pipe_ends) == 0);
    std::fflush(stdout);
    const pid_t child = fork();
    TESSERA_CHECK(child >= 0);
    if (child == 0) {
      close(pipe_ends[0]);
      for (size_t i = first; i < cases.size(); ++i) {
        const std::string verdict = checker_.Check(cases[i]);
        const std::string line = verdict.empty() ? "." : "!" + verdict;
        if (write(pipe_ends[1], line.data(), line.size()) < 0) _exit(3);
        if (!verdict.empty()) _exit(0);
      }
      _exit(0);
    }
    close(pipe_ends[1]);
    std::string text;
    char buffer[512];
    for (ssize_t n = 0; (n = read(pipe_ends[0], buffer, sizeof(buffer))) > 0;) {
      text.append(buffer, static_cast<size_t>(n));
    }
    close(pipe_ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    const size_t failed = text.find('!');
    const size_t passed = std::min(failed, text.size());
    if (failed != std::string::npos) wrong = text.substr(failed + 1);
    if (WIFSIGNALED(status)) {
      wrong = "ends by signal " + std::to_string(WTERMSIG(status));
    }
    return first + passed;
  }

  static constexpr int kMostReports = 20;

  PlanChecker checker_;
  CaseGenerator generator_;
  Splits splits_;
  const RowSet wanted_;
};

// Plans of one search after the other, in this process.
int CheckSearched(int plans) {
  int checked = 0;
  int failures = 0;
  int searches = 0;
  for (uint64_t number = 0; checked < plans; ++number) {
    PlanChecker checker;
    const SearchedPlans searched = SearchPlans(number, checker);
    ++searches;
    for (const Plan& plan : searched.plans) {
      const std::string wrong = checker.Check(
          searched.graph, searched.cluster, plan, searched.optimizer, checked);
      ++checked;
      if (wrong.empty()) continue;
      ++failures;
      std::printf("FAILED %s\n  %s\n", wrong.c_str(), searched.text.c_str());
    }
    if (number % 50 == 49) {
      std::printf("%d plans, %d failures\n", checked, failures);
      std::fflush(stdout);
    }
  }
  std::printf("%d of %d plans of %d searches failed\n", failures, checked,
              searches);
  return failures == 0 ? 0 : 1;
}

int Main(int argc, char** argv) {
  int plans = 1000;
  int models = 0;
  uint64_t seed = 1;
  RowSet wanted = 0;
  bool checks = true;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (i + 1 == argc) {
      std::fprintf(flag == "--help" ? stdout : stderr,
                   "usage: tessera_plan_fuzz [--plans N] [--seed S] "
                   "[--models M] [--rows TEXT] | --draw N … | --one CASE | "
                   "--searched N\n");
      return flag == "--help" ? 0 : 2;
    }
    const char* const value = argv[i + 1];
    if (flag == "--one") return CheckOne(value);
    if (flag == "--searched") return CheckSearched(std::atoi(value));
    if (flag == "--plans") {
      plans = std::atoi(value);
    } else if (flag == "--draw") {
      plans = std::atoi(value);
      checks = false;
    } else if (flag == "--models") {
      models = std::atoi(value);
    } else if (flag == "--seed") {
      seed = std::strtoull(value, nullptr, 10);
    } else if (flag == "--rows") {
      for (size_t r = 0; r < PlacementRows().size(); ++r) {
        if (PlacementRows()[r].name.find(value) != std::string_view::npos) {
          wanted |= RowSet{1} << r;
        }
      }
      if (wanted == 0) {
        std::fprintf(stderr, "no row has '%s' in its name\n", value);
        return 2;
      }
    } else {
      std::fprintf(stderr, "unknown flag %s\n", argv[i]);
      return 2;
    }
  }
  if (models == 0) models = std::max(20, plans / 20);
  Sequence sequence(seed, models, wanted);
  int failures = 0;
  if (checks) {
    failures = sequence.Run(plans);
  } else {
    sequence.Draw(plans);
  }
  std::printf("%s", sequence.coverage().ToString(50).c_str());
  sequence.splits().Print();
  if (checks) std::printf("%d of %d plans failed\n", failures, plans);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::Main(argc, argv);
}
