#include "costmodel/evaluate/stage.h"

#include <algorithm>
#include <boost/container/small_vector.hpp>
#include <limits>
#include <unordered_map>

#include "planner/base/rng.h"

namespace tessera {
namespace {

// No path from a column to a task. Far enough from the minimum that adding
// durations does not wrap.
constexpr int64_t kNever = std::numeric_limits<int64_t>::min() / 4;

// What a stage does, as numbers: kBegin, then kForward to kLast of each chunk,
// then the tail.
enum FoldKind { kForwardFold, kBackwardFold, kWeightFold, kLastFold };
constexpr int kFoldKinds = 4;
constexpr int kBeginFold = 0;
int FoldNumber(int chunk, FoldKind kind) {
  return 1 + chunk * kFoldKinds + kind;
}

// Sets of chunks. More chunks than bits share the last.
constexpr uint64_t kAllChunks = ~uint64_t{0};
uint64_t ChunkBit(int chunk) {
  return uint64_t{1} << std::min(chunk, 63);
}

// Numbers ports: open addressing with keys of one word.
class PortTable {
 public:
  explicit PortTable(size_t ports) {
    size_t size = 64;
    while (size < 2 * ports) size *= 2;
    keys_.assign(size, 0);
    numbers_.resize(size);
  }

  // The number of `port`, which may be assigned to; -1 when it is new.
  int& operator[](const Port& port) {
    const uint64_t key = (static_cast<uint64_t>(port.kind) + 1) << 56 |
                         static_cast<uint64_t>(port.index) << 48 |
                         static_cast<uint64_t>(port.tile) << 32 |
                         static_cast<uint32_t>(port.tensor.value);
    const size_t mask = keys_.size() - 1;
    size_t at = Mix64(key) & mask;
    while (keys_[at] != 0 && keys_[at] != key) at = (at + 1) & mask;
    if (keys_[at] == 0) {
      keys_[at] = key;
      numbers_[at] = -1;
    }
    return numbers_[at];
  }

 private:
  std::vector<uint64_t> keys_;
  std::vector<int> numbers_;
};

// What a fold does with a buffer: its last tasks there that write and touch it.
struct Use {
  int fold = 0;
  int writer = -1;
  int touch = -1;
};

// A buffer that more than one program touches.
struct Buffer {
  const TemplateBuffer* what = nullptr;
  boost::container::small_vector<Use, 4> uses;  // by fold, ascending
  bool is_loss = false;
  bool is_square_sum = false;
  // Persistent: readers since the last writer, by fold and task.
  std::vector<std::pair<int, int>> readers;
  // Persistent: the stream of all that the chunks' folds do with it.
  int stream = kNoStream;
  static constexpr int kNoStream = -1;
  static constexpr int kSeveralStreams = -2;
  bool followed = true;  // by all that runs once and touches it

  // -1 for none.
  int Writer(int number) const {
    for (const Use& use : uses) {
      if (use.fold == number) return use.writer;
    }
    return -1;
  }
  int Touch(int number) const {
    for (const Use& use : uses) {
      if (use.fold == number) return use.touch;
    }
    return -1;
  }
  Use& UseIn(int number) {
    const auto at = std::find_if(uses.begin(), uses.end(), [&](const Use& use) {
      return use.fold >= number;
    });
    if (at != uses.end() && at->fold == number) return *at;
    return *uses.insert(at, {number});
  }

  // Whether one stream, other than compute, orders all that is done with it.
  bool HasItsStream() const { return stream > 0 && followed; }
  void NoteStream(int number) {
    stream = stream == kNoStream || stream == number ? number : kSeveralStreams;
  }
};

// An off-compute touch of a persistent buffer in the loop.
struct OffCompute {
  int fold = 0;
  int task = 0;
  int buffer = 0;
};

// For each task, or stream, its time as a function of the columns.
struct Rows {
  size_t columns = 0;
  std::vector<int64_t> cells;
  int64_t* at(size_t i) { return cells.data() + i * columns; }
  const int64_t* at(size_t i) const { return cells.data() + i * columns; }
};

class StageBuilder {
 public:
  StageBuilder(std::span<const StageMember> members, bool splits,
               int microbatches)
      : members_(members),
        splits_(splits),
        microbatches_(microbatches),
        stage_(std::make_shared<Stage>()),
        ports_(CountPorts(members)) {
    int chunks = 0;
    size_t buffers = 0;
    for (const StageMember& member : members) {
      for (const TemplateProgram& program : member.block->programs) {
        buffers += program.buffers.size();
      }
    }
    buffers_.reserve(buffers);
    stage_->streams = {{StreamRole::kCompute, 0}};
    for (const StageMember& member : members) {
      chunks = std::max(chunks, member.chunk + 1);
      auto& numbers = streams_.emplace_back();
      for (const StreamKey& key : member.block->streams) {
        numbers.push_back(StreamNumber(key));
      }
    }
    stage_->chunks.resize(static_cast<size_t>(chunks));
    folds_.push_back(&stage_->begin);
    for (Stage::Chunk& chunk : stage_->chunks) {
      for (StageFold* fold :
           {&chunk.forward, &chunk.backward, &chunk.weight, &chunk.last}) {
        folds_.push_back(fold);
      }
    }
    folds_.push_back(&stage_->tail);
    tail_ = static_cast<int>(folds_.size()) - 1;
    placed_.resize(folds_.size());
    after_.resize(folds_.size());
    stream_after_.resize(folds_.size());
    rows_.resize(folds_.size());
    ends_.resize(folds_.size());
    input_numbers_.resize(folds_.size());
  }

  std::shared_ptr<const Stage> Build() {
    const auto chunks = static_cast<int>(stage_->chunks.size());
    PlaceAscending(ProgramKind::kBegin, kBeginFold, -1);
    for (int c = 0; c < chunks; ++c) {
      const int fold = FoldNumber(c, kForwardFold);
      PlaceAscending(ProgramKind::kForward, fold, c);
      FindRows(fold);
    }
    // The last gradients of weights follow the same actions as the others, and
    // make the same ports anew.
    for (int c = chunks; c-- > 0;) {
      const int backward = FoldNumber(c, kBackwardFold);
      const int weight = FoldNumber(c, kWeightFold);
      if (splits_) {
        PlaceDescending(ProgramKind::kBackwardInput, backward, c);
        FindRows(backward);
        if (microbatches_ == 1) continue;
        PlaceDescending(ProgramKind::kBackwardWeight, weight, c);
        FindRows(weight);
      } else if (microbatches_ > 1) {
        PlaceDescending(ProgramKind::kBackward, backward, c);
        FindRows(backward);
      }
    }
    for (int c = chunks; c-- > 0;) {
      PlaceDescending(splits_ ? ProgramKind::kBackwardWeightReduce
                              : ProgramKind::kBackwardReduce,
                      FoldNumber(c, kLastFold), c);
    }
    PlaceTail(Stage::kTie);
    PlaceTail(Stage::kLoss);
    PlaceTail(Stage::kNorm);
    PlaceTail(Stage::kUpdate);

    CheckPersistent();
    for (int f = 0; f < tail_; ++f) {
      if (IsLoop(f)) Export(f);
    }
    FoldMemory();
    // Of what runs for each microbatch the matrix says all.
    for (int f = 0; f < tail_; ++f) {
      if (!IsLoop(f)) continue;
      fold(f).tasks = {};
      fold(f).deps = {};
      fold(f).waits = {};
      fold(f).send_tasks = {};
    }
    return stage_;
  }

 private:
  static size_t CountPorts(std::span<const StageMember> members) {
    size_t count = 0;
    for (const StageMember& member : members) {
      for (const TemplateProgram& program : member.block->programs) {
        count += program.imports.size() + program.exports.size();
      }
    }
    return count;
  }

  StageFold& fold(int number) { return *folds_[static_cast<size_t>(number)]; }
  const StageFold& fold(int number) const {
    return *folds_[static_cast<size_t>(number)];
  }
  static int ChunkOf(int number) { return (number - 1) / kFoldKinds; }
  bool IsOf(int number, FoldKind kind) const {
    return number != kBeginFold && number != tail_ &&
           (number - 1) % kFoldKinds == kind;
  }
  // Whether the fold runs for each microbatch.
  bool IsLoop(int number) const {
    return number != kBeginFold && number != tail_ && !IsOf(number, kLastFold);
  }

  bool WrittenInLoop(const Buffer& b) const {
    return std::any_of(b.uses.begin(), b.uses.end(), [&](const Use& use) {
      return use.writer >= 0 && IsLoop(use.fold);
    });
  }

  int StreamNumber(const StreamKey& key) {
    auto& streams = stage_->streams;
    const auto it = std::find(streams.begin(), streams.end(), key);
    if (it != streams.end()) return static_cast<int>(it - streams.begin());
    streams.push_back(key);
    return static_cast<int>(streams.size() - 1);
  }

  Port PortOf(int block, const TemplatePort& port) const {
    Port out;
    out.kind = port.kind;
    out.index = port.index;
    out.tile = port.tile;
    if (port.tensor >= 0) {
      out.tensor = members_[static_cast<size_t>(block)]
                       .shape->tensors[static_cast<size_t>(port.tensor)];
    }
    return out;
  }

  // ---- stringing programs together, as Lower does

  void Place(int block, ProgramKind kind, int action) {
    const BlockTemplate& whole = *members_[static_cast<size_t>(block)].block;
    const TemplateProgram& program = whole.programs[static_cast<size_t>(kind)];
    if (program.tasks.empty() && program.imports.empty()) return;
    StageFold& out = fold(action);
    const int first = static_cast<int>(out.tasks.size());
    bound_.assign(program.buffers.size(), -1);
    const auto make = [&](int local) {
      Buffer& made = buffers_.emplace_back();
      made.what = &program.buffers[static_cast<size_t>(local)];
      return static_cast<int>(buffers_.size() - 1);
    };
    for (const TemplateBinding& import : program.imports) {
      const Port port = PortOf(block, import.port);
      int& number = ports_[port];
      if (number < 0) {
        number = make(import.buffer);
        Buffer& made = buffers_.back();
        made.is_square_sum = port.kind == Port::kSquareSum;
        made.is_loss = port.kind == Port::kTensor &&
                       import.port.tensor == whole.loss_tensor;
        if (made.is_loss) loss_ = number;
      }
      bound_[static_cast<size_t>(import.buffer)] = number;
    }
    for (size_t i = 0; i < bound_.size(); ++i) {
      if (bound_[i] < 0) bound_[i] = make(static_cast<int>(i));
    }

    const std::vector<int>& streams = streams_[static_cast<size_t>(block)];
    receive_of_.assign(program.tasks.size(), -1);
    for (const TemplateTransfer& receive : program.receives) {
      receive_of_[static_cast<size_t>(receive.task)] =
          static_cast<int>(out.receives.size());
      out.receives.push_back({block, receive.port, receive.peer});
    }
    size_t next_outside = 0;
    for (size_t i = 0; i < program.tasks.size(); ++i) {
      const TemplateTask& from = program.tasks[i];
      StageTask task;
      task.duration = from.cost.duration.picoseconds;
      task.stream = streams[static_cast<size_t>(from.stream)];
      task.after_compute = from.after_compute;
      task.first_dep = static_cast<int>(out.deps.size());
      for (int d = from.first_dep; d < from.last_dep; ++d) {
        out.deps.push_back(first + program.deps[static_cast<size_t>(d)]);
      }
      task.first_wait = static_cast<int>(out.waits.size());
      if (receive_of_[i] >= 0) {
        Wait(action, task, {StageInput::kReceive, receive_of_[i]});
      }
      const size_t first_outside = next_outside;
      for (; next_outside < program.outside.size() &&
             program.outside[next_outside].task == static_cast<int>(i);
           ++next_outside) {
        const TemplateAccess& access = program.outside[next_outside];
        DependAcross(out, action, task,
                     bound_[static_cast<size_t>(access.buffer)], access.writes);
      }
      task.last_dep = static_cast<int>(out.deps.size());
      NoteAfterCompute(out, action, task);
      for (size_t o = first_outside; o < next_outside; ++o) {
        const TemplateAccess& access = program.outside[o];
        Resolve(action, task, bound_[static_cast<size_t>(access.buffer)],
                access.writes);
      }
      for (size_t o = first_outside; o < next_outside; ++o) {
        const TemplateAccess& access = program.outside[o];
        WaitForLoop(action, task, bound_[static_cast<size_t>(access.buffer)],
                    access.writes);
      }
      task.last_wait = static_cast<int>(out.waits.size());
      out.tasks.push_back(task);
      out.time_by_source[static_cast<size_t>(from.cost.source)] +=
          task.duration;
    }
    for (const TemplateTransfer& send : program.sends) {
      out.sends.push_back({block, send.port, send.peer});
      out.send_tasks.push_back(first + send.task);
    }

    for (size_t i = 0; i < bound_.size(); ++i) {
      const TemplateBuffer& local = program.buffers[i];
      Buffer& b = buffers_[static_cast<size_t>(bound_[i])];
      if (local.last_touch >= 0) {
        b.UseIn(action).touch = first + local.last_touch;
      }
      if (b.what->persistent) {
        if (local.last_writer >= 0) b.readers.clear();
        for (int reader : local.readers) {
          b.readers.emplace_back(action, first + reader);
        }
        if (action != kBeginFold && action != tail_) {
          if (local.on_compute) b.NoteStream(0);
          for (int task : local.off_compute) {
            off_compute_.push_back({action, first + task, bound_[i]});
            b.NoteStream(out.tasks[static_cast<size_t>(first + task)].stream);
          }
        }
      }
      if (local.last_writer >= 0) {
        const int writer = first + local.last_writer;
        b.UseIn(action).writer = writer;
        if (b.is_square_sum) {
          out.tasks[static_cast<size_t>(writer)].sums_squares = true;
        }
      }
    }
    for (const TemplateBinding& exported : program.exports) {
      ports_[PortOf(block, exported.port)] =
          bound_[static_cast<size_t>(exported.buffer)];
    }
    placed_[static_cast<size_t>(action)].push_back({&program, first});
  }

  // Room for the tasks of the programs that are placed next.
  void Reserve(ProgramKind kind, int number, int chunk) {
    size_t tasks = 0;
    size_t deps = 0;
    for (const StageMember& member : members_) {
      if (chunk >= 0 && member.chunk != chunk) continue;
      const TemplateProgram& program =
          member.block->programs[static_cast<size_t>(kind)];
      tasks += program.tasks.size();
      deps += program.deps.size();
    }
    fold(number).tasks.reserve(tasks);
    fold(number).deps.reserve(deps);
    after_[static_cast<size_t>(number)].reserve(tasks);
  }

  // The blocks of a chunk, or with -1 of all.
  void PlaceAscending(ProgramKind kind, int number, int chunk) {
    Reserve(kind, number, chunk);
    for (size_t b = 0; b < members_.size(); ++b) {
      if (chunk >= 0 && members_[b].chunk != chunk) continue;
      Place(static_cast<int>(b), kind, number);
    }
  }
  void PlaceDescending(ProgramKind kind, int number, int chunk) {
    Reserve(kind, number, chunk);
    for (size_t b = members_.size(); b-- > 0;) {
      if (members_[b].chunk == chunk) Place(static_cast<int>(b), kind, number);
    }
  }

  void PlaceTail(Stage::Phase phase) {
    std::vector<size_t>& ends = stage_->phase_ends[phase];
    ends.resize(members_.size());
    for (size_t i = 0; i < members_.size(); ++i) {
      const size_t b = Stage::Descends(phase) ? members_.size() - 1 - i : i;
      switch (phase) {
        case Stage::kTie:
          Place(static_cast<int>(b), ProgramKind::kTie, tail_);
          break;
        case Stage::kLoss:
          PlaceLoss(b);
          break;
        case Stage::kNorm:
          Place(static_cast<int>(b), ProgramKind::kNorm, tail_);
          break;
        case Stage::kUpdate:
        case Stage::kPhases:
          Place(static_cast<int>(b), ProgramKind::kUpdate, tail_);
          break;
      }
      ends[b] = stage_->tail.tasks.size();
    }
  }

  void FindRows(int number) {
    const auto at = static_cast<size_t>(number);
    rows_[at] = RowsOf(fold(number));
    ends_[at] = EndRows(fold(number), rows_[at]);
  }

  void PlaceLoss(size_t b) {
    const BlockTemplate& block = *members_[b].block;
    if (block.loss_tensor < 0) return;
    fold(FoldNumber(members_[b].chunk, kForwardFold)).has_loss = true;
    if (!block.reduces_loss) return;
    StageFold& out = stage_->tail;
    StageTask task;
    task.duration = block.loss_reduce.duration.picoseconds;
    task.stream = streams_[b][static_cast<size_t>(block.loss_stream)];
    task.first_dep = task.last_dep = static_cast<int>(out.deps.size());
    task.first_wait = static_cast<int>(out.waits.size());
    NoteAfterCompute(out, tail_, task);
    Wait(tail_, task, {StageInput::kLoss, 0});
    task.last_wait = static_cast<int>(out.waits.size());
    out.tasks.push_back(task);
    out.time_by_source[static_cast<size_t>(block.loss_reduce.source)] +=
        task.duration;
  }

  // ---- dependencies

  void Depend(StageFold& out, const StageTask& task, int on) {
    if (out.tasks[static_cast<size_t>(on)].stream == task.stream) return;
    const auto begin = out.deps.begin() + task.first_dep;
    if (std::find(begin, out.deps.end(), on) == out.deps.end()) {
      out.deps.push_back(on);
    }
  }

  // On what other programs of the same action did with a buffer.
  void DependAcross(StageFold& out, int action, const StageTask& task, int b,
                    bool writes) {
    const Buffer& buffer = buffers_[static_cast<size_t>(b)];
    const int writer = buffer.Writer(action);
    if (writer >= 0) Depend(out, task, writer);
    if (!writes) return;
    for (const auto& [number, reader] : buffer.readers) {
      if (number == action) Depend(out, task, reader);
    }
  }

  // The chunks, bit by bit, whose loop's compute has ended when the task
  // starts: all where it starts no earlier than the compute stream was free
  // before the action, since it is on that stream, or behind a task that is.
  void NoteAfterCompute(const StageFold& out, int action,
                        const StageTask& task) {
    auto& after = after_[static_cast<size_t>(action)];
    auto& stream_after = stream_after_[static_cast<size_t>(action)];
    stream_after.resize(stage_->streams.size(), 0);
    stream_after[0] = kAllChunks;
    const auto stream = static_cast<size_t>(task.stream);
    uint64_t mask = task.after_compute ? kAllChunks : stream_after[stream];
    for (int d = task.first_dep; d < task.last_dep; ++d) {
      mask |= after[static_cast<size_t>(out.deps[static_cast<size_t>(d)])];
    }
    after.push_back(mask);
    stream_after[stream] = mask;
  }

  // Waits for a task of chunk `chunk`'s last action. What is behind compute
  // there is behind that of the chunk's loop.
  void WaitForLast(int action, const StageTask& task, int from, int on) {
    const int chunk = ChunkOf(from);
    Wait(action, task, {StageInput::kLast, on, chunk});
    if (after_[static_cast<size_t>(from)][static_cast<size_t>(on)] !=
        kAllChunks) {
      return;
    }
    uint64_t& mask = after_[static_cast<size_t>(action)].back();
    mask |= ChunkBit(chunk);
    stream_after_[static_cast<size_t>(action)]
                 [static_cast<size_t>(task.stream)] |= mask;
  }

  void Wait(int action, const StageTask& task, StageInput input) {
    StageFold& out = fold(action);
    const uint64_t key = static_cast<uint64_t>(input.kind) << 56 |
                         static_cast<uint64_t>(input.chunk) << 32 |
                         static_cast<uint32_t>(input.index);
    const auto [it, is_new] =
        input_numbers_[static_cast<size_t>(action)].try_emplace(
            key, static_cast<int>(out.inputs.size()));
    if (is_new) out.inputs.push_back(input);
    const int number = it->second;
    const auto begin = out.waits.begin() + task.first_wait;
    if (std::find(begin, out.waits.end(), number) == out.waits.end()) {
      out.waits.push_back(number);
    }
  }

  // What the task waits for when it touches a buffer that the action has not
  // written before. `after_` already has the task.
  void Resolve(int action, const StageTask& task, int number, bool writes) {
    Buffer& b = buffers_[static_cast<size_t>(number)];
    if (b.is_square_sum) {
      Wait(action, task, {StageInput::kSquareSum, 0});
      return;
    }
    if (b.is_loss && action == tail_) {
      Wait(action, task, {StageInput::kLoss, 0});
      return;
    }
    if (b.Writer(action) >= 0) return;
    if (b.what->persistent) {
      ResolvePersistent(action, task, b, writes);
      return;
    }
    int from = -1;  // the fold that made it
    int writer = -1;
    for (const Use& use : b.uses) {
      if (use.fold == tail_ || use.writer < 0) continue;
      // The fold knows no second writer.
      if (from >= 0) stage_->exact = false;
      from = use.fold;
      writer = use.writer;
    }
    if (from < 0) return;  // the task makes it
    if (writes) {
      stage_->exact = false;
      return;
    }
    if (from == kBeginFold) {
      Wait(action, task, {StageInput::kBegin, writer});
      return;
    }
    if (!IsLoop(from)) {
      WaitForLast(action, task, from, writer);
      return;
    }
    // Implied where a stream that the reader follows was busy for longer.
    if (NotAfter(from, writer, static_cast<size_t>(task.stream)) ||
        (after_[static_cast<size_t>(action)].back() == kAllChunks &&
         NotAfter(from, writer, 0))) {
      return;
    }
    Wait(action, task, {StageInput::kCarried, Carry(from, writer)});
  }

  // What runs once waits for what else ran once.
  void ResolvePersistent(int action, const StageTask& task, const Buffer& b,
                         bool writes) {
    if (IsLoop(action) || action == kBeginFold) return;
    for (const Use& use : b.uses) {
      if (!IsOf(use.fold, kLastFold) || use.fold == action) continue;
      if (use.writer >= 0) WaitForLast(action, task, use.fold, use.writer);
    }
    if (!writes) return;
    for (const auto& [f, reader] : b.readers) {
      if (!IsOf(f, kLastFold) || f == action) continue;
      WaitForLast(action, task, f, reader);
    }
  }

  // What runs once and touches a persistent buffer comes later than what the
  // loop did with it: behind its compute, or else it waits for that, which has
  // to be on the compute stream.
  void WaitForLoop(int action, const StageTask& task, int number, bool writes) {
    Buffer& b = buffers_[static_cast<size_t>(number)];
    if (IsLoop(action) || action == kBeginFold || !b.what->persistent ||
        b.is_square_sum || b.Writer(action) >= 0) {
      return;
    }
    if (FollowsItsStream(action, task, b)) return;
    b.followed = false;
    const uint64_t after = after_[static_cast<size_t>(action)].back();
    for (const Use& use : b.uses) {
      const int f = use.fold;
      if (!IsLoop(f) || (after & ChunkBit(ChunkOf(f))) != 0) continue;
      const int on = writes ? use.touch : use.writer;
      if (on < 0) continue;
      if (std::any_of(off_compute_.begin(), off_compute_.end(),
                      [&](const OffCompute& touch) {
                        return touch.fold == f && touch.buffer == number;
                      })) {
        stage_->exact = false;
      }
      Wait(action, task, {StageInput::kLatest, Carry(f, on)});
    }
  }

  // Whether all that the loop does with a buffer is on one stream, other than
  // compute, and done before the task: since it is on that stream too, or waits
  // for each chunk's last action with the buffer.
  bool FollowsItsStream(int action, const StageTask& task,
                        const Buffer& b) const {
    if (b.stream <= 0) return false;
    if (task.stream == b.stream) return true;
    if (action != tail_) return false;
    return std::none_of(b.uses.begin(), b.uses.end(), [&](const Use& use) {
      return IsLoop(use.fold) && use.touch >= 0 &&
             b.Writer(FoldNumber(ChunkOf(use.fold), kLastFold)) < 0;
    });
  }

  // The number under which the end of a task of a loop's fold is carried on.
  int Carry(int from, int task) {
    for (int number : fold(from).carries) {
      if (carried_tasks_[static_cast<size_t>(number)] == task) return number;
    }
    fold(from).carries.push_back(stage_->carried);
    carried_tasks_.push_back(task);
    return stage_->carried++;
  }

  // Whether a task of a loop's fold always ends before the fold leaves a
  // stream.
  bool NotAfter(int number, int task, size_t stream) const {
    const Rows& rows = rows_[static_cast<size_t>(number)];
    const int64_t* a = rows.at(static_cast<size_t>(task));
    const int64_t* b = ends_[static_cast<size_t>(number)].at(stream);
    for (size_t c = 0; c < rows.columns; ++c) {
      if (a[c] > b[c]) return false;
    }
    return true;
  }

  // Persistent buffers are touched by every microbatch. The fold follows them
  // through the compute stream only: in the loop, what writes one and what
  // touches a written one has to be on it, and other readers' ends have to be
  // waited for by it. A chunk's last action may touch off it only what no other
  // chunk touches. Or all that the chunks do with it is on one other stream,
  // which orders it.
  void CheckPersistent() {
    for (const OffCompute& touch : off_compute_) {
      const Buffer& b = buffers_[static_cast<size_t>(touch.buffer)];
      if (b.HasItsStream()) continue;
      if (IsLoop(touch.fold)) {
        if (WrittenInLoop(b) || !NotAfter(touch.fold, touch.task, 0)) {
          stage_->exact = false;
        }
        continue;
      }
      bool written = false;
      bool elsewhere = false;
      for (const Use& use : b.uses) {
        if (use.fold == kBeginFold || use.fold == tail_) continue;
        written = written || use.writer >= 0;
        elsewhere = elsewhere || (ChunkOf(use.fold) != ChunkOf(touch.fold) &&
                                  use.touch >= 0);
      }
      if (written && elsewhere) stage_->exact = false;
    }
  }

  // ---- matrices

  Rows RowsOf(const StageFold& a) const {
    const size_t streams = stage_->streams.size();
    Rows rows;
    rows.columns = streams + a.inputs.size();
    rows.cells.assign(a.tasks.size() * rows.columns, kNever);
    std::vector<int> last(streams, -1);
    for (size_t t = 0; t < a.tasks.size(); ++t) {
      const StageTask& task = a.tasks[t];
      int64_t* row = rows.at(t);
      const auto join = [&](int other) {
        const int64_t* from = rows.at(static_cast<size_t>(other));
        for (size_t c = 0; c < rows.columns; ++c) {
          row[c] = std::max(row[c], from[c]);
        }
      };
      const auto follow = [&](size_t stream) {
        if (last[stream] >= 0) {
          join(last[stream]);
        } else {
          row[stream] = std::max<int64_t>(row[stream], 0);
        }
      };
      const auto stream = static_cast<size_t>(task.stream);
      follow(stream);
      if (task.after_compute) follow(0);
      for (int d = task.first_dep; d < task.last_dep; ++d) {
        join(a.deps[static_cast<size_t>(d)]);
      }
      for (int w = task.first_wait; w < task.last_wait; ++w) {
        const auto column =
            streams + static_cast<size_t>(a.waits[static_cast<size_t>(w)]);
        row[column] = std::max<int64_t>(row[column], 0);
      }
      for (size_t c = 0; c < rows.columns; ++c) {
        if (row[c] > kNever) row[c] += task.duration;
      }
      last[stream] = static_cast<int>(t);
    }
    return rows;
  }

  // For each stream the time that it is free after the action.
  Rows EndRows(const StageFold& a, const Rows& rows) const {
    const size_t streams = stage_->streams.size();
    Rows ends;
    ends.columns = rows.columns;
    ends.cells.assign(streams * ends.columns, kNever);
    std::vector<int> last(streams, -1);
    for (size_t t = 0; t < a.tasks.size(); ++t) {
      last[static_cast<size_t>(a.tasks[t].stream)] = static_cast<int>(t);
    }
    for (size_t s = 0; s < streams; ++s) {
      if (last[s] < 0) {
        ends.at(s)[s] = 0;
      } else {
        std::copy_n(rows.at(static_cast<size_t>(last[s])), ends.columns,
                    ends.at(s));
      }
    }
    return ends;
  }

  void Export(int number) {
    StageFold& a = fold(number);
    const Rows& rows = rows_[static_cast<size_t>(number)];
    MaxPlus& matrix = a.matrix;
    matrix.row = {0};
    const auto add = [&](int task) {
      const int64_t* row = rows.at(static_cast<size_t>(task));
      for (size_t c = 0; c < rows.columns; ++c) {
        if (row[c] > kNever) {
          matrix.entries.push_back({static_cast<int>(c), row[c]});
        }
      }
      matrix.row.push_back(static_cast<int>(matrix.entries.size()));
    };
    std::vector<int> last(stage_->streams.size(), -1);
    for (size_t t = 0; t < a.tasks.size(); ++t) {
      last[static_cast<size_t>(a.tasks[t].stream)] = static_cast<int>(t);
    }
    for (size_t s = 0; s < last.size(); ++s) {
      if (last[s] < 0) continue;
      a.touched.push_back(static_cast<int>(s));
      add(last[s]);
    }
    for (int task : a.send_tasks) add(task);
    for (int carried : a.carries) {
      add(carried_tasks_[static_cast<size_t>(carried)]);
    }
    if (!a.has_loss) return;
    const int writer = buffers_[static_cast<size_t>(loss_)].Writer(number);
    TESSERA_CHECK(writer >= 0) << "nothing writes the loss";
    add(writer);
  }

  // ---- memory

  // Folds in which a buffer that is not persistent is given back: in each run
  // of `each`, or only in the last run of `once`; -1 for none.
  struct GivenBack {
    int each = -1;
    int once = -1;
  };

  GivenBack FindGivenBack(const Buffer& b) {
    GivenBack given;
    const auto in = [&](int f) { return b.Touch(f) >= 0; };
    // The fold that runs last of those that touch it, of the loop and of what
    // runs once. Of two chunks the later goes first in the backward.
    int loop = -1;
    int last = -1;
    bool weights = false;  // in some chunk's gradients of weights
    bool shared = false;   // with the microbatch that ends in a last fold
    int chunks = 0;        // that touch it
    int latest = -1;       // of these
    for (const Use& use : b.uses) {
      const int f = use.fold;
      if (f == kBeginFold || f == tail_ || use.touch < 0) continue;
      const int c = ChunkOf(f);
      chunks += c != latest;
      latest = c;
      if (IsOf(f, kLastFold)) {
        if (last < 0) last = f;
        weights = weights || splits_;
        continue;
      }
      // Chunks descend in the backward: the first found is last.
      if (loop < 0 || IsOf(loop, kForwardFold) || ChunkOf(loop) == c) {
        loop = f;
      }
      weights = weights || IsOf(f, kWeightFold);
      shared = shared || IsOf(f, kForwardFold) ||
               (splits_ && IsOf(f, kBackwardFold));
    }
    // Whose gradients of weights come last the schedule says.
    if (weights && chunks > 1) stage_->exact = false;
    if (in(tail_)) last = tail_;
    if (in(kBeginFold)) {
      // Made once: given back in the last run of what touches it last.
      if (last >= 0) {
        given.once = last;
      } else {
        given.once = loop >= 0 ? loop : kBeginFold;
      }
      if (chunks > 1 && last != tail_) stage_->exact = false;
      return given;
    }
    if (loop < 0) {
      given.once = last;
      return given;
    }
    given.each = loop;
    if (!shared) {
      if (last >= 0) stage_->exact = false;
      return given;
    }
    // What the loop's last action gives back, the last fold does for its
    // microbatch.
    const bool ends = IsOf(loop, splits_ ? kWeightFold : kBackwardFold);
    if (ends) {
      const int own = FoldNumber(ChunkOf(loop), kLastFold);
      if (!in(own)) stage_->exact = false;
      given.once = last;
    } else if (last >= 0) {
      // No other run of what comes last than the last touches it.
      given.once = last;
      if (microbatches_ > 1) stage_->exact = false;
      given.each = -1;
    }
    return given;
  }

  void FoldMemory() {
    struct Given {
      int task = 0;
      const TemplateBuffer* what = nullptr;
      bool final_only = false;
    };
    std::vector<std::vector<Given>> given(folds_.size());
    for (const Buffer& buffer : buffers_) {
      const TemplateBuffer* what = buffer.what;
      if (what->persistent) {
        stage_->persistent[static_cast<size_t>(what->category)] +=
            what->bytes.value;
        continue;
      }
      const GivenBack back = FindGivenBack(buffer);
      if (back.each >= 0) {
        given[static_cast<size_t>(back.each)].push_back(
            {buffer.Touch(back.each), what, false});
      }
      if (back.once >= 0) {
        given[static_cast<size_t>(back.once)].push_back(
            {buffer.Touch(back.once), what, true});
      }
    }
    for (int f = 0; f <= tail_; ++f) {
      auto& list = given[static_cast<size_t>(f)];
      std::stable_sort(
          list.begin(), list.end(),
          [](const Given& a, const Given& b) { return a.task < b.task; });
      std::vector<std::pair<int, const TemplateBuffer*>> every;
      std::vector<std::pair<int, const TemplateBuffer*>> final;
      for (const Given& g : list) {
        if (!g.final_only) every.emplace_back(g.task, g.what);
        final.emplace_back(g.task, g.what);
      }
      FoldMemory(f, every, fold(f).memory);
      if (final.size() == every.size()) {
        fold(f).final_memory = fold(f).memory;
      } else {
        FoldMemory(f, final, fold(f).final_memory);
      }
    }
  }

  void FoldMemory(
      int action,
      const std::vector<std::pair<int, const TemplateBuffer*>>& given,
      MemoryElement& memory) const {
    memory.total_peak = std::numeric_limits<int64_t>::min();
    const auto change = [&](MemoryCategory category, int64_t bytes) {
      memory.delta[static_cast<size_t>(category)] += bytes;
      memory.total_delta += bytes;
    };
    size_t next_given = 0;
    for (const Placed& placed : placed_[static_cast<size_t>(action)]) {
      const TemplateProgram& program = *placed.program;
      size_t taken = 0;
      size_t own = 0;
      for (int t = 0; t < static_cast<int>(program.tasks.size()); ++t) {
        for (; taken < program.taken.size() && program.taken[taken].task == t;
             ++taken) {
          change(program.taken[taken].category, program.taken[taken].bytes);
        }
        if (memory.total_delta > memory.total_peak) {
          memory.total_peak = memory.total_delta;
          memory.peak = memory.delta;
        }
        for (; own < program.given.size() && program.given[own].task == t;
             ++own) {
          change(program.given[own].category, -program.given[own].bytes);
        }
        for (; next_given < given.size() &&
               given[next_given].first == placed.first + t;
             ++next_given) {
          const TemplateBuffer& what = *given[next_given].second;
          change(what.category, -what.bytes.value);
        }
      }
    }
  }

  struct Placed {
    const TemplateProgram* program = nullptr;
    int first = 0;  // its first task in the action
  };

  std::span<const StageMember> members_;
  const bool splits_;
  const int microbatches_;
  std::shared_ptr<Stage> stage_;
  PortTable ports_;
  std::vector<StageFold*> folds_;  // by number
  int tail_ = 0;
  std::vector<std::vector<int>> streams_;  // by block and its own stream
  std::vector<Buffer> buffers_;
  int loss_ = -1;  // buffer
  // By fold.
  std::vector<std::vector<Placed>> placed_;
  std::vector<std::vector<uint64_t>> after_;
  std::vector<std::vector<uint64_t>> stream_after_;
  std::vector<Rows> rows_;
  std::vector<Rows> ends_;
  std::vector<std::unordered_map<uint64_t, int>> input_numbers_;
  std::vector<OffCompute> off_compute_;
  std::vector<int> carried_tasks_;  // whose ends they are
  std::vector<int> bound_;          // scratch
  std::vector<int> receive_of_;     // scratch
};

}  // namespace

std::shared_ptr<const Stage> MakeStage(std::span<const StageMember> members,
                                       bool splits, int microbatches) {
  return StageBuilder(members, splits, microbatches).Build();
}

}  // namespace tessera
