// The step of a factored optimizer: sums, their reductions, states, weights.

#include <algorithm>
#include <array>

#include "planner/lower/factored_update.h"
#include "planner/lower/program_builder.h"

namespace tessera {
namespace {

constexpr std::array kKernels = {
    // G; P -> sums of rows, of columns, of matrices.
    FactoredKernel{"adafactor_sums", 1, 0, 0, 3},
    // These sums -> R, C, mean, R / mean.
    FactoredKernel{"adafactor_factors", 0, 3, 0, 4},
    // G, R / mean, C -> sum of U^2.
    FactoredKernel{"adafactor_norm", 1, 2, 0, 1},
    // G, R / mean, C, sums of P^2 and of U^2 -> P.
    FactoredKernel{"adafactor_step", 1, 4, 1, 0},
    // G -> V, sum of U^2.
    FactoredKernel{"adafactor_vector_norm", 1, 0, 1, 1},
    // G, V, sums of P^2 and of U^2 -> P.
    FactoredKernel{"adafactor_vector_step", 2, 2, 1, 0},
};

// Lists behind each other.
std::vector<ValueId> Joined(
    std::initializer_list<const std::vector<ValueId>*> lists) {
  std::vector<ValueId> joined;
  for (const std::vector<ValueId>* list : lists) {
    joined.insert(joined.end(), list->begin(), list->end());
  }
  return joined;
}

// The first `count` of a list, which are taken from it.
std::vector<ValueId> Take(std::vector<ValueId>& from, size_t count) {
  const auto end = from.begin() + static_cast<int64_t>(count);
  std::vector<ValueId> first(from.begin(), end);
  from.erase(from.begin(), end);
  return first;
}

}  // namespace

const FactoredKernel* FindFactoredKernel(std::string_view name) {
  const auto kernel = std::ranges::find(kKernels, name, &FactoredKernel::name);
  return kernel == kKernels.end() ? nullptr : &*kernel;
}

Value ProgramBuilder::SumsOf(TensorId weight, std::string_view what,
                             Along along) {
  const auto& form = context_.matrix_form(weight);
  const size_t batches = form ? form->batches : 0;
  const size_t columns = form ? form->batches + form->rows : 0;
  const Layout state = context_.StateLayout({weight});
  Value v = TensorValue(weight, what, Layout(), MemoryCategory::kWorkspace);
  const Shape shape = std::exchange(v.shape, {});
  v.dtype = StateDType(weight);
  v.element_bytes = std::nullopt;
  v.layout.rooted = state.rooted;
  v.layout.partial = state.flat;
  for (size_t d = 0; d < shape.size(); ++d) {
    const bool has = along == Along::kNone ? false
                     : d < batches         ? true
                     : d < columns         ? along == Along::kRows
                                           : along == Along::kColumns;
    if (has) {
      v.layout.dims[v.shape.size()] = state.dims[d];
      v.shape.push_back(shape[d]);
    } else {
      v.layout.partial |= state.dims[d];
    }
  }
  return v;
}

std::vector<std::pair<Port, ValueId>> ProgramBuilder::MatrixMoments(
    TensorId weight, int index) {
  std::vector<std::pair<Port, ValueId>> moments;
  for (const auto& [kind, what, along] :
       {std::tuple(Port::kFirstMoment, "row", Along::kRows),
        std::tuple(Port::kSecondMoment, "column", Along::kColumns),
        std::tuple(Port::kMeanMoment, "mean", Along::kMatrices)}) {
    const ValueId id = Import(PortOf(kind, {weight}), [&] {
      Value v = SumsOf(weight, what, along);
      v.layout.partial = 0;
      v.category = MemoryCategory::kOptimizer;
      v.persistent = true;
      v.tier = context_.weight_placement(weight).optimizer_tier;
      return v;
    });
    moments.push_back({PortOf(kind, {weight}, index), id});
  }
  return moments;
}

void ProgramBuilder::AddFactored(std::string_view kernel,
                                 std::vector<ValueId> reads,
                                 std::vector<ValueId> writes,
                                 const std::vector<ValueId>& scalars) {
  if (writes.empty()) return;
  reads.insert(reads.end(), scalars.begin(), scalars.end());
  const bool on_host = value(writes[0]).tier == MemoryTier::kHost;
  Task& task = AddTask(TaskKind::kCompute, std::move(reads), std::move(writes));
  task.kernel = kernel;
  if (on_host) task.stream = Stream(StreamRole::kHost);
}

std::vector<ValueId> ProgramBuilder::Summed(
    const std::vector<ValueId>& partial) {
  std::vector<ValueId> summed = partial;
  std::map<AxisSet, std::vector<size_t>> by_axes;
  for (size_t i = 0; i < partial.size(); ++i) {
    const AxisSet axes = value(partial[i]).layout.partial;
    if (group().Size(axes) > 1) by_axes[axes].push_back(i);
  }
  for (const auto& [axes, members] : by_axes) {
    std::vector<ValueId> here;
    std::vector<ValueId> from;
    std::vector<Layout> layouts;
    for (size_t i : members) {
      const ValueId id = partial[i];
      here.push_back(id);
      from.push_back(value(id).tier == MemoryTier::kDevice
                         ? id
                         : OnTier(id, MemoryTier::kDevice,
                                  MemoryCategory::kCommunication));
      layouts.push_back(value(id).layout);
      layouts.back().partial = 0;
    }
    EmitCopies(here, from);
    const std::vector<ValueId> whole =
        EmitStep(ReshardKind::kAllReduce, axes, from, layouts,
                 /*in_place=*/true, MemoryCategory::kCommunication);
    std::vector<ValueId> back;
    for (size_t m = 0; m < members.size(); ++m) {
      const MemoryTier tier = value(here[m]).tier;
      back.push_back(tier == MemoryTier::kDevice
                         ? whole[m]
                         : OnTier(whole[m], tier, MemoryCategory::kWorkspace));
      summed[members[m]] = back.back();
    }
    EmitCopies(whole, back);
  }
  return summed;
}

// Weights of one form: matrices, or others.
struct ProgramBuilder::Kin {
  std::vector<TensorId> weights;
  // By piece.
  std::vector<ValueId> gradients;
  std::vector<ValueId> parameters;
  std::vector<ValueId> v;  // of what is no matrix
  // By weight.
  std::vector<ValueId> rows;  // these three of matrices
  std::vector<ValueId> columns;
  std::vector<ValueId> means;
  std::vector<ValueId> scaled_rows;       // over the mean
  std::vector<ValueId> squares;           // sums over the parameter
  std::vector<ValueId> squared_updates;   // sums over its update
  MemoryTier tier = MemoryTier::kDevice;  // of all sums
};

ProgramBuilder::Kin ProgramBuilder::KinOf(const FactoredStep& step,
                                          bool is_matrix) {
  Kin kin;
  kin.tier = value(step.parameters[0]).tier;
  for (size_t i = 0; i < step.pieces.size(); ++i) {
    const WeightPiece& piece = step.pieces[i];
    if (context_.matrix_form(piece.weight).has_value() != is_matrix) continue;
    const auto moment = [&](Port::Kind kind) {
      return step.moments.at(PortOf(kind, {piece.weight}));
    };
    kin.gradients.push_back(step.gradients[i]);
    kin.parameters.push_back(step.parameters[i]);
    if (!is_matrix) {
      kin.v.push_back(step.moments.at(PortOf(Port::kSecondMoment, piece)));
    }
    if (piece.tile != 0) continue;
    kin.weights.push_back(piece.weight);
    if (!is_matrix) continue;
    kin.rows.push_back(moment(Port::kFirstMoment));
    kin.columns.push_back(moment(Port::kSecondMoment));
    kin.means.push_back(moment(Port::kMeanMoment));
  }
  return kin;
}

std::vector<ValueId> ProgramBuilder::AddSums(const Kin& kin,
                                             std::string_view what,
                                             Along along) {
  std::vector<ValueId> sums;
  for (TensorId weight : kin.weights) {
    Value v = SumsOf(weight, what, along);
    v.tier = kin.tier;
    sums.push_back(AddValue(std::move(v)));
  }
  return sums;
}

void ProgramBuilder::EmitFactored(const FactoredStep& step) {
  Kin matrices = KinOf(step, /*is_matrix=*/true);
  Kin others = KinOf(step, /*is_matrix=*/false);
  for (Kin* kin : {&matrices, &others}) {
    kin->squares = AddSums(*kin, "parameter squares", Along::kNone);
    AddFactored("square_sum", kin->parameters, kin->squares, {});
  }
  EmitFactors(matrices, others, step.scalars);
  EmitSquaredUpdates(matrices, others, step.scalars);
  AddFactored(
      "adafactor_step",
      Joined({&matrices.gradients, &matrices.scaled_rows, &matrices.columns,
              &matrices.squares, &matrices.squared_updates}),
      matrices.parameters, step.scalars);
  AddFactored("adafactor_vector_step",
              Joined({&others.gradients, &others.v, &others.squares,
                      &others.squared_updates}),
              others.parameters, step.scalars);
}

void ProgramBuilder::EmitFactors(Kin& matrices, Kin& others,
                                 const std::vector<ValueId>& scalars) {
  const std::vector<ValueId> rows = AddSums(matrices, "row sums", Along::kRows);
  const std::vector<ValueId> columns =
      AddSums(matrices, "column sums", Along::kColumns);
  const std::vector<ValueId> totals =
      AddSums(matrices, "sum of squares", Along::kMatrices);
  AddFactored("adafactor_sums", matrices.gradients,
              Joined({&rows, &columns, &totals}), scalars);
  std::vector<ValueId> summed = Summed(
      Joined({&rows, &columns, &totals, &matrices.squares, &others.squares}));
  std::vector<ValueId> sums = Take(summed, 3 * matrices.weights.size());
  matrices.squares = Take(summed, matrices.weights.size());
  others.squares = std::move(summed);

  matrices.scaled_rows = AddSums(matrices, "row factor", Along::kRows);
  for (ValueId id : matrices.scaled_rows) value(id).layout.partial = 0;
  AddFactored("adafactor_factors", std::move(sums),
              Joined({&matrices.rows, &matrices.columns, &matrices.means,
                      &matrices.scaled_rows}),
              scalars);
}

void ProgramBuilder::EmitSquaredUpdates(Kin& matrices, Kin& others,
                                        const std::vector<ValueId>& scalars) {
  for (Kin* kin : {&matrices, &others}) {
    kin->squared_updates = AddSums(*kin, "update squares", Along::kNone);
  }
  AddFactored(
      "adafactor_norm",
      Joined({&matrices.gradients, &matrices.scaled_rows, &matrices.columns}),
      matrices.squared_updates, scalars);
  AddFactored("adafactor_vector_norm", others.gradients,
              Joined({&others.v, &others.squared_updates}), scalars);
  std::vector<ValueId> summed =
      Summed(Joined({&matrices.squared_updates, &others.squared_updates}));
  matrices.squared_updates = Take(summed, matrices.weights.size());
  others.squared_updates = std::move(summed);
}

}  // namespace tessera
