#pragma once
// UniformBound: a lower bound of a uniform strategy's score, from tables that
// the strategies of a space share.
//
// A step takes as long as the longest path through its tasks, so the length of
// any path is a bound from below. A device's peak is no less than what it holds
// at any moment. Both are found here without a plan.
//
// Quick bound, in a microsecond: for each stage s of p, the path that waits for
// the pipeline to fill, follows the stage's compute stream through all m
// microbatches, drains the pipeline, and ends with the first stage's optimizer:
//
//   fill(s)  + m (F(s) + B(s)) + max(drain(s) + U(0), U(s))
//   fill(s)  = sum of F'(i) over the first chunks of stages i < s
//   drain(s) = the same sum of B'(i)
//
// F(s) is the time from when the compute stream begins a forward of all the
// stage's chunks to when it ends it, exposed collectives of activations
// included; F'(i) is that from a chunk's input to its output. Where backwards
// are split the gradients of weights W(s) join B(s), and as many of them as the
// schedule puts off behind its last gradients of activations
// (PipelineSchedule::put_off) run beside the drain in place of before it.
//
// Loose bound: of a strategy that runs forward again the quick bound of the one
// that does not, and what its stages store. What runs again is compute and
// collectives more on the same paths. So a sweep needs the tables of strategies
// that recompute only where these would be fast if that cost nothing.
//
// Close bound, in tens of microseconds: the same chunks walked in the order of
// the schedule, one microbatch after the other, with the time that a chunk's
// output takes over the network to the next stage.
//
// Each block is a max-plus matrix (block_cost.h) of the times at which the
// compute stream and the block's output are free as functions of those at which
// the stream and the input were (stage.h has the same for whole stages), and a
// chunk's is the product of its blocks' matrices: a path, for each entry is the
// length of one.
//
// Replicas. The gathers and reductions of one stage follow each other on one
// stream, so a stage takes no less than all of them: of every microbatch the
// gathers of ZeRO-3, of what each pass reads, and the reductions of ZeRO-2 and
// 3; of a step the reductions of ZeRO-0 and 1 of the first chunk, which begin
// with its last backward, and the return of what ZeRO-1 and 2 update. Of B
// bytes that the ranks of a host share with those of H - 1 others, (H - 1) / H
// enter each host (Chan et al. 2007, table of lower bounds), twice for a sum
// that all need unless switches add; the links to the network that their routes
// take are the limit. Where hosts have unlike numbers of the n copies of a
// part, one that has k of them takes in (n - k) / n. Of a sum that all need
// rings bring it twice that, but trees, to which ranks of one host are as one,
// do not: there 2 (H - 1) / H enter the average host, since H - 1 messages make
// a sum of H and as many bring it to all. So does (n - 1) / n of n devices,
// over all links that each has. With measured collectives none of this counts.
//
// Memory. What a stage stores, and the activations of the (chunk, microbatch)
// pairs that have run forward when the first backward starts
// (PipelineSchedule::ahead), and the highest point of that backward's first
// block. What ZeRO cuts counts as cut over all copies of the weight.
//
// Blocks are lowered and priced in a plan of as many devices as one replica of
// a layer has (dp = pp = 1): a stage's tasks have the same shapes there, so the
// same prices, for each combination of tp, cp, ep, microbatch, recompute and
// what else splits a layer. Blocks that repeat are left out of its graph
// (planner/ir/short_graph.h).
//
// Offloading. What lies in the host's memory or in files is none of the
// device's. In place of the optimizer on the device comes that on the host,
// behind the last gradients where their norm clips them. Each of the streams
// that serve the tiers is a bound, too: the host's sums and updates, copies in
// and out, files read and written. Of unlike hosts that with fewest devices
// serves each fastest.
//
// Unlike devices. A sample passes, in each stage, the replica that has it: each
// such chain of replicas, on devices of their types and with their samples, is
// a path of its own, and the slowest counts. Tables have
// microbatches of sizes that the batch is a multiple of: of other shares that
// of the next smaller size. A stage lacks memory where the least lucky chain's
// does.
//
// Networks. Hosts that are alike, but hang on unlike places of the network (the
// leaves of a fat tree), count as if one switch joined them (one_switch.h). Of
// hosts that are still unlike, as where one has fewer devices, a replica of a
// layer counts as where it lies best; unlike devices count as the best where a
// replica's ranks are not neighbours.
//
// Left out, so that the bound is below: what links that ranks of a host share
// limit, and sends within a host; all latencies of exchanges between replicas;
// the optimizer where ZeRO cuts its state; the sum of squares' reduction;
// collectives wherever ranks are laid so that a layer's replica is not a block
// of neighbours; plans of one microbatch where gradients of others are added
// apart; whatever the table cannot know because a strategy offloads
// activations, is rooted, splits branches or has a table of actions: these have
// the bound of no time and no memory.
//
// Estimates. Of a graph of many unlike blocks tables take as long as prices. Of
// a sample of its blocks (block_sample.h), each in place of those around it,
// they do not: then nothing here is a bound, but says which strategies to price
// first.
//
// Thread-safe.

#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "costmodel/evaluate/block_cost.h"
#include "costmodel/evaluate/block_template.h"
#include "costmodel/memo.h"
#include "costmodel/price.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/ir/short_graph.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/strategy.h"
#include "planner/schedule/pipeline_schedule.h"
#include "planner/search/objective.h"

namespace tessera {

class UniformBound {
 public:
  // Bounds of all blocks, or estimates from a sample of them.
  enum class Blocks { kAll, kSample };

  // `profile` may be null. `graph` is differentiated; the three outlive this,
  // unchanged.
  UniformBound(const Graph& graph, const Cluster& cluster,
               const ProfileDb* profile, const TrainingOptions& options,
               Blocks blocks = Blocks::kAll);

  // Blocks that tables have, one by one.
  int64_t blocks() const { return std::ssize(short_.graph.blocks); }

  // `index` is of the constructor's graph.
  Score Of(const GraphIndex& index, const Strategy& strategy,
           Objective::Bound bound) const;

  // Objective::LayerCosts, from the same tables. A reduction to parts among the
  // ranks that hold a weight alike, or a gather from parts, takes half of their
  // all-reduce; experts count as all other weights.
  // Of replicas on unlike devices the most counts.
  std::vector<LayerCost> LayerCosts(const Strategy& strategy,
                                    DeviceId first) const;

 private:
  using BlockCosts = std::vector<BlockCost>;  // by block of the short graph

  // A chunk of a stage.
  struct Position {
    Passage forward;
    Passage backward;
    int64_t weight = 0;
    int64_t forward_bytes = 0;  // that it sends on
    int64_t backward_bytes = 0;
  };
  struct StageCost {
    int64_t forward = 0;  // all chunks, for each microbatch
    int64_t backward = 0;
    int64_t weight = 0;
    int64_t fill = 0;
    int64_t drain = 0;
    int64_t update = 0;
    int64_t kept = 0;  // by the chunk that keeps least
    int64_t backward_peak = 0;
    std::array<int64_t, 3> stored = {};
    std::array<double, 3> cut = {};
    std::array<int64_t, 2> exchanged = {};
    int64_t gathered = 0;
    Bytes memory;                 // of a device of it, the most
    int64_t first_gradients = 0;  // of those exchanged, of the first chunk
  };
  struct Pipeline {
    std::vector<Position> positions;
    std::vector<StageCost> stages;
  };
  // What tells replicas of a layer apart: the types of their devices
  // (ReplicaSetting::types) and the samples of a microbatch.
  struct Replica {
    uint64_t types = 0;
    int samples = 0;
    auto operator<=>(const Replica&) const = default;
  };
  using Chain = std::vector<Replica>;  // by stage: what some samples pass
  struct Held {
    Replica replica;
    int64_t samples = 0;  // of a microbatch, by all its ranks
  };
  struct Placement {
    std::vector<Chain> chains;  // that differ; none where that is not known
    std::vector<int> starts;    // of positions, their first blocks
  };
  // Setting::exchange of what each rank gathers or leaves with one, and of each
  // time that a sum which all need crosses to a host.
  struct Exchange {
    double once = 0;
    double sum = 0;
  };
  // What a strategy leaves open, and its tables.
  struct Setting {
    const PipelineSchedule* schedule = nullptr;
    PipelineShape shape;
    int64_t dp = 1;
    const std::vector<Pipeline>* pipelines = nullptr;  // by chain
    const Pipeline* pipeline = nullptr;  // of these the one that is looked at
    // Seconds in which a byte of each rank of a stage can be gathered from all
    // data-parallel replicas, or its sum be left with one of them; and in which
    // a byte of each replica can go to a stage on other hosts.
    double exchange = 0;
    double device_exchange = 0;  // the same, by what each device takes in
    double onward = 0;
    int64_t step = 0;  // ranks from one stage to the next
    // In place of `exchange`, by stage, where the hosts of a stage do not have
    // as many of its replicas each.
    const std::vector<Exchange>* exchanges = nullptr;

    Exchange ExchangeOf(size_t stage) const {
      return exchanges == nullptr ? Exchange{exchange, exchange}
                                  : (*exchanges)[stage];
    }
  };

  using Key = std::array<uint64_t, 3>;
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  template <typename T>
  using Table = Memo<T, Key, KeyHash>;

  // What tells a strategy's block costs from another's.
  static Key KeyOf(const Strategy& strategy, bool comm, bool splits,
                   uint64_t types);
  const BlockCosts& CostsOf(const Strategy& strategy, bool splits,
                            uint64_t types = 0) const;
  // An all-reduce of so many bytes among the replicas of a stage that begins
  // with a device.
  double AllReduce(const Strategy& strategy, DeviceId first,
                   int64_t bytes) const;
  // Of stages whose replicas hold the samples of a microbatch one after
  // another, the chains that differ.
  static std::vector<Chain> ChainsOf(
      const std::vector<std::vector<Held>>& stages);
  // REQUIRES: a replica's ranks are neighbours.
  Placement PlacementOf(const GraphIndex& index,
                        const Strategy& strategy) const;
  // Of all chains; none where the tables do not know them.
  std::vector<Pipeline> PipelinesOf(const GraphIndex& index,
                                    const Strategy& strategy,
                                    bool splits) const;
  // Of one, where positions begin with the blocks `starts`.
  std::optional<Pipeline> PipelineOf(const Strategy& strategy, bool splits,
                                     const std::vector<int>& starts,
                                     const Chain& chain) const;
  void SetBandwidths(const Router& router);
  void SetExchanges(const Strategy& strategy, Setting& setting) const;
  // By stage, where replicas are `stride` ranks apart and stages `step`.
  std::vector<Exchange> ExchangesOf(const Strategy& strategy, int64_t dp,
                                    int64_t stride, int64_t step) const;
  // Nothing where the tables do not know the strategy.
  std::optional<Setting> SettingOf(const GraphIndex& index,
                                   const Strategy& strategy) const;
  int64_t UpdateOf(const Strategy& strategy, const Setting& setting,
                   size_t stage) const;
  double StateBytes(const Strategy& strategy, const Setting& setting,
                    size_t stage) const;
  int64_t OnHost(double bytes) const;
  int64_t TierTime(const Strategy& strategy, const Setting& setting,
                   size_t stage) const;
  int64_t Formula(const Strategy& strategy, const Setting& setting) const;
  int64_t Walk(const Strategy& strategy, const Setting& setting) const;
  // Of bytes that each rank of a stage gathers, or leaves the sum of with one,
  // and of those whose sums all need.
  int64_t ExchangeTime(const Setting& setting, size_t stage, double bytes,
                       double summed = 0) const;
  int64_t ReductionEnd(const Strategy& strategy, const Setting& setting,
                       size_t stage, int64_t begin) const;
  // Bytes that the stage lacks which lacks most, by what it stores, or by that
  // with its activations; negative: what is left.
  double LackingStored(const Strategy& strategy, const Setting& setting) const;
  double LackingAtPeak(const Strategy& strategy, const Setting& setting) const;
  double LackingOfHosts(const Strategy& strategy, const Setting& setting,
                        MemoryTier tier) const;
  // Of a step of so many picoseconds, on devices that lack so many bytes.
  Score ScoreFor(const Strategy& strategy, const Setting& setting, int64_t time,
                 double lacking) const;

  const std::optional<Cluster> one_switch_;  // in place of its network
  const Cluster& cluster_;
  const ShortGraph short_;
  const std::vector<int> stands_;  // SampleBlocks of it, or empty
  const GraphIndex index_;         // of the short graph
  const LoweringFacts facts_;
  const std::vector<BlockShape> shapes_;
  Pricer pricer_;
  const int host_size_;  // devices of a host, the most
  const int least_host_size_;
  const std::vector<double> most_of_host_;  // MostDevicesByHost
  const Host fastest_host_;
  const bool shared_memory_;  // of some devices and their host
  bool alike_ = false;        // hosts, in themselves and in the network
  bool one_type_ = false;     // of devices
  std::vector<Bytes> memory_of_type_;  // 0: no device is of it
  const bool measured_;                // kernels, by a profile
  const bool clips_;                   // gradients, by the norm of all
  const bool ties_;                    // weights that several blocks read
  // Some weights' gradients are added by a `sum`, unless there is one
  // microbatch (AddsItsGradients).
  const bool adds_apart_;
  // Bytes a second into or out of a host, whichever is more, and how often a
  // sum over hosts crosses that; 0: collectives are measured, or do not cross.
  double host_bandwidth_ = 0;
  std::vector<double> bandwidth_of_host_;  // the same of each; that is the best
  // Bytes a second out of a host from so many neighbours at every so many
  // devices of it, by (neighbours, stride): the links that their routes to such
  // devices of other hosts take. Empty where that is all links.
  std::map<std::pair<int64_t, int64_t>, double> bandwidth_of_;
  int crossings_of_sum_ = 2;
  double device_bandwidth_ = 0;  // the same of a device
  int device_crossings_of_sum_ = 2;
  mutable Table<BlockCosts> blocks_;
  mutable Table<std::vector<Pipeline>> pipelines_;
  mutable Table<std::vector<Exchange>> exchanges_;
  mutable Table<Placement> placements_;
};

}  // namespace tessera
