#include "costmodel/evaluate/stage.h"

#include <algorithm>
#include <boost/container/small_vector.hpp>
#include <limits>

#include "planner/base/rng.h"

namespace tessera {
namespace {

// No path from a column to a task.
constexpr int64_t kNever = std::numeric_limits<int64_t>::min();

// What a stage does, as numbers: kBegin, then kForward to kLast of each chunk,
// then the tail.
enum FoldKind { kForwardFold, kBackwardFold, kWeightFold, kLastFold };
constexpr int kFoldKinds = 4;
constexpr int kBeginFold = 0;
int FoldNumber(int chunk, FoldKind kind) {
  return 1 + chunk * kFoldKinds + kind;
}

// Sets of chunks. Those that there are no bits for are in none but the last.
constexpr uint64_t kAllChunks = ~uint64_t{0};
uint64_t ChunkBit(int chunk) {
  return chunk < 63 ? uint64_t{1} << chunk : 0;
}

// Numbers ports: open addressing with keys of one word.
class PortTable {
 public:
  // For at most so many ports.
  void Reset(size_t ports) {
    size_t size = 64;
    while (size <= ports) size *= 2;
    slots_.assign(size, {});
  }

  // The number of `port`, which may be assigned to; -1 when it is new.
  int& operator[](const Port& port) {
    const uint64_t key = port.word();
    const size_t mask = slots_.size() - 1;
    size_t at = Mix64(key) & mask;
    while (slots_[at].key != 0 && slots_[at].key != key) at = (at + 1) & mask;
    slots_[at].key = key;
    return slots_[at].number;
  }

 private:
  struct Slot {
    uint64_t key = 0;
    int number = -1;
  };
  std::vector<Slot> slots_;
};

// What a fold does with a buffer: its last tasks there that write and touch it.
struct Use {
  int fold = 0;
  int writer = -1;
  int touch = -1;
  bool off_compute = false;  // a persistent one, on some other stream
};

// A buffer that more than one program touches.
struct Buffer {
  const TemplateBuffer* what = nullptr;
  bool persistent = false;
  bool is_loss = false;
  bool is_square_sum = false;
  // Persistent: readers since the last writer; a list, -1 for none.
  int first_reader = -1;
  int last_reader = -1;
  // Persistent: the stream of all that the chunks' folds do with it.
  int stream = kNoStream;
  static constexpr int kNoStream = -1;
  static constexpr int kSeveralStreams = -2;
  bool followed = true;  // by all that runs once and touches it
  // The last fold that touches it, and its last task that writes it or -1.
  int fold = -1;
  int writer = -1;
  boost::container::small_vector<Use, 4> uses;  // by fold, ascending

  // In the fold that is being made; -1 for none.
  int WriterNow(int making) const { return fold == making ? writer : -1; }
  // In any.
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
    auto at = uses.end();
    while (at != uses.begin() && (at - 1)->fold >= number) --at;
    if (at == uses.end()) return uses.emplace_back(Use{number});
    return at->fold == number ? *at : *uses.insert(at, {number});
  }

  // Whether one stream, other than compute, orders all that is done with it.
  bool HasItsStream() const { return stream > 0 && followed; }
  void NoteStream(int number) {
    stream = stream == kNoStream || stream == number ? number : kSeveralStreams;
  }
};

// A reader of a persistent buffer.
struct Reader {
  int fold = 0;
  int task = 0;
  int next = -1;  // of the same buffer
};

// An off-compute touch of a persistent buffer in the loop.
struct OffCompute {
  int fold = 0;
  int task = 0;
  int buffer = 0;
};

// The ends of an action's tasks as functions of the columns: of each a weight
// for every column, or kNever. Most tasks only follow others by some time, so
// an end is one of a few rows of weights and what it is later by.
class Ends {
 public:
  struct End {
    int row = 0;
    int64_t later = 0;
  };

  // All streams are free at the times of their columns.
  void Reset(size_t columns, size_t streams) {
    columns_ = columns;
    cells_.assign(streams * columns, kNever);
    for (size_t s = 0; s < streams; ++s) cells_[s * columns + s] = 0;
  }
  size_t columns() const { return columns_; }
  static End FreeAt(size_t stream) { return {static_cast<int>(stream), 0}; }

  int64_t Weight(const End& end, size_t column) const {
    const int64_t cell = Row(end.row)[column];
    return cell > kNever ? cell + end.later : kNever;
  }

  // Whether `a` is never later than `b`. Each row has a weight.
  bool NotAfter(const End& a, const End& b) const {
    if (a.row == b.row) return a.later <= b.later;
    for (size_t c = 0; c < columns_; ++c) {
      if (Weight(a, c) > Weight(b, c)) return false;
    }
    return true;
  }

  End Later(const End& a, const End& b) {
    if (a.row == b.row) return a.later < b.later ? b : a;
    if (NotAfter(b, a)) return a;
    if (NotAfter(a, b)) return b;
    const int row = AddRow();
    int64_t* const to = cells_.data() + static_cast<size_t>(row) * columns_;
    for (size_t c = 0; c < columns_; ++c) {
      to[c] = std::max(Weight(a, c), Weight(b, c));
    }
    return {row, 0};
  }

  // No earlier than a column either.
  End Later(const End& a, size_t column) {
    if (Weight(a, column) >= 0) return a;
    const int row = AddRow();
    int64_t* const to = cells_.data() + static_cast<size_t>(row) * columns_;
    for (size_t c = 0; c < columns_; ++c) to[c] = Weight(a, c);
    to[column] = 0;
    return {row, 0};
  }

 private:
  const int64_t* Row(int row) const {
    return cells_.data() + static_cast<size_t>(row) * columns_;
  }
  int AddRow() {
    const auto row = static_cast<int>(cells_.size() / columns_);
    cells_.resize(cells_.size() + columns_);
    return row;
  }

  size_t columns_ = 0;
  std::vector<int64_t> cells_;
};

// Makes one stage after another, in the same working memory.
class StageBuilder {
 public:
  std::shared_ptr<const Stage> Build(std::span<const StageMember> members,
                                     bool splits, int microbatches) {
    Reset(members, splits, microbatches);
    const auto chunks = static_cast<int>(stage_->chunks.size());
    MakeFold(ProgramKind::kBegin, kBeginFold);
    for (int c = 0; c < chunks; ++c) {
      MakeFold(ProgramKind::kForward, FoldNumber(c, kForwardFold));
    }
    // The last gradients of weights follow the same actions as the others, and
    // make the same ports anew.
    for (int c = chunks; c-- > 0;) {
      const int backward = FoldNumber(c, kBackwardFold);
      const int weight = FoldNumber(c, kWeightFold);
      if (splits_) {
        MakeFold(ProgramKind::kBackwardInput, backward);
        if (microbatches_ == 1) continue;
        MakeFold(ProgramKind::kBackwardWeight, weight);
      } else if (microbatches_ > 1) {
        MakeFold(ProgramKind::kBackward, backward);
      }
    }
    for (int c = chunks; c-- > 0;) {
      MakeFold(splits_ ? ProgramKind::kBackwardWeightReduce
                       : ProgramKind::kBackwardReduce,
               FoldNumber(c, kLastFold));
    }
    BeginFold(tail_);
    PlaceTail(Stage::kTie);
    PlaceTail(Stage::kLoss);
    PlaceTail(Stage::kNorm);
    PlaceTail(Stage::kUpdate);
    EndFold();

    CheckPersistent();
    for (int f = 0; f < tail_; ++f) {
      if (IsLoop(f)) Export(f);
    }
    FoldMemory();
    members_ = {};
    return std::move(stage_);
  }

 private:
  void Reset(std::span<const StageMember> members, bool splits,
             int microbatches) {
    members_ = members;
    splits_ = splits;
    microbatches_ = microbatches;
    stage_ = std::make_shared<Stage>();
    int chunks = 0;
    size_t ports = 0;
    streams_.clear();
    first_stream_.clear();
    stage_->streams = {{StreamRole::kCompute, 0}};
    for (const StageMember& member : members) {
      chunks = std::max(chunks, member.chunk + 1);
      for (const auto& program : member.block->programs) {
        first_stream_.push_back(streams_.size());
        if (program == nullptr) continue;
        ports += program->imports.size() + program->exports.size();
        for (const StreamKey& key : program->streams) {
          streams_.push_back(StreamNumber(key));
        }
      }
    }
    ports_.Reset(ports);
    stage_->chunks.resize(static_cast<size_t>(chunks));
    folds_.clear();
    folds_.push_back(&stage_->begin);
    for (Stage::Chunk& chunk : stage_->chunks) {
      for (StageFold* fold :
           {&chunk.forward, &chunk.backward, &chunk.weight, &chunk.last}) {
        folds_.push_back(fold);
      }
    }
    folds_.push_back(&stage_->tail);
    tail_ = static_cast<int>(folds_.size()) - 1;
    if (made_.size() < folds_.size()) made_.resize(folds_.size());
    for (Made& made : made_) {
      made.tasks = 0;
      made.first_placed = made.last_placed = 0;
    }
    input_numbers_.resize(StageInput::kSquareSum + 1 +
                          static_cast<size_t>(chunks));
    placed_.clear();
    buffers_.clear();
    readers_.clear();
    loss_ = -1;
    off_compute_.clear();
    carried_tasks_.clear();
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

  // Null where the block has no such program.
  const TemplateProgram* ProgramAt(size_t b, ProgramKind kind) const {
    const auto& program =
        members_[b].block->programs[static_cast<size_t>(kind)];
    return program == nullptr || program->empty() ? nullptr : program.get();
  }
  // The numbers of its streams.
  const int* StreamsOf(size_t b, ProgramKind kind) const {
    return streams_.data() +
           first_stream_[b * kProgramKinds + static_cast<size_t>(kind)];
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

  // ---- folds, one after the other

  void BeginFold(int number) {
    number_ = number;
    is_loop_ = IsLoop(number);
    tasks_.clear();
    deps_.clear();
    waits_.clear();
    after_.clear();
    stream_after_.assign(stage_->streams.size(), 0);
    stream_after_[0] = kAllChunks;
    for (std::vector<int>& numbers : input_numbers_) numbers.clear();
    made_[static_cast<size_t>(number)].first_placed = placed_.size();
  }

  void EndFold() {
    Made& made = made_[static_cast<size_t>(number_)];
    made.last_placed = placed_.size();
    made.tasks = tasks_.size();
    if (is_loop_) {
      made.carried.assign(tasks_.size(), -1);
      FindEnds();
      return;
    }
    StageFold& out = fold(number_);
    out.tasks = tasks_;
    out.deps = deps_;
    out.waits = waits_;
    std::swap(made.after, after_);
  }

  // The programs of all blocks of the fold's chunk, or of the stage.
  void MakeFold(ProgramKind kind, int number) {
    BeginFold(number);
    const size_t n = members_.size();
    const bool descends =
        kind != ProgramKind::kBegin && kind != ProgramKind::kForward;
    for (size_t i = 0; i < n; ++i) {
      const size_t b = descends ? n - 1 - i : i;
      if (number != kBeginFold && members_[b].chunk != ChunkOf(number)) {
        continue;
      }
      Place(static_cast<int>(b), kind);
    }
    EndFold();
  }

  void PlaceTail(Stage::Phase phase) {
    std::vector<size_t>& ends = stage_->phase_ends[phase];
    ends.resize(members_.size());
    for (size_t i = 0; i < members_.size(); ++i) {
      const size_t b = Stage::Descends(phase) ? members_.size() - 1 - i : i;
      switch (phase) {
        case Stage::kTie:
          Place(static_cast<int>(b), ProgramKind::kTie);
          break;
        case Stage::kLoss:
          PlaceLoss(b);
          break;
        case Stage::kNorm:
          Place(static_cast<int>(b), ProgramKind::kNorm);
          break;
        case Stage::kUpdate:
        case Stage::kPhases:
          Place(static_cast<int>(b), ProgramKind::kUpdate);
          break;
      }
      ends[b] = tasks_.size();
    }
  }

  void PlaceLoss(size_t b) {
    const TemplateProgram* const forward = ProgramAt(b, ProgramKind::kForward);
    if (forward == nullptr || forward->loss_tensor < 0) return;
    fold(FoldNumber(members_[b].chunk, kForwardFold)).has_loss = true;
    if (!forward->reduces_loss) return;
    StageTask task;
    task.duration = forward->loss_reduce.duration.picoseconds;
    task.stream = StreamsOf(b, ProgramKind::kForward)[forward->loss_stream];
    task.first_dep = task.last_dep = static_cast<int>(deps_.size());
    task.first_wait = static_cast<int>(waits_.size());
    NoteAfterCompute(task);
    Wait(task, {StageInput::kLoss, 0});
    task.last_wait = static_cast<int>(waits_.size());
    tasks_.push_back(task);
    fold(number_)
        .time_by_source[static_cast<size_t>(forward->loss_reduce.source)] +=
        static_cast<double>(task.duration);
  }

  // ---- stringing programs together, as Lower does

  void Place(int block, ProgramKind kind) {
    const auto b = static_cast<size_t>(block);
    if (ProgramAt(b, kind) == nullptr) return;
    const TemplateProgram& program = *ProgramAt(b, kind);
    StageFold& out = fold(number_);
    const int first = static_cast<int>(tasks_.size());
    Bind(block, program);

    const int* const streams = StreamsOf(b, kind);
    receive_of_.clear();
    if (!program.receives.empty()) {
      receive_of_.resize(program.tasks.size(), -1);
    }
    for (const TemplateTransfer& receive : program.receives) {
      receive_of_[static_cast<size_t>(receive.task)] =
          static_cast<int>(out.receives.size());
      out.receives.push_back({block, receive.port, receive.peer});
    }
    const TemplateAccess* access = program.outside.data();
    const TemplateAccess* const end = access + program.outside.size();
    for (size_t i = 0; i < program.tasks.size(); ++i) {
      const TemplateTask& from = program.tasks[i];
      StageTask task;
      task.duration = from.cost.duration.picoseconds;
      task.stream = streams[from.stream];
      task.after_compute = from.after_compute;
      task.first_dep = static_cast<int>(deps_.size());
      for (int d = from.first_dep; d < from.last_dep; ++d) {
        deps_.push_back(first + program.deps[static_cast<size_t>(d)]);
      }
      task.first_wait = static_cast<int>(waits_.size());
      if (!receive_of_.empty() && receive_of_[i] >= 0) {
        Wait(task, {StageInput::kReceive, receive_of_[i]});
      }
      const TemplateAccess* const outside = access;
      while (access != end && access->task == static_cast<int>(i)) ++access;
      const std::span own(outside, access);
      for (const TemplateAccess& a : own) {
        DependAcross(task, BoundTo(a), a.writes);
      }
      task.last_dep = static_cast<int>(deps_.size());
      NoteAfterCompute(task);
      for (const TemplateAccess& a : own) Resolve(task, BoundTo(a), a.writes);
      if (!is_loop_ && number_ != kBeginFold) {
        for (const TemplateAccess& a : own) {
          WaitForLoop(task, BoundTo(a), a.writes);
        }
      }
      task.last_wait = static_cast<int>(waits_.size());
      tasks_.push_back(task);
      out.time_by_source[static_cast<size_t>(from.cost.source)] +=
          static_cast<double>(task.duration);
    }
    for (const TemplateTransfer& send : program.sends) {
      out.sends.push_back({block, send.port, send.peer});
      out.send_tasks.push_back(first + send.task);
    }
    for (size_t i = 0; i < bound_.size(); ++i) {
      NoteUse(bound_[i], program.buffers[i], first);
    }
    for (const TemplateBinding& exported : program.exports) {
      ports_[PortOf(block, exported.port)] =
          bound_[static_cast<size_t>(exported.buffer)];
    }
    placed_.push_back({&program, first});
  }

  // Finds the buffers that a program imports, and makes the others.
  void Bind(int block, const TemplateProgram& program) {
    bound_.assign(program.buffers.size(), -1);
    const auto make = [&](int local) {
      Buffer& made = buffers_.emplace_back();
      made.what = &program.buffers[static_cast<size_t>(local)];
      made.persistent = made.what->persistent;
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
                       import.port.tensor == program.loss_tensor;
        if (made.is_loss) loss_ = number;
      }
      bound_[static_cast<size_t>(import.buffer)] = number;
    }
    for (size_t i = 0; i < bound_.size(); ++i) {
      if (bound_[i] < 0) bound_[i] = make(static_cast<int>(i));
    }
  }
  Buffer& BoundTo(const TemplateAccess& access) {
    return buffers_[static_cast<size_t>(
        bound_[static_cast<size_t>(access.buffer)])];
  }

  // What a program, whose first task is `first`, does with a buffer.
  void NoteUse(int number, const TemplateBuffer& local, int first) {
    Buffer& b = buffers_[static_cast<size_t>(number)];
    if (local.last_touch < 0) return;
    Use& use = b.UseIn(number_);
    use.touch = first + local.last_touch;
    if (b.persistent) {
      if (local.last_writer >= 0) b.first_reader = b.last_reader = -1;
      for (int reader : local.readers) AddReader(b, first + reader);
      if (number_ != kBeginFold && number_ != tail_) {
        if (local.on_compute) b.NoteStream(0);
        for (int task : local.off_compute) {
          use.off_compute = true;
          off_compute_.push_back({number_, first + task, number});
          b.NoteStream(tasks_[static_cast<size_t>(first + task)].stream);
        }
      }
    }
    if (local.last_writer >= 0) use.writer = first + local.last_writer;
    b.fold = number_;
    b.writer = use.writer;
    if (local.last_writer >= 0 && b.is_square_sum) {
      tasks_[static_cast<size_t>(use.writer)].sums_squares = true;
    }
  }

  void AddReader(Buffer& b, int task) {
    const auto added = static_cast<int>(readers_.size());
    readers_.push_back({number_, task});
    if (b.first_reader < 0) {
      b.first_reader = added;
    } else {
      readers_[static_cast<size_t>(b.last_reader)].next = added;
    }
    b.last_reader = added;
  }
  template <typename Visit>
  void ForReaders(const Buffer& b, Visit visit) const {
    for (int r = b.first_reader; r >= 0;) {
      const Reader& reader = readers_[static_cast<size_t>(r)];
      visit(reader);
      r = reader.next;
    }
  }

  // ---- dependencies

  void Depend(const StageTask& task, int on) {
    if (tasks_[static_cast<size_t>(on)].stream == task.stream) return;
    const auto begin = deps_.begin() + task.first_dep;
    if (std::find(begin, deps_.end(), on) == deps_.end()) deps_.push_back(on);
  }

  // On what other programs of the same action did with a buffer.
  void DependAcross(const StageTask& task, const Buffer& b, bool writes) {
    const int writer = b.WriterNow(number_);
    if (writer >= 0) Depend(task, writer);
    if (!writes) return;
    ForReaders(b, [&](const Reader& reader) {
      if (reader.fold == number_) Depend(task, reader.task);
    });
  }

  // The chunks, bit by bit, whose loop's compute has ended when the task
  // starts: all where it starts no earlier than the compute stream was free
  // before the action, since it is on that stream, or behind a task that is.
  void NoteAfterCompute(const StageTask& task) {
    uint64_t& stream_after = stream_after_[static_cast<size_t>(task.stream)];
    uint64_t mask = task.after_compute ? kAllChunks : stream_after;
    for (int d = task.first_dep; d < task.last_dep; ++d) {
      mask |= after_[static_cast<size_t>(deps_[static_cast<size_t>(d)])];
    }
    after_.push_back(mask);
    stream_after = mask;
  }

  // Waits for a task of chunk `chunk`'s last action. What is behind compute
  // there is behind that of the chunk's loop.
  void WaitForLast(const StageTask& task, int from, int on) {
    const int chunk = ChunkOf(from);
    Wait(task, {StageInput::kLast, on, chunk});
    if (made_[static_cast<size_t>(from)].after[static_cast<size_t>(on)] !=
        kAllChunks) {
      return;
    }
    uint64_t& mask = after_.back();
    mask |= ChunkBit(chunk);
    stream_after_[static_cast<size_t>(task.stream)] |= mask;
  }

  void Wait(const StageTask& task, StageInput input) {
    std::vector<int>& numbers =
        input_numbers_[input.kind == StageInput::kLast
                           ? StageInput::kSquareSum + 1 +
                                 static_cast<size_t>(input.chunk)
                           : static_cast<size_t>(input.kind)];
    const auto index = static_cast<size_t>(input.index);
    if (numbers.size() <= index) numbers.resize(index + 1, -1);
    int& number = numbers[index];
    if (number < 0) {
      std::vector<StageInput>& inputs = fold(number_).inputs;
      number = static_cast<int>(inputs.size());
      inputs.push_back(input);
    }
    const auto begin = waits_.begin() + task.first_wait;
    if (std::find(begin, waits_.end(), number) == waits_.end()) {
      waits_.push_back(number);
    }
  }

  // What the task waits for when it touches a buffer that the action has not
  // written before. `after_` already has the task.
  void Resolve(const StageTask& task, const Buffer& b, bool writes) {
    if (b.is_square_sum) {
      Wait(task, {StageInput::kSquareSum, 0});
      return;
    }
    if (b.is_loss && number_ == tail_) {
      Wait(task, {StageInput::kLoss, 0});
      return;
    }
    if (b.WriterNow(number_) >= 0) return;
    if (b.persistent) {
      if (!is_loop_ && number_ != kBeginFold) {
        ResolvePersistent(task, b, writes);
      }
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
      Wait(task, {StageInput::kBegin, writer});
      return;
    }
    if (!IsLoop(from)) {
      WaitForLast(task, from, writer);
      return;
    }
    // Implied where a stream that the reader follows was busy for longer.
    if (NotAfter(from, writer, static_cast<size_t>(task.stream)) ||
        (after_.back() == kAllChunks && NotAfter(from, writer, 0))) {
      return;
    }
    Wait(task, {StageInput::kCarried, Carry(from, writer)});
  }

  // What runs once waits for what else ran once.
  void ResolvePersistent(const StageTask& task, const Buffer& b, bool writes) {
    for (const Use& use : b.uses) {
      if (!IsOf(use.fold, kLastFold) || use.fold == number_) continue;
      if (use.writer >= 0) WaitForLast(task, use.fold, use.writer);
    }
    if (!writes) return;
    ForReaders(b, [&](const Reader& reader) {
      if (!IsOf(reader.fold, kLastFold) || reader.fold == number_) return;
      WaitForLast(task, reader.fold, reader.task);
    });
  }

  // What runs once and touches a persistent buffer comes later than what the
  // loop did with it: behind its compute, or else it waits for that, which has
  // to be on the compute stream, or all of it on one other stream.
  void WaitForLoop(const StageTask& task, Buffer& b, bool writes) {
    if (!b.persistent || b.is_square_sum || b.WriterNow(number_) >= 0) {
      return;
    }
    if (FollowsItsStream(task, b)) return;
    const auto wait = [&](const Use& use) {
      const int on = writes ? use.touch : use.writer;
      if (on < 0) return false;
      Wait(task, {StageInput::kLatest, Carry(use.fold, on)});
      return true;
    };
    if (b.stream > 0) {
      for (const Use& use : b.uses) {
        if (IsLoop(use.fold)) wait(use);
      }
      return;
    }
    b.followed = false;
    const uint64_t after = after_.back();
    if (after == kAllChunks) return;
    for (const Use& use : b.uses) {
      const int f = use.fold;
      if (!IsLoop(f) || (after & ChunkBit(ChunkOf(f))) != 0) continue;
      if (wait(use) && use.off_compute) stage_->exact = false;
    }
  }

  // Whether all that the loop does with a buffer is on one stream, other than
  // compute, and done before the task: since it is on that stream too, or waits
  // for each chunk's last action with the buffer.
  bool FollowsItsStream(const StageTask& task, const Buffer& b) const {
    if (b.stream <= 0) return false;
    if (task.stream == b.stream) return true;
    if (number_ != tail_) return false;
    return std::none_of(b.uses.begin(), b.uses.end(), [&](const Use& use) {
      return IsLoop(use.fold) && use.touch >= 0 &&
             b.Writer(FoldNumber(ChunkOf(use.fold), kLastFold)) < 0;
    });
  }

  // The number under which the end of a task of a loop's fold is carried on.
  int Carry(int from, int task) {
    int& number =
        made_[static_cast<size_t>(from)].carried[static_cast<size_t>(task)];
    if (number >= 0) return number;
    number = stage_->carried++;
    fold(from).carries.push_back(number);
    carried_tasks_.push_back(task);
    return number;
  }

  // Whether a task of a loop's fold always ends before the fold leaves a
  // stream.
  bool NotAfter(int number, int task, size_t stream) const {
    const Made& made = made_[static_cast<size_t>(number)];
    return made.ends.NotAfter(made.task_ends[static_cast<size_t>(task)],
                              made.stream_ends[stream]);
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

  // Of the loop's fold that is being made.
  void FindEnds() {
    Made& made = made_[static_cast<size_t>(number_)];
    StageFold& a = fold(number_);
    const size_t streams = stage_->streams.size();
    Ends& ends = made.ends;
    ends.Reset(streams + a.inputs.size(), streams);
    made.stream_ends.clear();
    for (size_t s = 0; s < streams; ++s) {
      made.stream_ends.push_back(Ends::FreeAt(s));
    }
    made.task_ends.clear();
    std::vector<bool> touched(streams);
    for (const StageTask& task : tasks_) {
      const auto stream = static_cast<size_t>(task.stream);
      touched[stream] = true;
      Ends::End end = made.stream_ends[stream];
      if (task.after_compute) end = ends.Later(end, made.stream_ends[0]);
      for (int d = task.first_dep; d < task.last_dep; ++d) {
        end = ends.Later(
            end,
            made.task_ends[static_cast<size_t>(deps_[static_cast<size_t>(d)])]);
      }
      for (int w = task.first_wait; w < task.last_wait; ++w) {
        end = ends.Later(
            end, streams + static_cast<size_t>(waits_[static_cast<size_t>(w)]));
      }
      end.later += task.duration;
      made.task_ends.push_back(end);
      made.stream_ends[stream] = end;
    }
    for (size_t s = 0; s < streams; ++s) {
      if (touched[s]) a.touched.push_back(static_cast<int>(s));
    }
  }

  void Export(int number) {
    StageFold& a = fold(number);
    const Made& made = made_[static_cast<size_t>(number)];
    MaxPlus& matrix = a.matrix;
    matrix.row = {0};
    if (made.tasks == 0) return;
    const auto add = [&](const Ends::End& end) {
      for (size_t c = 0; c < made.ends.columns(); ++c) {
        const int64_t weight = made.ends.Weight(end, c);
        if (weight > kNever) {
          matrix.entries.push_back({static_cast<int>(c), weight});
        }
      }
      matrix.row.push_back(static_cast<int>(matrix.entries.size()));
    };
    const auto add_task = [&](int task) {
      add(made.task_ends[static_cast<size_t>(task)]);
    };
    for (int s : a.touched) add(made.stream_ends[static_cast<size_t>(s)]);
    for (int task : a.send_tasks) add_task(task);
    for (int carried : a.carries) {
      add_task(carried_tasks_[static_cast<size_t>(carried)]);
    }
    // Its rows say all.
    a.send_tasks = {};
    if (!a.has_loss) return;
    const int writer = buffers_[static_cast<size_t>(loss_)].Writer(number);
    TESSERA_CHECK(writer >= 0) << "nothing writes the loss";
    add_task(writer);
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

  // What is given back behind a task: lists, by fold and task.
  struct Given {
    const TemplateBuffer* what = nullptr;
    bool final_only = false;
    int next = -1;
  };

  void FoldMemory() {
    size_t tasks = 0;
    for (size_t f = 0; f < folds_.size(); ++f) {
      made_[f].first_given = tasks;
      made_[f].final_differs = false;
      tasks += made_[f].tasks;
    }
    given_.clear();
    given_behind_.assign(tasks, -1);
    const auto give = [&](const Buffer& b, int f, bool final_only) {
      if (f < 0) return;
      Made& made = made_[static_cast<size_t>(f)];
      made.final_differs |= final_only;
      int& first =
          given_behind_[made.first_given + static_cast<size_t>(b.Touch(f))];
      given_.push_back({b.what, final_only, first});
      first = static_cast<int>(given_.size() - 1);
    };
    for (const Buffer& buffer : buffers_) {
      const TemplateBuffer* what = buffer.what;
      if (what->persistent) {
        stage_->persistent[static_cast<size_t>(what->category)] +=
            what->bytes.value;
        continue;
      }
      const GivenBack back = FindGivenBack(buffer);
      give(buffer, back.each, false);
      give(buffer, back.once, true);
    }
    for (int f = 0; f <= tail_; ++f) {
      StageFold& a = fold(f);
      FoldMemory(f, true, a.final_memory);
      // What is not of the loop has one run only.
      if (IsLoop(f) && made_[static_cast<size_t>(f)].final_differs) {
        FoldMemory(f, false, a.memory);
      } else {
        a.memory = a.final_memory;
      }
    }
  }

  void FoldMemory(int number, bool final, MemoryElement& memory) const {
    memory.total_peak = std::numeric_limits<int64_t>::min();
    const auto change = [&](MemoryCategory category, int64_t bytes) {
      memory.delta[static_cast<size_t>(category)] += bytes;
      memory.total_delta += bytes;
    };
    const Made& made = made_[static_cast<size_t>(number)];
    for (size_t p = made.first_placed; p < made.last_placed; ++p) {
      const TemplateProgram& program = *placed_[p].program;
      const int* const given = given_behind_.data() + made.first_given +
                               static_cast<size_t>(placed_[p].first);
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
        for (int g = given[t]; g >= 0;) {
          const Given& back = given_[static_cast<size_t>(g)];
          if (final || !back.final_only) {
            change(back.what->category, -back.what->bytes.value);
          }
          g = back.next;
        }
      }
    }
  }

  struct Placed {
    const TemplateProgram* program = nullptr;
    int first = 0;  // its first task in the action
  };
  // What is known of a fold that has been made.
  struct Made {
    size_t tasks = 0;
    size_t first_placed = 0;  // of `placed_`
    size_t last_placed = 0;
    size_t first_given = 0;  // of `given_behind_`, its first task's
    bool final_differs = false;
    std::vector<uint64_t> after;  // by task, where it is not of the loop
    // Of the loop's.
    std::vector<int> carried;  // by task, the number of its end or -1
    Ends ends;
    std::vector<Ends::End> task_ends;
    std::vector<Ends::End> stream_ends;
  };

  std::span<const StageMember> members_;
  bool splits_ = false;
  int microbatches_ = 0;
  std::shared_ptr<Stage> stage_;
  std::vector<StageFold*> folds_;  // by number
  int tail_ = 0;
  std::vector<int> streams_;          // by block, kind and its own stream
  std::vector<size_t> first_stream_;  // by block and kind
  PortTable ports_;
  std::vector<Buffer> buffers_;
  std::vector<Reader> readers_;
  int loss_ = -1;  // buffer
  std::vector<OffCompute> off_compute_;
  std::vector<int> carried_tasks_;  // whose ends they are
  std::vector<Placed> placed_;
  std::vector<Made> made_;  // by fold
  std::vector<Given> given_;
  std::vector<int> given_behind_;
  // Of the fold that is being made.
  int number_ = 0;
  bool is_loop_ = false;
  std::vector<StageTask> tasks_;
  std::vector<int> deps_;
  std::vector<int> waits_;
  std::vector<uint64_t> after_;         // by task
  std::vector<uint64_t> stream_after_;  // by stream
  // Into StageFold::inputs, by kind, those of last actions by chunk, and index.
  std::vector<std::vector<int>> input_numbers_;
  // Of the program that is being placed.
  std::vector<int> bound_;       // buffers
  std::vector<int> receive_of_;  // by task, -1 for none; empty where none does
};

}  // namespace

std::shared_ptr<const Stage> MakeStage(std::span<const StageMember> members,
                                       bool splits, int microbatches) {
  thread_local StageBuilder builder;
  return builder.Build(members, splits, microbatches);
}

}  // namespace tessera
