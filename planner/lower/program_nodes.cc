// The tasks of nodes: calls, tiles, recomputation and exchanges inside of them.

#include <algorithm>

#include "planner/ir/statistics_dtype.h"
#include "planner/lower/accumulation.h"
#include "planner/lower/program_builder.h"

namespace tessera {
namespace {

// "NAME.state" of every coupled operator, alive for the whole process.
std::string_view StateKernel(const OpDef& op) {
  static const auto* const names = [] {
    auto* map = new std::map<std::string_view, std::string>();
    for (const OpDef& row : Ops()) {
      if (row.coupling.exists()) {
        map->emplace(row.name, std::string(row.name) + ".state");
      }
    }
    return map;
  }();
  return names->at(op.name);
}

// The dimension that a factor indexes, or -1.
int DimOf(const Indices& indices, int factor) {
  const auto it = std::find(indices.begin(), indices.end(), factor);
  return it == indices.end() ? -1 : static_cast<int>(it - indices.begin());
}

}  // namespace

void ProgramBuilder::EmitNodes() {
  if (kind_ != ProgramKind::kBegin) EmitGathers();
  if (pass_ == Pass::kBackward) EmitCopiesIn();
  const auto& nodes =
      context_.nodes_of_block(pass_)[static_cast<size_t>(block_)];
  // The last node of the program that adds to the gradient of a weight.
  std::map<TensorId, NodeId> completes;
  for (NodeId id : nodes) {
    if (!Includes(action_, context_.part(id))) continue;
    for (TensorId result : graph_.node(id).results) {
      const Tensor& tensor = graph_.tensor(result);
      if (tensor.kind == TensorKind::kWeightGradient) {
        completes[tensor.gradient_of] = id;
      }
    }
  }
  for (NodeId id : nodes) {
    const Node& node = graph_.node(id);
    if (node.op->once_per_step != (kind_ == ProgramKind::kBegin)) continue;
    here_ = context_.placement(id).group;
    if (!Includes(action_, context_.part(id))) {
      if (action_ == ActionKind::kBackwardInput) ReceiveOperands(node);
      continue;
    }
    if (node.op->name == "sum") {
      EmitSum(id, node);
    } else {
      EmitNode(id, node);
    }
    for (TensorId result : node.results) Settle(result);
    for (TensorId result : node.results) {
      const Tensor& tensor = graph_.tensor(result);
      if (tensor.kind == TensorKind::kWeightGradient &&
          completes.at(tensor.gradient_of) == id) {
        Complete(tensor.gradient_of);
      }
    }
  }
  if (kind_ == ProgramKind::kBackwardWeightReduce) {
    // Those that came with the gradients of activations alone.
    for (TensorId weight : context_.home_weights(block_)) {
      if (completes.contains(weight) || ReducesEach(weight)) continue;
      here_ = HomeGroup(weight);
      Complete(weight);
    }
  }
  for (const Bucket& bucket : buckets_) ReduceBucket(bucket);
  if (kind_ == ProgramKind::kBackwardReduce ||
      kind_ == ProgramKind::kBackwardWeightReduce) {
    CopyOutShards(true);
  }
  EmitCopiesOut();
}

void ProgramBuilder::ReceiveOperands(const Node& node) {
  for (TensorId operand : node.operands) {
    const TensorKind kind = graph_.tensor(operand).kind;
    if (kind == TensorKind::kInput || kind == TensorKind::kWeight) continue;
    const auto* presence = context_.presence(operand, here_);
    if (context_.presences(operand)[0].group != here_ &&
        presence->first_block == block_ &&
        presence->first_part == ActionKind::kBackwardInput) {
      Present(operand);
    }
    if (context_.recomputed(operand).valid()) Present(operand);
  }
}

void ProgramBuilder::EmitNode(NodeId id, const Node& node) {
  const OpPlacement& placement = context_.placement(id);
  if (TiledFactor(graph_, placement, id) >= 0) {
    EmitTiles(id, node, placement);
    return;
  }
  std::vector<ValueId> reads = ReadsOf(id, node, placement);
  const Writes writes = WritesOf(node);
  Task& task = AddTask(TaskKind::kCompute, std::move(reads), writes.values);
  task.kernel = node.op->name;
  task.node = id;
  task.accumulate = writes.accumulate;
  task.adds_microbatches =
      writes.adds_gradients && context_.plan().microbatches > 1;
  task.masks = Masks(node, placement);
  SetScratch(id, node, task);
  if (const auto ranks = group().Size(placement.streamed); ranks > 1) {
    const RingCall call = {task, &node, placement.streamed,
                           static_cast<int>(ranks), Stream(StreamRole::kComm)};
    program_.tasks.pop_back();
    EmitRing(call, program_);
  }
  for (const auto& [from, to] : writes.add_later) {
    Task& add = AddTask(TaskKind::kCompute, {from}, {to});
    add.kernel = "sum";
    add.accumulate = true;
  }
  for (size_t k = 0; k < node.results.size(); ++k) {
    const Tensor& tensor = graph_.tensor(node.results[k]);
    if (tensor.kind != TensorKind::kWeightGradient &&
        node.results[k] != graph_.loss) {
      made_[node.results[k]] = writes.values[k];
    }
  }
}

std::vector<ValueId> ProgramBuilder::ReadsOf(NodeId id, const Node& node,
                                             const OpPlacement& placement) {
  std::vector<ValueId> reads;
  reads.reserve(node.operands.size() + 2);
  for (size_t k = 0; k < node.operands.size(); ++k) {
    reads.push_back(
        context_.passes_partial(id)
            ? Present(node.operands[k])
            : Acquire(node.operands[k], context_.Wanted(node, placement, k)));
  }
  if (node.op->coupling.exists()) {
    reads.push_back(EmitState(id, node, placement, reads));
  }
  if (context_.scales_loss() && BeginsBackward(node)) {
    reads.push_back(LossScale());
  }
  return reads;
}

bool ProgramBuilder::AddsInPlace(const Node& node) const {
  if (AddsItsGradients(graph_, node)) return true;
  return context_.plan().microbatches == 1 &&
         std::ranges::none_of(node.results, [&](TensorId result) {
           const Tensor& tensor = graph_.tensor(result);
           return tensor.kind == TensorKind::kWeightGradient &&
                  std::ranges::count(graph_.gradients, tensor.gradient_of,
                                     &GradientTerm::weight) > 1;
         });
}

ProgramBuilder::Writes ProgramBuilder::WritesOf(const Node& node) {
  Writes writes;
  // A kernel adds to all its results or to none: with one gradient that is
  // reduced each time, all of a node's are written anew and added afterwards.
  const bool anew = std::ranges::any_of(node.results, [&](TensorId result) {
    const Tensor& tensor = graph_.tensor(result);
    return tensor.kind == TensorKind::kWeightGradient &&
           (ReducesEach(tensor.gradient_of) || !AddsInPlace(node));
  });
  for (TensorId result : node.results) {
    const Tensor& tensor = graph_.tensor(result);
    if (result == graph_.loss) {
      writes.values.push_back(Import({Port::kTensor, result, 0}, [&] {
        Value v = TensorValue(result, "loss", context_.produced(result),
                              MemoryCategory::kActivation);
        v.persistent = true;
        return v;
      }));
      writes.accumulate = true;
    } else if (tensor.kind != TensorKind::kWeightGradient) {
      writes.values.push_back(
          AddValue(TensorValue(result, "activation", context_.produced(result),
                               MemoryCategory::kActivation)));
    } else if (!anew) {
      writes.values.push_back(
          Accumulator({tensor.gradient_of}, AccumulatorIndex(result)));
      writes.accumulate = writes.adds_gradients = true;
    } else {
      const WeightPiece weight = {tensor.gradient_of};
      const ValueId gradient =
          AddValue(GradientValue(weight, context_.produced(result)));
      writes.values.push_back(gradient);
      if (ReducesEach(weight.weight)) {
        new_gradients_[weight].push_back(gradient);
      } else {
        writes.add_later.push_back(
            {gradient, Accumulator(weight, AccumulatorIndex(result))});
      }
    }
  }
  return writes;
}

void ProgramBuilder::SetScratch(NodeId id, const Node& node, Task& task) const {
  const KernelScratch scratch = context_.scratch(id);
  if (scratch.bytes == 0) return;
  task.scratch_bytes = scratch.bytes;
  for (size_t k = 0; k < node.operands.size(); ++k) {
    if (node.operands[k] == scratch.of) task.scratch_of = task.reads[k];
  }
  for (size_t k = 0; k < node.results.size(); ++k) {
    if (node.results[k] == scratch.of) task.scratch_of = task.writes[k];
  }
}

void ProgramBuilder::EmitTiles(NodeId id, const Node& node,
                               const OpPlacement& placement) {
  const int factor = TiledFactor(graph_, placement, id);
  const TensorId result = node.results[0];
  const bool is_gradient =
      graph_.tensor(result).kind == TensorKind::kWeightGradient;
  const int result_dim = DimOf(node.rule.results[0], factor);
  // Of a tiled weight, or whole.
  std::vector<ValueId> operands;
  for (size_t k = 0; k < node.operands.size(); ++k) {
    operands.push_back(
        DimOf(node.rule.operands[k], factor) >= 0 && IsTiled(node.operands[k])
            ? ValueId()
            : Acquire(node.operands[k], context_.Wanted(node, placement, k)));
  }
  ValueId whole;  // the result, where it is no weight's gradient
  ValueId sum;    // of 16-bit terms, in fp32
  if (!is_gradient) {
    whole =
        AddValue(TensorValue(result, "activation", context_.produced(result),
                             MemoryCategory::kActivation));
    if (result_dim < 0 && SizeOf(value(whole).dtype) < 4) {
      sum = Relaid(whole, value(whole).layout, MemoryCategory::kActivation);
      value(sum).dtype = DType::kFloat32;
    }
  }
  next_tile_ = ValueId();
  for (int tile = 0; tile < placement.tiles; ++tile) {
    const auto part = [&](Layout layout, int dim) {
      layout.tile = {dim, tile, placement.tiles};
      return layout;
    };
    std::vector<ValueId> reads;
    for (size_t k = 0; k < node.operands.size(); ++k) {
      const int dim = DimOf(node.rule.operands[k], factor);
      if (dim < 0) {
        reads.push_back(operands[k]);
      } else if (operands[k].valid()) {
        reads.push_back(EmitStep(ReshardKind::kSlice, 0, {operands[k]},
                                 {part(value(operands[k]).layout, dim)}, false,
                                 MemoryCategory::kActivation)[0]);
      } else {
        reads.push_back(TileOf(node.operands[k], tile));
      }
    }
    ValueId written;
    if (is_gradient) {
      const WeightPiece piece = {graph_.tensor(result).gradient_of, tile};
      written = ReducesEach(piece.weight)
                    ? AddValue(GradientValue(piece, context_.produced(result)))
                    : Accumulator(piece, AccumulatorIndex(result));
    } else if (result_dim >= 0) {
      written = Relaid(whole, part(value(whole).layout, result_dim),
                       MemoryCategory::kActivation);
    } else {
      written = sum.valid() ? sum : whole;
    }
    Task& task = AddTask(TaskKind::kCompute, std::move(reads), {written});
    task.kernel = node.op->name;
    task.node = id;
    // The first write of a value overwrites (Lower).
    task.accumulate = result_dim < 0 || is_gradient;
    task.adds_microbatches = is_gradient &&
                             !ReducesEach(graph_.tensor(result).gradient_of) &&
                             context_.plan().microbatches > 1;
    task.masks = Masks(node, placement);
    if (is_gradient) {
      const WeightPiece piece = {graph_.tensor(result).gradient_of, tile};
      if (!ReducesEach(piece.weight)) continue;
      new_gradients_[piece].push_back(written);
      ReduceBucket({here_, {}, {piece}, 0});
    } else if (result_dim >= 0) {
      AddTask(TaskKind::kSlice, {written}, {whole});
    }
  }
  if (sum.valid()) AddTask(TaskKind::kCompute, {sum}, {whole}).kernel = "cast";
  if (!is_gradient) made_[result] = whole;
}

bool ProgramBuilder::IsTiled(TensorId tensor) const {
  return graph_.tensor(tensor).kind == TensorKind::kWeight &&
         context_.tiles(tensor) > 1;
}

ValueId ProgramBuilder::TileOf(TensorId weight, int tile) {
  if (!context_.IsFetched(weight)) return Parameter({weight, tile});
  const auto gather = [&](int t) {
    const WeightPiece piece = {weight, t};
    return Fetched({piece})[0];
  };
  const ValueId here = next_tile_.valid() ? next_tile_ : gather(tile);
  const bool ahead =
      context_.plan().prefetch > 0 && tile + 1 < context_.tiles(weight);
  next_tile_ = ahead ? gather(tile + 1) : ValueId();
  return here;
}

void ProgramBuilder::Recompute(NodeId id) {
  const Node& node = graph_.node(id);
  EmitNode(id, node);
  for (TensorId result : node.results) {
    if (!context_.recomputed(result).valid()) continue;
    const ValueId settled =
        Reshard(made_.at(result), context_.presences(result)[0].layout, true,
                MemoryCategory::kActivation);
    present_[{here_, result}] = settled;
    Export(result, settled);
  }
}

bool ProgramBuilder::BeginsBackward(const Node& node) const {
  return node.forward.valid() &&
         std::none_of(node.operands.begin(), node.operands.end(),
                      [&](TensorId id) {
                        return graph_.tensor(id).kind == TensorKind::kGradient;
                      });
}

std::vector<AxisSet> ProgramBuilder::Masks(const Node& node,
                                           const OpPlacement& placement) {
  if (node.rule.terms.empty() || node.rule.terms.back() == 0) return {};
  std::vector<AxisSet> masks(node.rule.operands.size(), 0);
  bool any = false;
  for (size_t f = 0; f < node.rule.factors.size(); ++f) {
    const int factor = static_cast<int>(f);
    if (placement.axes[f] == 0 || Holds(node.rule.results[0], factor)) {
      continue;
    }
    for (size_t i = 0; i < masks.size(); ++i) {
      bool term_has = false;
      for (size_t j = 0; j < masks.size(); ++j) {
        term_has = term_has || (node.rule.terms[i] == node.rule.terms[j] &&
                                Holds(node.rule.operands[j], factor));
      }
      if (!term_has) {
        masks[i] |= placement.axes[f];
        any = true;
      }
    }
  }
  return any ? masks : std::vector<AxisSet>();
}

ValueId ProgramBuilder::EmitState(NodeId id, const Node& node,
                                  const OpPlacement& placement,
                                  const std::vector<ValueId>& reads) {
  const Coupling& coupling = node.op->coupling;
  const AxisSet axes = MergedAxes(node, placement, group());
  Value state;
  state.what = "state";
  state.group = here_;
  state.dtype = StatisticsDType(graph_.dtype);
  state.shape = {group().Size(axes)};
  state.layout.dims[0] = axes;
  if (group().IsUneven(axes)) state.layout.even = axes;
  state.layout.rooted = placement.rooted;
  if (!coupling.groups.empty()) {
    const auto samples = static_cast<size_t>(node.rule.FactorOf('b'));
    state.sample_dim = static_cast<int>(state.shape.size());
    state.layout.dims[state.shape.size()] = placement.axes[samples] & ~axes;
    state.shape.push_back(
        static_cast<int64_t>(node.attribute(coupling.groups)));
  }
  for (char letter : coupling.state_indices) {
    const int f = node.rule.FactorOf(letter);
    if (f < 0) continue;
    int64_t extent = 0;
    for (size_t k = 0; k < node.operands.size(); ++k) {
      const Indices& indices = node.rule.operands[k];
      const auto it = std::find(indices.begin(), indices.end(), f);
      if (it != indices.end()) {
        extent =
            value(reads[k]).shape[static_cast<size_t>(it - indices.begin())];
      }
    }
    if (node.rule.factors[static_cast<size_t>(f)].role == Role::kSample) {
      state.sample_dim = static_cast<int>(state.shape.size());
    }
    state.layout.dims[state.shape.size()] =
        placement.axes[static_cast<size_t>(f)];
    state.shape.push_back(extent);
  }
  state.shape.push_back(coupling.state_width);
  const ValueId local = AddValue(state);
  Task& task = AddTask(TaskKind::kCompute, reads, {local});
  task.kernel = StateKernel(*node.op);
  task.node = id;
  Layout gathered = state.layout;
  gathered.dims[0] = 0;
  return Reshard(local, gathered, false, MemoryCategory::kCommunication);
}

void ProgramBuilder::EmitSum(NodeId id, const Node& node) {
  const TensorId result = node.results[0];
  const Layout target = context_.produced(result);
  std::vector<std::pair<Layout, std::vector<ValueId>>> by_layout;
  for (TensorId operand : node.operands) {
    const ValueId v = Present(operand);
    const Layout layout = value(v).layout;
    auto it = std::find_if(by_layout.begin(), by_layout.end(),
                           [&](const auto& b) { return b.first == layout; });
    if (it == by_layout.end()) {
      by_layout.push_back({layout, {}});
      it = std::prev(by_layout.end());
    }
    it->second.push_back(v);
  }
  const auto add = [&](const std::vector<ValueId>& terms, ValueId to) {
    Task& task = AddTask(TaskKind::kCompute, terms, {to});
    task.kernel = "sum";
    task.node = id;
    return to;
  };
  const auto new_value = [&](const Layout& layout) {
    return AddValue(
        TensorValue(result, "gradient", layout, MemoryCategory::kActivation));
  };
  if (by_layout.size() == 1) {
    made_[result] = add(by_layout[0].second, new_value(target));
    return;
  }
  std::vector<ValueId> terms;
  for (const auto& [layout, values] : by_layout) {
    const bool several = values.size() > 1;
    const ValueId local = several ? add(values, new_value(layout)) : values[0];
    terms.push_back(
        Reshard(local, target, several, MemoryCategory::kCommunication));
  }
  made_[result] = add(terms, new_value(target));
}

void ProgramBuilder::Settle(TensorId tensor) {
  const auto it = made_.find(tensor);
  if (it == made_.end()) return;
  const auto& presences = context_.presences(tensor);
  const ValueId settled = Reshard(it->second, presences[0].layout, true,
                                  MemoryCategory::kActivation);
  present_[{here_, tensor}] = settled;
  Layout whole = presences[0].layout;
  whole.partial = 0;
  for (size_t i = 1; i < presences.size(); ++i) {
    const ValueId sent =
        Reshard(settled, whole, false, MemoryCategory::kCommunication);
    EmitSend({Port::kTensor, tensor, 0}, presences[i].group, sent,
             pass_ == Pass::kForward ? StreamRole::kSendForward
                                     : StreamRole::kSendBackward);
  }
  Export(tensor, settled);
  if (context_.kept_as_produced(tensor)) {
    program_.exports.push_back({{Port::kTensor, tensor, 1}, it->second});
    CopyOutLater(tensor, 1, it->second);
  }
  if (!context_.once_per_step(tensor)) return;
  for (size_t i = 1; i < presences.size(); ++i) {
    here_ = presences[i].group;
    Receive(tensor, presences[i], presences[0].group);
  }
  here_ = presences[0].group;
}

}  // namespace tessera
