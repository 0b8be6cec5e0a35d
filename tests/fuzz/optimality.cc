// How often the search finds the best of all plans, on random problems small
// enough to enumerate (tests/support/small_instances.h); kUsage has its flags.
// Prints a line for each instance, with the times of the enumeration and of the
// slowest search, and a summary. Exits with 1 where fewer than 99 % of the
// searches find a plan as fast.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string>

#include "costmodel/evaluate/evaluator.h"
#include "planner/plan/describe.h"
#include "planner/plan/strategy.h"
#include "planner/search/mcmc.h"
#include "tests/support/number_flags.h"
#include "tests/support/small_instances.h"

namespace tessera {
namespace {

struct Settings {
  int64_t instances = 200;
  int64_t seeds = 20;
  int64_t first = 0;
  int64_t proposals = 14000;
  int64_t threads = 0;        // of a search; 0: all cores
  int64_t limit = 1'000'000;  // of plans; instances of more are passed over
  int64_t show = 0;
};

double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int Run(const Settings& settings) {
  int64_t found = 0;
  int64_t runs = 0;
  int64_t instances = 0;
  double slowest = 0;
  double total = 0;
  for (int64_t i = settings.first; instances < settings.instances; ++i) {
    const auto instance = testing::MakeSmallInstance(static_cast<uint64_t>(i));
    const SearchSpace space(instance.graph, instance.cluster);
    const Evaluator evaluator(instance.graph, instance.cluster, nullptr, {});
    const double begin = Now();
    const auto best = testing::BestOfAll(space, evaluator, settings.limit);
    if (!best) continue;
    ++instances;
    const double enumerated = Now() - begin;
    int64_t found_here = 0;
    double slowest_here = 0;
    double worst = 1;
    std::optional<Plan> instead;
    for (int64_t seed = 0; seed < settings.seeds; ++seed) {
      // Each search prices its plans anew.
      const Evaluator own(instance.graph, instance.cluster, nullptr, {});
      SearchOptions options;
      options.seed = static_cast<uint64_t>(seed);
      options.proposals = settings.proposals;
      options.time_limit = 0;
      options.threads = static_cast<int>(settings.threads);
      const double start = Now();
      const auto result = Search(space, own, options);
      const double seconds = Now() - start;
      slowest_here = std::max(slowest_here, seconds);
      total += seconds;
      if (!result) continue;
      const bool reached = !Better(best->evaluation, result->evaluation);
      found_here += reached ? 1 : 0;
      if (!reached) {
        worst = std::max(worst, result->evaluation.step_time.seconds() /
                                    best->evaluation.step_time.seconds());
        instead = result->best;
      }
    }
    found += found_here;
    runs += settings.seeds;
    slowest = std::max(slowest, slowest_here);
    std::printf(
        "%lld: %s: %lld plans in %.2f s, best %.6g s%s, found by %lld of %lld "
        "in at most %.2f s%s\n",
        static_cast<long long>(i), instance.name.c_str(),
        static_cast<long long>(best->plans), enumerated,
        best->evaluation.step_time.seconds(),
        best->evaluation.feasible() ? "" : " (does not fit)",
        static_cast<long long>(found_here),
        static_cast<long long>(settings.seeds), slowest_here,
        found_here == settings.seeds
            ? ""
            : (", worst " + std::to_string(worst) + " x").c_str());
    if (settings.show != 0 && instead) {
      for (const Plan& plan : {best->best, *instead}) {
        std::printf("%s\n",
                    Describe(instance.graph, instance.cluster, plan).c_str());
      }
    }
    std::fflush(stdout);
  }
  std::printf(
      "%lld of %lld searches on %lld instances found the best plan; a search "
      "took %.3f s on average and %.2f s at most\n",
      static_cast<long long>(found), static_cast<long long>(runs),
      static_cast<long long>(instances),
      total / static_cast<double>(std::max<int64_t>(1, runs)), slowest);
  return found * 100 >= runs * 99 ? 0 : 1;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  constexpr const char* kUsage =
      "usage: tessera_optimality [FLAG N]...\n"
      "  --instances N  how many are searched (200)\n"
      "  --first N      the first of them (0)\n"
      "  --seeds N      searches of each (20)\n"
      "  --proposals N  of a search (14000)\n"
      "  --threads N    of a search (all cores)\n"
      "  --limit N      instances of more plans are passed over (1000000)\n"
      "  --show 1       prints the best plan beside one found instead\n";
  tessera::Settings settings;
  const tessera::testing::NumberFlag flags[] = {
      {"--instances", &settings.instances},
      {"--seeds", &settings.seeds},
      {"--first", &settings.first},
      {"--proposals", &settings.proposals},
      {"--threads", &settings.threads},
      {"--limit", &settings.limit},
      {"--show", &settings.show}};
  if (const auto code =
          tessera::testing::ReadNumberFlags(argc, argv, flags, kUsage)) {
    return *code;
  }
  return tessera::Run(settings);
}
