#include "costmodel/evaluate/evaluator.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>

#include "costmodel/evaluate/all_reduce.h"
#include "costmodel/evaluate/memory_check.h"
#include "costmodel/evaluate/surroundings.h"
#include "costmodel/evaluate/uniform_bound.h"
#include "costmodel/memory/peak_memory.h"
#include "costmodel/simulate/simulator.h"
#include "planner/base/rng.h"
#include "planner/ir/statistics_dtype.h"
#include "planner/lower/concurrent_streams.h"
#include "planner/lower/lower.h"
#include "planner/lower/needs_norm.h"
#include "planner/plan/rooted.h"
#include "planner/plan/sequence_order.h"
#include "planner/plan/stages.h"

namespace tessera {
namespace {

// Of the plans that were simulated, in all (SizeOf).
constexpr size_t kMaxSimulated = 1'000'000;

// Of what is explained, how many times as much is simulated as of one plan
// among many.
constexpr int64_t kMoreExplained = 2;

// How many times less is simulated for each plan that a walk goes to: what
// takes up to a tenth of a second.
constexpr int64_t kLessQuick = 20;

// Tables of so many unlike blocks take some 20 ms each.
constexpr int64_t kMostBounded = 256;

// So many operators, each of every microbatch, take a few milliseconds to
// simulate (docs/search.md): no longer than what folds.
constexpr int64_t kSimulatedFreely = 500;

// Ranks of a kind whose memory is looked at where windows reach.
constexpr size_t kMostRanksOfKind = 8;

// Of every device what was found for its set.
void ListDevices(const Plan& plan, Evaluation& result) {
  const std::vector<DeviceSet> sets = DeviceSets(plan.groups);
  for (size_t s = 0; s < sets.size(); ++s) {
    DeviceMemory& alike = result.devices.emplace_back();
    alike.group = sets[s].name;
    alike.devices = sets[s].devices;
    alike.memory = result.memory[s];
    if (result.host_memory.empty()) continue;
    alike.host = result.host_memory[s];
    alike.file = result.file_memory[s];
  }
}

// Everything that a strategy says of a plan. Taken apart whole: a new field
// does not compile until it has been looked at here. REQUIRES: it has no table
// of actions.
IntKey KeyOf(const Strategy& strategy) {
  const auto& [dp, tp, pp, vp, cp, cp_kind, zigzag, ep, etp, mbs, zero, dp_kind,
               zero_group, bucket, prefetch, tiles, parameter_tier,
               optimizer_tier, gradient_tier, activation_tier,
               offload_directory, by_speed, sp, split_branches, recompute,
               recompute_layers, schedule, actions, order] = strategy;
  const auto pair = [](int64_t a, int64_t b) { return a << 32 | b; };
  IntKey key;
  key.reserve(20);
  key.push_back(pair(dp, tp));
  key.push_back(pair(pp, vp));
  key.push_back(pair(cp, ep));
  key.push_back(pair(mbs, prefetch));
  key.push_back(pair(tiles, recompute_layers));
  key.push_back(pair(zero_group, etp));
  key.push_back(bucket.value);
  int64_t small = zero;
  for (int64_t value :
       {int64_t{zigzag}, static_cast<int64_t>(dp_kind),
        static_cast<int64_t>(parameter_tier),
        static_cast<int64_t>(optimizer_tier),
        static_cast<int64_t>(gradient_tier),
        static_cast<int64_t>(activation_tier), int64_t{by_speed}, int64_t{sp},
        int64_t{split_branches}, static_cast<int64_t>(recompute)}) {
    small = small << 4 | value;
  }
  key.push_back(small);
  auto dimensions = static_cast<int64_t>(order.size());
  for (MeshDimension dimension : order) {
    dimensions = dimensions << 4 | static_cast<int64_t>(dimension);
  }
  key.push_back(dimensions);
  for (const std::string* text : {&schedule, &cp_kind}) {
    key.push_back(static_cast<int64_t>(text->size()));
    for (size_t i = 0; i < text->size(); i += 8) {
      int64_t word = 0;
      for (size_t c = i; c < std::min(i + 8, text->size()); ++c) {
        word = word << 8 | static_cast<unsigned char>((*text)[c]);
      }
      key.push_back(word);
    }
  }
  return key;
}

uint64_t HashOf(const Plan& plan) {
  uint64_t hash = std::hash<std::string>()(plan.schedule);
  const auto add = [&](auto... values) {
    uint64_t mixed = 0;
    ((mixed = mixed * 31 + static_cast<uint64_t>(values)), ...);
    hash = Mix64(hash ^ mixed);
  };
  add(plan.microbatches, plan.bucket_bytes.value, plan.prefetch, plan.zigzag);
  for (const DeviceGroup& group : plan.groups) {
    for (DeviceId device : group.devices) add(device.value);
  }
  for (const OpPlacement& op : plan.ops) {
    uint64_t splits = 0;
    for (AxisSet set : op.axes) splits = splits * 31 + set;
    add(splits, op.group.value, op.chunk, op.recompute, op.rooted, op.tiles,
        op.streamed, op.activation_tier);
  }
  for (const WeightPlacement& weight : plan.weights) {
    add(weight.zero_stage, weight.zero_axes, weight.rooted,
        weight.parameter_tier, weight.optimizer_tier, weight.gradient_tier);
  }
  for (const std::vector<Action>& actions : plan.actions) {
    for (const Action& action : actions) {
      add(action.kind, action.chunk, action.microbatch);
    }
  }
  return hash;
}

// What of a plan takes memory, of some 70 bytes each.
size_t SizeOf(const Plan& plan) {
  size_t size = plan.ops.size() + plan.weights.size();
  for (const DeviceGroup& group : plan.groups) size += group.devices.size();
  for (const std::vector<Action>& actions : plan.actions) {
    size += actions.size();
  }
  return size;
}

// How many blocks ahead parameters are fetched; 0 where none is.
int FetchesAhead(const Plan& plan) {
  const auto is_cut = [](const WeightPlacement& weight) {
    return weight.zero_stage >= 3 && weight.zero_axes != 0;
  };
  return std::ranges::any_of(plan.weights, is_cut) ? plan.prefetch : 0;
}

// Picoseconds of tasks, by the source of their costs.
using TimeBySource = std::array<double, kCostSources>;

double Total(const TimeBySource& time) {
  return std::accumulate(time.begin(), time.end(), 0.0);
}

// What is extrapolated counts as analytical: how far off it is is not known.
SourceShares Shares(const TimeBySource& time) {
  const double total = Total(time);
  if (total == 0) return {0, 0, 1};
  const auto of = [&](CostSource source) {
    return time[static_cast<size_t>(source)] / total;
  };
  return {of(CostSource::kMeasured), of(CostSource::kInterpolated),
          of(CostSource::kExtrapolated) + of(CostSource::kAnalytical)};
}

// A step of tasks that take so long one after another may be longer than a
// Duration holds.
constexpr double kLongest =
    static_cast<double>(std::numeric_limits<int64_t>::max());

// What stands for the price of a plan that has none.
Evaluation Unpriced(const Plan& plan, std::string why) {
  Evaluation unpriced;
  unpriced.memory.resize(DeviceSets(plan.groups).size());
  unpriced.overflow = {std::numeric_limits<int64_t>::max() / 2};
  unpriced.violations.push_back(std::move(why));
  return unpriced;
}
Evaluation TooLong(const Plan& plan, const TimeBySource& time) {
  char days[32];
  std::snprintf(days, sizeof days, "%.0f", Total(time) * 1e-12 / 86'400);
  return Unpriced(plan, "too long to be priced: its tasks take " +
                            std::string(days) + " days, one after another");
}

}  // namespace

Evaluator::Evaluator(const Graph& graph, const Cluster& cluster,
                     const ProfileDb* profile, const TrainingOptions& options,
                     int64_t most_simulated, const Cluster* whole)
    : graph_(graph),
      cluster_(cluster),
      profile_(profile),
      options_(options),
      most_simulated_(most_simulated),
      whole_(whole),
      facts_(graph, cluster, options),
      index_(cluster.stack.memory.communicator > Bytes{}
                 ? std::make_unique<const GraphIndex>(graph)
                 : nullptr),
      pricer_(graph, cluster, profile, PricerOptionsOf(options), whole),
      forms_(FormsOf(facts_, pricer_)) {}

Evaluator::~Evaluator() = default;

const Evaluator::Neighbours& Evaluator::NeighboursFor(int prefetch) const {
  const int blocks = static_cast<int>(graph_.blocks.size());
  const int reach = std::clamp(prefetch, 1, blocks);
  std::lock_guard lock(shapes_mutex_);
  const auto [it, is_new] = shapes_.try_emplace(reach);
  Neighbours& around = it->second;
  if (!is_new) return around;
  around.shapes = ShapesOf(graph_, reach);
  around.dependents.resize(around.shapes.size());
  around.readers.resize(facts_.weights.size());
  for (size_t b = 0; b < around.shapes.size(); ++b) {
    for (int depends : around.shapes[b].depends) {
      around.dependents[static_cast<size_t>(depends)].push_back(
          static_cast<int>(b));
    }
    for (size_t w : around.shapes[b].weights) {
      around.readers[w].push_back(static_cast<int>(b));
    }
  }
  return around;
}

// A number for what the plan decides in a block.
int Evaluator::DecisionsOf(const Plan& plan, const BlockShape& shape) const {
  IntKey key;
  for (NodeId node : shape.forward) {
    const auto& axes = plan.ops[node.index()].axes;
    key.push_back(plan.ops[node.index()].recompute);
    key.push_back(plan.ops[node.index()].tiles);
    key.push_back(plan.ops[node.index()].streamed);
    const size_t factors = graph_.node(node).rule.factors.size();
    // Two axis sets to a number.
    for (size_t f = 0; f < factors; f += 2) {
      key.push_back(static_cast<int64_t>(axes[f]) << 32 |
                    (f + 1 < factors ? axes[f + 1] : 0));
    }
  }
  for (size_t w : shape.weights) {
    key.push_back(plan.weights[w].zero_stage);
    key.push_back(plan.weights[w].zero_axes);
  }
  return decisions_.Get(key, [&] { return numbers_++; });
}

// With one stream reductions wait for all backwards of a pipeline.
int64_t Evaluator::StreamsOf(const Plan& plan, int stages) const {
  return HasConcurrentStreams(cluster_, plan) ? 0 : 1 + (stages > 1);
}

// The template of every block. A block's programs follow from its own
// decisions, those of the blocks around it (BlockShape::depends), the layouts
// of the gradient sums that it reads, and how the groups lie. So a block stays
// as it was `before` where none of these is touched by the change.
std::shared_ptr<const Evaluator::Blocks> Evaluator::BlocksOf(
    const Plan& plan, int prefetch, std::shared_ptr<const Order> order,
    const PlanChange& change, const Blocks* before) const {
  const Neighbours& around = NeighboursFor(prefetch);
  const size_t n = around.shapes.size();
  const bool anew =
      change.whole || before == nullptr || before->prefetch != prefetch;
  auto now =
      anew ? std::make_shared<Blocks>() : std::make_shared<Blocks>(*before);
  std::vector<bool> stale(n, anew);
  const auto look_at = [&](size_t b) {
    const BlockShape& shape = around.shapes[b];
    const OpPlacement& last = plan.ops[shape.forward.back().index()];
    now->groups[b] = last.group;
    now->chunks[b] = last.chunk;
    now->decisions[b] = DecisionsOf(plan, shape);
    for (int dependent : around.dependents[b]) {
      stale[static_cast<size_t>(dependent)] = true;
    }
  };
  if (anew) {
    now->prefetch = prefetch;
    now->groups.resize(n);
    now->chunks.resize(n);
    now->decisions.resize(n);
    now->begins.resize(n);
    now->blocks.resize(n);
    now->classes.assign(plan.groups.size() * plan.groups.size(), -1);
    size_t devices = 0;
    for (const DeviceGroup& group : plan.groups) {
      devices += group.devices.size();
    }
    now->world = {{-1}, CostSource::kMeasured};
    if (NeedsNorm(options_, graph_.dtype) && devices > 1) {
      now->world = WorldReduce(plan);
    }
    for (size_t b = 0; b < n; ++b) look_at(b);
  } else {
    std::vector<bool> seen(n, false);
    const auto look_once = [&](int block) {
      const auto b = static_cast<size_t>(block);
      if (!seen[b]) look_at(b);
      seen[b] = true;
    };
    for (NodeId node : change.nodes) look_once(graph_.node(node).block);
    for (size_t w : change.weights) {
      for (int block : around.readers[w]) look_once(block);
    }
  }
  now->order = std::move(order);
  // What begins a group has its once-a-step work.
  std::vector<bool> begun(plan.groups.size(), false);
  for (size_t b = 0; b < n; ++b) {
    const size_t group = now->groups[b].index();
    if (now->begins[b] == begun[group]) stale[b] = true;
    now->begins[b] = !begun[group];
    begun[group] = true;
  }
  FindBlocks(plan, around, stale, *now);
  return now;
}

// Those that are stale; each has the key of just what it depends on, and only
// what is not known yet is lowered.
void Evaluator::FindBlocks(const Plan& plan, const Neighbours& around,
                           std::vector<bool>& stale, Blocks& now) const {
  const std::vector<BlockShape>& shapes = around.shapes;
  const std::vector<GroupId>& groups = now.groups;
  const std::vector<int>& chunks = now.chunks;
  const std::vector<int>& decisions = now.decisions;
  const std::vector<bool>& splits = now.order->splits;
  std::vector<BlockPtr>& blocks = now.blocks;
  const int prefetch = now.prefetch;
  const size_t n = shapes.size();
  const size_t count = plan.groups.size();
  const auto class_of = [&](GroupId a, GroupId b) {
    int& number = now.classes[a.index() * count + b.index()];
    if (number < 0) {
      number = pricer_.ClassOf(plan.groups[a.index()],
                               a == b ? nullptr : &plan.groups[b.index()]);
    }
    return number;
  };

  const int64_t streams =
      StreamsOf(plan, static_cast<int>(now.order->stages.size()));
  std::optional<LoweringContext> context;
  std::optional<Programs> programs;
  size_t known_from = n;  // the context knows the sums of these and behind
  IntKey key;
  for (size_t b = n; b-- > 0;) {
    if (!stale[b]) continue;
    const BlockShape& shape = shapes[b];
    const GroupId own = groups[b];
    key.clear();
    key.push_back(shape.wiring);
    key.push_back(plan.microbatches);
    key.push_back(plan.bucket_bytes.value);
    key.push_back(prefetch);
    key.push_back(plan.zigzag);
    key.push_back(streams);
    key.push_back(splits[own.index()]);
    key.push_back(now.begins[b]);
    key.push_back(now.position.value_or(-1));
    std::vector<GroupId> distinct;
    std::vector<int> chunk_of;  // the first block's of each of these
    for (int depends : shape.depends) {
      const auto d = static_cast<size_t>(depends);
      auto at = std::find(distinct.begin(), distinct.end(), groups[d]);
      if (at == distinct.end()) {
        key.push_back(class_of(own, groups[d]));
        distinct.push_back(groups[d]);
        chunk_of.push_back(chunks[d]);
        at = std::prev(distinct.end());
      }
      const auto number = static_cast<size_t>(at - distinct.begin());
      key.push_back(at - distinct.begin());
      key.push_back(chunks[d] - chunk_of[number]);
      key.push_back(decisions[d]);
      if (d > b) key.push_back(blocks[d]->sums);
    }
    BlockPtr block = blocks_.Get(key, [&]() -> BlockPtr {
      if (!context) {
        context.emplace(facts_, plan);
        programs.emplace(*context);
      }
      for (; known_from > b + 1; --known_from) {
        const std::vector<TensorId>& sums = shapes[known_from - 1].sums;
        for (size_t i = 0; i < sums.size(); ++i) {
          context->Assume(sums[i], blocks[known_from - 1]->laid[i]);
        }
      }
      BlockSetting setting;
      setting.block = static_cast<int>(b);
      setting.shape = &shape;
      setting.begins = now.begins[b];
      setting.splits = splits[own.index()];
      setting.prefetch = prefetch;
      setting.streams = streams;
      setting.position = now.position;
      setting.number_of = [&](GroupId group) -> int64_t {
        const auto at = std::find(distinct.begin(), distinct.end(), group);
        TESSERA_CHECK(at != distinct.end()) << "a group that is not around";
        return at - distinct.begin();
      };
      setting.class_of = [&](GroupId group) { return class_of(own, group); };
      return FindPrograms(setting, *programs);
    });
    // Earlier blocks follow the gradient sums.
    if (blocks[b] != nullptr && blocks[b]->sums != block->sums) {
      for (int dependent : around.dependents[b]) {
        stale[static_cast<size_t>(dependent)] = true;
      }
    }
    blocks[b] = std::move(block);
  }
}

// The programs of a block, each by just what it sees of the plan.
Evaluator::BlockPtr Evaluator::FindPrograms(const BlockSetting& setting,
                                            Programs& programs) const {
  const LoweringContext& context = programs.context();
  const Plan& plan = context.plan();
  const Surroundings around(context, setting.block, *setting.shape,
                            setting.prefetch, setting.number_of,
                            setting.class_of);
  enum Sight : int64_t {
    kForward,
    kBackward,
    kWeight,
    kStored,
    kReduce,
    kUpdate
  };
  const int64_t group_class =
      setting.class_of(context.group_of_block(setting.block));
  const int64_t position = setting.position.value_or(-1);
  // In which order a sequence lies is seen where it is split.
  const bool splits_sequence =
      std::ranges::any_of(setting.shape->forward, [&](NodeId id) {
        const Node& node = graph_.node(id);
        const OpPlacement& op = plan.ops[id.index()];
        const auto axes = [&](char letter) {
          const int factor = node.rule.FactorOf(letter);
          return factor < 0 ? 0 : op.axes[static_cast<size_t>(factor)];
        };
        return node.op->op_class == OpClass::kAttention &&
               (axes(kSequenceFactor) | axes(kKeyFactor) | op.streamed) != 0;
      });
  const int form = forms_[static_cast<size_t>(setting.block)];
  const auto begin = [&](Sight sight) -> IntKey {
    return {sight,
            form,
            group_class,
            position,
            setting.streams,
            plan.microbatches,
            splits_sequence ? plan.zigzag : 0};
  };
  const auto append_splits = [&](IntKey& key) {
    for (NodeId node : setting.shape->forward) {
      const OpPlacement& op = plan.ops[node.index()];
      key.push_back(static_cast<int64_t>(op.tiles) << 32 | op.streamed);
      const auto factors = std::ssize(graph_.node(node).rule.factors);
      key.insert(key.end(), op.axes.begin(), op.axes.begin() + factors);
    }
  };
  IntKey key = begin(kForward);
  append_splits(key);
  around.AppendForward(key);
  const int forward = NumberOf(key);
  key = begin(kBackward);
  append_splits(key);
  for (NodeId node : setting.shape->forward) {
    key.push_back(plan.ops[node.index()].recompute);
  }
  around.AppendBackward(
      setting.splits ? ActionKind::kBackwardInput : ActionKind::kBackward, key);
  const int backward = NumberOf(key);
  int weight = backward;
  if (setting.splits) {
    key = begin(kWeight);
    around.AppendBackwardWeight(key);
    weight = NumberOf(key);
  }
  key = {kStored, form, group_class, position, setting.streams};
  around.AppendUpdate(key);
  const int stored = NumberOf(key);
  const int reduce = NumberOf({kReduce, weight, stored});
  const int update = NumberOf({kUpdate, stored, setting.begins});
  const bool begins_step = std::ranges::any_of(
      setting.shape->forward,
      [&](NodeId id) { return graph_.node(id).op->once_per_step; });

  auto made = std::make_shared<Block>();
  bool lowered = false;
  key.clear();
  for (ProgramKind kind : KindsOf(setting.splits, plan.microbatches)) {
    const auto seen = [&] {
      switch (kind) {
        case ProgramKind::kBegin:
        case ProgramKind::kForward:
          return forward;
        case ProgramKind::kBackward:
        case ProgramKind::kBackwardInput:
          return backward;
        case ProgramKind::kBackwardWeight:
          return weight;
        case ProgramKind::kBackwardReduce:
        case ProgramKind::kBackwardWeightReduce:
          return reduce;
        case ProgramKind::kTie:
          return stored;
        case ProgramKind::kNorm:
        case ProgramKind::kUpdate:
          break;
      }
      return update;
    }();
    if (kind == ProgramKind::kBegin && !begins_step) continue;
    const ProgramPtr program =
        FindProgram(seen, kind, setting, programs, lowered);
    key.push_back(program->number);
    made->priced.programs[static_cast<size_t>(kind)] = {program,
                                                        &program->priced};
  }
  blocks_lowered_ += lowered;
  IntKey sums;
  for (TensorId id : setting.shape->sums) {
    const Layout& layout = made->laid.emplace_back(context.produced(id));
    sums.insert(sums.end(), layout.dims.begin(), layout.dims.end());
    sums.push_back(layout.partial);
    sums.push_back(layout.flat);
  }
  made->sums = sums_.Get(sums, [&] { return numbers_++; });
  key.push_back(made->sums);
  return templates_.Get(key, [&]() -> BlockPtr {
    made->number = numbers_++;
    return made;
  });
}

// What lowering makes of what has number `seen`. Says whether it is `lowered`.
Evaluator::ProgramPtr Evaluator::FindProgram(int seen, ProgramKind kind,
                                             const BlockSetting& setting,
                                             Programs& programs,
                                             bool& lowered) const {
  const IntKey key = {seen, static_cast<int64_t>(kind)};
  const Bytes bucket = programs.context().plan().bucket_bytes;
  const auto find = [&]() -> ProgramPtr {
    const auto it = programs_.find(key);
    if (it == programs_.end()) return nullptr;
    for (const ProgramPtr& program : it->second) {
      if (program->priced.least_bucket <= bucket &&
          bucket <= program->priced.most_bucket) {
        return program;
      }
    }
    return nullptr;
  };
  {
    std::shared_lock lock(programs_mutex_);
    if (ProgramPtr known = find(); known != nullptr) return known;
  }
  auto made = std::make_shared<Program>();
  made->priced = MakeTemplate(pricer_, programs, setting.block, *setting.shape,
                              kind, setting.position);
  lowered = true;
  std::unique_lock lock(programs_mutex_);
  // The first of two threads that make the same wins, as in Memo.
  if (ProgramPtr known = find(); known != nullptr) return known;
  if (programs_.size() >= kMaxPrograms) programs_.clear();
  made->number = numbers_++;
  return programs_[key].emplace_back(std::move(made));
}

int Evaluator::NumberOf(const IntKey& key) const {
  return seen_.Get(key, [&] { return numbers_++; });
}

Evaluator::NumberedStage Evaluator::StageOf(const std::vector<BlockPtr>& blocks,
                                            const std::vector<BlockShape>& all,
                                            int prefetch,
                                            const StepStage& stage, bool splits,
                                            int microbatches) const {
  // Blocks know the number of microbatches and whether backwards are split, and
  // their wiring, numbered for each prefetch, with which blocks they share a
  // tensor.
  IntKey key = {prefetch};
  for (size_t i = 0; i < stage.blocks.size(); ++i) {
    const auto b = static_cast<size_t>(stage.blocks[i]);
    const int64_t behind_first = stage.blocks[i] - stage.blocks[0];
    const int64_t wiring = all[b].wiring;
    key.push_back(wiring << 32 | blocks[b]->number);
    key.push_back(behind_first << 32 | stage.chunks[i]);
  }
  const auto make = [&] {
    std::vector<StageMember> members;
    for (size_t i = 0; i < stage.blocks.size(); ++i) {
      const auto b = static_cast<size_t>(stage.blocks[i]);
      members.push_back({&blocks[b]->priced, &all[b], stage.chunks[i]});
    }
    return NumberedStage{numbers_++, MakeStage(members, splits, microbatches)};
  };
  return stages_.Get(key, make, stage.blocks.size());
}

// Of stage `number` of the plan.
MemoryUse Evaluator::PeakOf(const NumberedStage& stage, const Order& order,
                            size_t number, int microbatches) const {
  const auto find = [&] {
    return StagePeak(*stage.stage, order.stages[number],
                     order.stage_steady[number], microbatches);
  };
  if (order.number < 0) return find();
  const IntKey key = {stage.number, order.number, static_cast<int64_t>(number)};
  return peaks_.Get(key, find);
}

// Shards of one kind differ by what does not divide evenly, of which the last
// has most, and of images by what windows reach into their neighbours'.
std::vector<KindMemory> Evaluator::MemoryByKindOf(const Plan& plan,
                                                  const Blocks& blocks,
                                                  const StepStage& stage,
                                                  size_t s,
                                                  const DeviceSet& set) const {
  const Neighbours& around = NeighboursFor(blocks.prefetch);
  const std::vector<DeviceId>& ranks = plan.groups[s].devices;
  const bool windows = std::ranges::any_of(
      graph_.nodes, [](const Node& node) { return node.op->windows; });
  std::vector<KindMemory> memory;
  for (DeviceSet& kind : KindsByShare(cluster_, plan.groups, set)) {
    std::vector<DeviceId> some = {kind.devices.back()};
    const size_t n = kind.devices.size();
    const size_t more = windows ? std::min(n, kMostRanksOfKind) : 0;
    for (size_t i = 0; i < more; ++i) {
      some.push_back(kind.devices[i * n / more]);
    }
    MemoryUse most;
    for (const DeviceId device : some) {
      Blocks own = blocks;
      own.position =
          static_cast<int>(std::ranges::find(ranks, device) - ranks.begin());
      std::vector<bool> stale(own.blocks.size(), false);
      for (const int b : stage.blocks) stale[static_cast<size_t>(b)] = true;
      FindBlocks(plan, around, stale, own);
      const NumberedStage numbered =
          StageOf(own.blocks, around.shapes, own.prefetch, stage,
                  own.order->splits[s], plan.microbatches);
      const MemoryUse use = PeakOf(numbered, *own.order, s, plan.microbatches);
      if (use.total > most.total) most = use;
    }
    memory.push_back({std::move(kind), most});
  }
  return memory;
}

std::shared_ptr<const Evaluator::Order> Evaluator::OrderOf(
    const Plan& plan) const {
  const std::pair key(plan.schedule, ShapeOf(graph_, plan));
  // A table is the plan's own.
  const bool remember = plan.actions.empty();
  if (remember) {
    std::lock_guard lock(orders_mutex_);
    if (auto it = orders_.find(key); it != orders_.end()) return it->second;
  }
  auto order = std::make_shared<Order>();
  order->stages = OrdersOf(graph_, plan);
  order->actions = GlobalOrder(order->stages, key.second);
  order->steady = FindSteadyPhase(order->actions);
  for (const std::vector<Action>& actions : order->stages) {
    std::vector<StageAction> alone;
    for (const Action& action : actions) alone.push_back({0, action});
    order->stage_steady.push_back(FindSteadyPhase(alone));
    const auto count = [&](ActionKind kind) {
      return std::count_if(
          actions.begin(), actions.end(),
          [&](const Action& action) { return action.kind == kind; });
    };
    order->splits.push_back(count(ActionKind::kBackwardInput) > 0);
    if (order->splits.back() && count(ActionKind::kBackward) > 0) {
      order->folds = false;
    }
  }
  // Chunks of one group may leave each other tensors: then it matters in which
  // order they end, which a table does not bind.
  if (!plan.actions.empty() && key.second.chunks > 1) order->folds = false;
  if (!remember) return order;
  order->number = numbers_++;
  std::lock_guard lock(orders_mutex_);
  return orders_.try_emplace(key, std::move(order)).first->second;
}

// The all-reduce of the sum of squares over all devices.
TaskCost Evaluator::WorldReduce(const Plan& plan) const {
  const DeviceGroup world = World(plan);
  Value sum;
  sum.dtype = StatisticsDType(graph_.dtype);
  Task task;
  task.optimizer = true;
  return PriceAllReduce(pricer_, task, sum, world);
}

Evaluation Evaluator::EvaluateBySimulation(const Plan& plan) const {
  const int64_t operators = OperatorsOf(plan);
  if (operators > most_simulated_) {
    return Unpriced(
        plan, "too large to simulate: " + std::to_string(operators) +
                  " operators, more than " + std::to_string(most_simulated_));
  }
  const uint64_t hash = HashOf(plan);
  {
    std::shared_lock lock(simulations_mutex_);
    const auto [begin, end] = simulations_.equal_range(hash);
    for (auto it = begin; it != end; ++it) {
      if (it->second.first == plan) return it->second.second;
    }
  }
  Evaluation result = SimulateAnew(plan);
  std::unique_lock lock(simulations_mutex_);
  simulations_size_ += SizeOf(plan);
  if (simulations_size_ > kMaxSimulated) {
    simulations_.clear();
    simulations_size_ = SizeOf(plan);
  }
  simulations_.emplace(hash, std::pair(plan, result));
  return result;
}

Evaluation Evaluator::SimulateAnew(const Plan& plan) const {
  ++simulated_;
  const TaskGraph tasks = Lower(facts_, plan);
  const std::vector<TaskCost> costs = PriceTasks(pricer_, tasks);
  TimeBySource time = {};
  for (const TaskCost& cost : costs) {
    time[static_cast<size_t>(cost.source)] +=
        static_cast<double>(cost.duration.picoseconds);
  }
  if (Total(time) > kLongest) return TooLong(plan, time);
  Evaluation result;
  result.simulated = true;
  result.step_time = LongestPath(tasks, costs).step_time;
  result.memory = PeakMemory(tasks);
  if (Offloads(plan)) {
    result.host_memory = PeakMemory(tasks, MemoryTier::kHost);
    result.file_memory = PeakMemory(tasks, MemoryTier::kFile);
  }
  result.sources = Shares(time);
  CheckMemoryFits(
      facts_, index_.get(), plan,
      [&](const DeviceSet& set) {
        std::vector<KindMemory> memory;
        for (DeviceSet& kind : DeviceKinds(cluster_, tasks)) {
          if (kind.groups != set.groups) continue;
          const DeviceId one[] = {kind.devices[0]};
          memory.push_back({std::move(kind), PeakMemoryOf(tasks, one)[0]});
        }
        return memory;
      },
      result);
  return result;
}

Evaluation Evaluator::Evaluate(const Plan& plan) const {
  std::shared_ptr<const PlanBasis> basis;
  return EvaluateChange(plan, {true, {}, {}}, basis);
}

Evaluation Evaluator::EvaluateChange(
    const Plan& plan, const PlanChange& change,
    std::shared_ptr<const PlanBasis>& basis) const {
  // Kept alive while its parts are looked at.
  const std::shared_ptr<const PlanBasis> kept = std::move(basis);
  basis = nullptr;
  const auto* before = dynamic_cast<const Blocks*>(kept.get());
  const int prefetch = FetchesAhead(plan);
  const std::vector<BlockShape>& shapes = NeighboursFor(prefetch).shapes;
  // Blocks are folded for one group. Where inputs and losses come from, if that
  // is a root, is not among what tells blocks apart.
  const bool same_order =
      !change.whole && before != nullptr &&
      std::ranges::all_of(change.nodes, [&](NodeId node) {
        const auto b = static_cast<size_t>(graph_.node(node).block);
        const OpPlacement& op = plan.ops[node.index()];
        return op.group == before->groups[b] && op.chunk == before->chunks[b];
      });
  const auto order = same_order ? before->order : OrderOf(plan);
  if (shapes.empty() || !order->folds || UsesRoot(plan) || Offloads(plan) ||
      order->stages.size() < plan.groups.size()) {
    return EvaluateBySimulation(plan);
  }
  const auto now = BlocksOf(plan, prefetch, order, change, before);
  const std::vector<GroupId>& groups = now->groups;
  const std::vector<BlockPtr>& blocks = now->blocks;
  std::vector<StepStage> stages(plan.groups.size());
  for (size_t b = 0; b < shapes.size(); ++b) {
    StepStage& stage = stages[groups[b].index()];
    stage.blocks.push_back(static_cast<int>(b));
    stage.chunks.push_back(now->chunks[b]);
  }
  std::vector<NumberedStage> owners(stages.size());
  for (size_t s = 0; s < stages.size(); ++s) {
    owners[s] = StageOf(blocks, shapes, prefetch, stages[s], order->splits[s],
                        plan.microbatches);
    stages[s].stage = owners[s].stage.get();
    if (!stages[s].stage->exact) return EvaluateBySimulation(plan);
  }

  const TaskCost& world = now->world;
  Evaluation result;
  result.step_time = StepTime(stages, shapes, groups, order->actions,
                              order->steady, plan.microbatches, world.duration)
                         .time;
  TimeBySource time = {};
  if (world.duration >= Duration{}) {
    time[static_cast<size_t>(world.source)] +=
        static_cast<double>(world.duration.picoseconds);
  }
  for (size_t s = 0; s < stages.size(); ++s) {
    const Stage& stage = *owners[s].stage;
    result.memory.push_back(PeakOf(owners[s], *order, s, plan.microbatches));
    const double m = plan.microbatches;
    for (size_t c = 0; c < time.size(); ++c) {
      time[c] += stage.begin.time_by_source[c] + stage.tail.time_by_source[c];
      for (const Stage::Chunk& chunk : stage.chunks) {
        time[c] +=
            m * chunk.forward.time_by_source[c] +
            (order->splits[s] ? m : m - 1) * chunk.backward.time_by_source[c] +
            (m - 1) * chunk.weight.time_by_source[c] +
            chunk.last.time_by_source[c];
      }
    }
  }
  if (Total(time) > kLongest) return TooLong(plan, time);
  result.sources = Shares(time);
  CheckMemoryFits(
      facts_, index_.get(), plan,
      [&](const DeviceSet& set) {
        const size_t s = set.groups[0].index();
        return MemoryByKindOf(plan, *now, stages[s], s, set);
      },
      result);
  basis = now;
  return result;
}

double Evaluator::PricedShare(const Plan& plan) const {
  if (OperatorsOf(plan) <= kSimulatedFreely) return 1;
  const auto stages = static_cast<size_t>(ShapeOf(graph_, plan).stages);
  // What folds takes no longer for more microbatches.
  return stages < plan.groups.size() ? 1.0 / plan.microbatches : 1;
}

std::optional<Score> Evaluator::EvaluateUniform(
    const GraphIndex& index, const Cluster& cluster,
    const Strategy& strategy) const {
  if (!strategy.actions.empty()) {
    return Objective::EvaluateUniform(index, cluster, strategy);
  }
  return uniform_.Get(KeyOf(strategy), [&] {
    return Objective::EvaluateUniform(index, cluster, strategy);
  });
}

Score Evaluator::BoundUniform(const GraphIndex& index, const Strategy& strategy,
                              Bound bound) const {
  return Bounds().Of(index, strategy, bound);
}

std::optional<Score> Evaluator::EstimateUniform(const GraphIndex& index,
                                                const Strategy& strategy,
                                                Bound bound) const {
  const UniformBound* const estimates = Estimates();
  if (estimates == nullptr) return std::nullopt;
  const Score score = estimates->Of(index, strategy, bound);
  // A bound of no time is of what tables do not know.
  if (score.step_time == Duration{}) return std::nullopt;
  return score;
}

std::vector<LayerCost> Evaluator::LayerCosts(const Strategy& strategy,
                                             DeviceId first) const {
  const UniformBound* const estimates = Estimates();
  return (estimates != nullptr ? *estimates : Bounds())
      .LayerCosts(strategy, first);
}

const UniformBound& Evaluator::Bounds() const {
  std::call_once(bound_made_, [&] {
    bound_ = std::make_unique<const UniformBound>(graph_, cluster_, profile_,
                                                  options_);
    if (bound_->blocks() <= kMostBounded) return;
    estimate_ = std::make_unique<const UniformBound>(
        graph_, cluster_, profile_, options_, UniformBound::Blocks::kSample);
  });
  return *bound_;
}

const UniformBound* Evaluator::Estimates() const {
  Bounds();
  return estimate_.get();
}

int64_t Evaluator::OperatorsOf(const Plan& plan) const {
  return std::ssize(graph_.nodes) * plan.microbatches;
}

bool Evaluator::IsTooLargeToExplain(const Plan& plan) const {
  return OperatorsOf(plan) / kMoreExplained > most_simulated_;
}

bool Evaluator::IsQuickToExplain(const Plan& plan) const {
  return OperatorsOf(plan) * kLessQuick <= most_simulated_;
}

std::optional<Duration> Evaluator::QuickSharedStepTime(const Plan& plan) const {
  if (!IsQuickToExplain(plan)) return std::nullopt;
  const TaskGraph tasks = Lower(facts_, plan);
  return Simulate(pricer_, tasks).step_time;
}

Evaluation Evaluator::ExplainUnsimulated(const Plan& plan) const {
  Evaluation result = Evaluate(plan);
  ListDevices(plan, result);
  return result;
}

Evaluation Evaluator::Explain(const Plan& plan, bool share_links) const {
  Evaluation result = Evaluate(plan);
  if (IsTooLargeToExplain(plan) || result.step_time == Duration{}) {
    ListDevices(plan, result);
    return result;
  }
  const TaskGraph tasks = Lower(facts_, plan);
  AddStep(plan, tasks, Simulate(pricer_, tasks, {.share_links = share_links}),
          result);
  return result;
}

Evaluation Evaluator::Explain(const Plan& plan, const TaskGraph& tasks,
                              const Timeline& timeline) const {
  Evaluation result = Evaluate(plan);
  if (IsTooLargeToExplain(plan) || result.step_time == Duration{}) {
    ListDevices(plan, result);
    return result;
  }
  AddStep(plan, tasks, timeline, result);
  return result;
}

void Evaluator::AddStep(const Plan& plan, const TaskGraph& tasks,
                        const Timeline& timeline, Evaluation& result) const {
  result.step_time = timeline.step_time;
  result.breakdown = BreakdownOf(tasks, timeline);
  result.moved = MovedBytes(pricer_, tasks);
  std::vector<DeviceId> devices;  // one of each kind
  const std::vector<DeviceSet> kinds = DeviceKinds(cluster_, tasks);
  for (const DeviceSet& alike : kinds) {
    devices.push_back(alike.devices[0]);
    result.devices.push_back({alike.name, alike.devices, {}, {}, {}});
  }
  auto memory = PeakMemoryOf(tasks, devices);
  AddOverheads(facts_, index_.get(), plan, kinds, memory);
  const auto host = PeakMemoryOf(tasks, devices, MemoryTier::kHost);
  const auto file = PeakMemoryOf(tasks, devices, MemoryTier::kFile);
  for (size_t i = 0; i < devices.size(); ++i) {
    result.devices[i].memory = memory[i];
    result.devices[i].host = host[i];
    result.devices[i].file = file[i];
  }
  if (result.overflow > Bytes{}) {
    const std::vector<DeviceSet> sets = DeviceSets(plan.groups);
    const auto list = [&](const std::vector<MemoryUse>& memory, MemoryTier tier,
                          const std::string& where) {
      const auto fullest = std::max_element(
          memory.begin(), memory.end(),
          [](const auto& a, const auto& b) { return a.total < b.total; });
      if (fullest == memory.end() || fullest->total == Bytes{}) return;
      const DeviceSet& devices =
          sets[static_cast<size_t>(fullest - memory.begin())];
      result.violations.push_back(
          "group " + devices.name + " holds " + where + "at its peak " +
          LargestAtPeakText(tasks, graph_, devices, tier));
    };
    list(result.memory, MemoryTier::kDevice, "");
    list(result.host_memory, MemoryTier::kHost, "on the host ");
    list(result.file_memory, MemoryTier::kFile, "in files ");
  }
}

}  // namespace tessera
