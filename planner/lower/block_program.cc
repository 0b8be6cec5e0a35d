// One block, one pass: nodes become tasks, layouts become reshards.

#include <algorithm>
#include <tuple>

#include "planner/lower/lower.h"
#include "planner/lower/ring.h"
#include "planner/plan/tiles.h"

namespace tessera {
namespace {

// "NAME.state" of every coupled operator, alive for the whole process.
std::string_view StateKernel(const OpDef& op) {
  static const auto* const names = [] {
    auto* map = new std::map<std::string_view, std::string>();
    for (const OpDef& row : Ops()) {
      if (row.coupling.factor != 0) {
        map->emplace(row.name, std::string(row.name) + ".state");
      }
    }
    return map;
  }();
  return names->at(op.name);
}

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

// The dimension that a factor indexes, or -1.
int DimOf(const Indices& indices, int factor) {
  const auto it = std::find(indices.begin(), indices.end(), factor);
  return it == indices.end() ? -1 : static_cast<int>(it - indices.begin());
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

Value Scalar(const LoweringContext& context, std::string_view what,
             GroupId group) {
  Value v;
  v.what = what;
  v.group = group;
  v.dtype = context.graph().dtype == DType::kFloat64 ? DType::kFloat64
                                                     : DType::kFloat32;
  v.category = MemoryCategory::kGradient;
  v.persistent = true;
  return v;
}

class ProgramBuilder {
 public:
  ProgramBuilder(const LoweringContext& context, int block, ProgramKind kind)
      : context_(context),
        graph_(context.graph()),
        block_(block),
        kind_(kind),
        action_(ActionOf(kind)),
        pass_(action_ == ActionKind::kForward ? Pass::kForward
                                              : Pass::kBackward) {}

  BlockProgram Build() {
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

 private:
  // ---- groups

  // The group whose tasks are being emitted: that of a node, or of a weight.
  const DeviceGroup& group() const {
    return context_.plan().groups[here_.index()];
  }

  GroupId HomeGroup(TensorId weight) const {
    return context_.replicas(weight)[0].group;
  }

  // Calls `emit` on each group that is home to some of the pieces, with them,
  // in the order of their first pieces.
  template <typename Emit>
  void AtHome(const std::vector<WeightPiece>& pieces, const Emit& emit) {
    std::vector<std::pair<GroupId, std::vector<WeightPiece>>> by_group;
    for (const WeightPiece& piece : pieces) {
      const GroupId home = HomeGroup(piece.weight);
      auto it = std::find_if(by_group.begin(), by_group.end(),
                             [&](const auto& g) { return g.first == home; });
      if (it == by_group.end()) {
        by_group.push_back({home, {}});
        it = std::prev(by_group.end());
      }
      it->second.push_back(piece);
    }
    for (const auto& [home, members] : by_group) {
      here_ = home;
      emit(members);
    }
  }

  // The pieces in which weights are stored.
  std::vector<WeightPiece> PiecesOf(
      const std::vector<TensorId>& weights) const {
    std::vector<WeightPiece> pieces;
    for (TensorId weight : weights) {
      for (int tile = 0; tile < context_.tiles(weight); ++tile) {
        pieces.push_back({weight, tile});
      }
    }
    return pieces;
  }

  // ---- values and tasks

  ValueId AddValue(Value value) {
    program_.values.push_back(std::move(value));
    return ValueId(program_.values.size() - 1);
  }
  Value& value(ValueId id) { return program_.values[id.index()]; }

  // A value that holds (a microbatch of) a graph tensor in `layout`.
  Value TensorValue(TensorId tensor, std::string_view what,
                    const Layout& layout, MemoryCategory category) {
    const Tensor& t = graph_.tensor(tensor);
    Value v;
    v.what = what;
    v.tensor = tensor;
    v.group = here_;
    v.shape = t.shape;
    v.sample_dim = t.sample_dim;
    if (t.sample_dim >= 0 && kind_ != ProgramKind::kBegin) {
      v.shape[static_cast<size_t>(t.sample_dim)] /=
          context_.plan().microbatches;
    }
    v.dtype = t.dtype;
    v.layout = layout;
    v.category = category;
    return v;
  }

  // A copy of `of`, not persistent, in another layout.
  ValueId Relaid(ValueId of, const Layout& layout, MemoryCategory category) {
    Value v = value(of);
    v.layout = layout;
    v.category = category;
    v.persistent = false;
    v.alias_of = ValueId();
    return AddValue(std::move(v));
  }

  Task& AddTask(TaskKind kind, std::vector<ValueId> reads,
                std::vector<ValueId> writes) {
    Task task;
    task.kind = kind;
    task.group = here_;
    task.pass = pass_;
    task.optimizer =
        kind_ == ProgramKind::kNorm || kind_ == ProgramKind::kUpdate;
    task.reads = std::move(reads);
    task.writes = std::move(writes);
    program_.tasks.push_back(std::move(task));
    return program_.tasks.back();
  }

  StreamRole Stream(StreamRole wanted) const {
    return context_.concurrent_streams() ? wanted : StreamRole::kCompute;
  }

  // Binds a value that exists outside the program; once for each port of a
  // group.
  template <typename Make>
  ValueId Import(const Port& port, Make make) {
    const auto [it, is_new] = imported_.try_emplace({here_, port});
    if (is_new) {
      it->second = AddValue(make());
      program_.imports.push_back({port, it->second});
    }
    return it->second;
  }

  // ---- resharding

  // One step of several values at once; `in_place` lets an all-reduce or a
  // reduce reuse the buffers of values that nothing else reads.
  std::vector<ValueId> EmitStep(ReshardKind kind, AxisSet axes,
                                const std::vector<ValueId>& from,
                                const std::vector<Layout>& to, bool in_place,
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

  ValueId Reshard(ValueId from, const Layout& to, bool in_place,
                  MemoryCategory category) {
    const Layout start = value(from).layout;
    for (const ReshardStep& step : PlanReshard(start, to, group())) {
      from = EmitStep(step.kind, step.axes, {from}, {step.to}, in_place,
                      category)[0];
    }
    return from;
  }

  // ---- tensors

  // The tensor as this group has it, imported or received.
  ValueId Present(TensorId tensor) {
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

  ValueId Receive(TensorId tensor, const LoweringContext::Presence& presence,
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

  // Leaves a tensor to later programs, if any reads it.
  void Export(TensorId tensor, ValueId id) {
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

  ValueId Load(TensorId tensor, const Layout& layout) {
    const ValueId result = AddValue(
        TensorValue(tensor, "input", layout, MemoryCategory::kActivation));
    AddTask(TaskKind::kLoad, {}, {result});
    return result;
  }

  // An input that the root alone loads: its first reader scatters it, and
  // later programs find it as it does.
  ValueId PresentInput(TensorId tensor) {
    const auto* presence = context_.presence(tensor, here_);
    if (present_.contains({here_, tensor}) || presence->first_block != block_ ||
        !Includes(action_, presence->first_part)) {
      return Present(tensor);
    }
    const AxisSet root = context_.InputRoot(tensor, here_);
    Layout loaded = presence->layout;
    for (AxisSet& dim : loaded.dims) dim &= ~root;
    loaded.rooted = root;
    const ValueId result = Reshard(Load(tensor, loaded), presence->layout,
                                   false, MemoryCategory::kActivation);
    present_[{here_, tensor}] = result;
    Export(tensor, result);
    return result;
  }

  // The tensor in the layout that a node wants; equal wishes share.
  ValueId Acquire(TensorId tensor, const Layout& wanted) {
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
        result = Reshard(Whole(tensor), wanted, false,
                         MemoryCategory::kCommunication);
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

  // The tensor in the layout in which its node leaves it.
  ValueId AsProduced(TensorId tensor) {
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

  const LoweringContext::Replica& ReplicaHere(TensorId weight) const {
    for (const auto& replica : context_.replicas(weight)) {
      if (replica.group == here_) return replica;
    }
    TESSERA_CHECK(false) << graph_.tensor(weight).name;
    return context_.replicas(weight)[0];
  }

  // The port of what is kept of a piece of a weight.
  static Port PortOf(Port::Kind kind, const WeightPiece& piece, int index = 0) {
    return {kind, piece.weight, index, piece.tile};
  }

  ValueId Parameter(const WeightPiece& piece) {
    return Import(PortOf(Port::kParameter, piece), [&] {
      Value v = TensorValue(
          piece.weight, "parameter",
          context_.ParameterLayout(piece, ReplicaHere(piece.weight)),
          MemoryCategory::kParameter);
      v.persistent = true;
      v.tier = context_.weight_placement(piece.weight).parameter_tier;
      return v;
    });
  }

  // ---- memory tiers

  // A value like `of` on another tier.
  ValueId OnTier(ValueId of, MemoryTier tier, MemoryCategory category) {
    const ValueId id = Relaid(of, value(of).layout, category);
    value(id).tier = tier;
    return id;
  }

  StreamRole CopyStream(MemoryTier from, MemoryTier to) const {
    if (from == MemoryTier::kFile) return Stream(StreamRole::kFileRead);
    if (to == MemoryTier::kFile) return Stream(StreamRole::kFileWrite);
    return Stream(from == MemoryTier::kHost ? StreamRole::kCopyIn
                                            : StreamRole::kCopyOut);
  }

  // Copies from[i] to to[i], between device and file through the host's memory:
  // one task for all that go the same way.
  void EmitCopies(std::vector<ValueId> from, const std::vector<ValueId>& to,
                  bool after_compute = false) {
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
          next = OnTier(from[i], MemoryTier::kHost,
                        MemoryCategory::kCommunication);
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

  // Leaves a value to later programs, and to this one.
  void Leave(const Port& port, ValueId id) {
    imported_[{here_, port}] = id;
    program_.exports.push_back({port, id});
  }

  // A buffer of Port::kTensor, new in forward: what backward reads is copied
  // out with the end of the block.
  void CopyOutLater(TensorId tensor, int index, ValueId id) {
    if (action_ == ActionKind::kForward &&
        context_.FindOffloaded(tensor, index, here_) != nullptr) {
      leaving_.push_back({{Port::kTensor, tensor, index}, id});
    }
  }

  void EmitCopiesOut() {
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

  // Copies in what backward first reads one block later; the first block of a
  // stage's backward also what it reads itself.
  void EmitCopiesIn() {
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

  // ---- parameters that are not stored as their readers see them

  // Whether the stored parameter is cut (ZeRO stage 3).
  bool IsCut(TensorId weight) const {
    return context_.ZeroStage(weight) >= 3 && HomeGroup(weight) == here_;
  }

  // The parameter as its readers see it.
  ValueId Whole(TensorId weight) {
    if (!context_.IsFetched(weight) || HomeGroup(weight) != here_) {
      return Parameter({weight});
    }
    if (const auto it = gathered_.find(weight); it != gathered_.end()) {
      return it->second;
    }
    const Port port{Port::kGathered, weight, static_cast<int>(action_)};
    const ValueId id = Import(port, [&] {
      return TensorValue(weight, "gathered", ReplicaHere(weight).layout,
                         MemoryCategory::kCommunication);
    });
    gathered_[weight] = id;
    return id;
  }

  void EmitGather(int block) {
    AtHome(PiecesOf(context_.FetchedWeights(block, action_)),
           [&](const std::vector<WeightPiece>& pieces) {
             EmitGather(block, pieces);
           });
  }

  void EmitGather(int block, const std::vector<WeightPiece>& pieces) {
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

  // Parameters as their readers see them, behind all earlier computation:
  // copied to the device, and gathered where they are cut, one collective for
  // those over equal axes.
  std::vector<ValueId> Fetched(const std::vector<WeightPiece>& pieces) {
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
      for (size_t m = 0; m < members.size(); ++m) here[members[m]] = whole[m];
    }
    for (ValueId id : here) value(id).what = "gathered";
    return here;
  }

  // Parameters are gathered Plan::prefetch blocks ahead of their use; the
  // first block of a stage's pass also gathers all that come before.
  void EmitGathers() {
    const int prefetch = context_.plan().prefetch;
    const bool first = context_.BlockAhead(block_, pass_, -1) < 0;
    for (int ahead = first ? 0 : prefetch; ahead <= prefetch; ++ahead) {
      const int block = context_.BlockAhead(block_, pass_, ahead);
      if (block < 0) break;
      EmitGather(block);
    }
  }

  ValueId Accumulator(const WeightPiece& piece, int index) {
    return Import(PortOf(Port::kAccumulator, piece, index), [&] {
      const auto& layouts = ReplicaHere(piece.weight).gradients;
      Value v = GradientValue(piece, layouts[static_cast<size_t>(index)]);
      v.persistent = true;
      return v;
    });
  }

  Value GradientValue(const WeightPiece& piece, const Layout& layout) {
    Value v =
        TensorValue(piece.weight, "gradient", context_.PieceOf(layout, piece),
                    MemoryCategory::kGradient);
    v.dtype = GradientDType(piece.weight);
    return v;
  }

  // Which of the accumulated layouts a gradient has.
  int AccumulatorIndex(TensorId gradient) const {
    const TensorId weight = graph_.tensor(gradient).gradient_of;
    const auto& layouts = ReplicaHere(weight).gradients;
    return static_cast<int>(
        std::find(layouts.begin(), layouts.end(), context_.produced(gradient)) -
        layouts.begin());
  }

  DType GradientDType(TensorId weight) const {
    return graph_.tensor(weight).dtype == DType::kFloat64 ? DType::kFloat64
                                                          : DType::kFloat32;
  }

  // ---- transfers between groups

  void EmitSend(const Port& port, GroupId to, ValueId id, StreamRole stream) {
    Task& task = AddTask(TaskKind::kSend, {id}, {});
    task.stream = Stream(stream);
    task.comm = CommKind::kSendRecv;
    program_.sends.push_back({program_.tasks.size() - 1, port, to});
  }

  void EmitReceive(const Port& port, GroupId from, ValueId id,
                   StreamRole stream) {
    Task& task = AddTask(TaskKind::kRecv, {}, {id});
    task.stream = Stream(stream);
    task.comm = CommKind::kSendRecv;
    program_.receives.push_back({program_.tasks.size() - 1, port, from});
  }

  // ---- nodes

  void EmitNodes() {
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
        if (completes.contains(weight) || CutsGradient(weight)) continue;
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

  // Receives, or computes again, what only the gradients of weights read: it
  // comes with the other tensors of the microbatch's backward.
  void ReceiveOperands(const Node& node) {
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

  void EmitNode(NodeId id, const Node& node) {
    const OpPlacement& placement = context_.placement(id);
    if (TiledFactor(graph_, placement, id) >= 0) {
      EmitTiles(id, node, placement);
      return;
    }
    std::vector<ValueId> reads;
    for (size_t k = 0; k < node.operands.size(); ++k) {
      reads.push_back(
          context_.passes_partial(id)
              ? Present(node.operands[k])
              : Acquire(node.operands[k], OperandLayout(node, placement, k)));
    }
    if (node.op->coupling.factor != 0) {
      reads.push_back(EmitState(id, node, placement, reads));
    }
    if (context_.scales_loss() && BeginsBackward(node)) {
      reads.push_back(LossScale());
    }
    std::vector<ValueId> writes;
    bool accumulate = false;
    // A kernel adds to all its results or to none: with one gradient cut, all
    // of a node's are written anew and added afterwards.
    bool cuts = false;
    for (TensorId result : node.results) {
      const Tensor& tensor = graph_.tensor(result);
      cuts = cuts || (tensor.kind == TensorKind::kWeightGradient &&
                      CutsGradient(tensor.gradient_of));
    }
    std::vector<std::pair<ValueId, ValueId>> add_later;  // from, accumulator
    for (size_t k = 0; k < node.results.size(); ++k) {
      const TensorId result = node.results[k];
      const Tensor& tensor = graph_.tensor(result);
      if (tensor.kind == TensorKind::kWeightGradient) {
        const WeightPiece weight = {tensor.gradient_of};
        const int index = AccumulatorIndex(result);
        if (!cuts) {
          writes.push_back(Accumulator(weight, index));
          accumulate = true;
          continue;
        }
        writes.push_back(
            AddValue(GradientValue(weight, context_.produced(result))));
        if (CutsGradient(weight.weight)) {
          new_gradients_[weight].push_back(writes.back());
        } else {
          add_later.push_back({writes.back(), Accumulator(weight, index)});
        }
      } else if (result == graph_.loss) {
        writes.push_back(Import({Port::kTensor, result, 0}, [&] {
          Value v = TensorValue(result, "loss", context_.produced(result),
                                MemoryCategory::kActivation);
          v.persistent = true;
          return v;
        }));
        accumulate = true;
      } else {
        writes.push_back(AddValue(TensorValue(result, "activation",
                                              context_.produced(result),
                                              MemoryCategory::kActivation)));
      }
    }
    Task& task = AddTask(TaskKind::kCompute, std::move(reads), writes);
    task.kernel = node.op->name;
    task.node = id;
    task.accumulate = accumulate;
    task.masks = Masks(node, placement);
    if (const auto ranks = group().Size(placement.streamed); ranks > 1) {
      const RingCall call = {task, &node, placement.streamed,
                             static_cast<int>(ranks),
                             Stream(StreamRole::kComm)};
      program_.tasks.pop_back();
      EmitRing(call, program_);
    }
    for (const auto& [from, to] : add_later) {
      Task& add = AddTask(TaskKind::kCompute, {from}, {to});
      add.kernel = "sum";
      add.accumulate = true;
    }
    for (size_t k = 0; k < node.results.size(); ++k) {
      const Tensor& tensor = graph_.tensor(node.results[k]);
      if (tensor.kind != TensorKind::kWeightGradient &&
          node.results[k] != graph_.loss) {
        made_[node.results[k]] = writes[k];
      }
    }
  }

  // ---- tiles (planner/plan/tiles.h)

  // A linear or one of its adjoints, tile by tile: on the tile's part of each
  // operand that has the tiled factor. Results that have it, too, are put
  // together; one that has not is a sum over the tiles.
  void EmitTiles(NodeId id, const Node& node, const OpPlacement& placement) {
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
              : Acquire(node.operands[k], OperandLayout(node, placement, k)));
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
                                   {part(value(operands[k]).layout, dim)},
                                   false, MemoryCategory::kActivation)[0]);
        } else {
          reads.push_back(TileOf(node.operands[k], tile));
        }
      }
      ValueId written;
      if (is_gradient) {
        const WeightPiece piece = {graph_.tensor(result).gradient_of, tile};
        written =
            CutsGradient(piece.weight)
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
      task.masks = Masks(node, placement);
      if (is_gradient) {
        const WeightPiece piece = {graph_.tensor(result).gradient_of, tile};
        if (!CutsGradient(piece.weight)) continue;
        new_gradients_[piece].push_back(written);
        ReduceBucket({here_, {}, {piece}, 0});
      } else if (result_dim >= 0) {
        AddTask(TaskKind::kSlice, {written}, {whole});
      }
    }
    if (sum.valid())
      AddTask(TaskKind::kCompute, {sum}, {whole}).kernel = "cast";
    if (!is_gradient) made_[result] = whole;
  }

  bool IsTiled(TensorId tensor) const {
    return graph_.tensor(tensor).kind == TensorKind::kWeight &&
           context_.tiles(tensor) > 1;
  }

  // A tile of a weight as its readers see it. One that is stored cut is
  // gathered for this reader alone: with Plan::prefetch while the tile before
  // it is at work, which makes two at a time, else when that is done.
  ValueId TileOf(TensorId weight, int tile) {
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

  // Runs a forward node again for those of its results that were not kept.
  void Recompute(NodeId id) {
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

  // Whether the node makes gradients of a loss alone, from no other gradient:
  // those that are scaled.
  bool BeginsBackward(const Node& node) const {
    return node.forward.valid() &&
           std::none_of(
               node.operands.begin(), node.operands.end(), [&](TensorId id) {
                 return graph_.tensor(id).kind == TensorKind::kGradient;
               });
  }

  // Where a reduction is split, an additive term that lacks the factor counts
  // at coordinate 0 only.
  static std::vector<AxisSet> Masks(const Node& node,
                                    const OpPlacement& placement) {
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

  // A coupled operator's state: [shards, state indices, width], gathered in
  // rank order over the axes that split the coupled factor.
  ValueId EmitState(NodeId id, const Node& node, const OpPlacement& placement,
                    const std::vector<ValueId>& reads) {
    const Coupling& coupling = node.op->coupling;
    const auto factor =
        static_cast<size_t>(node.rule.FactorOf(coupling.factor));
    const AxisSet axes = placement.axes[factor];
    Value state;
    state.what = "state";
    state.group = here_;
    state.dtype =
        graph_.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    state.shape = {group().Size(axes)};
    state.layout.dims[0] = axes;
    state.layout.rooted = placement.rooted;
    for (char letter : coupling.state_indices) {
      const int f = node.rule.FactorOf(letter);
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

  // Adds operands of equal layout first, then reshards each sum once.
  void EmitSum(NodeId id, const Node& node) {
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
      const ValueId local =
          several ? add(values, new_value(layout)) : values[0];
      terms.push_back(
          Reshard(local, target, several, MemoryCategory::kCommunication));
    }
    made_[result] = add(terms, new_value(target));
  }

  // Resolves the partial sums of a new tensor as its first reader wants it,
  // sends it to the groups that read it, and leaves it to later programs. They
  // receive it where they first read it, but for what is made once a step.
  void Settle(TensorId tensor) {
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

  // ---- gradients

  // Brings the gradient terms of each weight into the layout that the
  // optimizer reads, and adds them. Steps of one kind over the same axes are
  // one collective for all weights.
  std::vector<ValueId> Reduce(
      const std::vector<WeightPiece>& weights,
      const std::vector<std::vector<ValueId>>& terms_of) {
    struct Term {
      size_t weight;  // index into `weights`
      ValueId id;
      std::vector<ReshardStep> steps;
    };
    std::vector<Term> terms;
    size_t rounds = 0;
    for (size_t w = 0; w < weights.size(); ++w) {
      const Layout target = context_.StateLayout(weights[w]);
      for (ValueId id : terms_of[w]) {
        auto steps = PlanReshard(value(id).layout, target, group());
        rounds = std::max(rounds, steps.size());
        terms.push_back({w, id, std::move(steps)});
      }
    }
    for (size_t round = 0; round < rounds; ++round) {
      // Buckets in order of first appearance, so that all ranks agree.
      std::vector<std::pair<ReshardKind, AxisSet>> buckets;
      for (const Term& term : terms) {
        if (round >= term.steps.size()) continue;
        const auto key =
            std::pair(term.steps[round].kind, term.steps[round].axes);
        if (std::find(buckets.begin(), buckets.end(), key) == buckets.end()) {
          buckets.push_back(key);
        }
      }
      for (const auto& [kind, axes] : buckets) {
        std::vector<ValueId> from;
        std::vector<Layout> to;
        std::vector<Term*> members;
        for (Term& term : terms) {
          if (round >= term.steps.size() || term.steps[round].kind != kind ||
              term.steps[round].axes != axes) {
            continue;
          }
          from.push_back(term.id);
          to.push_back(term.steps[round].to);
          members.push_back(&term);
        }
        const auto results =
            EmitStep(kind, axes, from, to, true, MemoryCategory::kGradient);
        for (size_t i = 0; i < members.size(); ++i) members[i]->id = results[i];
      }
    }
    std::vector<ValueId> reduced;
    for (size_t w = 0; w < weights.size(); ++w) {
      std::vector<ValueId> ready;
      for (const Term& term : terms) {
        if (term.weight == w) ready.push_back(term.id);
      }
      if (ready.size() > 1) {
        const ValueId sum =
            Relaid(ready[0], value(ready[0]).layout, MemoryCategory::kGradient);
        AddTask(TaskKind::kCompute, ready, {sum}).kernel = "sum";
        ready[0] = sum;
      }
      reduced.push_back(ready[0]);
    }
    return reduced;
  }

  // Gradients that are reduced together: where their size is limited, by equal
  // conversions, so that a bucket is one collective.
  struct Bucket {
    GroupId group;
    std::vector<std::pair<ReshardKind, AxisSet>> steps;
    std::vector<WeightPiece> weights;
    int64_t bytes = 0;  // of the largest rank's gradients
  };

  // A gradient of this block's is complete: of the microbatch where it is
  // stored cut (then every microbatch's is reduced and the shards are summed),
  // else of the step. Of a weight tied within this chunk it is complete in its
  // home block, the first of its blocks, whose backward runs last. Weights
  // tied across chunks or groups wait for the other terms (kTie).
  void Complete(TensorId weight) {
    if (CutsGradient(weight)) {
      // Tiles are reduced one by one as they are made.
      if (context_.tiles(weight) > 1) return;
    } else {
      const auto& home = context_.home_weights(block_);
      const bool last = kind_ == ProgramKind::kBackwardReduce ||
                        kind_ == ProgramKind::kBackwardWeightReduce;
      if (!last || !context_.CompleteWithBackward(weight) ||
          std::find(home.begin(), home.end(), weight) == home.end()) {
        return;
      }
    }
    for (const WeightPiece& piece : PiecesOf({weight})) AddToBucket(piece);
  }

  void AddToBucket(const WeightPiece& piece) {
    Bucket wanted;
    wanted.group = here_;
    for (ValueId term : CompleteTerms(piece)) {
      const Value& v = value(term);
      for (const ReshardStep& step :
           PlanReshard(v.layout, context_.StateLayout(piece), group())) {
        wanted.steps.emplace_back(step.kind, step.axes);
      }
      wanted.bytes +=
          LargestElements(v.layout, group(), v.shape) * SizeOf(v.dtype);
    }
    const int64_t limit = context_.plan().bucket_bytes.value;
    if (limit == 0) wanted.steps.clear();
    auto bucket =
        std::find_if(buckets_.begin(), buckets_.end(), [&](const Bucket& b) {
          return b.group == wanted.group && b.steps == wanted.steps;
        });
    if (bucket == buckets_.end()) {
      bucket = buckets_.insert(buckets_.end(), {here_, wanted.steps, {}, 0});
    }
    bucket->weights.push_back(piece);
    bucket->bytes += wanted.bytes;
    if (limit == 0 || bucket->bytes < limit) return;
    ReduceBucket(*bucket);
    buckets_.erase(bucket);
  }

  // What of a weight's complete gradient is reduced.
  std::vector<ValueId> CompleteTerms(const WeightPiece& piece) {
    return CutsGradient(piece.weight) ? new_gradients_.at(piece)
                                      : GradientTerms(piece);
  }

  void ReduceBucket(const Bucket& bucket) {
    here_ = bucket.group;
    std::vector<std::vector<ValueId>> terms;
    for (const WeightPiece& piece : bucket.weights) {
      terms.push_back(CompleteTerms(piece));
    }
    const std::vector<ValueId> reduced = Reduce(bucket.weights, terms);
    std::vector<std::pair<WeightPiece, ValueId>> complete;
    for (size_t w = 0; w < reduced.size(); ++w) {
      const WeightPiece& piece = bucket.weights[w];
      if (CutsGradient(piece.weight)) {
        AddShard(piece, reduced[w]);
      } else {
        program_.exports.push_back({PortOf(Port::kReduced, piece), reduced[w]});
        complete.emplace_back(piece, reduced[w]);
      }
    }
    CopyOutGradients(complete);
  }

  // The reduction of gradients that were summed locally over the microbatches.
  void EmitReduce(const std::vector<TensorId>& all) {
    AtHome(PiecesOf(all), [&](const std::vector<WeightPiece>& pieces) {
      std::vector<std::vector<ValueId>> terms;
      for (const WeightPiece& piece : pieces)
        terms.push_back(GradientTerms(piece));
      const std::vector<ValueId> reduced = Reduce(pieces, terms);
      std::vector<std::pair<WeightPiece, ValueId>> complete;
      for (size_t i = 0; i < pieces.size(); ++i) {
        program_.exports.push_back(
            {PortOf(Port::kReduced, pieces[i]), reduced[i]});
        complete.emplace_back(pieces[i], reduced[i]);
      }
      CopyOutGradients(complete);
    });
  }

  bool StepsOnHost(TensorId weight) const {
    return context_.weight_placement(weight).optimizer_tier !=
           MemoryTier::kDevice;
  }

  // Copies the step's reduced gradients to the host that makes their step.
  void CopyOutGradients(
      const std::vector<std::pair<WeightPiece, ValueId>>& complete) {
    std::vector<ValueId> from;
    std::vector<ValueId> to;
    for (const auto& [piece, reduced] : complete) {
      if (!StepsOnHost(piece.weight)) continue;
      from.push_back(reduced);
      to.push_back(
          OnTier(reduced, MemoryTier::kHost, MemoryCategory::kGradient));
      program_.exports.push_back({PortOf(Port::kReduced, piece, 1), to.back()});
    }
    EmitCopies(from, to);
  }

  // The same of those that are stored cut, whose shards have all been added: of
  // this block's weights that are complete `with_backward`, or those that are
  // not.
  void CopyOutShards(bool with_backward) {
    std::vector<TensorId> cut = context_.home_weights(block_);
    std::erase_if(cut, [&](TensorId weight) {
      return !CutsGradient(weight) ||
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

  // Whether a weight's gradient is stored cut (ZeRO stages 2 and 3).
  bool CutsGradient(TensorId weight) const {
    return context_.ZeroStage(weight) >= 2;
  }

  // Adds a microbatch's reduced shard to the step's, on the stream that made
  // it: compute does not wait for the reduction.
  void AddShard(const WeightPiece& piece, ValueId shard) {
    const auto made = std::find_if(
        program_.tasks.rbegin(), program_.tasks.rend(), [&](const Task& task) {
          return std::find(task.writes.begin(), task.writes.end(), shard) !=
                 task.writes.end();
        });
    const StreamRole stream = made->stream;
    const AxisSet axes = made->axes;
    const ValueId sum = Reduced(piece);
    Task& task = AddTask(TaskKind::kCompute, {shard}, {sum});
    task.kernel = "sum";
    task.accumulate = true;
    task.stream = stream;
    task.axes = axes;
  }

  // The accumulators of a weight here, and what kTie received for it, with
  // terms of equal layout added.
  std::vector<ValueId> GradientTerms(const WeightPiece& piece) {
    std::vector<ValueId> terms;
    const auto& gradients = ReplicaHere(piece.weight).gradients;
    for (size_t i = 0; i < gradients.size(); ++i) {
      terms.push_back(Accumulator(piece, static_cast<int>(i)));
    }
    for (ValueId id : received_[piece.weight]) {
      const auto same =
          std::find_if(terms.begin(), terms.end(), [&](ValueId other) {
            return value(other).layout == value(id).layout;
          });
      if (same == terms.end()) {
        terms.push_back(id);
        continue;
      }
      const ValueId sum =
          Relaid(*same, value(id).layout, MemoryCategory::kGradient);
      AddTask(TaskKind::kCompute, {*same, id}, {sum}).kernel = "sum";
      *same = sum;
    }
    return terms;
  }

  // The layout in which a replica's gradient travels to the home group: as it
  // is between like meshes, partial sums included; else whole.
  Layout TravelLayout(TensorId weight, const LoweringContext::Replica& replica,
                      size_t index) const {
    const auto& home = context_.replicas(weight)[0];
    const auto& groups = context_.plan().groups;
    Layout layout = replica.gradients[index];
    if (SameMesh(groups[replica.group.index()], groups[home.group.index()])) {
      return layout;
    }
    return home.layout;
  }

  void EmitTie() {
    // Replicas that live in this block send their terms home.
    for (TensorId weight : context_.tied_weights()) {
      const auto& replicas = context_.replicas(weight);
      for (size_t r = 1; r < replicas.size(); ++r) {
        if (replicas[r].block != block_) continue;
        here_ = replicas[r].group;
        for (size_t i = 0; i < replicas[r].gradients.size(); ++i) {
          ValueId id = Accumulator({weight}, static_cast<int>(i));
          const auto& home = context_.plan().groups[replicas[0].group.index()];
          if (!SameMesh(group(), home)) {
            Layout whole = value(id).layout;
            whole.partial = 0;
            id = Reshard(id, whole, true, MemoryCategory::kGradient);
          }
          EmitSend({Port::kAccumulator, weight, static_cast<int>(i)},
                   replicas[0].group, id, StreamRole::kSendBackward);
        }
      }
    }
    std::vector<TensorId> tied;
    for (TensorId weight : context_.home_weights(block_)) {
      if (context_.CompleteWithBackward(weight) || CutsGradient(weight)) {
        continue;
      }
      const auto& replicas = context_.replicas(weight);
      tied.push_back(weight);
      here_ = replicas[0].group;
      for (size_t r = 1; r < replicas.size(); ++r) {
        for (size_t i = 0; i < replicas[r].gradients.size(); ++i) {
          Value v = TensorValue(weight, "tied gradient",
                                TravelLayout(weight, replicas[r], i),
                                MemoryCategory::kGradient);
          v.dtype = GradientDType(weight);
          const ValueId id = AddValue(std::move(v));
          EmitReceive({Port::kAccumulator, weight, static_cast<int>(i)},
                      replicas[r].group, id, StreamRole::kRecvBackward);
          received_[weight].push_back(id);
        }
      }
    }
    if (!tied.empty()) EmitReduce(tied);
    CopyOutShards(false);
  }

  // The step's gradient as the optimizer reads it. One that is stored cut is a
  // sum over the microbatches.
  ValueId Reduced(const WeightPiece& piece) {
    return Import(PortOf(Port::kReduced, piece), [&] {
      const bool cut = CutsGradient(piece.weight);
      Value v =
          TensorValue(piece.weight, cut ? "gradient shard" : "reduced gradient",
                      context_.StateLayout(piece), MemoryCategory::kGradient);
      v.dtype = GradientDType(piece.weight);
      v.persistent = cut;
      return v;
    });
  }

  ValueId SquareSum() {
    return Import({Port::kSquareSum, TensorId(), 0},
                  [&] { return SquareSumValue(context_); });
  }

  ValueId Clip() {
    return Import({Port::kClip, TensorId(), 0},
                  [&] { return Scalar(context_, "clip", here_); });
  }

  ValueId LossScale() {
    return Import({Port::kLossScale, TensorId(), 0}, [&] {
      Value v = Scalar(context_, "loss scale", here_);
      v.shape = {3};  // runtime/loss_scale.h
      v.category = MemoryCategory::kOptimizer;
      return v;
    });
  }

  // Whether the optimizer reads a coefficient: scaled gradients need the norm
  // to be seen to overflow.
  bool clips() const {
    return context_.options().clip > 0 || context_.scales_loss();
  }

  // Each group begins with a sum, of nothing if need be.
  void EmitNorm() {
    if (!clips()) return;
    std::vector<GroupId> begun = context_.groups_begun(block_);
    AtHome(PiecesOf(context_.home_weights(block_)),
           [&](const std::vector<WeightPiece>& pieces) {
             std::erase(begun, here_);
             EmitSquareSum(pieces);
           });
    for (GroupId group : begun) {
      here_ = group;
      EmitSquareSum({});
    }
  }

  void EmitSquareSum(const std::vector<WeightPiece>& pieces) {
    std::vector<ValueId> reads;
    std::vector<AxisSet> masks;
    for (const WeightPiece& piece : pieces) {
      reads.push_back(Reduced(piece));
      // Each element once: at coordinate 0 of the axes that replicate it, and
      // where it is at all.
      const Layout& layout = value(reads.back()).layout;
      masks.push_back(layout.replicated(group()) | layout.rooted);
    }
    Task& task = AddTask(TaskKind::kCompute, reads, {SquareSum()});
    task.kernel = "square_sum";
    task.masks = masks;
    task.accumulate = true;
  }

  ValueId State(Port::Kind kind, const WeightPiece& piece,
                std::string_view what, const Layout& layout) {
    return Import(PortOf(kind, piece), [&] {
      Value v =
          TensorValue(piece.weight, what, layout, MemoryCategory::kOptimizer);
      v.dtype = GradientDType(piece.weight);
      v.persistent = true;
      v.tier = context_.weight_placement(piece.weight).optimizer_tier;
      return v;
    });
  }

  void EmitUpdate() {
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

  void UpdateWeights(std::vector<WeightPiece> pieces) {
    const auto on_host = std::stable_partition(
        pieces.begin(), pieces.end(),
        [&](const WeightPiece& piece) { return !StepsOnHost(piece.weight); });
    const std::vector<WeightPiece> on_device(pieces.begin(), on_host);
    pieces.erase(pieces.begin(), on_host);
    if (!on_device.empty()) UpdateOnDevice(on_device);
    UpdateOnHost(pieces);
  }

  void UpdateOnDevice(const std::vector<WeightPiece>& pieces) {
    const bool adamw = context_.options().optimizer == "adamw";
    std::vector<WeightPiece> updated_itself;  // not its master
    for (const WeightPiece& piece : pieces) {
      if (SizeOf(graph_.tensor(piece.weight).dtype) >= 4) {
        updated_itself.push_back(piece);
      }
    }
    CopyParameters(updated_itself, true);
    std::vector<ValueId> reads;
    std::vector<ValueId> writes;
    std::vector<ValueId> slice_from;
    std::vector<ValueId> slice_to;
    std::vector<ValueId> shards;  // what the parameter is made of afterwards
    for (const WeightPiece& piece : pieces) {
      const Layout layout = context_.StateLayout(piece);
      const ValueId parameter = DeviceParameter(piece);
      const bool stored_so = value(parameter).layout == layout;
      reads.push_back(Reduced(piece));
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
      writes.push_back(updated);
      if (adamw) {
        writes.push_back(State(Port::kFirstMoment, piece, "m", layout));
        writes.push_back(State(Port::kSecondMoment, piece, "v", layout));
      }
    }
    if (clips()) reads.push_back(Clip());
    if (context_.scales_loss()) reads.push_back(LossScale());
    if (!slice_to.empty()) AddTask(TaskKind::kSlice, slice_from, slice_to);
    AddTask(TaskKind::kCompute, reads, writes).kernel = adamw ? "adamw" : "sgd";
    ReturnShards(pieces, shards);
    CopyParameters(pieces, false);
  }

  // The stored parameter; off the device a copy of it there.
  ValueId DeviceParameter(const WeightPiece& piece) {
    const ValueId stored = Parameter(piece);
    if (value(stored).tier == MemoryTier::kDevice) return stored;
    const auto [it, is_new] = device_parameters_.try_emplace(piece);
    if (is_new) {
      it->second =
          OnTier(stored, MemoryTier::kDevice, MemoryCategory::kCommunication);
    }
    return it->second;
  }

  // Copies stored parameters to their copies on the device, or back.
  void CopyParameters(const std::vector<WeightPiece>& pieces, bool in) {
    std::vector<ValueId> stored;
    std::vector<ValueId> copies;
    for (const WeightPiece& piece : pieces) {
      stored.push_back(Parameter(piece));
      copies.push_back(DeviceParameter(piece));
    }
    EmitCopies(in ? stored : copies, in ? copies : stored);
  }

  // ---- the step on the host

  // What the step of a group reads beside gradients, if any of its weights
  // steps on the host.
  void CopyOutScalars() {
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

  // A copy in the host's memory that an earlier program has left of a value.
  ValueId LeftOnHost(const Port& port, ValueId of) {
    return Import(port, [&] {
      Value v = value(of);
      v.persistent = false;
      v.tier = MemoryTier::kHost;
      return v;
    });
  }

  // What the host's step updates: the parameter in the precision of the state
  // and the moments, as they are stored.
  std::vector<std::pair<Port, ValueId>> HostState(const WeightPiece& piece) {
    const Layout layout = context_.StateLayout(piece);
    std::vector<std::pair<Port, ValueId>> state;
    const auto add = [&](Port::Kind kind, std::string_view what) {
      state.push_back(
          {PortOf(kind, piece, 1), State(kind, piece, what, layout)});
    };
    if (context_.HasHostMaster(piece.weight)) {
      add(Port::kMaster, "master");
    } else {
      state.push_back({PortOf(Port::kParameter, piece, 1), Parameter(piece)});
    }
    if (context_.options().optimizer == "adamw") {
      add(Port::kFirstMoment, "m");
      add(Port::kSecondMoment, "v");
    }
    return state;
  }

  // Reads what the host's step of a block's weights here updates in files.
  void ReadState(int block) {
    std::vector<ValueId> from;
    std::vector<ValueId> to;
    for (const WeightPiece& piece : PiecesOf(context_.home_weights(block))) {
      if (!context_.HasFileState(piece.weight) ||
          HomeGroup(piece.weight) != here_) {
        continue;
      }
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

  // State in files is read while the block before steps, and written behind the
  // step.
  void UpdateOnHost(const std::vector<WeightPiece>& pieces) {
    if (pieces.empty()) return;
    if (std::any_of(pieces.begin(), pieces.end(),
                    [&](const WeightPiece& piece) {
                      return context_.HasFileState(piece.weight);
                    })) {
      if (context_.NextFileBlock(block_, here_, -1) < 0) ReadState(block_);
      const int next = context_.NextFileBlock(block_, here_, 1);
      if (next >= 0) ReadState(next);
    }
    const bool adamw = context_.options().optimizer == "adamw";
    std::vector<ValueId> reads;
    std::vector<ValueId> writes;
    std::vector<ValueId> read_back;  // of files
    std::vector<ValueId> stored_in;
    std::vector<ValueId> updated;  // parameters
    for (const WeightPiece& piece : pieces) {
      reads.push_back(
          LeftOnHost(PortOf(Port::kReduced, piece, 1), Reduced(piece)));
      updated.push_back(ValueId());
      for (const auto& [port, stored] : HostState(piece)) {
        ValueId id = stored;
        if (value(stored).tier == MemoryTier::kFile) {
          id = LeftOnHost(port, stored);
          read_back.push_back(id);
          stored_in.push_back(stored);
        }
        writes.push_back(id);
        if (!updated.back().valid()) updated.back() = id;
      }
    }
    if (clips()) reads.push_back(LeftOnHost({Port::kClip, {}, 1}, Clip()));
    if (context_.scales_loss()) {
      reads.push_back(LeftOnHost({Port::kLossScale, {}, 1}, LossScale()));
    }
    Task& task = AddTask(TaskKind::kCompute, reads, writes);
    task.kernel = adamw ? "adamw" : "sgd";
    task.stream = Stream(StreamRole::kHost);
    EmitCopies(read_back, stored_in);
    ReturnFromHost(pieces, updated);
  }

  // Masters are cast to the parameter's type and copied to where it is stored;
  // shards of one that is not cut meet on the device.
  void ReturnFromHost(const std::vector<WeightPiece>& pieces,
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
      task.kernel = "cast";
      task.stream = Stream(StreamRole::kHost);
    }
    EmitCopies(from, to);
    ReturnShards(cut, shards);
    CopyParameters(cut, false);
  }

  // Lets `value` share the buffer of `of`, which is laid out alike where it is
  // at all.
  void InPlace(ValueId shared, ValueId of) {
    value(shared).alias_of = of;
    value(shared).category = value(of).category;
  }

  // What a root returns shares the buffer of the parameter that the others
  // receive it in, if that is stored on the device.
  void ReturnInPlace(ValueId shared, const WeightPiece& piece) {
    const ValueId parameter = Parameter(piece);
    if (value(parameter).tier == MemoryTier::kDevice) {
      InPlace(shared, parameter);
    }
  }

  // Masters are cast to the parameter's type, shards gathered into it, what the
  // root has broadcast.
  void ReturnShards(const std::vector<WeightPiece>& pieces,
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
      AddTask(TaskKind::kCompute, cast_from, cast_to).kernel = "cast";
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

  void ReturnTiedWeights() {
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

  const LoweringContext& context_;
  const Graph& graph_;
  const int block_;
  const ProgramKind kind_;
  const ActionKind action_;
  const Pass pass_;
  BlockProgram program_;
  GroupId here_;  // the current group
  std::map<std::pair<GroupId, Port>, ValueId> imported_;
  // As the producing node left them.
  std::map<TensorId, ValueId> made_;
  // As a group has them, and as its nodes want them.
  std::map<std::pair<GroupId, TensorId>, ValueId> present_;
  std::map<std::tuple<GroupId, TensorId, Layout>, ValueId> acquired_;
  std::map<TensorId, std::vector<ValueId>> received_;  // kTie
  std::map<TensorId, ValueId> gathered_;  // fetched parameters made whole
  ValueId next_tile_;                     // fetched ahead of its use
  std::map<WeightPiece, ValueId> device_parameters_;  // copies of stored ones
  std::vector<BoundValue> leaving_;                   // to be copied out
  std::map<WeightPiece, std::vector<ValueId>> new_gradients_;  // to be cut
  std::vector<Bucket> buckets_;                                // being filled
};

}  // namespace

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

BlockProgram LowerBlock(const LoweringContext& context, int block,
                        ProgramKind kind) {
  return ProgramBuilder(context, block, kind).Build();
}

}  // namespace tessera
