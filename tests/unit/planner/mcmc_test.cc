#include "planner/search/mcmc.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <set>

#include "planner/plan/validate.h"
#include "planner/search/starts.h"
#include "planner/search/tidy.h"
#include "planner/topology/topologies.h"
#include "tests/support/exhaustive.h"
#include "tests/support/small_models.h"
#include "tests/support/uniform_plan.h"

namespace tessera {
namespace {

using testing::MlpGraph;
using testing::Ranks;
using testing::StateOf;
using testing::ToyObjective;
using testing::TwoLayerGraph;
using testing::Uniform;

// So many proposals, and no limit to the time: equal results.
SearchOptions WithProposals(int64_t proposals) {
  SearchOptions options;
  options.proposals = proposals;
  options.time_limit = 0;
  return options;
}

// A cost between 1000 and 1100 that depends on everything and on nothing in
// particular, and up to 100 more on shared links. `some_slow`: a fifth of the
// plans is to be priced more seldom.
class HashObjective : public Objective {
 public:
  explicit HashObjective(bool some_slow = false) : some_slow_(some_slow) {}

  Evaluation Evaluate(const Plan& plan) const override {
    Evaluation evaluation;
    evaluation.step_time = {1000 + Hash(plan) % 101};
    return evaluation;
  }
  std::optional<Duration> QuickSharedStepTime(const Plan& plan) const override {
    return Evaluate(plan).step_time + Duration{Hash(plan) / 101 % 101};
  }
  double PricedShare(const Plan& plan) const override {
    return some_slow_ && Hash(plan) % 5 == 0 ? 0.4 : 1;
  }

 private:
  static int64_t Hash(const Plan& plan) {
    return static_cast<int64_t>(
        Mix64(std::hash<std::string>()(StateOf(plan))) >> 1);
  }

  const bool some_slow_;
};

// The chain's visits against exp(-cost / T), state by state; the cost is
// without or with what is lost on shared links.
void ExpectBoltzmannWeights(bool shares_links, bool some_slow = false) {
  const Graph graph = TwoLayerGraph(2, 2, 2);
  const Cluster cluster = Ranks(2);
  const SearchSpace space(graph, cluster);
  const HashObjective objective(some_slow);
  const Plan start = Uniform(space, "");
  std::map<std::string, double> weights;
  const double temperature = 0.05;
  const auto step_time = [&](const Plan& plan) {
    const Duration time = shares_links ? *objective.QuickSharedStepTime(plan)
                                       : objective.Evaluate(plan).step_time;
    return static_cast<double>(time.picoseconds);
  };
  // The start's, from before the chain looks at links.
  const auto unit =
      static_cast<double>(objective.Evaluate(start).step_time.picoseconds);
  double total = 0;
  ForEachPlan(space, start, [&](const Plan& plan) {
    const double cost = step_time(plan) / unit;
    total += weights[StateOf(plan)] = std::exp(-cost / temperature);
    return true;
  });
  // Lookup b/v/h/none, dense b/i/v/none, count b/none, loss b/v/none is
  // 4*4*2*3 = 96 placements with 1 microbatch; with 2, of one sample, b cannot
  // be split but in count, which sees the whole batch: 3*3*2*2 = 36. Times
  // four stages of ZeRO for each of two weights.
  ASSERT_EQ(weights.size(), (96u + 36u) * 16u);

  // All moves but those that leave the mesh or what ForEachPlan visits.
  std::vector<Move> moves;
  for (const Move& move : Moves()) {
    const std::string_view name = move.name;
    if (name != "stage-count" && name != "chunks" && name != "recompute" &&
        name != "recompute-op" && name != "tiles" && name != "offload" &&
        name != "bucket" && name != "prefetch" && name != "rooted") {
      moves.push_back(move);
    }
  }
  Chain chain(space, objective, moves, start, temperature, Rng(5));
  if (shares_links) chain.ShareLinks();
  // Visits are correlated, so that the error is estimated from batch means.
  constexpr int kBatches = 40;
  constexpr int kSteps = 30'000;
  std::map<std::string, std::array<int, kBatches>> visits;
  for (size_t batch = 0; batch < kBatches; ++batch) {
    for (int i = 0; i < kSteps; ++i) {
      chain.Step();
      ++visits[StateOf(chain.plan())][batch];
    }
  }
  EXPECT_EQ(visits.size(), weights.size());  // all are reached, and no other
  int beyond_three_sigma = 0;
  double chi = 0;
  for (const auto& [state, weight] : weights) {
    const double expected = weight / total * kSteps;
    double mean = 0;
    double square = 0;
    for (int count : visits[state]) {
      mean += count / static_cast<double>(kBatches);
      square += static_cast<double>(count) * count / kBatches;
    }
    const double sigma = std::sqrt((square - mean * mean) / (kBatches - 1));
    const double deviation = (mean - expected) / sigma;
    chi += deviation * deviation;
    beyond_three_sigma += std::abs(deviation) > 3;
  }
  // Of 2112 states 0.27 % lie beyond three sigma by chance, 6; with batch
  // means of 40 (Student's t) twice as many, and more for counts this small.
  EXPECT_LE(beyond_three_sigma, 40);
  // Mean of t^2 with 39 degrees of freedom is 39 / 37.
  EXPECT_NEAR(chi / static_cast<double>(weights.size()), 39.0 / 37, 0.35);
}
TEST(Mcmc, VisitsStatesByTheirBoltzmannWeight) {
  ExpectBoltzmannWeights(false);
}
TEST(Mcmc, CountsWhatIsLostOnSharedLinks) {
  ExpectBoltzmannWeights(true);
}
TEST(Mcmc, StaysAsOftenAtPlansThatItSeldomPrices) {
  ExpectBoltzmannWeights(false, /*some_slow=*/true);
}

// Two chains that exchange their plans: both must visit states by the Boltzmann
// weights of their own temperatures.
TEST(Mcmc, ExchangesKeepBothDistributions) {
  const Graph graph = TwoLayerGraph(2, 2, 2);
  const Cluster cluster = Ranks(2);
  const SearchSpace space(graph, cluster);
  const HashObjective objective;
  const Plan start = Uniform(space, "");
  // Of one weight's ZeRO stage only: 4 states each, so that counts are large.
  std::vector<Move> moves;
  for (const Move& move : Moves()) {
    if (std::string_view(move.name) == "zero") moves.push_back(move);
  }
  const auto cost = [&](const Plan& plan) {
    return static_cast<double>(objective.Evaluate(plan).step_time.picoseconds) /
           static_cast<double>(objective.Evaluate(start).step_time.picoseconds);
  };
  constexpr std::array kTemperatures = {0.01, 0.04};
  std::array<std::map<std::string, double>, 2> weights;
  std::array<double, 2> totals = {};
  ForEachPlan(space, start, [&](const Plan& plan) {
    if (plan.ops != start.ops || plan.microbatches != start.microbatches) {
      return true;
    }
    for (size_t c = 0; c < 2; ++c) {
      totals[c] += weights[c][StateOf(plan)] =
          std::exp(-cost(plan) / kTemperatures[c]);
    }
    return true;
  });
  ASSERT_EQ(weights[0].size(), 16u);  // four stages for each of two weights
  Chain cold(space, objective, moves, start, kTemperatures[0], Rng(1));
  Chain hot(space, objective, moves, start, kTemperatures[1], Rng(2));
  Rng rng(3);
  constexpr int kBatches = 40;
  constexpr int kRounds = 4'000;
  std::array<std::map<std::string, std::array<int, kBatches>>, 2> visits;
  int accepted = 0;
  for (size_t batch = 0; batch < kBatches; ++batch) {
    for (int i = 0; i < kRounds; ++i) {
      for (int step = 0; step < 3; ++step) {
        cold.Step();
        hot.Step();
      }
      accepted += Chain::Exchange(cold, hot, rng) ? 1 : 0;
      ++visits[0][StateOf(cold.plan())][batch];
      ++visits[1][StateOf(hot.plan())][batch];
    }
  }
  EXPECT_GT(accepted, kBatches * kRounds / 10);
  EXPECT_LT(accepted, kBatches * kRounds);
  for (size_t c = 0; c < 2; ++c) {
    for (const auto& [state, weight] : weights[c]) {
      const double expected = weight / totals[c] * kRounds;
      double mean = 0;
      double square = 0;
      for (int count : visits[c][state]) {
        mean += count / static_cast<double>(kBatches);
        square += static_cast<double>(count) * count / kBatches;
      }
      const double sigma = std::sqrt((square - mean * mean) / (kBatches - 1));
      // Of 32 means one in 30,000 lies so far off by chance.
      EXPECT_LT(std::abs(mean - expected), 4.5 * sigma + 0.5)
          << "chain " << c << ", " << state;
    }
  }
}

TEST(Mcmc, EqualsBruteForce) {
  const Graph graph = TwoLayerGraph(2, 2, 4);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  // One group with two axes of 2: at most 16*16*4*9 placements, 2 numbers of
  // microbatches, 4 storages.
  const Plan start = Uniform(space, "tp=2");
  const auto exhaustive = Exhaustive(space, start, objective, 100'000);
  ASSERT_TRUE(exhaustive.has_value());
  EXPECT_GT(exhaustive->plans, 1000);
  RecordProperty("plans", static_cast<int>(exhaustive->plans));
  const auto result = Search(space, objective, WithProposals(200'000));
  ASSERT_TRUE(result.has_value()) << result.error().ToString();
  // The search also tries pipelines, which brute force does not.
  ASSERT_EQ(result->best.groups.size(), 1u);
  EXPECT_EQ(result->evaluation.step_time.picoseconds,
            exhaustive->evaluation.step_time.picoseconds);
  EXPECT_GT(exhaustive->evaluation.step_time.picoseconds, 1);
}

TEST(Mcmc, SamePlanForAnyNumberOfThreads) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  SearchOptions options = WithProposals(2'003);
  options.seed = 7;
  options.threads = 1;
  const auto one = Search(space, objective, options);
  ASSERT_TRUE(one.has_value());
  ASSERT_EQ(one->swaps.size(), 3u);  // of four temperatures
  int64_t swaps = 0;
  for (const SwapStatistics& swap : one->swaps) {
    EXPECT_GT(swap.attempts, 0);
    swaps += swap.accepted;
  }
  EXPECT_GT(swaps, 0);
  int64_t of_moves = 0;
  for (const MoveStatistics& move : one->moves) of_moves += move.proposals;
  EXPECT_EQ(of_moves, 2'003);
  for (int threads : {2, 3}) {
    options.threads = threads;
    const auto more = Search(space, objective, options);
    ASSERT_TRUE(more.has_value());
    EXPECT_EQ(one->best, more->best);
    EXPECT_EQ(one->evaluation, more->evaluation);
    EXPECT_EQ(one->accepted, more->accepted);
    EXPECT_EQ(more->proposals, 2'003);
    for (size_t s = 0; s < one->swaps.size(); ++s) {
      EXPECT_EQ(one->swaps[s].attempts, more->swaps[s].attempts);
      EXPECT_EQ(one->swaps[s].accepted, more->swaps[s].accepted);
    }
    for (size_t m = 0; m < one->moves.size(); ++m) {
      EXPECT_EQ(one->moves[m].accepted, more->moves[m].accepted);
    }
    ASSERT_EQ(one->trace.size(), more->trace.size());
    for (size_t i = 0; i < one->trace.size(); ++i) {
      EXPECT_EQ(one->trace[i].step_time, more->trace[i].step_time);
      EXPECT_EQ(one->trace[i].proposal, more->trace[i].proposal);
    }
  }
}

// All plans cost the same, and links lose nothing.
class FlatObjective : public Objective {
 public:
  Evaluation Evaluate(const Plan&) const override {
    Evaluation evaluation;
    evaluation.step_time = {1000};
    return evaluation;
  }
  std::optional<Duration> QuickSharedStepTime(const Plan&) const override {
    return Duration{1000};
  }
};

// Plans of unlike numbers of stages are candidates even where they take as
// long: a better model may tell them apart.
TEST(Mcmc, CandidatesAreAlikeInNoMoreThanTime) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  SearchOptions options = WithProposals(2'000);
  options.candidates = 3;
  const auto result = Search(space, FlatObjective(), options);
  ASSERT_TRUE(result.has_value());
  std::set<size_t> stages;
  std::set<std::pair<size_t, size_t>> forms;  // and devices
  for (const FoundPlan& found : result->candidates) {
    size_t devices = 0;
    for (const DeviceGroup& group : found.plan.groups) {
      devices += group.devices.size();
    }
    stages.insert(found.plan.groups.size());
    EXPECT_TRUE(forms.insert({found.plan.groups.size(), devices}).second);
  }
  EXPECT_GT(stages.size(), 1u);
}

// Nothing is better than what a ladder starts from, so that each of the two
// starts anew when the eight rounds after its first have passed: behind rounds
// 9 and 18 of 20.
TEST(Mcmc, LaddersThatFindNothingBetterStartAnew) {
  const Graph graph = TwoLayerGraph(2, 2, 2);
  const Cluster cluster = Ranks(2);
  const SearchSpace space(graph, cluster);
  SearchOptions options = WithProposals(20 * SearchOptions().chains * kRound);
  for (int threads : {1, 2}) {
    options.threads = threads;
    const auto result = Search(space, FlatObjective(), options);
    ASSERT_TRUE(result.has_value());
    EXPECT_EQ(result->restarts, 4);
    EXPECT_EQ(result->proposals, options.proposals);
  }
}

// Without proposals to come to an end it is half of its time without something
// better that ends a search; what its answer takes is kept from that, too.
TEST(Mcmc, KeepsTheTimeThatTheAnswerTakes) {
  const Graph graph = TwoLayerGraph(2, 2, 2);
  const Cluster cluster = Ranks(2);
  const SearchSpace space(graph, cluster);
  SearchOptions options;
  options.time_limit = 3;
  int asked = 0;
  options.answer_time = [&](const Plan& plan) {
    EXPECT_TRUE(Validate(graph, cluster, plan).empty());
    ++asked;
    return 2.4;
  };
  const auto result = Search(space, FlatObjective(), options);
  ASSERT_TRUE(result.has_value());
  EXPECT_GT(asked, 0);
  // The 0.6 s that are left are over before half of the 3 s are.
  EXPECT_FALSE(result->stalled);
}

TEST(Mcmc, AChainThatStartsAnewKeepsWhatItFound) {
  const Graph graph = TwoLayerGraph(2, 2, 4);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  Chain chain(space, objective, Moves(), Uniform(space, "tp=2"), 0.01, Rng(5));
  for (int i = 0; i < 2'000; ++i) chain.Step();
  const Plan best = chain.best().plan;
  const Plan other = Uniform(space, "tp=2");
  ASSERT_LT(chain.statistics().best.step_time,
            objective.Evaluate(other).step_time);
  chain.Restart(other);
  EXPECT_EQ(chain.plan(), other);
  EXPECT_EQ(chain.evaluation(), objective.Evaluate(other));
  EXPECT_EQ(chain.best().plan, best);
  for (int i = 0; i < 200; ++i) chain.Step();
  EXPECT_EQ(chain.statistics().proposals, 2'200);
  EXPECT_EQ(chain.evaluation(), objective.Evaluate(chain.plan()));
}

TEST(Mcmc, NeverWorseThanTheBaselinesAndValid) {
  const Graph graph = MlpGraph(3, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(8);
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  const auto result = Search(space, objective, WithProposals(400));
  ASSERT_TRUE(result.has_value());
  // All but hybrid ZeRO, which needs several nodes.
  ASSERT_EQ(result->baselines.size(), BaselineRows().size() - 1);
  for (const Baseline& baseline : result->baselines) {
    EXPECT_LE(result->evaluation.step_time, baseline.evaluation.step_time)
        << baseline.name;
    EXPECT_EQ(baseline.evaluation, objective.Evaluate(baseline.plan));
  }
  EXPECT_TRUE(Validate(graph, cluster, result->best).empty());
  EXPECT_EQ(result->evaluation, objective.Evaluate(result->best));
  EXPECT_LT(result->evaluation.step_time,
            objective.Evaluate(Uniform(space, "")).step_time);
}

// The toy's costs, and half as much again with a single microbatch. Plans of
// `unknown` microbatches take too long to be seen.
class SharingObjective : public ToyObjective {
 public:
  explicit SharingObjective(const Graph& graph, int unknown = 0)
      : ToyObjective(graph), unknown_(unknown) {}
  std::optional<Duration> QuickSharedStepTime(const Plan& plan) const override {
    if (plan.microbatches == unknown_) return std::nullopt;
    const Duration time = Evaluate(plan).step_time;
    return plan.microbatches > 1 ? time : Duration{time.picoseconds * 3 / 2};
  }

 private:
  int unknown_;
};

TEST(Mcmc, FindsWhatIsFastestOnSharedLinks) {
  const Graph graph = MlpGraph(3, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const SharingObjective objective(graph);
  const auto shared = [&](const Plan& plan) {
    return *objective.QuickSharedStepTime(plan);
  };
  SearchOptions options = WithProposals(4'000);
  options.candidates = 4;
  const auto without = Search(space, objective, options);
  ASSERT_TRUE(without.has_value());
  EXPECT_FALSE(without->shares_links);
  ASSERT_EQ(without->best.microbatches, 1);
  options.share_links = true;
  const auto with = Search(space, objective, options);
  ASSERT_TRUE(with.has_value());
  EXPECT_TRUE(with->shares_links);
  EXPECT_GT(with->best.microbatches, 1);
  EXPECT_LT(shared(with->best), shared(without->best));
  // Evaluations are without all the same, and the best comes first.
  EXPECT_EQ(with->evaluation, objective.Evaluate(with->best));
  EXPECT_EQ(with->candidates[0].plan, with->best);
  for (const FoundPlan& found : with->candidates) {
    EXPECT_EQ(found.evaluation, objective.Evaluate(found.plan));
    EXPECT_GE(shared(found.plan), shared(with->best));
    EXPECT_EQ(found.shared, shared(found.plan));
  }
  EXPECT_EQ(with->candidates[0].shared, shared(with->best));
  for (const Baseline& baseline : with->baselines) {
    EXPECT_GE(shared(baseline.plan), shared(with->best)) << baseline.name;
    EXPECT_EQ(baseline.evaluation, objective.Evaluate(baseline.plan));
  }
}

// Of the plans that it starts from the best with shared links comes first.
TEST(Mcmc, StartsWithWhatIsFastestOnSharedLinks) {
  const Graph graph = MlpGraph(3, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const SharingObjective objective(graph);
  SearchOptions options = WithProposals(0);
  SearchClock clock(0, nullptr);
  const Plan first =
      FindStarts(space, objective, options, clock)->ranked.at(0).plan;
  ASSERT_EQ(first.microbatches, 1);
  options.share_links = true;
  const Starts starts = FindStarts(space, objective, options, clock).value();
  const auto shared = [&](const Plan& plan) {
    return *objective.QuickSharedStepTime(plan);
  };
  EXPECT_LT(shared(starts.ranked.at(0).plan), shared(first));
  for (const FoundPlan& found : starts.ranked) {
    EXPECT_GE(shared(found.plan), shared(starts.ranked[0].plan));
  }
  EXPECT_EQ(std::ranges::count(starts.ranked, starts.ranked[0].plan,
                               &FoundPlan::plan),
            1);
}

// What is faster than `limit` loses half as much again.
class LosingObjective : public ToyObjective {
 public:
  LosingObjective(const Graph& graph, Duration limit)
      : ToyObjective(graph), limit_(limit) {}
  std::optional<Duration> QuickSharedStepTime(const Plan& plan) const override {
    const Duration time = Evaluate(plan).step_time;
    return time < limit_ ? Duration{time.picoseconds * 3 / 2} : time;
  }

 private:
  Duration limit_;
};

TEST(Mcmc, LooksAtSharedLinksOnceTheBestPlanLosesOnThem) {
  const Graph graph = MlpGraph(3, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  SearchOptions options = WithProposals(4'000);
  options.share_links = true;
  const auto without = Search(space, ToyObjective(graph), options);
  ASSERT_TRUE(without.has_value());
  // The best start loses nothing, and whatever a walk finds better does.
  Duration start = without->chains[0].start.step_time;
  for (const ChainStatistics& chain : without->chains) {
    start = std::min(start, chain.start.step_time);
  }
  ASSERT_LT(without->evaluation.step_time, start);
  const LosingObjective objective(graph, start);
  const auto with = Search(space, objective, options);
  ASSERT_TRUE(with.has_value());
  EXPECT_TRUE(with->shares_links);
  EXPECT_EQ(objective.QuickSharedStepTime(with->best), start);
}

// Every operator has a time of its own for each way to be split, so that a walk
// improves for long. What is faster than `limit` loses 30 %.
class RuggedObjective : public Objective {
 public:
  explicit RuggedObjective(Duration limit) : limit_(limit) {}
  Evaluation Evaluate(const Plan& plan) const override {
    Evaluation evaluation;
    evaluation.step_time = {1'000'000};
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      uint64_t hash = i;
      for (AxisSet axes : plan.ops[i].axes) hash = Mix64(hash + axes);
      evaluation.step_time += Duration{static_cast<int64_t>(hash % 50'000)};
    }
    return evaluation;
  }
  std::optional<Duration> QuickSharedStepTime(const Plan& plan) const override {
    const Duration time = Evaluate(plan).step_time;
    return time < limit_ ? Duration{time.picoseconds * 13 / 10} : time;
  }

 private:
  Duration limit_;
};

// Times from before links are looked at are less than all that come behind:
// none of these would count as an improvement, and the ladder would start anew.
TEST(Mcmc, ALadderThatImprovesOnSharedLinksGoesOn) {
  const Graph graph = MlpGraph(8, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  SearchOptions options;
  options.chains = 4;  // one ladder
  options.share_links = true;
  // After two rounds of 64 without links, so many of 8 as without an
  // improvement lead to a new start, and some.
  options.proposals = 4 * (2 * 64 + (std::ssize(graph.nodes) + 5) * 8);
  const auto without = Search(space, RuggedObjective(Duration{}), options);
  ASSERT_TRUE(without.has_value());
  Duration start = without->chains[0].start.step_time;
  for (const ChainStatistics& chain : without->chains) {
    start = std::min(start, chain.start.step_time);
  }
  const auto result = Search(space, RuggedObjective(start), options);
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE(result->shares_links);
  EXPECT_EQ(result->restarts, 0);
}

TEST(Mcmc, GoesToNoPlanWhoseSharedLinksAreUnknown) {
  const Graph graph = MlpGraph(2, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const SharingObjective objective(graph, /*unknown=*/2);
  Chain chain(space, objective, Moves(), Uniform(space, "tp=4"), 0.1, Rng(3));
  chain.ShareLinks();
  int microbatched = 0;
  for (int i = 0; i < 3'000; ++i) {
    chain.Step();
    ASSERT_NE(chain.plan().microbatches, 2);
    microbatched += chain.plan().microbatches > 2;
  }
  EXPECT_GT(microbatched, 0);
}

// Every plan but one takes three times as long on shared links as without, and
// of that one the time is not known.
class OneUnknownObjective : public ToyObjective {
 public:
  OneUnknownObjective(const Graph& graph, Plan unknown)
      : ToyObjective(graph), unknown_(std::move(unknown)) {}
  std::optional<Duration> QuickSharedStepTime(const Plan& plan) const override {
    if (plan == unknown_) return std::nullopt;
    return Duration{3 * Evaluate(plan).step_time.picoseconds};
  }

 private:
  Plan unknown_;
};

// A start whose shared links are unknown seems faster than all plans that come
// after it; the best of these is remembered all the same.
TEST(Mcmc, RemembersTheBestOnSharedLinksBehindAStartOfUnknownOnes) {
  const Graph graph = MlpGraph(2, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const Plan start = Uniform(space, "tp=4");
  const OneUnknownObjective objective(graph, start);
  Chain chain(space, objective, Moves(), start, /*temperature=*/1, Rng(3));
  chain.ShareLinks();
  std::optional<Duration> least;
  for (int i = 0; i < 500; ++i) {
    if (!chain.Step()) continue;
    const auto shared = objective.QuickSharedStepTime(chain.plan());
    ASSERT_TRUE(shared.has_value());
    if (!least || *shared < *least) least = shared;
  }
  ASSERT_TRUE(least.has_value());
  EXPECT_EQ(chain.best().shared, least);
}

TEST(Mcmc, LinksThatLoseNothingAreNotLookedAt) {
  const Graph graph = TwoLayerGraph(2, 2, 2);
  const Cluster cluster = Ranks(2);
  const SearchSpace space(graph, cluster);
  SearchOptions options = WithProposals(200);
  options.share_links = true;
  EXPECT_FALSE(Search(space, FlatObjective(), options)->shares_links);
  // Not known.
  EXPECT_FALSE(
      Search(space, SharingObjective(graph, 1), options)->shares_links);
}

TEST(Mcmc, ComparesWithDataParallelismWhateverTheTime) {
  const Graph graph = TwoLayerGraph(8, 8, 16);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const auto baselines = Baselines(
      space, HashObjective(), 1, [] { return true; }, [] { return false; });
  ASSERT_EQ(baselines.size(), 1u);
  EXPECT_EQ(baselines[0].name, "DDP");
}

// Where data parallelism does not fit and there is no time to compare, what
// people choose for large models is priced until it fits: of Megatron's tp 4,
// which ToyObjective's memory, a part of each weight, has no less of than
// ZeRO-3's.
TEST(Mcmc, PricesWhatFitsWhateverTheTime) {
  const Graph graph = MlpGraph(2, 4, 2, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const auto stop = [] { return true; };
  for (const double memory : {1'500.0, 100.0}) {
    const ToyObjective objective(graph, memory);
    const auto baselines =
        Baselines(space, objective, 1, stop, [] { return false; });
    const auto fits = std::ranges::count_if(
        baselines, [](const Baseline& b) { return b.evaluation.feasible(); });
    EXPECT_EQ(fits, memory > 1'000 ? 1 : 0);
    for (const Baseline& b : Baselines(space, objective, 1, stop, stop)) {
      EXPECT_FALSE(b.evaluation.feasible());
    }
    EXPECT_TRUE(std::ranges::is_sorted(baselines, {}, [](const Baseline& b) {
      return std::ranges::find(BaselineRows(), b.name, &BaselineRow::name) -
             BaselineRows().begin();
    }));
  }
}

TEST(Mcmc, TakesNoInfeasiblePlanOnceOneIsFeasible) {
  const Graph graph = MlpGraph(2, 4, 2, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  // Weights: table and matrix 256 each, two layers of 8 + 2*128: 1040
  // elements, 4160 with state. A quarter and a bit must do.
  const ToyObjective objective(graph, 1'500);
  const Plan start = Uniform(space, "");
  ASSERT_FALSE(objective.Evaluate(start).feasible());
  Chain chain(space, objective, Moves(), start, 0.02, Rng(3));
  bool feasible = false;
  for (int i = 0; i < 20'000; ++i) {
    chain.Step();
    if (feasible) {
      ASSERT_TRUE(chain.evaluation().feasible()) << i;
    }
    feasible = chain.evaluation().feasible();
  }
  EXPECT_TRUE(feasible);
  EXPECT_TRUE(objective.Evaluate(chain.best().plan).feasible());
}

TEST(Mcmc, StopsByFlagAndByTime) {
  const Graph graph = MlpGraph(2, 4, 2, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  std::atomic<bool> stop = true;
  SearchOptions options;
  options.time_limit = 0;
  options.stop = &stop;
  const auto stopped = Search(space, objective, options);
  ASSERT_TRUE(stopped.has_value());
  EXPECT_EQ(stopped->proposals, 0);
  EXPECT_TRUE(Validate(graph, cluster, stopped->best).empty());
  options.stop = nullptr;
  options.time_limit = 0.05;
  const auto timed = Search(space, objective, options);
  ASSERT_TRUE(timed.has_value());
  EXPECT_EQ(static_cast<int64_t>(timed->chains.size()), 8);
  int64_t sum = 0;
  for (const ChainStatistics& chain : timed->chains) sum += chain.proposals;
  EXPECT_EQ(sum, timed->proposals);
}

TEST(Tidy, MakesEqualLayersAlikeWhereItCostsNothing) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  const Plan uniform = Uniform(space, "tp=2");
  Plan drifted = uniform;
  for (size_t i = 0; i < drifted.ops.size(); ++i) {
    if (graph.nodes[i].name == "h.1.up" || graph.nodes[i].name == "h.3.norm") {
      drifted.ops[i].axes = {};
    }
  }
  drifted.weights[4].zero_stage = 1;
  ASSERT_TRUE(MakeCanonical(space, drifted));
  Evaluation evaluation = objective.Evaluate(drifted);
  const Evaluation before = evaluation;
  // Told to stop, it changes nothing, and does not ask again.
  int asked = 0;
  const auto stop = [&] {
    ++asked;
    return true;
  };
  const Plan kept = drifted;
  EXPECT_EQ(Tidy(space, objective, stop, drifted, evaluation), 0);
  EXPECT_EQ(drifted, kept);
  EXPECT_EQ(asked, 1);
  const int evaluations = Tidy(space, objective, nullptr, drifted, evaluation);
  EXPECT_GT(evaluations, 0);
  EXPECT_LT(evaluation.step_time, before.step_time);
  EXPECT_EQ(evaluation, objective.Evaluate(drifted));
  EXPECT_EQ(drifted.ops, uniform.ops);
  for (const WeightPlacement& weight : drifted.weights) {
    EXPECT_EQ(weight.zero_stage, drifted.weights[0].zero_stage);
  }
}

// Every stage of ZeRO less costs; how it is cut does not.
class StagesObjective : public Objective {
 public:
  Evaluation Evaluate(const Plan& plan) const override {
    Evaluation evaluation;
    evaluation.step_time = {1'000};
    for (const WeightPlacement& weight : plan.weights) {
      evaluation.step_time += Duration{3 - weight.zero_stage};
    }
    return evaluation;
  }
};

// Of one layer all is cut over all nodes, of the others within them.
TEST(Tidy, MakesCutsWithinNodesAlike) {
  const Graph graph = MlpGraph(4, 16, 4, 8, 16, 32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2x4").value();
  const SearchSpace space(graph, cluster);
  const StagesObjective objective;
  const Plan uniform = Uniform(space, "zero=3,zero-group=node");
  ASSERT_TRUE(CutWithinNode(space, uniform)[0]);
  Plan drifted = uniform;
  const Plan whole = Uniform(space, "zero=3");
  for (const size_t w : space.weights_of_block[2]) {
    drifted.weights[w] = whole.weights[w];
  }
  ASSERT_NE(drifted.weights, uniform.weights);
  Evaluation evaluation = objective.Evaluate(drifted);
  EXPECT_GT(Tidy(space, objective, nullptr, drifted, evaluation), 0);
  EXPECT_EQ(drifted.weights, uniform.weights);
}

// Takes a nanosecond less for each operator of the second layer that runs again
// and a picosecond more for each of another's; and a nanosecond more where some
// layers' `down` is split, and others' is not. Nothing else matters.
class ChangesObjective : public Objective {
 public:
  explicit ChangesObjective(const Graph& graph) : graph_(graph) {}
  Evaluation Evaluate(const Plan& plan) const override {
    Evaluation evaluation;
    evaluation.step_time = {1'000'000};
    std::set<bool> split;
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      const std::string& name = graph_.nodes[i].name;
      if (name.ends_with(".down")) {
        split.insert(plan.ops[i].axes != OpPlacement().axes);
      }
      if (!plan.ops[i].recompute) continue;
      evaluation.step_time += Duration{name.starts_with("h.1.") ? -1'000 : 1};
    }
    if (split.size() > 1) evaluation.step_time += Duration{1'000};
    return evaluation;
  }

 private:
  const Graph& graph_;
};

TEST(Tidy, TakesBackWhatWasChangedForNothing) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const Plan uniform = Uniform(space, "tp=2");
  Plan drifted = uniform;
  const auto is_layer = [&](size_t i) {
    return graph.nodes[i].name.starts_with("h.");
  };
  int in_layers = 0;
  int elsewhere = 0;
  int moved = 0;
  for (size_t i = 0; i < drifted.ops.size(); ++i) {
    if (CanRecompute(graph, NodeId(i))) {
      drifted.ops[i].recompute = true;
      ++(is_layer(i) ? in_layers : elsewhere);
    }
    // In all layers alike, so that no other layer has it as it was.
    if (!graph.nodes[i].name.ends_with(".down")) continue;
    drifted.ops[i].axes = {};
    ++moved;
  }
  ASSERT_GT(in_layers, 0);
  ASSERT_GT(elsewhere, 0);
  ASSERT_EQ(moved, 4);
  drifted.weights[0].zero_stage = 3;
  drifted.bucket_bytes = Bytes{1};
  ASSERT_TRUE(MakeCanonical(space, drifted));
  const ChangesObjective objective(graph);
  Evaluation evaluation = objective.Evaluate(drifted);
  EXPECT_GT(Tidy(space, objective, nullptr, drifted, evaluation), 0);
  EXPECT_EQ(evaluation, objective.Evaluate(drifted));
  // The second layer gains by it: it stays in that, and in the one before, as
  // layers are taken from the end.
  for (size_t i = 0; i < drifted.ops.size(); ++i) {
    const std::string& name = graph.nodes[i].name;
    EXPECT_EQ(drifted.ops[i].recompute,
              (name.starts_with("h.0.") || name.starts_with("h.1.")) &&
                  CanRecompute(graph, NodeId(i)))
        << name;
    drifted.ops[i].recompute = false;
  }
  EXPECT_TRUE(SameUpToNames(drifted, uniform));
}

// Of the third layer's weights the cut at stage 3 saves time; all else is
// equal.
class CutObjective : public Objective {
 public:
  explicit CutObjective(const SearchSpace& space) : space_(space) {}
  Evaluation Evaluate(const Plan& plan) const override {
    Evaluation evaluation;
    evaluation.step_time = {1'000};
    for (const size_t w : space_.weights_of_block[3]) {
      if (plan.weights[w].zero_stage == 3) evaluation.step_time += Duration{-1};
    }
    return evaluation;
  }

 private:
  const SearchSpace& space_;
};

// Its like get what the third layer gains by; then most weights have that, and
// those of the table and the head get it, too.
TEST(Tidy, CutsAsMostWeightsAreCut) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const Plan uniform = Uniform(space, "");
  Plan drifted = uniform;
  ASSERT_FALSE(space.weights_of_block[3].empty());
  for (const size_t w : space.weights_of_block[3]) {
    drifted.weights[w].zero_stage = 3;
  }
  for (const size_t w : space.weights_of_block[0]) {
    drifted.weights[w].zero_stage = 2;
  }
  ASSERT_TRUE(MakeCanonical(space, drifted));
  const CutObjective objective(space);
  Evaluation evaluation = objective.Evaluate(drifted);
  const Duration before = evaluation.step_time;
  EXPECT_GT(Tidy(space, objective, nullptr, drifted, evaluation), 0);
  EXPECT_LE(evaluation.step_time, before);
  for (const WeightPlacement& weight : drifted.weights) {
    EXPECT_EQ(weight.zero_stage, 3);
  }
}

// A picosecond for each operator that runs again, but for `up`, which costs as
// much as it saves; less than three layers in which `act` does leave no room.
class LayersAgainObjective : public Objective {
 public:
  explicit LayersAgainObjective(const Graph& graph) : graph_(graph) {}
  Evaluation Evaluate(const Plan& plan) const override {
    Evaluation evaluation;
    evaluation.step_time = {1'000};
    std::set<int> layers;
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      if (!plan.ops[i].recompute) continue;
      const std::string& name = graph_.nodes[i].name;
      if (!name.ends_with(".up")) evaluation.step_time += Duration{1};
      if (name.ends_with(".act")) layers.insert(graph_.nodes[i].block);
    }
    if (layers.size() < 3) {
      evaluation.overflow = Bytes{1};
      evaluation.violations = {"no room"};
    }
    return evaluation;
  }

 private:
  const Graph& graph_;
};

// Of eight layers the last four need not run again, of the other four one; and
// in those that are left only what leaves room.
TEST(Tidy, LeavesAsMuchToRunAgainAsFits) {
  const Graph graph = MlpGraph(8, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(2);
  const SearchSpace space(graph, cluster);
  Plan plan = Uniform(space, "recompute=full");
  const LayersAgainObjective objective(graph);
  Evaluation evaluation = objective.Evaluate(plan);
  Tidy(space, objective, nullptr, plan, evaluation);
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const std::string& name = graph.nodes[i].name;
    EXPECT_EQ(plan.ops[i].recompute,
              name == "h.0.act" || name == "h.1.act" || name == "h.2.act")
        << name;
  }
  EXPECT_EQ(evaluation.step_time, Duration{1'003});
}

// What is said of each kind of change holds for that kind alone: with its
// bucket the plan may not lose what its layers lose.
TEST(Tidy, TakesBackNoMoreThanIsKept) {
  const Graph graph = MlpGraph(8, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(2);
  const SearchSpace space(graph, cluster);
  Plan plan = Uniform(space, "recompute=full,bucket=1MB");
  const LayersAgainObjective objective(graph);
  Evaluation evaluation = objective.Evaluate(plan);
  const Bytes bucket = plan.bucket_bytes;
  Tidy(space, objective, nullptr, plan, evaluation,
       [&](const Plan& tidied) { return tidied.bucket_bytes == bucket; });
  EXPECT_EQ(plan.bucket_bytes, bucket);
  EXPECT_EQ(evaluation.step_time, Duration{1'003});
  EXPECT_EQ(evaluation, objective.Evaluate(plan));
}

// Schedules are as fast as one another, but for gpipe.
class SchedulesObjective : public Objective {
 public:
  Evaluation Evaluate(const Plan& plan) const override {
    Evaluation evaluation;
    evaluation.step_time = {plan.schedule == "gpipe" ? 1'001 : 1'000};
    return evaluation;
  }
};

TEST(Tidy, TakesThePlainestSchedule) {
  const Graph graph = MlpGraph(8, 8, 4, 8, 16, 32);
  const Cluster cluster = Ranks(2);
  const SearchSpace space(graph, cluster);
  for (const char* schedule : {"zb-h2", "zb-h1", "gpipe", "1f1b"}) {
    Plan plan = Uniform(space, "pp=2,mbs=2,schedule=" + std::string(schedule));
    Evaluation evaluation = SchedulesObjective().Evaluate(plan);
    Tidy(space, SchedulesObjective(), nullptr, plan, evaluation);
    EXPECT_EQ(plan.schedule, "1f1b");
  }
}

// Three samples on 16 ranks, and one row of two columns: all ranks do all the
// work, but that of two at most.
TEST(Mcmc, StartsWhereNoStrategyIsValid) {
  const Graph graph = TwoLayerGraph(3, 1, 2);
  const Cluster cluster = Ranks(16);
  const SearchSpace space(graph, cluster);
  ASSERT_FALSE(PlanFromStrategy(graph, cluster, Strategy()).has_value());
  const ToyObjective objective(graph);
  const auto result = Search(space, objective, WithProposals(10));
  ASSERT_TRUE(result.has_value()) << result.error().ToString();
  EXPECT_TRUE(Validate(graph, cluster, result->best).empty());
}

TEST(Mcmc, CallsProgress) {
  const Graph graph = TwoLayerGraph(2, 2, 2);
  const Cluster cluster = Ranks(2);
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  SearchOptions options;
  options.time_limit = 0.35;
  int calls = 0;
  options.progress = [&](const SearchProgress& progress) {
    ++calls;
    EXPECT_TRUE(progress.feasible);
    EXPECT_GT(progress.best.picoseconds, 0);
  };
  ASSERT_TRUE(Search(space, objective, options).has_value());
  EXPECT_GE(calls, 1);
}

}  // namespace
}  // namespace tessera
