// Copies to and from the tiers beside the device, and the step on the host.

#include <algorithm>

#include "planner/lower/program_builder.h"

namespace tessera {

ValueId ProgramBuilder::OnTier(ValueId of, MemoryTier tier,
                               MemoryCategory category) {
  const ValueId id = Relaid(of, value(of).layout, category);
  value(id).tier = tier;
  return id;
}

StreamRole ProgramBuilder::CopyStream(MemoryTier from, MemoryTier to) const {
  if (from == MemoryTier::kFile) return Stream(StreamRole::kFileRead);
  if (to == MemoryTier::kFile) return Stream(StreamRole::kFileWrite);
  return Stream(from == MemoryTier::kHost ? StreamRole::kCopyIn
                                          : StreamRole::kCopyOut);
}

void ProgramBuilder::EmitCopies(std::vector<ValueId> from,
                                const std::vector<ValueId>& to,
                                bool after_compute) {
  for (;;) {
    std::map<std::pair<MemoryTier, MemoryTier>,
             std::pair<std::vector<ValueId>, std::vector<ValueId>>>
        ways;
    for (size_t i = 0; i < from.size(); ++i) {
      if (from[i] == to[i]) continue;
      const MemoryTier source = value(from[i]).tier;
      ValueId next = to[i];
      if (source != MemoryTier::kHost &&
          value(next).tier != MemoryTier::kHost) {
        next =
            OnTier(from[i], MemoryTier::kHost, MemoryCategory::kCommunication);
      }
      auto& [reads, writes] = ways[{source, value(next).tier}];
      reads.push_back(from[i]);
      writes.push_back(next);
      from[i] = next;
    }
    if (ways.empty()) return;
    for (const auto& [way, lists] : ways) {
      Task& task = AddTask(TaskKind::kCopy, lists.first, lists.second);
      task.stream = CopyStream(way.first, way.second);
      task.after_compute = after_compute;
    }
  }
}

void ProgramBuilder::Leave(const Port& port, ValueId id) {
  imported_[{here_, port}] = id;
  program_.exports.push_back({port, id});
}

void ProgramBuilder::CopyOutLater(TensorId tensor, int index, ValueId id) {
  if (action_ == ActionKind::kForward &&
      context_.FindOffloaded(tensor, index, here_) != nullptr) {
    leaving_.push_back({{Port::kTensor, tensor, index}, id});
  }
}

void ProgramBuilder::EmitCopiesOut() {
  std::map<GroupId, std::pair<std::vector<ValueId>, std::vector<ValueId>>>
      by_group;
  for (const auto& [port, id] : leaving_) {
    here_ = value(id).group;
    const MemoryTier tier =
        context_.FindOffloaded(port.tensor, port.index, here_)->tier;
    const ValueId away = OnTier(id, tier, value(id).category);
    auto& [from, to] = by_group[here_];
    from.push_back(id);
    to.push_back(away);
    program_.exports.push_back(
        {{Port::kOffloaded, port.tensor, port.index}, away});
  }
  for (const auto& [group, lists] : by_group) {
    here_ = group;
    EmitCopies(lists.first, lists.second);
  }
}

void ProgramBuilder::EmitCopiesIn() {
  const bool first = context_.BlockAhead(block_, pass_, -1) < 0;
  for (int ahead = first ? 0 : 1; ahead <= 1; ++ahead) {
    const int block = context_.BlockAhead(block_, pass_, ahead);
    if (block < 0) return;
    std::map<GroupId, std::pair<std::vector<ValueId>, std::vector<ValueId>>>
        by_group;
    for (const auto& kept : context_.offloaded(block)) {
      if (!Includes(action_, kept.part)) continue;
      here_ = kept.group;
      const auto* presence = context_.presence(kept.tensor, here_);
      const Layout& layout =
          kept.index == 1 ? context_.produced(kept.tensor) : presence->layout;
      const ValueId away =
          Import({Port::kOffloaded, kept.tensor, kept.index}, [&] {
            Value v = TensorValue(kept.tensor, "activation", layout,
                                  MemoryCategory::kActivation);
            v.tier = kept.tier;
            return v;
          });
      const ValueId id =
          OnTier(away, MemoryTier::kDevice, MemoryCategory::kActivation);
      auto& [from, to] = by_group[here_];
      from.push_back(away);
      to.push_back(id);
      Leave({Port::kTensor, kept.tensor, kept.index}, id);
    }
    for (const auto& [group, lists] : by_group) {
      here_ = group;
      EmitCopies(lists.first, lists.second, true);
    }
  }
}

bool ProgramBuilder::StepsOnHost(TensorId weight) const {
  return context_.weight_placement(weight).optimizer_tier !=
         MemoryTier::kDevice;
}

void ProgramBuilder::CopyOutGradients(
    const std::vector<std::pair<WeightPiece, ValueId>>& complete) {
  std::vector<ValueId> from;
  std::vector<ValueId> to;
  for (const auto& [piece, reduced] : complete) {
    if (!StepsOnHost(piece.weight)) continue;
    from.push_back(reduced);
    to.push_back(OnTier(reduced, MemoryTier::kHost, MemoryCategory::kGradient));
    program_.exports.push_back({PortOf(Port::kReduced, piece, 1), to.back()});
  }
  EmitCopies(from, to);
}

void ProgramBuilder::AddOnHost(
    const std::vector<std::pair<WeightPiece, ValueId>>& reduced) {
  std::vector<ValueId> from;
  std::vector<ValueId> to;
  for (const auto& [piece, id] : reduced) {
    from.push_back(id);
    to.push_back(OnTier(id, MemoryTier::kHost, MemoryCategory::kGradient));
  }
  EmitCopies(from, to);
  for (size_t i = 0; i < reduced.size(); ++i) {
    const ValueId sum = Reduced(reduced[i].first);
    Task& task = AddTask(TaskKind::kCompute, {to[i]}, {sum});
    task.kernel = "sum";
    task.accumulate = true;
    task.stream = Stream(StreamRole::kHost);
  }
}

void ProgramBuilder::CopyOutShards(bool with_backward) {
  std::vector<TensorId> cut = context_.home_weights(block_);
  std::erase_if(cut, [&](TensorId weight) {
    return !ReducesEach(weight) || context_.HasHostGradient(weight) ||
           context_.CompleteWithBackward(weight) != with_backward;
  });
  AtHome(PiecesOf(cut), [&](const std::vector<WeightPiece>& pieces) {
    std::vector<std::pair<WeightPiece, ValueId>> complete;
    for (const WeightPiece& piece : pieces) {
      complete.emplace_back(piece, Reduced(piece));
    }
    CopyOutGradients(complete);
  });
}

void ProgramBuilder::CopyOutScalars() {
  const auto& weights = context_.weights();
  if (std::none_of(weights.begin(), weights.end(), [&](TensorId weight) {
        return StepsOnHost(weight) && HomeGroup(weight) == here_;
      })) {
    return;
  }
  std::vector<ValueId> from = {Clip()};
  if (context_.scales_loss()) from.push_back(LossScale());
  std::vector<ValueId> to;
  for (ValueId id : from) {
    to.push_back(OnTier(id, MemoryTier::kHost, value(id).category));
  }
  EmitCopies(from, to);
  Leave({Port::kClip, TensorId(), 1}, to[0]);
  if (context_.scales_loss()) Leave({Port::kLossScale, TensorId(), 1}, to[1]);
}

ValueId ProgramBuilder::LeftOnHost(const Port& port, ValueId of) {
  return Import(port, [&] {
    Value v = value(of);
    v.persistent = false;
    v.tier = MemoryTier::kHost;
    return v;
  });
}

std::vector<std::pair<Port, ValueId>> ProgramBuilder::HostState(
    const WeightPiece& piece) {
  std::vector<std::pair<Port, ValueId>> state;
  if (context_.HasHostMaster(piece.weight)) {
    state.push_back(
        {PortOf(Port::kMaster, piece, 1),
         State(Port::kMaster, piece, "master", context_.StateLayout(piece))});
  } else {
    state.push_back({PortOf(Port::kParameter, piece, 1), Parameter(piece)});
  }
  const auto moments = Moments(piece, 1);
  state.insert(state.end(), moments.begin(), moments.end());
  return state;
}

std::vector<std::vector<WeightPiece>> ProgramBuilder::HostSteps(
    int block) const {
  std::vector<WeightPiece> together;
  std::vector<std::vector<WeightPiece>> steps;
  for (const WeightPiece& piece : PiecesOf(context_.home_weights(block))) {
    if (!StepsOnHost(piece.weight) || HomeGroup(piece.weight) != here_) {
      continue;
    }
    // A factored optimizer has sums over all tiles.
    const bool alone = context_.tiles(piece.weight) > 1 &&
                       context_.HasFileState(piece.weight) &&
                       !optimizer().factored;
    if (alone) {
      steps.push_back({piece});
    } else {
      together.push_back(piece);
    }
  }
  if (!together.empty()) steps.insert(steps.begin(), std::move(together));
  return steps;
}

void ProgramBuilder::ReadState(const std::vector<WeightPiece>& pieces) {
  std::vector<ValueId> from;
  std::vector<ValueId> to;
  for (const WeightPiece& piece : pieces) {
    if (!context_.HasFileState(piece.weight)) continue;
    for (const auto& [port, stored] : HostState(piece)) {
      if (value(stored).tier != MemoryTier::kFile) continue;
      const ValueId read =
          OnTier(stored, MemoryTier::kHost, value(stored).category);
      from.push_back(stored);
      to.push_back(read);
      Leave(port, read);
    }
  }
  EmitCopies(from, to);
}

void ProgramBuilder::UpdateOnHost() {
  const auto steps = HostSteps(block_);
  const bool reads =
      std::ranges::any_of(context_.home_weights(block_), [&](TensorId weight) {
        return context_.HasFileState(weight) && HomeGroup(weight) == here_;
      });
  if (reads && context_.NextFileBlock(block_, here_, -1) < 0) {
    ReadState(steps[0]);
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    if (i + 1 < steps.size()) {
      ReadState(steps[i + 1]);
    } else if (reads) {
      const int next = context_.NextFileBlock(block_, here_, 1);
      if (next >= 0) ReadState(HostSteps(next)[0]);
    }
    StepOnHost(steps[i]);
  }
}

void ProgramBuilder::StepOnHost(const std::vector<WeightPiece>& pieces) {
  Update update;
  std::vector<ValueId> read_back;  // of files
  std::vector<ValueId> stored_in;
  std::vector<ValueId> updated;  // parameters
  for (const WeightPiece& piece : pieces) {
    ValueId reduced = Reduced(piece);
    if (!context_.HasHostGradient(piece.weight)) {
      reduced = LeftOnHost(PortOf(Port::kReduced, piece, 1), reduced);
    }
    updated.push_back(ValueId());
    std::vector<std::pair<Port, ValueId>> moments;
    for (const auto& [port, stored] : HostState(piece)) {
      ValueId id = stored;
      if (value(stored).tier == MemoryTier::kFile) {
        id = LeftOnHost(port, stored);
        read_back.push_back(id);
        stored_in.push_back(stored);
      }
      if (!updated.back().valid()) {
        updated.back() = id;
        continue;
      }
      Port moment = port;
      moment.index = 0;
      moments.emplace_back(moment, id);
    }
    AddPiece(piece, reduced, updated.back(), moments, update);
  }
  std::vector<ValueId> scalars;
  if (clips()) scalars.push_back(LeftOnHost({Port::kClip, {}, 1}, Clip()));
  if (context_.scales_loss()) {
    scalars.push_back(LeftOnHost({Port::kLossScale, {}, 1}, LossScale()));
  }
  EmitUpdateTasks(update, scalars, /*on_host=*/true);
  EmitCopies(read_back, stored_in);
  ReturnFromHost(pieces, updated);
}

void ProgramBuilder::ReturnFromHost(const std::vector<WeightPiece>& pieces,
                                    std::vector<ValueId> updated) {
  std::vector<ValueId> cast_from;
  std::vector<ValueId> cast_to;
  std::vector<ValueId> from;
  std::vector<ValueId> to;
  std::vector<WeightPiece> cut;
  std::vector<ValueId> shards;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!context_.HasHostMaster(pieces[i].weight)) continue;
    const ValueId parameter = Parameter(pieces[i]);
    const Layout layout = context_.StateLayout(pieces[i]);
    ValueId target = parameter;
    if (value(parameter).layout != layout) {
      target = Relaid(DeviceParameter(pieces[i]), layout,
                      MemoryCategory::kCommunication);
      if (layout.rooted != 0) ReturnInPlace(target, pieces[i]);
      cut.push_back(pieces[i]);
      shards.push_back(target);
    }
    ValueId fresh = updated[i];
    if (value(fresh).dtype != value(parameter).dtype) {
      cast_from.push_back(fresh);
      fresh = value(target).tier == MemoryTier::kHost
                  ? target
                  : OnTier(target, MemoryTier::kHost,
                           MemoryCategory::kCommunication);
      cast_to.push_back(fresh);
    }
    from.push_back(fresh);
    to.push_back(target);
  }
  if (!cast_to.empty()) {
    Task& task = AddTask(TaskKind::kCompute, cast_from, cast_to);
    task.kernel = CastOfUpdates();
    task.stream = Stream(StreamRole::kHost);
  }
  EmitCopies(from, to);
  ReturnShards(cut, shards);
  CopyParameters(cut, false);
}

}  // namespace tessera
