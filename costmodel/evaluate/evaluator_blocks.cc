// Evaluator: the blocks and stages of a plan, from what is remembered.

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/evaluate/surroundings.h"
#include "planner/lower/concurrent_streams.h"
#include "planner/lower/lower.h"
#include "planner/lower/needs_norm.h"

namespace tessera {

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

// The fewest of the plan's decisions that tell programs apart.
std::array<int, kProgramKinds> Evaluator::SeenBy(
    const BlockSetting& setting, const LoweringContext& context) const {
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

  std::array<int, kProgramKinds> seen;
  const auto set = [&](int number, std::initializer_list<ProgramKind> kinds) {
    for (ProgramKind kind : kinds) seen[static_cast<size_t>(kind)] = number;
  };
  set(forward, {ProgramKind::kBegin, ProgramKind::kForward});
  set(backward, {ProgramKind::kBackward, ProgramKind::kBackwardInput});
  set(weight, {ProgramKind::kBackwardWeight});
  set(reduce,
      {ProgramKind::kBackwardReduce, ProgramKind::kBackwardWeightReduce});
  set(stored, {ProgramKind::kTie});
  set(update, {ProgramKind::kNorm, ProgramKind::kUpdate});
  return seen;
}

Evaluator::BlockPtr Evaluator::FindPrograms(const BlockSetting& setting,
                                            Programs& programs) const {
  const LoweringContext& context = programs.context();
  const std::array<int, kProgramKinds> seen = SeenBy(setting, context);
  const bool begins_step = std::ranges::any_of(
      setting.shape->forward,
      [&](NodeId id) { return graph_.node(id).op->once_per_step; });

  auto made = std::make_shared<Block>();
  bool lowered = false;
  IntKey key;
  for (ProgramKind kind :
       KindsOf(setting.splits, context.plan().microbatches)) {
    if (kind == ProgramKind::kBegin && !begins_step) continue;
    const auto k = static_cast<size_t>(kind);
    const ProgramPtr program =
        FindProgram(seen[k], kind, setting, programs, lowered);
    key.push_back(program->number);
    made->priced.programs[k] = {program, &program->priced};
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

}  // namespace tessera
