#include "planner/search/draft.h"

#include <algorithm>
#include <utility>

#include "planner/base/check.h"
#include "planner/plan/layers_again.h"
#include "planner/plan/validate.h"

namespace tessera {
namespace {

// Whether two blocks that PlaceBlock cannot tell from each other are on one
// group each and have equal axes there.
bool PlacedAlike(const SearchSpace& space, const Plan& plan, int a, int b) {
  const auto& of_a = space.index.nodes_of_block[static_cast<size_t>(a)];
  const auto& of_b = space.index.nodes_of_block[static_cast<size_t>(b)];
  const GroupId group_a = plan.ops[of_a[0].index()].group;
  const GroupId group_b = plan.ops[of_b[0].index()].group;
  return std::ranges::equal(of_a, of_b, [&](NodeId x, NodeId y) {
    const OpPlacement& p = plan.ops[x.index()];
    const OpPlacement& q = plan.ops[y.index()];
    return p.group == group_a && q.group == group_b && p.axes == q.axes &&
           p.streamed == q.streamed;
  });
}

// Whether a plan may be that of a strategy: false where equal layers or weights
// differ, which is sooner seen than what strategy it could be.
bool MayBeUniform(const SearchSpace& space, const Plan& plan,
                  const std::vector<bool>& within_node) {
  const GraphIndex& index = space.index;
  // Stages on unlike devices may have axes of other shares.
  for (const DeviceGroup& group : plan.groups) {
    if (!std::ranges::equal(group.axes, plan.groups[0].axes, {},
                            &MeshAxis::size, &MeshAxis::size)) {
      return false;
    }
  }
  // Layers are placed by the same roles.
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    const int like = space.placed_like[b];
    if (index.nodes_of_block[b].empty() || like == static_cast<int>(b)) {
      continue;
    }
    if (!PlacedAlike(space, plan, like, static_cast<int>(b))) return false;
  }
  // All weights have one stage, but for those that several groups read, and
  // where weights are cut within nodes those that have nothing to cut there.
  const bool all_cut =
      std::ranges::find(within_node, true) == within_node.end();
  int stage = 0;
  for (const WeightPlacement& weight : plan.weights) {
    stage = std::max(stage, weight.zero_stage);
  }
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    const int own = plan.weights[w].zero_stage;
    if (own != stage && own != HighestZeroStage(index, plan, w, stage) &&
        (own != 0 || all_cut)) {
      return false;
    }
  }
  return LayersAgainOf(index, plan).has_value();
}

}  // namespace

Draft::Fields Draft::FieldsOf(const Plan& plan) {
  return {plan.schedule, plan.microbatches, plan.bucket_bytes, plan.prefetch,
          plan.zigzag};
}

Draft::Draft(const SearchSpace& space, Plan plan)
    : space_(&space),
      plan_(std::move(plan)),
      fields_(FieldsOf(plan_)),
      within_node_(tessera::CutWithinNode(space, plan_)),
      within_of_group_(plan_.groups.size()),
      roles_(space.index.nodes_of_block.size()),
      knows_roles_(space.index.nodes_of_block.size(), false),
      touched_ops_(plan_.ops.size(), 0),
      touched_weights_(plan_.weights.size(), 0),
      cut_blocks_(space.index.nodes_of_block.size(), 0) {
  Plan canonical = plan_;
  regular_ = tessera::SetCuts(space, within_node_, canonical) &&
             canonical.weights == plan_.weights && Allowed(space, plan_);
  if (!regular_) old_plan_ = plan_;
}

const Draft::Pipeline& Draft::pipeline() {
  if (pipeline_.has_value()) return *pipeline_;
  const GraphIndex& index = space_->index;
  Stages stages = StagesOf(*index.graph, plan_);
  Pipeline pipeline;
  pipeline.stages = stages.count();
  for (const OpPlacement& op : plan_.ops) {
    pipeline.chunks = std::max(pipeline.chunks, op.chunk + 1);
  }
  pipeline.blocks.resize(
      static_cast<size_t>(pipeline.stages * pipeline.chunks));
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    const auto& nodes = index.nodes_of_block[b];
    if (nodes.empty()) continue;
    const int position = plan_.ops[nodes[0].index()].chunk * pipeline.stages +
                         stages.of_block[b];
    pipeline.blocks[static_cast<size_t>(position)].push_back(
        static_cast<int>(b));
  }
  pipeline.groups = std::move(stages.groups);
  return pipeline_.emplace(std::move(pipeline));
}

std::vector<int> Draft::BlocksOf(int stage) {
  std::vector<int> blocks;
  const auto stages = static_cast<size_t>(pipeline().stages);
  for (auto at = static_cast<size_t>(stage); at < pipeline_->blocks.size();
       at += stages) {
    blocks.insert(blocks.end(), pipeline_->blocks[at].begin(),
                  pipeline_->blocks[at].end());
  }
  return blocks;
}

const std::optional<AxisRoles>& Draft::roles(int block) {
  const auto b = static_cast<size_t>(block);
  if (!knows_roles_[b]) {
    roles_[b] = RolesOf(space_->index, plan_, block);
    knows_roles_[b] = true;
  }
  return roles_[b];
}

const std::optional<Strategy>& Draft::strategy() {
  if (!knows_strategy_) {
    strategy_ = MayBeUniform(*space_, plan_, within_node_)
                    ? UniformStrategy(space_->index, *space_->cluster, plan_)
                    : std::nullopt;
    knows_strategy_ = true;
  }
  return strategy_;
}

void Draft::Touch(NodeId node) {
  uint64_t& edit = touched_ops_[node.index()];
  if (edit == edit_) return;
  edit = edit_;
  old_ops_.push_back({node, plan_.ops[node.index()]});
}

void Draft::TouchBlock(int block) {
  for (NodeId node : space_->index.nodes_of_block[static_cast<size_t>(block)]) {
    Touch(node);
  }
}

void Draft::TouchWeight(size_t weight) {
  uint64_t& edit = touched_weights_[weight];
  if (edit == edit_) return;
  edit = edit_;
  old_weights_.push_back({weight, plan_.weights[weight], within_node_[weight]});
}

void Draft::CutWithinNode(size_t weight, bool within) {
  TouchWeight(weight);
  within_node_[weight] = within;
}

void Draft::Replace(Plan plan) {
  TESSERA_CHECK(old_ops_.empty() && old_weights_.empty() && !replaced_)
      << "parts are edited already";
  if (regular_) {
    old_plan_ = std::exchange(plan_, std::move(plan));
  } else {
    plan_ = std::move(plan);
  }
  replaced_ = true;
}

bool Draft::Finish() {
  return replaced_ || !regular_ ? FinishWhole() : FinishParts();
}

bool Draft::FinishWhole() {
  change_.whole = true;
  return tessera::SetCuts(*space_, within_node_, plan_) &&
         !SameUpToNames(plan_, *old_plan_) &&
         IsValid(space_->index, *space_->cluster, plan_) &&
         Allowed(*space_, plan_);
}

bool Draft::FinishParts() {
  const GraphIndex& index = space_->index;
  FindNodes();
  if (!SetCuts()) return false;
  for (const OldWeight& old : old_weights_) {
    if (plan_.weights[old.weight] != old.placement) {
      change_.weights.push_back(old.weight);
      read_.push_back(old.weight);
    }
  }
  const Fields fields = FieldsOf(plan_);
  change_.whole = fields != fields_;
  if (!change_.whole && change_.nodes.empty() && change_.weights.empty()) {
    return false;
  }
  if ((moved_ && !MayMove()) ||
      !StaysValid(index, *space_->cluster, plan_, change_.nodes, read_)) {
    return false;
  }
  if (fields.schedule != fields_.schedule ||
      fields.microbatches != fields_.microbatches ||
      fields.zigzag != fields_.zigzag) {
    // Where a block moves, the pipeline is known from before.
    return FieldsAreValid(
               index, *space_->cluster, plan_,
               {pipeline().stages, pipeline().chunks, plan_.microbatches}) &&
           Allowed(*space_, plan_);
  }
  return space_->constraints.empty() ||
         space_->constraints.StillHold(index, *space_->cluster, plan_,
                                       change_.nodes, change_.weights);
}

void Draft::FindNodes() {
  const GraphIndex& index = space_->index;
  for (const OldOp& old : old_ops_) {
    const OpPlacement& op = plan_.ops[old.node.index()];
    const OpPlacement& was = old.placement;
    if (op == was) continue;
    change_.nodes.push_back(old.node);
    if (op.group != was.group || op.chunk != was.chunk) FindMoved(old);
    if (op.axes == was.axes && op.tiles == was.tiles && op.group == was.group) {
      continue;  // weights do not look at the rest
    }
    const Node& node = index.graph->node(old.node);
    for (TensorId operand : node.operands) {
      const int weight = space_->weight_of_tensor[operand.index()];
      if (weight >= 0) read_.push_back(static_cast<size_t>(weight));
    }
    const auto block = static_cast<size_t>(node.block);
    if (cut_blocks_[block] == edit_) continue;
    cut_blocks_[block] = edit_;
    const auto& weights = space_->weights_of_block[block];
    cut_.insert(cut_.end(), weights.begin(), weights.end());
  }
}

void Draft::FindMoved(const OldOp& old) {
  TESSERA_CHECK(pipeline_.has_value() &&
                pipeline_->groups.size() == plan_.groups.size())
      << "a block of a stage of several groups moves";
  const auto position = [&](const OpPlacement& at) {
    return static_cast<size_t>(at.chunk * pipeline_->stages + at.group.value);
  };
  const MovedBlock moved = {space_->index.graph->node(old.node).block,
                            position(old.placement),
                            position(plan_.ops[old.node.index()])};
  if (!moved_) moved_ = moved;
  TESSERA_CHECK(moved.block == moved_->block && moved.to == moved_->to)
      << "blocks " << moved.block << " and " << moved_->block << " move";
}

bool Draft::SetCuts() {
  const GraphIndex& index = space_->index;
  for (const OldWeight& old : old_weights_) {
    const NodeId home = index.weights[old.weight].home.node;
    const bool listed =
        cut_blocks_[static_cast<size_t>(index.graph->node(home).block)] ==
        edit_;
    if (!listed) cut_.push_back(old.weight);
  }
  const std::vector<AxisSet> whole = ZeroAxesOf(index, plan_, cut_);
  for (size_t i = 0; i < cut_.size(); ++i) {
    const size_t w = cut_[i];
    AxisSet axes = whole[i];
    if (within_node_[w] && plan_.weights[w].zero_stage != 0) {
      const NodeId home = index.weights[w].home.node;
      axes = InnermostWithin(WithinNode(plan_.ops[home.index()].group), axes);
      if (axes == 0 || axes == whole[i]) return false;
    }
    if (plan_.weights[w].zero_axes == axes) continue;
    TouchWeight(w);
    plan_.weights[w].zero_axes = axes;
  }
  return true;
}

bool Draft::MayMove() const {
  return pipeline_->blocks[moved_->from].size() > 1 &&
         SendsForward(
             space_->index, plan_,
             space_->edges_of_block[static_cast<size_t>(moved_->block)]);
}

AxisSet Draft::WithinNode(GroupId group) {
  std::optional<AxisSet>& within = within_of_group_[group.index()];
  if (!within) {
    within = AxesWithinNode(*space_->cluster, plan_.groups[group.index()]);
  }
  return *within;
}

void Draft::Undo() {
  if (replaced_ || !regular_) {
    if (regular_) {
      plan_ = *std::move(old_plan_);
      old_plan_.reset();
    } else {
      plan_ = *old_plan_;
    }
  } else {
    for (const OldOp& old : old_ops_) {
      plan_.ops[old.node.index()] = old.placement;
    }
    if (FieldsOf(plan_) != fields_) {
      plan_.schedule = fields_.schedule;
      plan_.microbatches = fields_.microbatches;
      plan_.bucket_bytes = fields_.bucket_bytes;
      plan_.prefetch = fields_.prefetch;
      plan_.zigzag = fields_.zigzag;
    }
  }
  for (const OldWeight& old : old_weights_) {
    plan_.weights[old.weight] = old.placement;
    within_node_[old.weight] = old.within_node;
  }
  Clear();
}

void Draft::Keep() {
  if (replaced_ || !regular_) {
    for (size_t w = 0; w < plan_.weights.size(); ++w) {
      within_node_[w] = within_node_[w] && plan_.weights[w].zero_stage != 0;
    }
    pipeline_.reset();
    within_of_group_.assign(plan_.groups.size(), std::nullopt);
    knows_roles_.assign(knows_roles_.size(), false);
    old_plan_.reset();
    regular_ = true;
  } else if (moved_) {
    std::erase(pipeline_->blocks[moved_->from], moved_->block);
    std::vector<int>& blocks = pipeline_->blocks[moved_->to];
    blocks.insert(std::ranges::lower_bound(blocks, moved_->block),
                  moved_->block);
  }
  for (const OldOp& old : old_ops_) {
    const int block = space_->index.graph->node(old.node).block;
    knows_roles_[static_cast<size_t>(block)] = false;
  }
  knows_strategy_ = false;
  fields_ = FieldsOf(plan_);
  Clear();
}

void Draft::Clear() {
  old_ops_.clear();
  old_weights_.clear();
  replaced_ = false;
  ++edit_;
  cut_.clear();
  read_.clear();
  moved_.reset();
  change_.whole = false;
  change_.nodes.clear();
  change_.weights.clear();
}

}  // namespace tessera
