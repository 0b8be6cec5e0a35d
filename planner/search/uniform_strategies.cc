#include "planner/search/uniform_strategies.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "planner/base/divide.h"
#include "planner/plan/recompute.h"
#include "planner/plan/strategy_groups.h"
#include "planner/schedule/action_table.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

// In the order of van der Corput (1935): indices by their bits reversed, so
// that each beginning is spread over the whole.
std::vector<Strategy> Spread(const std::vector<Strategy>& strategies) {
  const int bits = std::bit_width(strategies.size());
  std::vector<Strategy> spread;
  for (size_t i = 0; i < size_t{1} << bits; ++i) {
    size_t reversed = 0;
    for (int b = 0; b < bits; ++b) reversed |= (i >> b & 1) << (bits - 1 - b);
    if (reversed < strategies.size()) spread.push_back(strategies[reversed]);
  }
  return spread;
}

// From so many tokens on a sequence may be cut anyhow. Below, samples and heads
// are enough to share, or where samples are fewer than devices it is cut
// among those that share one; short ones are not.
constexpr int64_t kLongSequence = 32'768;
constexpr int kMostContext = 16;
constexpr int64_t kShortSequence = 4'096;

int64_t MostContext(const SearchSpace& space) {
  const Graph& graph = *space.index.graph;
  int64_t most = space.constraints.MostFixed("cp");
  const int64_t devices = space.devices();
  if (graph.seq_len >= kShortSequence && devices > graph.global_batch) {
    most = std::max(most, devices / std::gcd(devices, graph.global_batch));
  }
  if (graph.seq_len >= kLongSequence) {
    most = std::max<int64_t>(most, kMostContext);
  }
  return most;
}

struct Context {
  int degree = 1;
  std::string kind = "gather";
};

// How `degree` ranks may cut a sequence. Of sequences that are not long there
// are too many other strategies to have each in all ways: OtherContexts.
std::vector<Context> Contexts(const SearchSpace& space, int degree) {
  if (degree == 1) return {{}};
  std::vector<Context> contexts = {{degree}};
  const bool all = space.index.graph->seq_len >= kLongSequence ||
                   space.constraints.MostFixed("cp") > 1;
  if (space.index.has_attention && all) {
    contexts.push_back({degree, "ring"});
    contexts.push_back({degree, "ulysses"});
  }
  return contexts;
}

struct Share {
  int ep = 1;
  int etp = 0;
  Context context;
};

// The experts of the layer that has fewest; 0: there are none.
int64_t FewestExperts(const GraphIndex& index) {
  int64_t fewest = 0;
  for (size_t i = 0; i < index.forward_nodes; ++i) {
    const int f = index.expert_factor[i];
    if (f < 0) continue;
    const int64_t experts = index.extents[i][static_cast<size_t>(f)];
    fewest = fewest == 0 ? experts : std::min(fewest, experts);
  }
  return fewest;
}

// How `replicas` may be shared among experts and cuts of the sequence. Tensor
// ranks have whole of `experts` where there are enough: they exchange less and
// compute alike.
std::vector<Share> Shares(const SearchSpace& space, int64_t experts, int tp,
                          int replicas) {
  std::vector<Share> shares;
  const int64_t most_context = MostContext(space);
  for (int ep : Divisors(replicas, std::max<int64_t>(1, experts))) {
    const int etp = tp > 1 && int64_t{ep} * tp <= experts ? 1 : 0;
    for (int cp : Divisors(replicas / ep, most_context)) {
      for (const Context& context : Contexts(space, cp)) {
        shares.push_back({ep, etp, context});
      }
    }
  }
  return shares;
}

// Rules of thumb. Nodes of so few devices leave hardly anything to split a
// layer over, and their network may well carry it.
constexpr int kFewDevices = 2;
// What a model's heads, columns and vocabulary may still be cut into.
constexpr int kMostBeyond = 64;

// The most tensor ranks that lie within nodes, and that constraints ask for.
int MostTensor(const SearchSpace& space) {
  const int within = space.least_devices_of_node;
  return std::max(within <= kFewDevices ? kMostAcross : within,
                  space.constraints.MostFixed("tp"));
}

// Where layers cannot be shared out evenly, or should not be, as few chunks: a
// rule of thumb.
constexpr int kMostUnevenChunks = 6;

// Chunks of a stage that share out its layers evenly, where layers can be.
std::vector<int> ChunksOf(const SearchSpace& space, int pp) {
  if (pp == 1) return {1};
  const auto [first, last] = Layers(space.index);
  const int64_t most = std::ssize(space.index.graph->blocks) / pp;
  std::vector<int> chunks = Divisors(DivideUp(last - first, pp), most);
  if ((last - first) % pp == 0 && !space.unlike_speeds) return chunks;
  for (int few = 1; few <= std::min<int64_t>(kMostUnevenChunks, most); ++few) {
    if (std::ranges::find(chunks, few) == chunks.end()) chunks.push_back(few);
  }
  return chunks;
}

// `strategy` in each schedule of each number of chunks, at each level of
// recomputation, and on unlike devices with equal work and with work by speed.
std::vector<Strategy> InEachSchedule(const SearchSpace& space,
                                     Strategy strategy) {
  std::vector<Strategy> all;
  for (const int chunks : ChunksOf(space, strategy.pp)) {
    strategy.vp = chunks;
    for (const PipelineSchedule* schedule :
         SchedulesFor({.stages = strategy.pp, .chunks = chunks})) {
      if (strategy.pp > 1) strategy.schedule = schedule->name;
      for (const RecomputeRow& row : RecomputeLevels()) {
        strategy.recompute = row.level;
        for (const bool by_speed : {false, true}) {
          if (by_speed && !space.unlike_speeds) continue;
          strategy.by_speed = by_speed;
          all.push_back(strategy);
        }
      }
      if (strategy.pp == 1) break;
    }
  }
  return all;
}

}  // namespace

std::vector<int> Divisors(int64_t n, int64_t most) {
  std::vector<int> divisors;
  for (int64_t d = 1; d * d <= n; ++d) {
    if (n % d != 0) continue;
    if (d <= most) divisors.push_back(static_cast<int>(d));
    if (d * d < n && n / d <= most) {
      divisors.push_back(static_cast<int>(n / d));
    }
  }
  std::ranges::sort(divisors);
  return divisors;
}

bool IsBalancedByZigzag(const SearchSpace& space, const Strategy& strategy) {
  return space.may_reorder && strategy.cp > 1 &&
         strategy.cp_kind != "ulysses" &&
         space.index.graph->seq_len % (2 * int64_t{strategy.cp}) == 0;
}

std::vector<Strategy> OtherContexts(const SearchSpace& space,
                                    const std::vector<Strategy>& strategies) {
  std::vector<Strategy> others;
  if (!space.index.has_attention) return others;
  for (const Strategy& strategy : strategies) {
    for (const char* kind : {"gather", "ring", "ulysses"}) {
      if (strategy.cp == 1 || strategy.cp_kind == kind) continue;
      Strategy other = strategy;
      other.cp_kind = kind;
      other.zigzag = IsBalancedByZigzag(space, other);
      others.push_back(std::move(other));
    }
  }
  return others;
}

std::vector<Strategy> OtherSchedules(const SearchSpace& space,
                                     const std::vector<Strategy>& strategies) {
  std::vector<Strategy> others;
  std::set<std::string> seen;
  for (const Strategy& strategy : strategies) {
    if (strategy.pp == 1) continue;
    for (Strategy& other : InEachSchedule(space, strategy)) {
      if (!seen.insert(ToString(other)).second) continue;
      others.push_back(std::move(other));
    }
  }
  return others;
}

std::vector<Strategy> WithSamples(const SearchSpace& space, Strategy strategy) {
  std::vector<Strategy> strategies;
  const int64_t batch = space.index.graph->global_batch;
  const int64_t replicas = int64_t{strategy.dp} * strategy.ep;
  if (batch % replicas != 0) return strategies;
  const int64_t samples = batch / replicas;
  const int64_t tokens = std::max<int64_t>(1, space.index.graph->seq_len);
  std::vector<int> sizes;
  for (int size : Divisors(
           samples, std::max<int64_t>(kMostSamples, kMostTokens / tokens))) {
    if (size > kMostSamples && size < 2 * int64_t{sizes.back()}) continue;
    sizes.push_back(size);
  }
  if (tokens == 1 && sizes.back() < samples) {
    sizes.push_back(static_cast<int>(samples));
  }
  for (int mbs : sizes) {
    strategy.mbs = mbs;
    strategies.push_back(strategy);
  }
  return strategies;
}

Strategy WithSchedule(const SearchSpace& space, Strategy strategy) {
  const int64_t samples = int64_t{strategy.mbs} * strategy.dp * strategy.ep;
  const PipelineShape shape = {
      strategy.pp, strategy.vp,
      static_cast<int>(space.index.graph->global_batch / samples)};
  const auto schedule = FindSchedule(strategy.schedule);
  const bool runs =
      strategy.pp > 1 && schedule && Accepts(**schedule, shape).has_value() &&
      ((*schedule)->order != nullptr || ShapeOf(strategy.actions) == shape);
  if (runs) return strategy;
  strategy.vp = 1;
  strategy.schedule = Strategy().schedule;
  strategy.actions.clear();
  return strategy;
}

std::vector<Strategy> UniformStrategies(const SearchSpace& space,
                                        TensorRanks ranks) {
  std::vector<Strategy> strategies;
  const int devices = space.devices();
  const auto blocks = static_cast<int64_t>(space.index.graph->blocks.size());
  const bool beyond = ranks == TensorRanks::kBeyond;
  const int least = beyond ? MostTensor(space) + 1 : 1;
  const int64_t experts = FewestExperts(space.index);
  for (int tp : Divisors(devices, beyond ? kMostBeyond : MostTensor(space))) {
    if (tp < least) continue;
    for (int pp : Divisors(devices / tp, blocks)) {
      const int replicas = devices / tp / pp;
      for (const Share& share : Shares(space, experts, tp, replicas)) {
        for (int zero = 0; zero <= (replicas > 1 ? 3 : 0); ++zero) {
          for (int sp = 0; sp <= (tp > 1 ? 1 : 0); ++sp) {
            Strategy strategy;
            strategy.cp = share.context.degree;
            strategy.cp_kind = share.context.kind;
            strategy.zigzag = IsBalancedByZigzag(space, strategy);
            strategy.dp = replicas / share.ep / share.context.degree;
            strategy.ep = share.ep;
            strategy.etp = share.etp;
            strategy.tp = tp;
            strategy.pp = pp;
            strategy.zero = zero;
            strategy.sp = sp == 1;
            for (const Strategy& each : InEachSchedule(space, strategy)) {
              std::ranges::move(WithSamples(space, each),
                                std::back_inserter(strategies));
            }
          }
        }
      }
    }
  }
  return Spread(strategies);
}

int64_t OperatorsOf(const SearchSpace& space, const Strategy& strategy) {
  const Graph& graph = *space.index.graph;
  return std::ssize(graph.nodes) * graph.global_batch / SamplesOf(strategy);
}

}  // namespace tessera
