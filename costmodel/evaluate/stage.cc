#include "costmodel/evaluate/stage.h"

#include <algorithm>
#include <limits>

#include "planner/base/rng.h"

namespace tessera {
namespace {

// No path from a column to a task. Far enough from the minimum that adding
// durations does not wrap.
constexpr int64_t kNever = std::numeric_limits<int64_t>::min() / 4;

enum FoldKind { kBeginAction, kForwardAction, kBackwardAction, kTailAction };
constexpr int kActions = 4;

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
                         static_cast<uint64_t>(port.index) << 32 |
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

// A buffer that more than one program touches.
struct Buffer {
  const TemplateBuffer* what = nullptr;
  bool is_loss = false;
  bool is_square_sum = false;
  // The last writer and last touch in each action; -1 for none.
  std::array<int, kActions> writer = {-1, -1, -1, -1};
  std::array<int, kActions> touch = {-1, -1, -1, -1};
  int carried = -1;
  // Persistent: readers since the last writer, in the action `readers_of`.
  std::vector<int> readers;
  int readers_of = -1;
};

// An off-compute touch of a persistent buffer in the loop.
struct OffCompute {
  int action = 0;
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
  StageBuilder(std::span<const BlockTemplate* const> blocks,
               std::span<const BlockShape* const> shapes, int microbatches)
      : blocks_(blocks),
        shapes_(shapes),
        microbatches_(microbatches),
        stage_(std::make_shared<Stage>()),
        ports_(CountPorts(blocks)) {
    stage_->streams = {{StreamRole::kCompute, 0}};
    for (const BlockTemplate* block : blocks) {
      auto& numbers = streams_.emplace_back();
      for (const StreamKey& key : block->streams) {
        numbers.push_back(StreamNumber(key));
      }
    }
  }

  std::shared_ptr<const Stage> Build() {
    const int n = static_cast<int>(blocks_.size());
    for (int b = 0; b < n; ++b) Place(b, ProgramKind::kBegin, kBeginAction);
    for (int b = 0; b < n; ++b) Place(b, ProgramKind::kForward, kForwardAction);
    forward_ = RowsOf(stage_->forward);
    forward_ends_ = EndRows(stage_->forward, forward_);
    // The tail's backward follows the same forward as the plain backward, and
    // makes the same ports anew.
    if (microbatches_ > 1) {
      for (int b = n; b-- > 0;) {
        Place(b, ProgramKind::kBackward, kBackwardAction);
      }
    }
    for (int b = n; b-- > 0;) {
      Place(b, ProgramKind::kBackwardReduce, kTailAction);
    }
    EndPhase(Stage::kReduce);
    PlaceAscending(ProgramKind::kTie, Stage::kTie);
    PlaceLoss();
    EndPhase(Stage::kLoss);
    PlaceAscending(ProgramKind::kNorm, Stage::kNorm);
    PlaceAscending(ProgramKind::kUpdate, Stage::kUpdate);

    const Rows backward = RowsOf(stage_->backward);
    CheckPersistent(backward);
    Export(stage_->forward, forward_);
    Export(stage_->backward, backward);
    FoldMemory();
    return stage_;
  }

 private:
  static size_t CountPorts(std::span<const BlockTemplate* const> blocks) {
    size_t count = 0;
    for (const BlockTemplate* block : blocks) {
      for (const TemplateProgram& program : block->programs) {
        count += program.imports.size() + program.exports.size();
      }
    }
    return count;
  }

  StageFold& fold(int action) {
    switch (action) {
      case kBeginAction:
        return stage_->begin;
      case kForwardAction:
        return stage_->forward;
      case kBackwardAction:
        return stage_->backward;
      default:
        return stage_->tail;
    }
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
    if (port.tensor >= 0) {
      out.tensor = shapes_[static_cast<size_t>(block)]
                       ->tensors[static_cast<size_t>(port.tensor)];
    }
    return out;
  }

  // ---- stringing programs together, as Lower does

  void Place(int block, ProgramKind kind, int action) {
    const BlockTemplate& whole = *blocks_[static_cast<size_t>(block)];
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
        Wait(out, task, {StageInput::kReceive, receive_of_[i]});
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
        Resolve(out, action, task, bound_[static_cast<size_t>(access.buffer)],
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
      const auto at = static_cast<size_t>(action);
      if (local.last_touch >= 0) b.touch[at] = first + local.last_touch;
      if (b.what->persistent) {
        if (local.last_writer >= 0 || b.readers_of != action) {
          b.readers.clear();
          b.readers_of = action;
        }
        for (int reader : local.readers) b.readers.push_back(first + reader);
        if (action == kForwardAction || action == kBackwardAction) {
          for (int task : local.off_compute) {
            off_compute_.push_back({action, first + task, bound_[i]});
          }
        }
      }
      if (local.last_writer >= 0) {
        b.writer[at] = first + local.last_writer;
        if (b.is_square_sum) {
          out.tasks[static_cast<size_t>(b.writer[at])].sums_squares = true;
        }
      }
    }
    for (const TemplateBinding& exported : program.exports) {
      ports_[PortOf(block, exported.port)] =
          bound_[static_cast<size_t>(exported.buffer)];
    }
    placed_[static_cast<size_t>(action)].push_back({&program, first});
  }

  void PlaceAscending(ProgramKind kind, Stage::Phase phase) {
    for (int b = 0; b < static_cast<int>(blocks_.size()); ++b) {
      Place(b, kind, kTailAction);
    }
    EndPhase(phase);
  }

  void EndPhase(Stage::Phase phase) {
    stage_->phase_end[phase] = stage_->tail.tasks.size();
  }

  void PlaceLoss() {
    for (size_t b = 0; b < blocks_.size(); ++b) {
      const BlockTemplate& block = *blocks_[b];
      if (block.loss_tensor < 0) continue;
      stage_->has_loss = true;
      if (!block.reduces_loss) continue;
      StageFold& out = stage_->tail;
      StageTask task;
      task.duration = block.loss_reduce.duration.picoseconds;
      task.stream = streams_[b][static_cast<size_t>(block.loss_stream)];
      task.first_dep = task.last_dep = static_cast<int>(out.deps.size());
      task.first_wait = static_cast<int>(out.waits.size());
      NoteAfterCompute(out, kTailAction, task);
      Wait(out, task, {StageInput::kLoss, 0});
      task.last_wait = static_cast<int>(out.waits.size());
      out.tasks.push_back(task);
      out.time_by_source[static_cast<size_t>(block.loss_reduce.source)] +=
          task.duration;
    }
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
    const int writer = buffer.writer[static_cast<size_t>(action)];
    if (writer >= 0) Depend(out, task, writer);
    if (!writes || buffer.readers_of != action) return;
    for (int reader : buffer.readers) Depend(out, task, reader);
  }

  // Whether the task starts no earlier than the compute stream was free before
  // the action: it is on that stream, or behind a task that is.
  void NoteAfterCompute(const StageFold& out, int action,
                        const StageTask& task) {
    auto& after = after_[static_cast<size_t>(action)];
    auto& stream_after = stream_after_[static_cast<size_t>(action)];
    stream_after.resize(stage_->streams.size(), false);
    stream_after[0] = true;
    const auto stream = static_cast<size_t>(task.stream);
    bool is_after = stream_after[stream] || task.after_compute;
    for (int d = task.first_dep; d < task.last_dep && !is_after; ++d) {
      const int dep = out.deps[static_cast<size_t>(d)];
      is_after = after[static_cast<size_t>(dep)];
    }
    after.push_back(is_after);
    stream_after[stream] = is_after;
  }

  static void Wait(StageFold& out, const StageTask& task, StageInput input) {
    auto it = std::find(out.inputs.begin(), out.inputs.end(), input);
    if (it == out.inputs.end()) {
      out.inputs.push_back(input);
      it = std::prev(out.inputs.end());
    }
    const int number = static_cast<int>(it - out.inputs.begin());
    const auto begin = out.waits.begin() + task.first_wait;
    if (std::find(begin, out.waits.end(), number) == out.waits.end()) {
      out.waits.push_back(number);
    }
  }

  // What the task waits for when it touches a buffer that the action has not
  // written before. `after_` already has the task.
  void Resolve(StageFold& out, int action, const StageTask& task, int number,
               bool writes) {
    Buffer& b = buffers_[static_cast<size_t>(number)];
    if (b.is_square_sum) {
      Wait(out, task, {StageInput::kSquareSum, 0});
      return;
    }
    if (b.is_loss && action == kTailAction) {
      Wait(out, task, {StageInput::kLoss, 0});
      return;
    }
    if (b.writer[static_cast<size_t>(action)] >= 0) return;
    const bool after_compute = after_[static_cast<size_t>(action)].back();
    if (b.what->persistent) {
      // The loop is checked by CheckPersistent. The tail comes later than all
      // that the loop's compute streams did.
      if (action == kTailAction && !after_compute) {
        const bool touched =
            b.touch[kForwardAction] >= 0 || b.touch[kBackwardAction] >= 0;
        const bool written =
            b.writer[kForwardAction] >= 0 || b.writer[kBackwardAction] >= 0;
        if (writes ? touched : written) stage_->exact = false;
      }
      return;
    }
    const int forward = b.writer[kForwardAction];
    const int begin = b.writer[kBeginAction];
    if (forward < 0 && begin < 0) return;  // the task makes it
    if (writes) {
      stage_->exact = false;  // the fold knows no second writer
      return;
    }
    if (forward < 0) {
      Wait(out, task, {StageInput::kBegin, begin});
      return;
    }
    // Implied where a stream that the reader follows was busy for longer.
    const auto writer = static_cast<size_t>(forward);
    if (NotAfter(forward_, writer, static_cast<size_t>(task.stream)) ||
        (after_compute && NotAfter(forward_, writer, 0))) {
      return;
    }
    if (b.carried < 0) {
      b.carried = stage_->carried++;
      carried_tasks_.push_back(forward);
    }
    Wait(out, task, {StageInput::kCarried, b.carried});
  }

  // Whether a forward task always ends before the forward leaves a stream.
  bool NotAfter(const Rows& rows, size_t task, size_t stream) const {
    return NotAfter(rows, task, forward_ends_, stream);
  }
  static bool NotAfter(const Rows& rows, size_t task, const Rows& ends,
                       size_t stream) {
    const int64_t* a = rows.at(task);
    const int64_t* b = ends.at(stream);
    for (size_t c = 0; c < rows.columns; ++c) {
      if (a[c] > b[c]) return false;
    }
    return true;
  }

  // Persistent buffers are touched by every microbatch. The fold follows them
  // through the compute stream only: in the loop, what writes one and what
  // touches a written one has to be on it, and other readers' ends have to be
  // waited for by it.
  void CheckPersistent(const Rows& backward) {
    if (off_compute_.empty()) return;
    const Rows backward_ends = EndRows(stage_->backward, backward);
    for (const OffCompute& touch : off_compute_) {
      const Buffer& b = buffers_[static_cast<size_t>(touch.buffer)];
      const bool written =
          b.writer[kForwardAction] >= 0 || b.writer[kBackwardAction] >= 0;
      const auto task = static_cast<size_t>(touch.task);
      const bool implied = touch.action == kForwardAction
                               ? NotAfter(forward_, task, forward_ends_, 0)
                               : NotAfter(backward, task, backward_ends, 0);
      if (written || !implied) stage_->exact = false;
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

  void Export(StageFold& a, const Rows& rows) {
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
    if (&a != &stage_->forward) return;
    for (int task : carried_tasks_) add(task);
    if (!stage_->has_loss) return;
    const int writer =
        buffers_[static_cast<size_t>(loss_)].writer[kForwardAction];
    TESSERA_CHECK(writer >= 0) << "nothing writes the loss";
    add(writer);
  }

  // ---- memory

  // The action whose last touch frees a buffer that is not persistent.
  int LastAction(const Buffer& b) {
    const auto in = [&](int action) {
      return b.touch[static_cast<size_t>(action)] >= 0;
    };
    // What is left to the backwards has to be so in all of them, and what is
    // made once a step has to last to the tail or end where it begins.
    if (in(kBeginAction)) {
      if ((in(kForwardAction) || in(kBackwardAction)) && !in(kTailAction)) {
        stage_->exact = false;
      }
    } else if (in(kForwardAction) && microbatches_ > 1 &&
               in(kBackwardAction) != in(kTailAction)) {
      stage_->exact = false;
    }
    for (int action = kActions; action-- > 0;) {
      if (in(action)) return action;
    }
    return -1;
  }

  void FoldMemory() {
    std::array<std::vector<std::pair<int, const TemplateBuffer*>>, kActions>
        given;
    for (const Buffer& b : buffers_) {
      if (b.what->persistent) {
        stage_->persistent[static_cast<size_t>(b.what->category)] +=
            b.what->bytes.value;
        continue;
      }
      const int last = LastAction(b);
      if (last < 0) continue;
      const auto give = [&](int action) {
        const auto at = static_cast<size_t>(action);
        given[at].emplace_back(b.touch[at], b.what);
      };
      give(last);
      // A forward's buffer is given back by either backward.
      if (last == kTailAction && b.touch[kForwardAction] >= 0 &&
          b.touch[kBeginAction] < 0 && b.touch[kBackwardAction] >= 0) {
        give(kBackwardAction);
      }
    }
    for (int action = 0; action < kActions; ++action) {
      auto& list = given[static_cast<size_t>(action)];
      std::sort(list.begin(), list.end(),
                [](const auto& a, const auto& b) { return a.first < b.first; });
      FoldMemory(action, list);
    }
  }

  void FoldMemory(
      int action,
      const std::vector<std::pair<int, const TemplateBuffer*>>& given) {
    MemoryElement& memory = fold(action).memory;
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

  std::span<const BlockTemplate* const> blocks_;
  std::span<const BlockShape* const> shapes_;
  const int microbatches_;
  std::shared_ptr<Stage> stage_;
  PortTable ports_;
  std::vector<std::vector<int>> streams_;  // by block and its own stream
  std::vector<Buffer> buffers_;
  int loss_ = -1;  // buffer
  std::array<std::vector<Placed>, kActions> placed_;
  std::array<std::vector<bool>, kActions> after_;
  std::array<std::vector<bool>, kActions> stream_after_;
  std::vector<OffCompute> off_compute_;
  Rows forward_;
  Rows forward_ends_;
  std::vector<int> carried_tasks_;  // the forward tasks whose ends they are
  std::vector<int> bound_;          // scratch
  std::vector<int> receive_of_;     // scratch
};

}  // namespace

std::shared_ptr<const Stage> MakeStage(
    std::span<const BlockTemplate* const> blocks,
    std::span<const BlockShape* const> shapes, int microbatches) {
  return StageBuilder(blocks, shapes, microbatches).Build();
}

}  // namespace tessera
