// Tensors as the current group has them, and as its nodes want them.

#include <algorithm>
#include <tuple>

#include "planner/lower/program_builder.h"

namespace tessera {

ValueId ProgramBuilder::Present(TensorId tensor) {
  if (const auto it = present_.find({here_, tensor}); it != present_.end()) {
    return it->second;
  }
  if (Includes(action_, ActionKind::kBackwardInput) &&
      context_.recomputed(tensor).valid()) {
    Recompute(context_.recomputed(tensor));
    return present_.at({here_, tensor});
  }
  const auto* presence = context_.presence(tensor, here_);
  TESSERA_CHECK(presence != nullptr) << graph_.tensor(tensor).name;
  const auto& source = context_.presences(tensor)[0];
  if (source.group != here_ && presence->first_block == block_ &&
      Includes(action_, presence->first_part) &&
      !context_.once_per_step(tensor)) {
    return Receive(tensor, *presence, source.group);
  }
  const Port port{Port::kTensor, tensor, 0};
  const ValueId result = Import(port, [&] {
    return TensorValue(tensor, "activation", presence->layout,
                       MemoryCategory::kActivation);
  });
  present_[{here_, tensor}] = result;
  return result;
}

ValueId ProgramBuilder::Receive(TensorId tensor,
                                const LoweringContext::Presence& presence,
                                GroupId from) {
  const ValueId result = AddValue(TensorValue(
      tensor, "activation", presence.layout, MemoryCategory::kActivation));
  EmitReceive({Port::kTensor, tensor, 0}, from, result,
              pass_ == Pass::kForward ? StreamRole::kRecvForward
                                      : StreamRole::kRecvBackward);
  Export(tensor, result);
  present_[{here_, tensor}] = result;
  return result;
}

void ProgramBuilder::Export(TensorId tensor, ValueId id) {
  const bool again = context_.recomputed(tensor).valid();
  for (const auto& reader : context_.presence(tensor, here_)->readers) {
    // What is computed again does not go from one pass to the other.
    const bool forward = reader.part == ActionKind::kForward;
    if (again && forward != (action_ == ActionKind::kForward)) continue;
    if (kind_ == ProgramKind::kBegin || reader.block != block_ ||
        !Includes(action_, reader.part)) {
      program_.exports.push_back({{Port::kTensor, tensor, 0}, id});
      CopyOutLater(tensor, 0, id);
      return;
    }
  }
}

ValueId ProgramBuilder::Load(TensorId tensor, const Layout& layout) {
  const ValueId result = AddValue(
      TensorValue(tensor, "input", layout, MemoryCategory::kActivation));
  AddTask(TaskKind::kLoad, {}, {result});
  return result;
}

ValueId ProgramBuilder::PresentInput(TensorId tensor) {
  const auto* presence = context_.presence(tensor, here_);
  if (present_.contains({here_, tensor}) || presence->first_block != block_ ||
      !Includes(action_, presence->first_part)) {
    return Present(tensor);
  }
  const AxisSet root = context_.InputRoot(tensor, here_);
  Layout loaded = presence->layout;
  for (AxisSet& dim : loaded.dims) dim &= ~root;
  loaded.rooted = root;
  const ValueId result = Reshard(Load(tensor, loaded), presence->layout, false,
                                 MemoryCategory::kActivation);
  present_[{here_, tensor}] = result;
  Export(tensor, result);
  return result;
}

ValueId ProgramBuilder::Acquire(TensorId tensor, const Layout& wanted) {
  const auto key = std::tuple(here_, tensor, wanted);
  if (const auto it = acquired_.find(key); it != acquired_.end()) {
    return it->second;
  }
  ValueId result;
  switch (graph_.tensor(tensor).kind) {
    case TensorKind::kInput:
      if (kind_ != ProgramKind::kBegin &&
          context_.InputRoot(tensor, here_) != 0) {
        result = Reshard(PresentInput(tensor), wanted, false,
                         MemoryCategory::kCommunication);
      } else {
        result = Load(tensor, wanted);
      }
      break;
    case TensorKind::kWeight:
      result =
          Reshard(Whole(tensor), wanted, false, MemoryCategory::kCommunication);
      break;
    default:
      result = wanted == context_.produced(tensor)
                   ? AsProduced(tensor)
                   : Reshard(Present(tensor), wanted, false,
                             MemoryCategory::kCommunication);
  }
  acquired_[key] = result;
  return result;
}

ValueId ProgramBuilder::AsProduced(TensorId tensor) {
  const Layout& layout = context_.produced(tensor);
  if (const auto it = made_.find(tensor);
      it != made_.end() && value(it->second).group == here_) {
    return it->second;
  }
  if (context_.kept_as_produced(tensor) &&
      context_.presences(tensor)[0].group == here_ &&
      context_.presences(tensor)[0].first_block == block_) {
    return Import({Port::kTensor, tensor, 1}, [&] {
      return TensorValue(tensor, "activation", layout,
                         MemoryCategory::kActivation);
    });
  }
  return Reshard(Present(tensor), layout, false,
                 MemoryCategory::kCommunication);
}

const LoweringContext::Replica& ProgramBuilder::ReplicaHere(
    TensorId weight) const {
  for (const auto& replica : context_.replicas(weight)) {
    if (replica.group == here_) return replica;
  }
  TESSERA_CHECK(false) << graph_.tensor(weight).name;
  return context_.replicas(weight)[0];
}

Port ProgramBuilder::PortOf(Port::Kind kind, const WeightPiece& piece,
                            int index) {
  return {kind, piece.weight, index, piece.tile};
}

ValueId ProgramBuilder::Parameter(const WeightPiece& piece) {
  return Import(PortOf(Port::kParameter, piece), [&] {
    Value v =
        TensorValue(piece.weight, "parameter",
                    context_.ParameterLayout(piece, ReplicaHere(piece.weight)),
                    MemoryCategory::kParameter);
    v.persistent = true;
    v.tier = context_.weight_placement(piece.weight).parameter_tier;
    return v;
  });
}

}  // namespace tessera
