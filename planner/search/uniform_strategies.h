#pragma once
// The grid of uniform strategies from which the search starts.

#include <cstdint>
#include <limits>
#include <vector>

#include "planner/plan/strategy.h"
#include "planner/search/search_space.h"

namespace tessera {

// Those of `n` up to `most`, ascending.
std::vector<int> Divisors(int64_t n,
                          int64_t most = std::numeric_limits<int64_t>::max());

// Rules of thumb. Of larger microbatches kernels gain little.
inline constexpr int kMostSamples = 64;
inline constexpr int64_t kMostTokens = 65'536;
inline constexpr int kMostAcross = 8;
enum class TensorRanks { kWithinNodes, kBeyond };

// Uniform strategies, of which most give valid plans: tensor parallelism
// within a node (of nodes with one or two devices up to kMostAcross) or
// beyond that, any pipeline, any split of experts, cuts of sequences (from
// 32,768 tokens on by up to 16 ranks, from 4,096 on where samples are fewer
// than devices), microbatches of up to kMostSamples samples on a replica, and
// of more where they are short (WithSamples), every ZeRO stage where there is
// data parallelism, sequence parallelism where there is tensor parallelism,
// where there is a pipeline every schedule with all numbers of chunks that
// share out the layers evenly, and few where layers cannot be or, on unlike
// devices, should not be. On these each with equal work and with work by speed.
// In a fixed order whose beginnings cover all of them evenly, for who runs out
// of time.
std::vector<Strategy> UniformStrategies(
    const SearchSpace& space, TensorRanks ranks = TensorRanks::kWithinNodes);

// Whether the zigzag order, which costs nothing, evens out the work of causal
// attention on the strategy's context ranks.
bool IsBalancedByZigzag(const SearchSpace& space, const Strategy& strategy);

// Those with context parallelism in each other way: all ranks' keys and values
// gathered, passed round in a ring, or exchanged for heads (Ulysses).
std::vector<Strategy> OtherContexts(const SearchSpace& space,
                                    const std::vector<Strategy>& strategies);

// The pipelines among them in each schedule of one chunk or several, at each
// level of recomputation, and on unlike devices with equal work and with work
// by speed; each once.
std::vector<Strategy> OtherSchedules(const SearchSpace& space,
                                     const std::vector<Strategy>& strategies);

// `strategy` with each possible number of samples in a microbatch up to
// kMostSamples, then, of up to kMostTokens tokens (of samples that are no
// sequences one each), with one of each doubling, and of such with all; none
// where the replicas do not divide the batch.
std::vector<Strategy> WithSamples(const SearchSpace& space, Strategy strategy);

// `strategy` with its schedule where that runs its pipeline, else with one
// chunk a stage and the default schedule: stages that are none need no
// schedule, a row may run other numbers of chunks, and a table of actions runs
// one shape alone. REQUIRES: WithSamples gave it.
Strategy WithSchedule(const SearchSpace& space, Strategy strategy);

// Operators of a step, each of every microbatch: what simulating it goes by.
// REQUIRES: `strategy` is complete.
int64_t OperatorsOf(const SearchSpace& space, const Strategy& strategy);

}  // namespace tessera
