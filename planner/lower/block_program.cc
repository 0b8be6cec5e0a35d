// One block, one pass: nodes become tasks, layouts become reshards.

#include "planner/ir/statistics_dtype.h"
#include "planner/lower/program_builder.h"

namespace tessera {
namespace {

CommKind CommKindOf(ReshardKind kind) {
  switch (kind) {
    case ReshardKind::kAllReduce:
      return CommKind::kAllReduce;
    case ReshardKind::kReduceScatter:
      return CommKind::kReduceScatter;
    case ReshardKind::kAllGather:
      return CommKind::kAllGather;
    case ReshardKind::kAllToAll:
      return CommKind::kAllToAll;
    case ReshardKind::kScatter:
      return CommKind::kScatter;
    case ReshardKind::kBroadcast:
      return CommKind::kBroadcast;
    case ReshardKind::kGather:
      return CommKind::kGather;
    case ReshardKind::kReduce:
      return CommKind::kReduce;
    case ReshardKind::kRedistribute:
    case ReshardKind::kSlice:
      break;
  }
  return CommKind::kRedistribute;
}

// The kind of action that a program is done in, or as.
ActionKind ActionOf(ProgramKind kind) {
  switch (kind) {
    case ProgramKind::kBegin:
    case ProgramKind::kForward:
    case ProgramKind::kUpdate:
      return ActionKind::kForward;
    case ProgramKind::kBackwardInput:
      return ActionKind::kBackwardInput;
    case ProgramKind::kBackwardWeight:
    case ProgramKind::kBackwardWeightReduce:
      return ActionKind::kBackwardWeight;
    case ProgramKind::kBackward:
    case ProgramKind::kBackwardReduce:
    case ProgramKind::kTie:
    case ProgramKind::kNorm:
      break;
  }
  return ActionKind::kBackward;
}

}  // namespace

Value Scalar(const LoweringContext& context, std::string_view what,
             GroupId group) {
  Value v;
  v.what = what;
  v.group = group;
  v.dtype = StatisticsDType(context.graph().dtype);
  v.category = MemoryCategory::kGradient;
  v.persistent = true;
  return v;
}

ProgramBuilder::ProgramBuilder(const LoweringContext& context, int block,
                               ProgramKind kind)
    : context_(context),
      graph_(context.graph()),
      block_(block),
      kind_(kind),
      action_(ActionOf(kind)),
      pass_(action_ == ActionKind::kForward ? Pass::kForward
                                            : Pass::kBackward) {}

BlockProgram ProgramBuilder::Build() {
  // Most nodes are a task with a value for each result and one to exchange.
  const size_t nodes =
      context_.nodes_of_block(pass_)[static_cast<size_t>(block_)].size();
  program_.tasks.reserve(2 * nodes);
  program_.values.reserve(4 * nodes);
  switch (kind_) {
    case ProgramKind::kBegin:
    case ProgramKind::kForward:
    case ProgramKind::kBackward:
    case ProgramKind::kBackwardReduce:
    case ProgramKind::kBackwardInput:
    case ProgramKind::kBackwardWeight:
    case ProgramKind::kBackwardWeightReduce:
      EmitNodes();
      break;
    case ProgramKind::kTie:
      EmitTie();
      break;
    case ProgramKind::kNorm:
      EmitNorm();
      break;
    case ProgramKind::kUpdate:
      EmitUpdate();
      break;
  }
  return std::move(program_);
}

const DeviceGroup& ProgramBuilder::group() const {
  return context_.plan().groups[here_.index()];
}

GroupId ProgramBuilder::HomeGroup(TensorId weight) const {
  return context_.replicas(weight)[0].group;
}

std::vector<WeightPiece> ProgramBuilder::PiecesOf(
    const std::vector<TensorId>& weights) const {
  std::vector<WeightPiece> pieces;
  for (TensorId weight : weights) {
    for (int tile = 0; tile < context_.tiles(weight); ++tile) {
      pieces.push_back({weight, tile});
    }
  }
  return pieces;
}

ValueId ProgramBuilder::AddValue(Value value) {
  program_.values.push_back(std::move(value));
  return ValueId(program_.values.size() - 1);
}

Value ProgramBuilder::TensorValue(TensorId tensor, std::string_view what,
                                  const Layout& layout,
                                  MemoryCategory category) {
  const Tensor& t = graph_.tensor(tensor);
  Value v;
  v.what = what;
  v.tensor = tensor;
  v.group = here_;
  v.shape = t.shape;
  v.sample_dim = t.sample_dim;
  if (t.sample_dim >= 0 && kind_ != ProgramKind::kBegin) {
    v.shape[static_cast<size_t>(t.sample_dim)] /= context_.plan().microbatches;
  }
  v.dtype = t.dtype;
  v.element_bytes = context_.kept_bytes(tensor);
  v.layout = layout;
  v.category = category;
  return v;
}

ValueId ProgramBuilder::Relaid(ValueId of, const Layout& layout,
                               MemoryCategory category) {
  Value v = value(of);
  v.layout = layout;
  v.category = category;
  v.persistent = false;
  v.alias_of = ValueId();
  return AddValue(std::move(v));
}

Task& ProgramBuilder::AddTask(TaskKind kind, std::vector<ValueId> reads,
                              std::vector<ValueId> writes) {
  Task task;
  task.kind = kind;
  task.group = here_;
  task.pass = pass_;
  task.optimizer = kind_ == ProgramKind::kNorm || kind_ == ProgramKind::kUpdate;
  task.reads = std::move(reads);
  task.writes = std::move(writes);
  program_.tasks.push_back(std::move(task));
  return program_.tasks.back();
}

StreamRole ProgramBuilder::Stream(StreamRole wanted) const {
  return context_.concurrent_streams() ? wanted : StreamRole::kCompute;
}

std::vector<ValueId> ProgramBuilder::EmitStep(ReshardKind kind, AxisSet axes,
                                              const std::vector<ValueId>& from,
                                              const std::vector<Layout>& to,
                                              bool in_place,
                                              MemoryCategory category) {
  std::vector<ValueId> results;
  for (size_t i = 0; i < from.size(); ++i) {
    results.push_back(Relaid(from[i], to[i], category));
    if (in_place &&
        (kind == ReshardKind::kAllReduce || kind == ReshardKind::kReduce)) {
      value(results[i]).alias_of = from[i];
      value(results[i]).category = value(from[i]).category;
    }
  }
  if (kind == ReshardKind::kSlice) {
    AddTask(TaskKind::kSlice, from, results);
  } else {
    Task& task = AddTask(TaskKind::kComm, from, results);
    task.comm = CommKindOf(kind);
    task.axes = axes;
    task.stream = Stream(StreamRole::kComm);
  }
  return results;
}

ValueId ProgramBuilder::Reshard(ValueId from, const Layout& to, bool in_place,
                                MemoryCategory category) {
  const Layout start = value(from).layout;
  for (const ReshardStep& step : PlanReshard(start, to, group())) {
    from = EmitStep(step.kind, step.axes, {from}, {step.to}, in_place,
                    category)[0];
  }
  return from;
}

void ProgramBuilder::EmitSend(const Port& port, GroupId to, ValueId id,
                              StreamRole stream) {
  Task& task = AddTask(TaskKind::kSend, {id}, {});
  task.stream = Stream(stream);
  task.comm = CommKind::kSendRecv;
  program_.sends.push_back({program_.tasks.size() - 1, port, to});
}

void ProgramBuilder::EmitReceive(const Port& port, GroupId from, ValueId id,
                                 StreamRole stream) {
  Task& task = AddTask(TaskKind::kRecv, {}, {id});
  task.stream = Stream(stream);
  task.comm = CommKind::kSendRecv;
  program_.receives.push_back({program_.tasks.size() - 1, port, from});
}

ProgramKind ProgramOf(ActionKind action, bool last) {
  switch (action) {
    case ActionKind::kForward:
      return ProgramKind::kForward;
    case ActionKind::kBackwardInput:
      return ProgramKind::kBackwardInput;
    case ActionKind::kBackwardWeight:
      return last ? ProgramKind::kBackwardWeightReduce
                  : ProgramKind::kBackwardWeight;
    case ActionKind::kBackward:
      break;
  }
  return last ? ProgramKind::kBackwardReduce : ProgramKind::kBackward;
}

Value SquareSumValue(const LoweringContext& context) {
  const GroupId world(static_cast<int64_t>(context.plan().groups.size()));
  Value v = Scalar(context, "square sum", world);
  v.layout.partial = 1;  // the world's only axis
  return v;
}

Value HostSquareSumValue(const LoweringContext& context, GroupId group) {
  Value v = Scalar(context, "square sum", group);
  v.layout.partial = context.plan().groups[group.index()].all_axes();
  v.tier = MemoryTier::kHost;
  return v;
}

BlockProgram LowerBlock(const LoweringContext& context, int block,
                        ProgramKind kind) {
  return ProgramBuilder(context, block, kind).Build();
}

}  // namespace tessera
