#include "planner/lower/lower.h"

#include <algorithm>
#include <boost/container/small_vector.hpp>
#include <map>
#include <tuple>

#include "planner/base/flat_map.h"
#include "planner/base/rng.h"
#include "planner/lower/needs_norm.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

// Places programs in a TaskGraph: binds their ports, matches their transfers,
// and derives dependencies from what tasks read and write.
class Assembler {
 public:
  Assembler(const LoweringContext& context, TaskGraph& tasks)
      : context_(context),
        tasks_(tasks),
        last_compute_(context.plan().groups.size()) {}

  // `like` is where the program was first placed, for another microbatch.
  // Returns the program's first task.
  TaskId Place(const BlockProgram& program, int microbatch, TaskId like = {}) {
    std::vector<ValueId> bound(program.values.size());
    for (const BoundValue& import : program.imports) {
      bound[import.value.index()] =
          Bind(import.port, microbatch, program.values[import.value.index()]);
    }
    for (size_t i = 0; i < bound.size(); ++i) {
      if (bound[i].valid()) continue;
      Value value = program.values[i];
      if (value.alias_of.valid()) {
        value.alias_of = bound[value.alias_of.index()];
      }
      if (value.sample_dim >= 0 && microbatch >= 0) {
        value.sample_offset =
            microbatch * value.shape[static_cast<size_t>(value.sample_dim)];
      }
      bound[i] = AddValue(std::move(value));
    }
    const auto first = static_cast<int64_t>(tasks_.tasks.size());
    for (const Task& local : program.tasks) {
      Task task = local;
      task.microbatch = microbatch;
      for (ValueId& id : task.reads) id = bound[id.index()];
      for (ValueId& id : task.writes) id = bound[id.index()];
      if (like.valid()) task.like = TaskId(like.value++);
      if (task.scratch_of.valid()) {
        task.scratch_of = bound[task.scratch_of.index()];
      }
      AddTask(std::move(task));
    }
    for (const Transfer& send : program.sends) {
      const TransferKey key{send.port, program.tasks[send.task].group,
                            send.peer, microbatch};
      sent_[key] = TaskId(first + static_cast<int64_t>(send.task));
    }
    for (const Transfer& receive : program.receives) {
      const TransferKey key{receive.port, receive.peer,
                            program.tasks[receive.task].group, microbatch};
      const auto it = sent_.find(key);
      TESSERA_CHECK(it != sent_.end()) << "a receive without its send";
      Task& task = tasks_.tasks[static_cast<size_t>(first) + receive.task];
      Task& send = tasks_.tasks[it->second.index()];
      task.peer = send.reads[0];
      send.peer = task.writes[0];
      task.deps.insert(
          std::upper_bound(task.deps.begin(), task.deps.end(), it->second),
          it->second);
      sent_.erase(it);
    }
    for (const BoundValue& exported : program.exports) {
      const ValueId id = bound[exported.value.index()];
      ports_[KeyOf(exported.port, tasks_.value(id).group, microbatch)] = id;
    }
    return TaskId(first);
  }

  // The value bound to a port, which may be `local` anew where it persists.
  ValueId Bind(const Port& port, int microbatch, const Value& local) {
    const auto [it, is_new] =
        ports_.try_emplace(KeyOf(port, local.group, microbatch));
    if (is_new) {
      TESSERA_CHECK(local.persistent)
          << local.what << " of tensor " << local.tensor
          << " is imported before it exists";
      it->second = AddValue(local);
    }
    return it->second;
  }

  // The value bound to a port, or an invalid id.
  ValueId Bound(const Port& port, GroupId group, int microbatch) const {
    const auto it = ports_.find(KeyOf(port, group, microbatch));
    return it == ports_.end() ? ValueId() : it->second;
  }

  // What it shares the buffer of, if anything, is there before it.
  ValueId AddValue(Value value) {
    const ValueId id(tasks_.values.size());
    roots_.push_back(value.alias_of.valid() ? roots_[value.alias_of.index()]
                                            : id);
    tasks_.values.push_back(std::move(value));
    uses_.emplace_back();
    written_.push_back(false);
    return id;
  }

  void AddTask(Task task) {
    const Use own = {TaskId(tasks_.tasks.size()), StreamOf(task)};
    const auto depend = [&](const Use& on) {
      if (on.stream != own.stream) task.deps.push_back(on.task);
    };
    const auto depend_all = [&](const UseList& on) {
      for (const Use& use : on) depend(use);
    };
    for (ValueId read : task.reads) depend_all(uses_[RootOf(read)].writers);
    // The first write of a step overwrites, later ones add: it is the first if
    // none of its results was written. A fresh result beside a sum (a token's
    // statistics beside the loss) does not restart the sum.
    bool first = true;
    for (ValueId written : task.writes) {
      const size_t root = RootOf(written);
      depend_all(uses_[root].writers);
      depend_all(uses_[root].readers);
      first = first && !Written(root, task.group);
    }
    if (task.accumulate && first) task.accumulate = false;
    if (task.after_compute) {
      const auto after = [&](GroupId group) {
        const Use& last = last_compute_[group.index()];
        if (last.task.valid()) depend(last);
      };
      after(task.group);
      for (GroupId other : context_.overlaps(task.group)) after(other);
    }
    if (task.stream == StreamRole::kCompute &&
        task.group.index() < last_compute_.size()) {
      last_compute_[task.group.index()] = own;
    }
    std::sort(task.deps.begin(), task.deps.end());
    task.deps.erase(std::unique(task.deps.begin(), task.deps.end()),
                    task.deps.end());
    for (ValueId read : task.reads) Replace(uses_[RootOf(read)].readers, own);
    for (ValueId written : task.writes) {
      const size_t root = RootOf(written);
      uses_[root].readers.clear();
      Replace(uses_[root].writers, own);
      MarkWritten(root, task.group);
    }
    tasks_.tasks.push_back(std::move(task));
  }

 private:
  struct PortKey {
    Port port;
    GroupId group;
    int microbatch = -1;
    bool operator==(const PortKey&) const = default;
  };
  struct PortHash {
    uint64_t operator()(const PortKey& key) const {
      return Mix64(key.port.word() ^
                   Mix64(static_cast<uint64_t>(key.group.value) << 32 |
                         static_cast<uint32_t>(key.microbatch)));
    }
  };
  using TransferKey = std::tuple<Port, GroupId, GroupId, int>;

  // Within a stream tasks run in their order.
  struct Stream {
    GroupId group;
    StreamRole role = StreamRole::kCompute;
    AxisSet axes = 0;  // of a communicator
    bool operator==(const Stream&) const = default;
  };
  static Stream StreamOf(const Task& task) {
    return {task.group, task.stream,
            task.stream == StreamRole::kComm ? task.axes : AxisSet{0}};
  }
  struct Use {
    TaskId task;
    Stream stream;
  };
  // The last task of each stream that wrote or read a buffer: earlier ones of
  // the same stream precede it.
  using UseList = boost::container::small_vector<Use, 2>;
  struct Uses {
    UseList writers;
    UseList readers;
  };

  // The list may have the same task already, which reads two parts of a buffer.
  static void Replace(UseList& list, const Use& use) {
    for (Use& other : list) {
      if (other.stream == use.stream) {
        other = use;
        return;
      }
    }
    list.push_back(use);
  }

  size_t RootOf(ValueId id) const { return roots_[id.index()].index(); }

  // Whether a task of `group` finds something there. Of the world's values
  // every group has a copy of its own.
  bool Written(size_t root, GroupId group) const {
    if (tasks_.values[root].group != tasks_.world) return written_[root];
    return std::any_of(
        world_written_.begin(), world_written_.end(),
        [&](const std::pair<size_t, GroupId>& written) {
          return written.first == root &&
                 (written.second == group || written.second == tasks_.world);
        });
  }
  void MarkWritten(size_t root, GroupId group) {
    written_[root] = true;
    if (tasks_.values[root].group == tasks_.world) {
      world_written_.emplace_back(root, group);
    }
  }

  PortKey KeyOf(const Port& port, GroupId group, int microbatch) const {
    const bool per_microbatch =
        port.kind == Port::kGathered || port.kind == Port::kOffloaded ||
        (port.kind == Port::kTensor && port.tensor != context_.graph().loss &&
         !context_.once_per_step(port.tensor));
    return {port, group, per_microbatch ? microbatch : -1};
  }

  const LoweringContext& context_;
  TaskGraph& tasks_;
  std::vector<Use> last_compute_;  // by group, on its compute stream
  std::vector<ValueId> roots_;     // by value: who owns its buffer
  std::vector<Uses> uses_;         // by root value
  std::vector<bool> written_;      // by root value, in this step
  std::vector<std::pair<size_t, GroupId>> world_written_;
  FlatMap<PortKey, ValueId, PortHash> ports_;
  std::map<TransferKey, TaskId> sent_;
};

class StepLowering {
 public:
  explicit StepLowering(const LoweringContext& context)
      : context_(context), assembler_(context, tasks_) {
    const Plan& plan = context.plan();
    tasks_.groups = plan.groups;
    tasks_.world = GroupId(plan.groups.size());
    tasks_.groups.push_back(World(plan));
    tasks_.microbatches = plan.microbatches;
    tasks_.zigzag = plan.zigzag;
    const PipelineShape shape = ShapeOf(context.graph(), plan);
    at_position_.resize(static_cast<size_t>(shape.stages * shape.chunks));
    for (size_t b = 0; b < context.graph().blocks.size(); ++b) {
      const int block = static_cast<int>(b);
      if (context.stage_of_block(block) < 0) continue;
      at_position_[static_cast<size_t>(context.position_of_block(block))]
          .push_back(block);
    }
  }

  TaskGraph Run() {
    PlaceAll(ProgramKind::kBegin, false);
    RunSchedule();
    PlaceAll(ProgramKind::kTie, true);
    ReduceLoss();
    BeginNorm();
    PlaceAll(ProgramKind::kNorm, false);
    AddHostSquareSums();
    ReduceNorm();
    PlaceAll(ProgramKind::kUpdate, false);
    return std::move(tasks_);
  }

 private:
  // Once-a-step programs of all blocks. Ties run from the last to the first,
  // since the home of a weight is in the first block that reads it.
  void PlaceAll(ProgramKind kind, bool descending) {
    const auto n = static_cast<int>(context_.graph().blocks.size());
    for (int i = 0; i < n; ++i) {
      const int block = descending ? n - 1 - i : i;
      assembler_.Place(LowerBlock(context_, block, kind), -1);
    }
  }

  void RunSchedule() {
    const Plan& plan = context_.plan();
    const PipelineShape shape = ShapeOf(context_.graph(), plan);
    std::vector<int> complete(at_position_.size(), 0);
    for (const StageAction& step :
         GlobalOrder(OrdersOf(context_.graph(), plan), shape)) {
      const ActionKind kind = step.action.kind;
      const auto position =
          static_cast<size_t>(step.action.chunk * shape.stages + step.stage);
      const std::vector<int>& blocks = at_position_[position];
      if (kind == ActionKind::kForward) {
        for (int block : blocks) Place(block, ProgramKind::kForward, step);
        continue;
      }
      // Gradients are complete with the last that the chunk makes.
      const bool last = kind != ActionKind::kBackwardInput &&
                        ++complete[position] == plan.microbatches;
      for (size_t i = blocks.size(); i-- > 0;) {
        Place(blocks[i], ProgramOf(kind, last), step);
      }
    }
    for (int microbatches : complete) {
      TESSERA_CHECK(microbatches == plan.microbatches)
          << plan.schedule << " deadlocks";
    }
  }

  void Place(int block, ProgramKind kind, const StageAction& step) {
    const auto key = std::pair(block, kind);
    auto it = programs_.find(key);
    if (it == programs_.end()) {
      it = programs_.emplace(key, Placed{LowerBlock(context_, block, kind), {}})
               .first;
    }
    Placed& placed = it->second;
    const TaskId first =
        assembler_.Place(placed.program, step.action.microbatch, placed.first);
    if (!placed.first.valid()) placed.first = first;
  }

  // The loss is summed over the ranks that share the batch; every rank of its
  // group has it afterwards.
  void ReduceLoss() {
    const TensorId loss = context_.graph().loss;
    const GroupId group = context_.presences(loss)[0].group;
    const ValueId partial =
        assembler_.Bound({Port::kTensor, loss, 0}, group, -1);
    TESSERA_CHECK(partial.valid()) << "no loss";
    tasks_.loss =
        AllReduceInPlace(partial, group, tasks_.value(partial).layout.partial);
    const AxisSet rooted = tasks_.value(partial).layout.rooted;
    if (tasks_.group(group).Size(rooted) == 1) return;
    Layout whole = tasks_.value(tasks_.loss).layout;
    whole.rooted = 0;
    tasks_.loss = ExchangeInPlace(CommKind::kBroadcast, tasks_.loss, group,
                                  rooted, whole);
  }

  // A rank of several groups adds the squares of all of them to one sum: it is
  // zero before the first. (Where groups share no device, the first task of
  // each overwrites it.)
  void BeginNorm() {
    const bool sums = NeedsNorm(context_.options(), context_.graph().dtype);
    if (!sums || !context_.devices_are_shared()) return;
    const Port port{Port::kSquareSum, TensorId(), 0};
    Task task;
    task.kernel = "square_sum";
    task.pass = Pass::kBackward;
    task.optimizer = true;
    task.group = tasks_.world;
    task.writes = {assembler_.Bind(port, -1, SquareSumValue(context_))};
    assembler_.AddTask(std::move(task));
  }

  // What a group's ranks have summed on their hosts joins their own sums.
  void AddHostSquareSums() {
    const bool streams = context_.concurrent_streams();
    const ValueId all =
        assembler_.Bound({Port::kSquareSum, TensorId(), 0}, tasks_.world, -1);
    for (size_t g = 0; g < context_.plan().groups.size(); ++g) {
      const ValueId sum =
          assembler_.Bound({Port::kSquareSum, TensorId(), 1}, GroupId(g), -1);
      if (!sum.valid()) continue;
      Value copied = tasks_.value(sum);
      copied.tier = MemoryTier::kDevice;
      copied.persistent = false;
      const ValueId on_device = assembler_.AddValue(std::move(copied));
      Task copy;
      copy.kind = TaskKind::kCopy;
      copy.stream = streams ? StreamRole::kCopyIn : StreamRole::kCompute;
      copy.pass = Pass::kBackward;
      copy.optimizer = true;
      copy.group = GroupId(g);
      copy.reads = {sum};
      copy.writes = {on_device};
      assembler_.AddTask(std::move(copy));
      Task add;
      add.kernel = "sum";
      add.accumulate = true;
      add.pass = Pass::kBackward;
      add.optimizer = true;
      add.group = GroupId(g);
      add.reads = {on_device};
      add.writes = {all};
      assembler_.AddTask(std::move(add));
    }
  }

  void ReduceNorm() {
    const ValueId sum =
        assembler_.Bound({Port::kSquareSum, TensorId(), 0}, tasks_.world, -1);
    if (sum.valid()) AllReduceInPlace(sum, tasks_.world, AxisSet{1});
  }

  ValueId AllReduceInPlace(ValueId partial, GroupId group, AxisSet axes) {
    if (tasks_.group(group).Size(axes) == 1) return partial;
    Layout whole = tasks_.value(partial).layout;
    whole.partial = 0;
    return ExchangeInPlace(CommKind::kAllReduce, partial, group, axes, whole);
  }

  ValueId ExchangeInPlace(CommKind kind, ValueId from, GroupId group,
                          AxisSet axes, const Layout& layout) {
    Value whole = tasks_.value(from);
    whole.layout = layout;
    whole.alias_of = from;
    whole.persistent = false;
    const ValueId result = assembler_.AddValue(std::move(whole));
    Task task;
    task.kind = TaskKind::kComm;
    task.stream = context_.concurrent_streams() ? StreamRole::kComm
                                                : StreamRole::kCompute;
    task.comm = kind;
    task.pass = Pass::kBackward;
    task.optimizer = true;
    task.group = group;
    task.axes = axes;
    task.reads = {from};
    task.writes = {result};
    assembler_.AddTask(std::move(task));
    return result;
  }

  struct Placed {
    BlockProgram program;
    TaskId first;  // of its tasks, where it was placed first
  };

  const LoweringContext& context_;
  TaskGraph tasks_;
  Assembler assembler_;
  std::vector<std::vector<int>> at_position_;  // blocks, by position
  std::map<std::pair<int, ProgramKind>, Placed> programs_;
};

}  // namespace

TaskGraph Lower(const LoweringFacts& facts, const Plan& plan) {
  const LoweringContext context(facts, plan);
  return StepLowering(context).Run();
}

TaskGraph Lower(const Graph& graph, const Cluster& cluster, const Plan& plan,
                const TrainingOptions& options) {
  return Lower(LoweringFacts(graph, cluster, options), plan);
}

}  // namespace tessera
