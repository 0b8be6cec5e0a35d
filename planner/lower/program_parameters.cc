// Parameters that are not stored as their readers see them, and accumulators.

#include <algorithm>

#include "planner/ir/statistics_dtype.h"
#include "planner/lower/program_builder.h"

namespace tessera {

bool ProgramBuilder::IsCut(TensorId weight) const {
  return context_.ZeroStage(weight) >= 3 && HomeGroup(weight) == here_;
}

ValueId ProgramBuilder::Whole(TensorId weight) {
  if (!context_.IsFetched(weight) || HomeGroup(weight) != here_) {
    return Parameter({weight});
  }
  if (const auto it = gathered_.find(weight); it != gathered_.end()) {
    return it->second;
  }
  const Port port{Port::kGathered, weight, static_cast<int>(action_)};
  const ValueId id = Import(port, [&] {
    return TensorValue(weight, IsCut(weight) ? "gathered" : "fetched",
                       ReplicaHere(weight).layout,
                       MemoryCategory::kCommunication);
  });
  gathered_[weight] = id;
  return id;
}

void ProgramBuilder::EmitGather(int block) {
  AtHome(PiecesOf(context_.FetchedWeights(block, action_)),
         [&](const std::vector<WeightPiece>& pieces) {
           EmitGather(block, pieces);
         });
}

void ProgramBuilder::EmitGather(int block,
                                const std::vector<WeightPiece>& pieces) {
  const std::vector<ValueId> whole = Fetched(pieces);
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (block == block_) {
      gathered_[pieces[i].weight] = whole[i];
    } else {
      program_.exports.push_back(
          {PortOf(Port::kGathered, pieces[i], static_cast<int>(action_)),
           whole[i]});
    }
  }
}

std::vector<ValueId> ProgramBuilder::Fetched(
    const std::vector<WeightPiece>& pieces) {
  std::vector<ValueId> here;
  std::vector<ValueId> away;
  std::vector<ValueId> copies;
  std::map<AxisSet, std::vector<size_t>> by_axes;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const ValueId stored = Parameter(pieces[i]);
    here.push_back(stored);
    if (value(stored).tier != MemoryTier::kDevice) {
      here[i] =
          OnTier(stored, MemoryTier::kDevice, MemoryCategory::kCommunication);
      value(here[i]).what = "fetched";
      away.push_back(stored);
      copies.push_back(here[i]);
    }
    if (IsCut(pieces[i].weight)) {
      by_axes[context_.StateLayout(pieces[i]).flat].push_back(i);
    }
  }
  EmitCopies(away, copies, true);
  for (const auto& [axes, members] : by_axes) {
    std::vector<ValueId> from;
    std::vector<Layout> to;
    for (size_t i : members) {
      from.push_back(here[i]);
      to.push_back(
          context_.PieceOf(ReplicaHere(pieces[i].weight).layout, pieces[i]));
    }
    const std::vector<ValueId> whole =
        EmitStep(ReshardKind::kAllGather, axes, from, to, false,
                 MemoryCategory::kCommunication);
    program_.tasks.back().after_compute = true;
    for (size_t m = 0; m < members.size(); ++m) {
      here[members[m]] = whole[m];
      value(whole[m]).what = "gathered";
    }
  }
  return here;
}

void ProgramBuilder::EmitGathers() {
  const int prefetch = context_.plan().prefetch;
  const bool first = context_.BlockAhead(block_, pass_, -1) < 0;
  for (int ahead = first ? 0 : prefetch; ahead <= prefetch; ++ahead) {
    const int block = context_.BlockAhead(block_, pass_, ahead);
    if (block < 0) break;
    EmitGather(block);
  }
}

ValueId ProgramBuilder::Accumulator(const WeightPiece& piece, int index) {
  return Import(PortOf(Port::kAccumulator, piece, index), [&] {
    const auto& layouts = ReplicaHere(piece.weight).gradients;
    Value v = GradientValue(piece, layouts[static_cast<size_t>(index)]);
    v.persistent = true;
    return v;
  });
}

Value ProgramBuilder::GradientValue(const WeightPiece& piece,
                                    const Layout& layout) {
  Value v =
      TensorValue(piece.weight, "gradient", context_.PieceOf(layout, piece),
                  MemoryCategory::kGradient);
  v.dtype = GradientDType(piece.weight);
  return v;
}

int ProgramBuilder::AccumulatorIndex(TensorId gradient) const {
  const TensorId weight = graph_.tensor(gradient).gradient_of;
  const auto& layouts = ReplicaHere(weight).gradients;
  return static_cast<int>(
      std::find(layouts.begin(), layouts.end(), context_.produced(gradient)) -
      layouts.begin());
}

DType ProgramBuilder::GradientDType(TensorId weight) const {
  return tessera::GradientDType(graph_.tensor(weight).dtype,
                                context_.stack().memory);
}

DType ProgramBuilder::StateDType(TensorId weight) const {
  return StatisticsDType(graph_.tensor(weight).dtype);
}

}  // namespace tessera
