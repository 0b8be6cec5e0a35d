// The end of a step: norm, loss scale, optimizer, and weights returned.

#include <algorithm>

#include "planner/lower/needs_norm.h"
#include "planner/lower/program_builder.h"

namespace tessera {

ValueId ProgramBuilder::Reduced(const WeightPiece& piece) {
  return Import(PortOf(Port::kReduced, piece), [&] {
    const bool on_host = context_.HasHostGradient(piece.weight);
    const Layout layout = context_.StateLayout(piece);
    const bool sum = ReducesEach(piece.weight);
    Value v = TensorValue(piece.weight,
                          !sum               ? "reduced gradient"
                          : layout.flat == 0 ? "summed gradient"
                                             : "gradient shard",
                          layout, MemoryCategory::kGradient);
    v.dtype = GradientDType(piece.weight);
    v.persistent = sum;
    if (on_host) {
      v.tier = MemoryTier::kHost;
    } else if (sum && context_.stack().memory.whole_gradients) {
      const AxisSet axes = context_.weight_placement(piece.weight).zero_axes;
      v.element_bytes = v.ElementBytes() * group().Size(axes);
    }
    return v;
  });
}

ValueId ProgramBuilder::SquareSum() {
  return Import({Port::kSquareSum, TensorId(), 0},
                [&] { return SquareSumValue(context_); });
}

ValueId ProgramBuilder::HostSquareSum() {
  return Import({Port::kSquareSum, TensorId(), 1},
                [&] { return HostSquareSumValue(context_, here_); });
}

ValueId ProgramBuilder::Clip() {
  return Import({Port::kClip, TensorId(), 0},
                [&] { return Scalar(context_, "clip", here_); });
}

ValueId ProgramBuilder::LossScale() {
  return Import({Port::kLossScale, TensorId(), 0}, [&] {
    Value v = Scalar(context_, "loss scale", here_);
    v.shape = {3};  // runtime/loss_scale.h
    v.category = MemoryCategory::kOptimizer;
    return v;
  });
}

bool ProgramBuilder::clips() const {
  return NeedsNorm(context_.options(), graph_.dtype);
}

const OptimizerRow& ProgramBuilder::optimizer() const {
  return OptimizerNamed(context_.options().optimizer);
}

std::string_view ProgramBuilder::CastOfUpdates() const {
  const bool at_random = context_.options().stochastic_rounding &&
                         context_.graph().dtype == DType::kBFloat16;
  return at_random ? "stochastic_cast" : "cast";
}

void ProgramBuilder::EmitNorm() {
  if (!clips()) return;
  std::vector<GroupId> begun = context_.groups_begun(block_);
  AtHome(PiecesOf(context_.home_weights(block_)),
         [&](std::vector<WeightPiece> pieces) {
           const auto on_host = std::stable_partition(
               pieces.begin(), pieces.end(), [&](const WeightPiece& piece) {
                 return !context_.HasHostGradient(piece.weight);
               });
           const std::vector<WeightPiece> away(on_host, pieces.end());
           pieces.erase(on_host, pieces.end());
           if (!pieces.empty()) {
             std::erase(begun, here_);
             EmitSquareSum(pieces, SquareSum());
           }
           if (!away.empty()) EmitSquareSum(away, HostSquareSum());
         });
  for (GroupId group : begun) {
    here_ = group;
    EmitSquareSum({}, SquareSum());
  }
}

void ProgramBuilder::EmitSquareSum(const std::vector<WeightPiece>& pieces,
                                   ValueId sum) {
  std::vector<ValueId> reads;
  std::vector<AxisSet> masks;
  for (const WeightPiece& piece : pieces) {
    if (context_.is_running_average(piece.weight)) continue;
    reads.push_back(Reduced(piece));
    // Each element once: at coordinate 0 of the axes that replicate it, and
    // where it is at all.
    const Layout& layout = value(reads.back()).layout;
    masks.push_back(layout.replicated(group()) | layout.rooted);
  }
  Task& task = AddTask(TaskKind::kCompute, reads, {sum});
  task.kernel = "square_sum";
  if (value(sum).tier == MemoryTier::kHost) {
    task.stream = Stream(StreamRole::kHost);
  }
  task.masks = masks;
  task.accumulate = true;
}

ValueId ProgramBuilder::State(Port::Kind kind, const WeightPiece& piece,
                              std::string_view what, const Layout& layout) {
  return Import(PortOf(kind, piece), [&] {
    Value v =
        TensorValue(piece.weight, what, layout, MemoryCategory::kOptimizer);
    v.dtype = StateDType(piece.weight);
    v.persistent = true;
    v.tier = context_.weight_placement(piece.weight).optimizer_tier;
    return v;
  });
}

std::vector<std::pair<Port, ValueId>> ProgramBuilder::Moments(
    const WeightPiece& piece, int index) {
  const Layout layout = context_.StateLayout(piece);
  std::vector<std::pair<Port, ValueId>> moments;
  if (context_.is_running_average(piece.weight)) return moments;
  const auto add = [&](Port::Kind kind, std::string_view what) {
    moments.push_back(
        {PortOf(kind, piece, index), State(kind, piece, what, layout)});
  };
  if (optimizer().factored) {
    if (context_.matrix_form(piece.weight)) {
      // Of all tiles.
      return piece.tile == 0 ? MatrixMoments(piece.weight, index) : moments;
    }
    add(Port::kSecondMoment, "v");
    return moments;
  }
  const int count = optimizer().moments;
  if (count > 0) add(Port::kFirstMoment, count > 1 ? "m" : "momentum");
  if (count > 1) add(Port::kSecondMoment, "v");
  return moments;
}

void ProgramBuilder::EmitUpdate() {
  for (GroupId group : context_.groups_begun(block_)) {
    if (!clips()) break;
    here_ = group;
    std::vector<ValueId> reads = {SquareSum()};
    std::vector<ValueId> writes = {Clip()};
    if (context_.scales_loss()) {
      reads.push_back(LossScale());
      writes.push_back(LossScale());
    }
    AddTask(TaskKind::kCompute, reads, writes).kernel = "clip_coefficient";
    CopyOutScalars();
  }
  AtHome(
      PiecesOf(context_.home_weights(block_)),
      [&](const std::vector<WeightPiece>& pieces) { UpdateWeights(pieces); });
  ReturnTiedWeights();
}

void ProgramBuilder::UpdateWeights(std::vector<WeightPiece> pieces) {
  const auto on_host = std::stable_partition(
      pieces.begin(), pieces.end(),
      [&](const WeightPiece& piece) { return !StepsOnHost(piece.weight); });
  pieces.erase(on_host, pieces.end());
  if (!pieces.empty()) UpdateOnDevice(pieces);
  UpdateOnHost();
}

void ProgramBuilder::UpdateOnDevice(const std::vector<WeightPiece>& pieces) {
  std::vector<WeightPiece> updated_itself;  // not its master
  for (const WeightPiece& piece : pieces) {
    if (SizeOf(graph_.tensor(piece.weight).dtype) >= 4) {
      updated_itself.push_back(piece);
    }
  }
  CopyParameters(updated_itself, true);
  Update update;
  std::vector<ValueId> slice_from;
  std::vector<ValueId> slice_to;
  std::vector<ValueId> shards;  // what the parameter is made of afterwards
  for (const WeightPiece& piece : pieces) {
    const Layout layout = context_.StateLayout(piece);
    const ValueId parameter = DeviceParameter(piece);
    const bool stored_so = value(parameter).layout == layout;
    const ValueId reduced = Reduced(piece);
    ValueId updated;
    if (SizeOf(value(parameter).dtype) < 4) {
      updated = State(Port::kMaster, piece, "master", layout);
    } else if (!stored_so) {
      updated = Relaid(parameter, layout, MemoryCategory::kCommunication);
      if (layout.rooted != 0) {
        InPlace(updated, parameter);
      } else {
        slice_from.push_back(parameter);
        slice_to.push_back(updated);
      }
    } else {
      updated = parameter;
    }
    shards.push_back(updated);
    AddPiece(piece, reduced, updated, Moments(piece, 0), update);
  }
  if (!slice_to.empty()) AddTask(TaskKind::kSlice, slice_from, slice_to);
  std::vector<ValueId> scalars;
  if (clips()) scalars.push_back(Clip());
  if (context_.scales_loss()) scalars.push_back(LossScale());
  EmitUpdateTasks(update, scalars, /*on_host=*/false);
  ReturnShards(pieces, shards);
  CopyParameters(pieces, false);
}

void ProgramBuilder::AddPiece(
    const WeightPiece& piece, ValueId gradient, ValueId updated,
    const std::vector<std::pair<Port, ValueId>>& moments,
    Update& update) const {
  if (context_.is_running_average(piece.weight)) {
    update.distances.push_back(gradient);
    update.averages.push_back(updated);
    return;
  }
  update.pieces.push_back(piece);
  update.gradients.push_back(gradient);
  update.parameters.push_back(updated);
  update.writes.push_back(updated);
  for (const auto& [port, moment] : moments) {
    update.moments.emplace(port, moment);
    update.writes.push_back(moment);
  }
}

void ProgramBuilder::EmitUpdateTasks(const Update& update,
                                     const std::vector<ValueId>& scalars,
                                     bool on_host) {
  const auto add = [&](std::vector<ValueId> reads, std::vector<ValueId> writes,
                       std::string_view kernel) {
    Task& task =
        AddTask(TaskKind::kCompute, std::move(reads), std::move(writes));
    task.kernel = kernel;
    if (on_host) task.stream = Stream(StreamRole::kHost);
  };
  if (!update.averages.empty()) {
    add(update.distances, update.averages, "running_average");
  }
  if (update.pieces.empty()) return;
  if (optimizer().factored) {
    EmitFactored({update.pieces, update.gradients, update.parameters,
                  update.moments, scalars});
    return;
  }
  std::vector<ValueId> reads = update.gradients;
  reads.insert(reads.end(), scalars.begin(), scalars.end());
  add(std::move(reads), update.writes, optimizer().name);
}

ValueId ProgramBuilder::DeviceParameter(const WeightPiece& piece) {
  const ValueId stored = Parameter(piece);
  if (value(stored).tier == MemoryTier::kDevice) return stored;
  const auto [it, is_new] = device_parameters_.try_emplace(piece);
  if (is_new) {
    it->second =
        OnTier(stored, MemoryTier::kDevice, MemoryCategory::kCommunication);
  }
  return it->second;
}

void ProgramBuilder::CopyParameters(const std::vector<WeightPiece>& pieces,
                                    bool in) {
  std::vector<ValueId> stored;
  std::vector<ValueId> copies;
  for (const WeightPiece& piece : pieces) {
    stored.push_back(Parameter(piece));
    copies.push_back(DeviceParameter(piece));
  }
  EmitCopies(in ? stored : copies, in ? copies : stored);
}

void ProgramBuilder::InPlace(ValueId shared, ValueId of) {
  value(shared).alias_of = of;
  value(shared).category = value(of).category;
}

void ProgramBuilder::ReturnInPlace(ValueId shared, const WeightPiece& piece) {
  const ValueId parameter = Parameter(piece);
  if (value(parameter).tier == MemoryTier::kDevice) {
    InPlace(shared, parameter);
  }
}

void ProgramBuilder::ReturnShards(const std::vector<WeightPiece>& pieces,
                                  std::vector<ValueId> shards) {
  std::vector<ValueId> cast_from;
  std::vector<ValueId> cast_to;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const ValueId parameter = DeviceParameter(pieces[i]);
    if (value(shards[i]).dtype == value(parameter).dtype) continue;
    cast_from.push_back(shards[i]);
    if (value(shards[i]).layout == value(parameter).layout) {
      shards[i] = parameter;
    } else {
      const Layout layout = value(shards[i]).layout;
      shards[i] = Relaid(parameter, layout, MemoryCategory::kCommunication);
      if (layout.rooted != 0) ReturnInPlace(shards[i], pieces[i]);
    }
    cast_to.push_back(shards[i]);
  }
  if (!cast_to.empty()) {
    AddTask(TaskKind::kCompute, cast_from, cast_to).kernel = CastOfUpdates();
  }
  std::map<std::pair<CommKind, AxisSet>,
           std::pair<std::vector<ValueId>, std::vector<ValueId>>>
      returns;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const ValueId parameter = DeviceParameter(pieces[i]);
    if (shards[i] == parameter) continue;
    const Layout& layout = value(shards[i]).layout;
    auto& [from, to] =
        returns[layout.rooted != 0
                    ? std::pair(CommKind::kBroadcast, layout.rooted)
                    : std::pair(CommKind::kAllGather, layout.flat)];
    from.push_back(shards[i]);
    to.push_back(parameter);
  }
  for (const auto& [exchange, lists] : returns) {
    Task& task = AddTask(TaskKind::kComm, lists.first, lists.second);
    task.comm = exchange.first;
    task.axes = exchange.second;
    task.stream = Stream(StreamRole::kComm);
  }
}

void ProgramBuilder::ReturnTiedWeights() {
  for (TensorId weight : context_.tied_weights()) {
    const auto& replicas = context_.replicas(weight);
    const Port port{Port::kParameter, weight, 0};
    for (size_t r = 1; r < replicas.size(); ++r) {
      if (replicas[0].block == block_) {
        here_ = replicas[0].group;
        EmitSend(port, replicas[r].group, Parameter({weight}),
                 StreamRole::kSendForward);
      }
      if (replicas[r].block == block_) {
        here_ = replicas[r].group;
        EmitReceive(port, replicas[0].group, Parameter({weight}),
                    StreamRole::kRecvForward);
      }
    }
  }
}

}  // namespace tessera
