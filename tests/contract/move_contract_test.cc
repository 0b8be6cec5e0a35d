// Every row of Moves(): valid in, valid out; a function of its arguments; and
// in balance with its way back.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "planner/plan/axis_roles.h"
#include "planner/plan/strategy.h"
#include "planner/plan/validate.h"
#include "planner/search/move.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"
#include "tests/support/uniform_plan.h"

namespace tessera {
namespace {

using testing::AttentionGraph;
using testing::BranchesGraph;
using testing::MlpGraph;
using testing::MoeGraph;
using testing::Ranks;
using testing::StateOf;
using testing::TwoLayerGraph;
using testing::Uniform;

class MoveContract : public ::testing::TestWithParam<std::string> {
 protected:
  const Move& move() const {
    const auto found = FindMove(GetParam());
    TESSERA_CHECK(found.has_value());
    return **found;
  }
};

// What Draft::Finish must make of an edit, from the definitions: all cuts, and
// all checks, of the whole plan.
std::optional<Plan> FinishedWhole(const Move& move, const SearchSpace& space,
                                  const Plan& plan, Rng rng) {
  Draft draft(space, plan);
  const auto log_ratio = move.edit(draft, rng);
  std::optional<Plan> finished;
  if (log_ratio.has_value()) {
    finished = draft.plan();
    std::vector<bool> within;
    for (size_t w = 0; w < plan.weights.size(); ++w) {
      within.push_back(draft.CutWithinNode(w));
    }
    if (!SetCuts(space, within, *finished) || SameUpToNames(*finished, plan) ||
        !IsValid(space.index, *space.cluster, *finished)) {
      finished.reset();
    }
  }
  draft.Undo();
  EXPECT_EQ(draft.plan(), plan);
  return finished;
}

// That a change lists what is otherwise in `after`.
void ExpectChange(const PlanChange& change, const Plan& before,
                  const Plan& after) {
  if (change.whole) return;
  Plan changed = before;
  std::set<NodeId> nodes(change.nodes.begin(), change.nodes.end());
  EXPECT_EQ(nodes.size(), change.nodes.size());
  for (NodeId node : nodes) {
    EXPECT_NE(before.ops[node.index()], after.ops[node.index()]);
    changed.ops[node.index()] = after.ops[node.index()];
  }
  std::set<size_t> weights(change.weights.begin(), change.weights.end());
  EXPECT_EQ(weights.size(), change.weights.size());
  for (size_t weight : weights) {
    EXPECT_NE(before.weights[weight], after.weights[weight]);
    changed.weights[weight] = after.weights[weight];
  }
  EXPECT_EQ(changed, after);
}

// Proposals of `move` and steps of all moves from `plan` on; the number of the
// former.
int Walk(const Move& move, const SearchSpace& space, const Plan& start) {
  int proposals = 0;
  Draft draft(space, start);
  Rng walk(11);
  for (uint64_t i = 0; i < 150; ++i) {
    // A long walk leaves the uniform plans, which some moves need.
    if (i % 15 == 0) draft = Draft(space, start);
    const Plan before = draft.plan();
    Rng rng(i);
    Rng again(i);
    // A plan of its own, and the one that the walk has edited all along.
    const auto proposal = move.Propose(before, space, rng);
    const auto log_ratio = move.Propose(draft, again);
    EXPECT_EQ(proposal.has_value(), log_ratio.has_value());
    const auto whole = FinishedWhole(move, space, before, Rng(i));
    EXPECT_EQ(proposal.has_value(), whole.has_value());
    if (proposal.has_value() && log_ratio.has_value() && whole.has_value()) {
      ++proposals;
      EXPECT_EQ(proposal->plan, draft.plan());
      EXPECT_EQ(proposal->plan, *whole);
      EXPECT_EQ(proposal->log_ratio, *log_ratio);
      EXPECT_TRUE(std::isfinite(proposal->log_ratio));
      ExpectChange(draft.change(), before, draft.plan());
      const auto errors =
          Validate(*space.index.graph, *space.cluster, proposal->plan);
      EXPECT_TRUE(errors.empty()) << errors[0].ToString();
      Plan canonical = proposal->plan;
      EXPECT_TRUE(MakeCanonical(space, canonical));
      EXPECT_EQ(canonical, proposal->plan);
      EXPECT_FALSE(SameUpToNames(proposal->plan, before));
    }
    if (log_ratio.has_value()) draft.Undo();
    EXPECT_EQ(draft.plan(), before);
    if (::testing::Test::HasFailure()) break;
    // On from here: by this move and, so that others' states come up too, by
    // any.
    const Move& next = i % 2 == 0 ? move : DrawMove(Moves(), walk);
    if (next.Propose(draft, walk)) draft.Keep();
  }
  return proposals;
}

TEST_P(MoveContract, ValidInValidOutAndAFunctionOfItsArguments) {
  const Cluster cluster = Ranks(12);
  const Graph layers = MlpGraph(4, 12, 4, 8, 12, 32);
  const SearchSpace of_layers(layers, cluster);
  const Graph branches = BranchesGraph(12, 4, 8, 12, 32);
  const SearchSpace of_branches(branches, cluster);
  const Graph attention = AttentionGraph(2, 12, 24, 8, 4, 16);
  const SearchSpace of_attention(attention, cluster);
  // Two nodes, so that weights are cut within them.
  const Cluster nodes = MakeCluster("dgx-a100-80gb:2x4").value();
  const Graph layers_of_eight = MlpGraph(4, 8, 4, 8, 16, 32);
  const SearchSpace of_nodes(layers_of_eight, nodes);
  const Graph tied = TwoLayerGraph(12, 12, 24, /*tied=*/true);
  const SearchSpace of_tied(tied, cluster);
  int proposals = 0;
  for (const auto& [space, text] :
       {std::pair(&of_layers, "tp=2,zero=1"),
        {&of_layers, "tp=3,pp=2,sp=1"},
        {&of_layers, "pp=3,zero=1,cp=2"},
        {&of_layers, "tp=2,pp=2,mbs=2"},
        {&of_layers, "tp=12"},
        {&of_layers, "pp=6,schedule=gpipe"},
        {&of_layers, "pp=2,vp=3,schedule=interleaved"},
        {&of_layers, "pp=3,mbs=1"},
        {&of_layers, "pp=2,mbs=2"},
        {&of_layers, "pp=2,vp=2,schedule=interleaved"},
        {&of_layers, "pp=3,vp=2,schedule=interleaved"},
        {&of_layers, "pp=2,schedule=zb-h1"},
        {&of_layers, "mbs=1"},
        {&of_branches, "zero=1,branches=split"},
        {&of_branches, "pp=3"},
        {&of_attention, "cp=3"},
        {&of_attention, "cp=3,cp-balance=zigzag"},
        {&of_layers, "dp-kind=rooted"},
        {&of_nodes, "zero=3,zero-group=node"},
        {&of_nodes, "pp=2,zero=1"},
        {&of_nodes, "tp=2,zero=2,zero-group=2,mbs=1"},
        {&of_tied, "pp=2,zero=1,mbs=2"}}) {
    proposals += Walk(move(), *space, Uniform(*space, text));
  }
  EXPECT_GT(proposals, 3);
}

// The expected number of accepted steps from one plan to each other where all
// costs are equal: the sum over draws of q * min(1, exp(log_ratio)).
struct Flow {
  double mean = 0;
  double square = 0;
};

std::map<std::string, Flow> FlowsFrom(const Move& move,
                                      const SearchSpace& space,
                                      const Plan& plan, bool folded, int draws,
                                      uint64_t seed,
                                      std::map<std::string, Plan>* reached) {
  std::map<std::string, Flow> flows;
  Draft draft(space, plan);
  draft.Fold(folded);
  Rng rng(seed);
  for (int i = 0; i < draws; ++i) {
    const auto log_ratio = move.Propose(draft, rng);
    if (!log_ratio.has_value()) continue;
    const double accepted = std::min(1.0, std::exp(*log_ratio));
    const std::string state = StateOf(draft.plan());
    flows[state].mean += accepted / draws;
    flows[state].square += accepted * accepted / draws;
    if (reached != nullptr) reached->emplace(state, draft.plan());
    draft.Undo();
  }
  return flows;
}

struct Balance {
  int pairs = 0;  // of plans that were compared
  int no_way_back = 0;
  double worst = 0;   // difference of the two flows in standard errors
  std::string where;  // of the worst
};

// So many draws must be accepted for a plan to be compared.
constexpr double kJudged = 30;

// Walks from `plan` and compares, for some plans on the way, what the move
// sends to others with what these send back, in a folded walk or another.
void Judge(const Move& move, const SearchSpace& space, Plan plan, bool folded,
           Balance& balance) {
  Rng walk(21);
  for (int round = 0; round < 4; ++round) {
    std::map<std::string, Plan> reached;
    std::map<std::string, Flow> forward;
    // The likeliest ones, where a wrong ratio shows.
    std::vector<std::pair<double, std::string>> likely;
    // More draws of a move that leads to many plans.
    int draws = 2000;
    for (;; draws *= 4) {
      reached.clear();
      forward = FlowsFrom(move, space, plan, folded, draws, 1, &reached);
      likely.clear();
      for (const auto& [state, flow] : forward) {
        likely.emplace_back(-flow.mean, state);
      }
      std::sort(likely.begin(), likely.end());
      if (likely.size() > 3) likely.resize(3);
      if (likely.empty() || draws == 32'000 ||
          -likely.back().first * draws >= kJudged) {
        break;
      }
    }
    for (const auto& [negative, state] : likely) {
      const Flow there = forward.at(state);
      if (there.mean * draws < kJudged) continue;  // too rare to judge
      const auto back =
          FlowsFrom(move, space, reached.at(state), folded, draws, 2, nullptr);
      const auto found = back.find(StateOf(plan));
      ++balance.pairs;
      if (found == back.end()) {
        ++balance.no_way_back;
        balance.where = state + " to " + StateOf(plan);
        continue;
      }
      const Flow here = found->second;
      const double variance = (there.square - there.mean * there.mean +
                               here.square - here.mean * here.mean) /
                              draws;
      const double sigmas =
          std::abs(there.mean - here.mean) / std::sqrt(variance + 1e-12);
      if (sigmas > balance.worst) {
        balance.worst = sigmas;
        balance.where = StateOf(plan) + " to " + state;
      }
    }
    for (int i = 0; i < 6; ++i) {
      auto step = DrawMove(Moves(), walk).Propose(plan, space, walk);
      if (step.has_value()) plan = std::move(step->plan);
    }
  }
}

Balance JudgeFromMany(const Move& move) {
  const Cluster cluster = Ranks(4);
  Balance balance;
  const Graph layers = MlpGraph(2, 4, 4, 4, 8, 16);
  const SearchSpace of_layers(layers, cluster);
  for (const char* text :
       {"", "tp=2,zero=1", "zero=3", "tp=2,sp=1", "pp=2,mbs=2", "pp=2,tp=2",
        "tp=4", "cp=2", "tp=2,mbs=2", "cp=2,mbs=2,dp-kind=rooted",
        "tp=2,mbs=2,dp-kind=rooted", "pp=2,vp=2,mbs=2,schedule=interleaved",
        "pp=2,vp=2,tp=2,schedule=interleaved"}) {
    Judge(move, of_layers, Uniform(of_layers, text), /*folded=*/false, balance);
  }
  const Graph branches = BranchesGraph(4, 2, 4, 8, 16);
  const SearchSpace of_branches(branches, cluster);
  for (const char* text : {"", "branches=split", "tp=2,branches=split"}) {
    Judge(move, of_branches, Uniform(of_branches, text), /*folded=*/false,
          balance);
  }
  // A weight that both stages read.
  const Graph tied = TwoLayerGraph(4, 4, 16, /*tied=*/true);
  const SearchSpace of_tied(tied, cluster);
  for (const char* text : {"pp=2,mbs=2", "pp=2,zero=1"}) {
    Judge(move, of_tied, Uniform(of_tied, text), /*folded=*/false, balance);
  }
  const Graph attention = AttentionGraph(1, 4, 8, 4, 2, 16);
  const SearchSpace of_attention(attention, cluster);
  for (const char* text : {"cp=4", "cp=2,cp-kind=ring"}) {
    Judge(move, of_attention, Uniform(of_attention, text), /*folded=*/false,
          balance);
  }
  return balance;
}

// Axes between data and expert parallelism.
TEST(AxisRole, BalancesWithExperts) {
  const Graph graph = MoeGraph(2, 4, 2, 4, 4, 4, 16);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const Move& move = **FindMove("axis-role");
  Balance balance;
  for (const char* text :
       {"", "ep=2,zero=1", "ep=4", "ep=2,tp=2", "ep=2,tp=2,etp=1"}) {
    Judge(move, space, Uniform(space, text), /*folded=*/false, balance);
  }
  EXPECT_GT(balance.pairs, 10);
  EXPECT_EQ(balance.no_way_back, 0) << balance.where;
  EXPECT_LT(balance.worst, 5) << balance.where;
  // Expert parallelism is in reach, of every degree.
  for (const int from : {1, 2}) {
    const Plan plan = Uniform(space, "ep=" + std::to_string(from));
    Rng rng(3);
    int64_t degree = 0;
    for (int i = 0; i < 300; ++i) {
      const auto step = move.Propose(plan, space, rng);
      if (!step.has_value()) continue;
      for (size_t b = 0; b < graph.blocks.size(); ++b) {
        const auto roles =
            RolesOf(space.index, step->plan, static_cast<int>(b));
        if (!roles.has_value()) continue;
        degree = std::max(degree, plan.groups[0].Size(roles->expert));
      }
    }
    EXPECT_EQ(degree, 2 * from);
  }
}

// Rings, the zigzag order, and the moves that meet rings.
TEST(Context, BalancesWithAttention) {
  const Graph graph = AttentionGraph(2, 4, 8, 4, 2, 16);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  for (const char* name : {"context", "sequence", "axis-role"}) {
    Balance balance;
    for (const char* text :
         {"cp=2", "cp=2,cp-kind=ring", "cp=4,cp-kind=ring,cp-balance=zigzag",
          "cp=2,tp=2,cp-kind=ring", "cp=2,cp-kind=ulysses"}) {
      Judge(**FindMove(name), space, Uniform(space, text), /*folded=*/false,
            balance);
    }
    EXPECT_GT(balance.pairs, 6) << name;
    EXPECT_EQ(balance.no_way_back, 0) << name << " " << balance.where;
    EXPECT_LT(balance.worst, 5) << name << " " << balance.where;
  }
  // One layer with a ring, one without.
  Plan mixed = Uniform(space, "dp=2,cp=2");
  const Plan rings = Uniform(space, "dp=2,cp=2,cp-kind=ring");
  for (NodeId node : space.index.nodes_of_block[1]) {
    mixed.ops[node.index()] = rings.ops[node.index()];
  }
  ASSERT_NE(mixed.ops, rings.ops);
  for (const char* name : {"context", "sequence", "axis-role"}) {
    Balance balance;
    Judge(**FindMove(name), space, mixed, /*folded=*/false, balance);
    EXPECT_GT(balance.pairs, 0) << name;
    EXPECT_EQ(balance.no_way_back, 0) << name << " " << balance.where;
    EXPECT_LT(balance.worst, 5) << name << " " << balance.where;
  }
  // A ring is in reach, and so is what it was.
  const Move& context = **FindMove("context");
  const Plan gather = Uniform(space, "cp=4");
  const Plan ring = Uniform(space, "cp=4,cp-kind=ring");
  std::map<std::string, Plan> reached;
  FlowsFrom(context, space, gather, /*folded=*/false, 300, 1, &reached);
  EXPECT_TRUE(reached.contains(StateOf(ring)));
  reached.clear();
  FlowsFrom(context, space, ring, /*folded=*/false, 300, 1, &reached);
  EXPECT_TRUE(reached.contains(StateOf(gather)));
}

// Stages of 1 and 3 devices: a block gets the other stage's degree of data
// parallelism, and comes back.
TEST(StageBoundary, BalancesBetweenUnlikeMeshes) {
  const Cluster cluster = Ranks(4);
  const Graph graph = MlpGraph(2, 6, 4, 4, 8, 16);
  const SearchSpace space(graph, cluster);
  const Move& devices = **FindMove("stage-devices");
  Plan unlike = Uniform(space, "pp=2,mbs=3");
  Rng rng(4);
  for (int i = 0; i < 100 && SameMesh(unlike.groups[0], unlike.groups[1]);
       ++i) {
    auto step = devices.Propose(unlike, space, rng);
    if (step.has_value()) unlike = std::move(step->plan);
  }
  ASSERT_EQ(unlike.groups[0].devices.size() + unlike.groups[1].devices.size(),
            4u);
  ASSERT_NE(unlike.groups[0].devices.size(), unlike.groups[1].devices.size());
  const Move& boundary = **FindMove("stage-boundary");
  Balance balance;
  Judge(boundary, space, unlike, /*folded=*/false, balance);
  EXPECT_GT(balance.pairs, 0);
  EXPECT_EQ(balance.no_way_back, 0) << balance.where;
  EXPECT_LT(balance.worst, 5) << balance.where;
  std::map<std::string, Plan> reached;
  FlowsFrom(boundary, space, unlike, /*folded=*/false, 300, 1, &reached);
  EXPECT_FALSE(reached.empty());
}

// Stages of the faster and of the slower devices, whose replicas in one of them
// have unequal shares, are of a strategy all the same.
TEST(StageCount, BalancesOnUnlikeDevices) {
  const Cluster cluster =
      MakeCluster("dgx-h100:1x4+dgx-a100-80gb:1x2+dgx-h100:1x2").value();
  const Graph graph = MlpGraph(6, 64, 4, 8, 16, 32);
  const SearchSpace space(graph, cluster);
  const Plan plan = Uniform(space, "dp=4,pp=2,mbs=8,balance=speed");
  ASSERT_FALSE(SameMesh(plan.groups[0], plan.groups[1]));
  const Move& move = **FindMove("stage-count");
  Balance balance;
  Judge(move, space, plan, /*folded=*/false, balance);
  Judge(move, space, Uniform(space, "dp=8,mbs=8,balance=speed"),
        /*folded=*/false, balance);
  EXPECT_GT(balance.pairs, 2);
  EXPECT_EQ(balance.no_way_back, 0) << balance.where;
  EXPECT_LT(balance.worst, 5) << balance.where;
}

// Hybrid sharding, of a weight too that cannot be cut within a node: most moves
// apply, and the plan is known for its strategy's.
TEST(Draft, StartsFromHybridSharding) {
  GraphBuilder builder("biased", 16, 4, DType::kFloat32);
  builder.BeginBlock("embed");
  const TensorId tokens = builder.Input("tokens", {16, 4}, DType::kInt32);
  const TensorId labels = builder.Input("labels", {16, 4}, DType::kInt32);
  const TensorId table = builder.Weight("table", {2, 64}, {.stddev = 1}, true);
  const TensorId x = builder.Add1("embedding", "lookup", {tokens, table});
  builder.BeginBlock("head");
  const TensorId matrix =
      builder.Weight("matrix", {2, 64}, {.stddev = 1}, true);
  const TensorId bias = builder.Weight("bias", {2}, {.stddev = 1}, false);
  const TensorId logits =
      builder.Add1("linear", "head", {x, matrix, bias}, "bsi,vi+v->bsv");
  const Graph graph = testing::FinishWithLoss(builder, logits, labels);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2x4").value();
  const SearchSpace space(graph, cluster);
  const Plan plan = Uniform(space, "zero=3,zero-group=node");
  Plan canonical = plan;
  ASSERT_TRUE(MakeCanonical(space, canonical));
  EXPECT_EQ(canonical, plan);
  Draft draft(space, plan);
  EXPECT_TRUE(draft.strategy().has_value());
  Rng rng(3);
  int candidates = 0;
  for (int i = 0; i < 1000; ++i) {
    if (!DrawMove(Moves(), rng).Propose(draft, rng)) continue;
    ++candidates;
    draft.Undo();
  }
  EXPECT_GT(candidates, 200);
}

TEST(Rooted, LeadsToTheStrategyAndBack) {
  const Graph graph = MlpGraph(2, 4, 4, 4, 8, 16);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const Move& move = **FindMove("rooted");
  Rng rng(1);
  for (const std::string text : {"dp=4", "dp=2,tp=2,mbs=2"}) {
    const Plan plain = Uniform(space, text);
    const Plan rooted = Uniform(space, text + ",dp-kind=rooted");
    const auto there = move.Propose(plain, space, rng);
    ASSERT_TRUE(there.has_value()) << text;
    EXPECT_TRUE(SameUpToNames(there->plan, rooted)) << text;
    const auto back = move.Propose(rooted, space, rng);
    ASSERT_TRUE(back.has_value()) << text;
    EXPECT_TRUE(SameUpToNames(back->plan, plain)) << text;
  }
  // Not where the root would have to have the state that is cut.
  EXPECT_FALSE(
      move.Propose(Uniform(space, "dp=4,zero=1"), space, rng).has_value());
}

// What a root does follows the axes that it is the root of.
TEST(FabricOrder, RootsFollowTheirAxes) {
  const Graph graph = MlpGraph(2, 4, 4, 4, 8, 16);
  const Cluster cluster = Ranks(4);
  const SearchSpace space(graph, cluster);
  const Plan plan = Uniform(space, "dp=2,tp=2,mbs=2,dp-kind=rooted");
  Rng rng(1);
  const auto step = (*FindMove("fabric-order"))->Propose(plan, space, rng);
  ASSERT_TRUE(step.has_value());
  // Of two axes the other one.
  const auto other = [](AxisSet axis) { return axis == 0 ? 0 : axis ^ 3; };
  int rooted = 0;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    EXPECT_EQ(step->plan.ops[i].rooted, other(plan.ops[i].rooted));
  }
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    EXPECT_EQ(step->plan.weights[w].rooted, other(plan.weights[w].rooted));
    rooted += plan.weights[w].rooted != 0 ? 1 : 0;
  }
  EXPECT_GT(rooted, 0);
}

// An order that balances any number of ranks is a move away.
TEST(Context, OrdersSequencesForAnyDegreeThatCutsEvenly) {
  const Cluster cluster = Ranks(12);
  const Move& move = **FindMove("context");
  const auto orders = [&](const SearchSpace& space, const char* text) {
    const Plan plan = Uniform(space, text);
    std::set<int> orders;
    Rng rng(5);
    for (int i = 0; i < 30; ++i) {
      const auto step = move.Propose(plan, space, rng);
      if (step.has_value()) orders.insert(step->plan.zigzag);
    }
    orders.erase(0);
    return orders;
  };
  const Graph even = AttentionGraph(1, 12, 72, 8, 4, 16);
  const SearchSpace of_even(even, cluster);
  EXPECT_EQ(orders(of_even, "cp=12"), std::set<int>{12});
  EXPECT_EQ(orders(of_even, "cp=3"), std::set<int>{3});
  EXPECT_EQ(orders(of_even, "tp=4"), std::set<int>());
  // 2 * 12 chunks of 36 positions are not whole.
  const Graph odd = AttentionGraph(1, 12, 36, 8, 4, 16);
  const SearchSpace of_odd(odd, cluster);
  EXPECT_EQ(orders(of_odd, "cp=12"), std::set<int>());
}

TEST_P(MoveContract, BalancesWithItsWayBack) {
  const Balance balance = JudgeFromMany(move());
  EXPECT_GE(balance.pairs, 8);
  EXPECT_EQ(balance.no_way_back, 0) << balance.where;
  // A few hundred comparisons: five standard errors are not chance.
  EXPECT_LT(balance.worst, 5) << balance.where;
}

TEST_P(MoveContract, BalancesWhereEqualLayersChangeTogether) {
  const Cluster cluster = Ranks(4);
  Balance balance;
  const Graph layers = MlpGraph(3, 4, 4, 4, 8, 16);
  const SearchSpace of_layers(layers, cluster);
  for (const char* text :
       {"tp=2,zero=1", "pp=2,tp=2", "cp=2,mbs=2",
        "pp=2,vp=2,mbs=2,schedule=interleaved", "tp=2,mbs=2,dp-kind=rooted"}) {
    Judge(move(), of_layers, Uniform(of_layers, text), /*folded=*/true,
          balance);
  }
  const Graph attention = AttentionGraph(2, 4, 8, 4, 2, 16);
  const SearchSpace of_attention(attention, cluster);
  for (const char* text :
       {"cp=4", "cp=2,cp-kind=ring", "cp=4,cp-kind=ring,cp-balance=zigzag"}) {
    Judge(move(), of_attention, Uniform(of_attention, text), /*folded=*/true,
          balance);
  }
  const Graph branches = BranchesGraph(4, 2, 4, 8, 16);
  const SearchSpace of_branches(branches, cluster);
  for (const char* text : {"", "branches=split"}) {
    Judge(move(), of_branches, Uniform(of_branches, text), /*folded=*/true,
          balance);
  }
  EXPECT_GE(balance.pairs, 4);
  EXPECT_EQ(balance.no_way_back, 0) << balance.where;
  EXPECT_LT(balance.worst, 5) << balance.where;
}

// Whether equal blocks of a stage have equal splits and tiles, and equal
// weights equal cuts.
bool EqualLayersAreAlike(const SearchSpace& space, const Draft& draft) {
  const Plan& plan = draft.plan();
  for (const auto& blocks : space.blocks_of_class) {
    for (int a : blocks) {
      for (int b : blocks) {
        const auto& of_a = space.index.nodes_of_block[static_cast<size_t>(a)];
        const auto& of_b = space.index.nodes_of_block[static_cast<size_t>(b)];
        for (size_t i = 0; i < of_a.size(); ++i) {
          const OpPlacement& x = plan.ops[of_a[i].index()];
          const OpPlacement& y = plan.ops[of_b[i].index()];
          if (x.group == y.group && (x.axes != y.axes || x.tiles != y.tiles ||
                                     x.streamed != y.streamed)) {
            return false;
          }
        }
      }
    }
  }
  for (const auto& weights : space.weights_of_kind) {
    for (size_t w : weights) {
      if (plan.weights[w].zero_stage != plan.weights[weights[0]].zero_stage ||
          draft.CutWithinNode(w) != draft.CutWithinNode(weights[0])) {
        return false;
      }
    }
  }
  return true;
}

// A block that goes to another stage is as it was.
TEST(Folded, LeavesEqualLayersAlike) {
  const Graph graph = MlpGraph(6, 4, 4, 4, 8, 16);
  for (const bool folded : {true, false}) {
    int kept = 0;
    int unlike = 0;
    int cut_within = 0;  // nodes
    for (const auto& [name, text] :
         {std::pair("local-cpu:4", "tp=2,zero=1"),
          {"local-cpu:4", "pp=2,tp=2"},
          {"local-cpu:4", "pp=2,mbs=2"},
          {"dgx-a100-80gb:2x2", "zero=3,zero-group=node"}}) {
      const Cluster cluster = MakeCluster(name).value();
      const SearchSpace space(graph, cluster);
      Draft draft(space, Uniform(space, text));
      draft.Fold(folded);
      Rng rng(3);
      for (int i = 0; i < 1000; ++i) {
        const Move& move = DrawMove(Moves(), rng);
        if (move.name == "stage-boundary" || move.name == "stage-count") {
          continue;
        }
        if (!move.Propose(draft, rng)) continue;
        draft.Keep();
        ++kept;
        unlike += EqualLayersAreAlike(space, draft) ? 0 : 1;
        cut_within += draft.CutWithinNode(0) ? 1 : 0;
      }
    }
    EXPECT_GT(kept, 100);
    EXPECT_GT(cut_within, 20);
    if (folded) {
      EXPECT_EQ(unlike, 0);
    } else {
      EXPECT_GT(unlike, 100);
    }
  }
}

// A move without its ratio.
template <const char* kName>
std::optional<double> ForgetRatio(Draft& draft, Rng& rng) {
  auto log_ratio = (*FindMove(kName))->edit(draft, rng);
  if (log_ratio.has_value()) log_ratio = 0;
  return log_ratio;
}

// The contract must see a move that is out of balance: all that have a ratio,
// without it.
TEST(MoveContractItself, CatchesForgottenRatios) {
  static constexpr char kAxisRole[] = "axis-role";
  static constexpr char kChunks[] = "chunks";
  static constexpr char kSplitPair[] = "split-pair";
  static constexpr char kStageCount[] = "stage-count";
  for (const Move& forgets :
       {Move{kAxisRole, "", 1, ForgetRatio<kAxisRole>},
        Move{kChunks, "", 1, ForgetRatio<kChunks>},
        Move{kSplitPair, "", 1, ForgetRatio<kSplitPair>},
        Move{kStageCount, "", 1, ForgetRatio<kStageCount>}}) {
    EXPECT_GT(JudgeFromMany(forgets).worst, 5) << forgets.name;
  }
}

TEST(MoveContractItself, CatchesALostWay) {
  static const Move& microbatches = **FindMove("microbatches");
  // Drops half of the ways to fewer microbatches.
  const Move leans = {
      "leans", "", 1, [](Draft& draft, Rng& rng) -> std::optional<double> {
        const int before = draft.plan().microbatches;
        const auto log_ratio = microbatches.edit(draft, rng);
        if (log_ratio.has_value() && draft.plan().microbatches < before &&
            rng.Below(2) == 0) {
          return std::nullopt;
        }
        return log_ratio;
      }};
  EXPECT_GT(JudgeFromMany(leans).worst, 5);
}

std::vector<std::string> MoveNames() {
  std::vector<std::string> names;
  for (const Move& move : Moves()) names.emplace_back(move.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, MoveContract, ::testing::ValuesIn(MoveNames()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace tessera
