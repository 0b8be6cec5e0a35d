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

}  // namespace

std::span<const FactoredKernel> FactoredKernels() {
  return kKernels;
}

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

void ProgramBuilder::EmitFactored(const FactoredStep& step) {
  // By weight: matrices, then others.
  struct Kin {
    std::vector<TensorId> weights;
    std::vector<ValueId> gradients;   // by piece
    std::vector<ValueId> parameters;  // by piece
    std::vector<ValueId> v;           // by piece of what is no matrix
    std::vector<ValueId> squares;     // of parameters, by weight
  };
  Kin matrices;
  Kin others;
  const auto moment = [&](Port::Kind kind, const WeightPiece& piece) {
    return step.moments.at(PortOf(kind, piece));
  };
  for (size_t i = 0; i < step.pieces.size(); ++i) {
    const WeightPiece& piece = step.pieces[i];
    const bool is_matrix = context_.matrix_form(piece.weight).has_value();
    Kin& kin = is_matrix ? matrices : others;
    if (piece.tile == 0) kin.weights.push_back(piece.weight);
    kin.gradients.push_back(step.gradients[i]);
    kin.parameters.push_back(step.parameters[i]);
    if (!is_matrix) kin.v.push_back(moment(Port::kSecondMoment, piece));
  }
  const MemoryTier tier = value(step.parameters[0]).tier;
  const auto sums = [&](TensorId weight, std::string_view what, Along along) {
    Value v = SumsOf(weight, what, along);
    v.tier = tier;
    return AddValue(std::move(v));
  };
  const auto sums_of = [&](const Kin& kin, std::string_view what, Along along) {
    std::vector<ValueId> of;
    for (TensorId weight : kin.weights) of.push_back(sums(weight, what, along));
    return of;
  };
  // The first `count` of a list, which are taken from it.
  const auto take = [](std::vector<ValueId>& from, size_t count) {
    const auto end = from.begin() + static_cast<int64_t>(count);
    std::vector<ValueId> first(from.begin(), end);
    from.erase(from.begin(), end);
    return first;
  };

  const size_t n = matrices.weights.size();
  for (Kin* kin : {&matrices, &others}) {
    kin->squares = sums_of(*kin, "parameter squares", Along::kNone);
    AddFactored("square_sum", kin->parameters, kin->squares, {});
  }
  const std::vector<ValueId> rows = sums_of(matrices, "row sums", Along::kRows);
  const std::vector<ValueId> columns =
      sums_of(matrices, "column sums", Along::kColumns);
  const std::vector<ValueId> totals =
      sums_of(matrices, "sum of squares", Along::kMatrices);
  AddFactored("adafactor_sums", matrices.gradients,
              Joined({&rows, &columns, &totals}), step.scalars);
  std::vector<ValueId> summed = Summed(
      Joined({&rows, &columns, &totals, &matrices.squares, &others.squares}));
  std::vector<ValueId> factors = take(summed, 3 * n);
  matrices.squares = take(summed, n);
  others.squares = summed;

  std::vector<ValueId> row;
  std::vector<ValueId> column;
  std::vector<ValueId> mean;
  std::vector<ValueId> scaled_row;
  for (TensorId weight : matrices.weights) {
    row.push_back(moment(Port::kFirstMoment, {weight}));
    column.push_back(moment(Port::kSecondMoment, {weight}));
    mean.push_back(moment(Port::kMeanMoment, {weight}));
    scaled_row.push_back(sums(weight, "row factor", Along::kRows));
    value(scaled_row.back()).layout.partial = 0;
  }
  AddFactored("adafactor_factors", std::move(factors),
              Joined({&row, &column, &mean, &scaled_row}), step.scalars);

  const std::vector<ValueId> matrix_updates =
      sums_of(matrices, "update squares", Along::kNone);
  const std::vector<ValueId> other_updates =
      sums_of(others, "update squares", Along::kNone);
  AddFactored("adafactor_norm",
              Joined({&matrices.gradients, &scaled_row, &column}),
              matrix_updates, step.scalars);
  AddFactored("adafactor_vector_norm", others.gradients,
              Joined({&others.v, &other_updates}), step.scalars);
  std::vector<ValueId> updates =
      Summed(Joined({&matrix_updates, &other_updates}));
  const std::vector<ValueId> of_matrices = take(updates, n);

  AddFactored("adafactor_step",
              Joined({&matrices.gradients, &scaled_row, &column,
                      &matrices.squares, &of_matrices}),
              matrices.parameters, step.scalars);
  AddFactored("adafactor_vector_step",
              Joined({&others.gradients, &others.v, &others.squares, &updates}),
              others.parameters, step.scalars);
}

}  // namespace tessera
