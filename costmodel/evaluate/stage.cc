#include "costmodel/evaluate/stage.h"

#include <algorithm>
#include <limits>
#include <map>

namespace tessera {
namespace {

// No path from a column to a task. Far enough from the minimum that adding
// durations does not wrap.
constexpr int64_t kNever = std::numeric_limits<int64_t>::min() / 4;

enum ActionKind { kBeginAction, kForwardAction, kBackwardAction, kTailAction };
constexpr int kActions = 4;

// A task of an action that touched a buffer.
struct Touch {
  int action = 0;
  int task = 0;
  bool writes = false;
};

struct Buffer {
  TemplateBuffer what;
  // In issue order. A microbatch's forward is followed by either the backward
  // or the tail.
  std::vector<Touch> touches;
  bool is_loss = false;
  bool is_square_sum = false;
};

// An action while it is put together: tasks with the buffers that they touch.
struct RawTask {
  TaskCost cost;
  int stream = 0;
  std::vector<int> reads;   // stage buffers
  std::vector<int> writes;
  int receive = -1;         // into StageFold::receives
};

class StageBuilder {
 public:
  StageBuilder(std::span<const BlockTemplate* const> blocks,
               std::span<const BlockShape* const> shapes, int microbatches)
      : blocks_(blocks),
        shapes_(shapes),
        microbatches_(microbatches),
        stage_(std::make_shared<Stage>()) {
    StreamNumber({StreamRole::kCompute, 0});
  }

  std::shared_ptr<const Stage> Build() {
    const int n = static_cast<int>(blocks_.size());
    for (int b = 0; b < n; ++b) {
      Place(b, ProgramKind::kBegin, kBeginAction);
    }
    for (int b = 0; b < n; ++b) {
      Place(b, ProgramKind::kForward, kForwardAction);
    }
    // The tail's backward follows the same forward as the plain backward.
    const std::map<Port, int> after_forward = ports_;
    if (microbatches_ > 1) {
      for (int b = n; b-- > 0;) {
        Place(b, ProgramKind::kBackward, kBackwardAction);
      }
      const std::map<Port, int> after_backward = ports_;
      ports_ = after_forward;
      // Persistent buffers are the same ones.
      for (const auto& [port, buffer] : after_backward) {
        if (buffers_[static_cast<size_t>(buffer)].what.persistent) {
          ports_.emplace(port, buffer);
        }
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

    Connect(kBeginAction);
    Connect(kForwardAction);
    const auto forward_rows = Rows(kForwardAction);
    ends_ = EndRows(kForwardAction, forward_rows);
    forward_rows_ = &forward_rows;
    Connect(kBackwardAction);
    Connect(kTailAction);
    const auto backward_rows = Rows(kBackwardAction);
    CheckPersistent(forward_rows, backward_rows);
    Export(kForwardAction, forward_rows);
    Export(kBackwardAction, backward_rows);
    FoldMemory();
    return stage_;
  }

 private:
  using Row = std::vector<int64_t>;

  StageFold& action(int kind) {
    switch (kind) {
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
  Buffer& buffer(int b) { return buffers_[static_cast<size_t>(b)]; }
  RawTask& raw(const Touch& touch) {
    return raw_[static_cast<size_t>(touch.action)]
               [static_cast<size_t>(touch.task)];
  }

  int StreamNumber(const StreamKey& key) {
    auto& streams = stage_->streams;
    const auto it = std::find(streams.begin(), streams.end(), key);
    if (it != streams.end()) return static_cast<int>(it - streams.begin());
    streams.push_back(key);
    return static_cast<int>(streams.size() - 1);
  }

  // ---- stringing programs together, as Lower does

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

  void Place(int block, ProgramKind kind, int into) {
    const BlockTemplate& whole = *blocks_[static_cast<size_t>(block)];
    const TemplateProgram& program =
        whole.programs[static_cast<size_t>(kind)];
    std::vector<int> bound(program.buffers.size(), -1);
    const auto make = [&](const TemplateBuffer& what) {
      buffers_.push_back({what, {}, false, false});
      return static_cast<int>(buffers_.size() - 1);
    };
    for (const TemplateBinding& import : program.imports) {
      const Port port = PortOf(block, import.port);
      const auto [it, is_new] = ports_.try_emplace(port, -1);
      if (is_new) {
        it->second = make(program.buffers[static_cast<size_t>(import.buffer)]);
        buffer(it->second).is_square_sum = port.kind == Port::kSquareSum;
        buffer(it->second).is_loss = port.kind == Port::kTensor &&
                                     import.port.tensor == whole.loss_tensor;
      }
      bound[static_cast<size_t>(import.buffer)] = it->second;
    }
    for (size_t i = 0; i < bound.size(); ++i) {
      if (bound[i] < 0) bound[i] = make(program.buffers[i]);
    }
    auto& tasks = raw_[static_cast<size_t>(into)];
    const size_t first = tasks.size();
    for (const TemplateTask& task : program.tasks) {
      RawTask& made = tasks.emplace_back();
      made.cost = task.cost;
      made.stream = StreamNumber(task.stream);
      for (int b : task.reads) {
        made.reads.push_back(bound[static_cast<size_t>(b)]);
      }
      for (int b : task.writes) {
        made.writes.push_back(bound[static_cast<size_t>(b)]);
      }
      Touched(into, static_cast<int>(tasks.size() - 1));
    }
    StageFold& out = action(into);
    for (const TemplateTransfer& send : program.sends) {
      out.sends.push_back({block, send.port, send.peer});
      out.send_tasks.push_back(static_cast<int>(first + send.task));
    }
    for (const TemplateTransfer& receive : program.receives) {
      tasks[first + receive.task].receive =
          static_cast<int>(out.receives.size());
      out.receives.push_back({block, receive.port, receive.peer});
    }
    for (const TemplateBinding& exported : program.exports) {
      ports_[PortOf(block, exported.port)] =
          bound[static_cast<size_t>(exported.buffer)];
    }
  }

  void Touched(int into, int task) {
    const RawTask& made =
        raw_[static_cast<size_t>(into)][static_cast<size_t>(task)];
    for (int b : made.reads) buffer(b).touches.push_back({into, task, false});
    for (int b : made.writes) buffer(b).touches.push_back({into, task, true});
  }

  void PlaceAscending(ProgramKind kind, Stage::Phase phase) {
    for (int b = 0; b < static_cast<int>(blocks_.size()); ++b) {
      Place(b, kind, kTailAction);
    }
    EndPhase(phase);
  }

  void EndPhase(Stage::Phase phase) {
    stage_->phase_end[phase] = raw_[kTailAction].size();
  }

  void PlaceLoss() {
    for (size_t b = 0; b < blocks_.size(); ++b) {
      const BlockTemplate& block = *blocks_[b];
      if (block.loss_tensor < 0) continue;
      stage_->has_loss = true;
      if (!block.reduces_loss) continue;
      RawTask task;
      task.cost = block.loss_reduce.cost;
      task.stream = StreamNumber(block.loss_reduce.stream);
      for (size_t i = 0; i < buffers_.size(); ++i) {
        if (buffers_[i].is_loss) task.reads = {static_cast<int>(i)};
      }
      raw_[kTailAction].push_back(task);
      Touched(kTailAction, static_cast<int>(raw_[kTailAction].size() - 1));
    }
  }

  // ---- dependencies

  // Which tasks of an action start no earlier than the compute stream was free
  // before it: those on it, and those behind one of these.
  std::vector<bool> AfterCompute(int kind,
                                 const std::vector<std::vector<int>>& deps) {
    const auto& tasks = raw_[static_cast<size_t>(kind)];
    std::vector<bool> after(tasks.size());
    std::vector<bool> stream_after(stage_->streams.size());
    stream_after[0] = true;
    for (size_t t = 0; t < tasks.size(); ++t) {
      const auto stream = static_cast<size_t>(tasks[t].stream);
      bool is_after = stream_after[stream];
      for (int dep : deps[t]) {
        is_after = is_after || after[static_cast<size_t>(dep)];
      }
      after[t] = is_after;
      stream_after[stream] = is_after;
    }
    return after;
  }

  int InputNumber(StageFold& out, StageInput input) {
    const auto it = std::find(out.inputs.begin(), out.inputs.end(), input);
    if (it != out.inputs.end()) {
      return static_cast<int>(it - out.inputs.begin());
    }
    out.inputs.push_back(input);
    return static_cast<int>(out.inputs.size() - 1);
  }

  // Fills the action's tasks, dependencies and inputs.
  void Connect(int kind) {
    const auto& tasks = raw_[static_cast<size_t>(kind)];
    StageFold& out = action(kind);
    std::vector<std::vector<int>> deps(tasks.size());
    std::vector<std::vector<int>> waits(tasks.size());
    // The last writer in this action, and the readers since, by buffer. The sum
  // of squares is all groups': others write it too.
    std::vector<int> writer(buffers_.size(), -1);
    std::vector<std::vector<int>> readers(buffers_.size());
    struct Outside {
      int task;
      int buffer;
      bool writes;
    };
    std::vector<Outside> outside;  // accesses that reach back before it
    for (size_t i = 0; i < tasks.size(); ++i) {
      const int t = static_cast<int>(i);
      const auto depend = [&](int on) {
        if (tasks[static_cast<size_t>(on)].stream != tasks[i].stream) {
          deps[i].push_back(on);
        }
      };
      if (tasks[i].receive >= 0) {
        waits[i].push_back(
            InputNumber(out, {StageInput::kReceive, tasks[i].receive}));
      }
      for (int b : tasks[i].reads) {
        const auto at = static_cast<size_t>(b);
        if (writer[at] >= 0) depend(writer[at]);
        if (writer[at] < 0 || buffer(b).is_square_sum) {
          outside.push_back({t, b, false});
        }
      }
      for (int b : tasks[i].writes) {
        const auto at = static_cast<size_t>(b);
        if (writer[at] >= 0) depend(writer[at]);
        if (writer[at] < 0 || buffer(b).is_square_sum) {
          outside.push_back({t, b, true});
        }
        for (int reader : readers[at]) {
          if (reader != t) depend(reader);
        }
      }
      for (int b : tasks[i].reads) readers[static_cast<size_t>(b)].push_back(t);
      for (int b : tasks[i].writes) {
        readers[static_cast<size_t>(b)].clear();
        writer[static_cast<size_t>(b)] = t;
      }
    }
    const std::vector<bool> after = AfterCompute(kind, deps);
    for (const Outside& o : outside) {
      Resolve(kind, o.task, o.buffer, o.writes,
              after[static_cast<size_t>(o.task)],
              waits[static_cast<size_t>(o.task)]);
    }
    out.tasks.resize(tasks.size());
    for (size_t t = 0; t < tasks.size(); ++t) {
      StageTask& task = out.tasks[t];
      task.duration = tasks[t].cost.duration.picoseconds;
      task.stream = tasks[t].stream;
      task.first_dep = static_cast<int>(out.deps.size());
      out.deps.insert(out.deps.end(), deps[t].begin(), deps[t].end());
      task.last_dep = static_cast<int>(out.deps.size());
      task.first_wait = static_cast<int>(out.waits.size());
      out.waits.insert(out.waits.end(), waits[t].begin(), waits[t].end());
      task.last_wait = static_cast<int>(out.waits.size());
      for (int b : tasks[t].writes) {
        task.sums_squares = task.sums_squares || buffer(b).is_square_sum;
      }
      out.time_by_source[static_cast<size_t>(tasks[t].cost.source)] +=
          task.duration;
    }
  }

  // What task `task` of an action waits for when it touches a buffer that the
  // action has not written before.
  void Resolve(int kind, int task, int b, bool writes, bool after_compute,
               std::vector<int>& waits) {
    const Buffer& touched = buffer(b);
    StageFold& out = action(kind);
    const auto wait = [&](StageInput input) {
      const int number = InputNumber(out, input);
      if (std::find(waits.begin(), waits.end(), number) == waits.end()) {
        waits.push_back(number);
      }
    };
    if (touched.is_square_sum) {
      wait({StageInput::kSquareSum, 0});
      return;
    }
    if (touched.is_loss && kind == kTailAction) {
      wait({StageInput::kLoss, 0});
      return;
    }
    if (touched.what.persistent) {
      // Checked by CheckPersistent, but for the tail, which comes later than
      // all that the loop's compute streams did.
      if (kind == kTailAction && !after_compute) {
        for (const Touch& touch : touched.touches) {
          if (touch.action == kTailAction || touch.action == kBeginAction) {
            continue;
          }
          if (writes || touch.writes) stage_->exact = false;
        }
      }
      return;
    }
    // Written once, before; where?
    const Touch* writer = nullptr;
    for (const Touch& touch : touched.touches) {
      if (touch.action >= kind) break;
      if (touch.writes) writer = &touch;
    }
    if (writer == nullptr) return;  // made by this task
    if (writes) {
      stage_->exact = false;  // the fold knows no second writer
      return;
    }
    if (writer->action == kBeginAction) {
      wait({StageInput::kBegin, writer->task});
      return;
    }
    TESSERA_CHECK(writer->action == kForwardAction) << writer->action;
    // Implied where a stream that the reader follows was busy for longer.
    const Row& row =
        (*forward_rows_)[static_cast<size_t>(writer->task)];
    const int stream =
        raw_[static_cast<size_t>(kind)][static_cast<size_t>(task)].stream;
    if (NotAfter(row, ends_[static_cast<size_t>(stream)]) ||
        (after_compute && NotAfter(row, ends_[0]))) {
      return;
    }
    const auto [it, is_new] = carried_.try_emplace(b, stage_->carried);
    if (is_new) {
      ++stage_->carried;
      carried_rows_.push_back(writer->task);
    }
    wait({StageInput::kCarried, it->second});
  }

  static bool NotAfter(const Row& row, const Row& other) {
    for (size_t i = 0; i < row.size(); ++i) {
      if (row[i] > other[i]) return false;
    }
    return true;
  }

  // ---- matrices

  // For each task of an action its end as a function of the columns.
  std::vector<Row> Rows(int kind) {
    const StageFold& a = action(kind);
    const size_t streams = stage_->streams.size();
    const size_t columns = streams + a.inputs.size();
    std::vector<Row> rows(a.tasks.size(), Row(columns, kNever));
    std::vector<int> last(streams, -1);
    const auto join = [](Row& into, const Row& other) {
      for (size_t i = 0; i < into.size(); ++i) {
        into[i] = std::max(into[i], other[i]);
      }
    };
    for (size_t t = 0; t < a.tasks.size(); ++t) {
      const StageTask& task = a.tasks[t];
      Row& row = rows[t];
      const auto stream = static_cast<size_t>(task.stream);
      if (last[stream] >= 0) {
        join(row, rows[static_cast<size_t>(last[stream])]);
      } else {
        row[stream] = 0;
      }
      for (int d = task.first_dep; d < task.last_dep; ++d) {
        join(row, rows[static_cast<size_t>(a.deps[static_cast<size_t>(d)])]);
      }
      for (int w = task.first_wait; w < task.last_wait; ++w) {
        const auto column =
            streams + static_cast<size_t>(a.waits[static_cast<size_t>(w)]);
        row[column] = std::max<int64_t>(row[column], 0);
      }
      for (int64_t& weight : row) {
        if (weight > kNever) weight += task.duration;
      }
      last[stream] = static_cast<int>(t);
    }
    return rows;
  }

  // For each stream the time that it is free after the action.
  std::vector<Row> EndRows(int kind, const std::vector<Row>& rows) {
    const StageFold& a = action(kind);
    const size_t streams = stage_->streams.size();
    std::vector<Row> ends(streams, Row(streams + a.inputs.size(), kNever));
    for (size_t s = 0; s < streams; ++s) ends[s][s] = 0;
    for (size_t t = 0; t < a.tasks.size(); ++t) {
      ends[static_cast<size_t>(a.tasks[t].stream)] = rows[t];
    }
    return ends;
  }

  void Export(int kind, const std::vector<Row>& rows) {
    StageFold& a = action(kind);
    MaxPlus& matrix = a.matrix;
    matrix.row = {0};
    const auto add = [&](const Row& row) {
      for (size_t c = 0; c < row.size(); ++c) {
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
      add(rows[static_cast<size_t>(last[s])]);
    }
    for (int task : a.send_tasks) add(rows[static_cast<size_t>(task)]);
    if (kind != kForwardAction) return;
    for (int task : carried_rows_) add(rows[static_cast<size_t>(task)]);
    if (!stage_->has_loss) return;
    for (const Buffer& b : buffers_) {
      if (!b.is_loss) continue;
      int writer = -1;
      for (const Touch& touch : b.touches) {
        if (touch.action == kForwardAction && touch.writes) writer = touch.task;
      }
      TESSERA_CHECK(writer >= 0) << "nothing writes the loss";
      add(rows[static_cast<size_t>(writer)]);
    }
  }

  // Persistent buffers are touched by every microbatch. The fold follows them
  // through the compute stream only: in the loop, what writes one and what
  // touches a written one has to be on it, and other readers' ends have to be
  // waited for by it.
  void CheckPersistent(const std::vector<Row>& forward,
                       const std::vector<Row>& backward) {
    const auto backward_ends = EndRows(kBackwardAction, backward);
    for (const Buffer& b : buffers_) {
      if (!b.what.persistent) continue;
      const bool written = std::any_of(
          b.touches.begin(), b.touches.end(), [](const Touch& touch) {
            return touch.writes && (touch.action == kForwardAction ||
                                    touch.action == kBackwardAction);
          });
      for (const Touch& touch : b.touches) {
        const bool in_forward = touch.action == kForwardAction;
        if (!in_forward && touch.action != kBackwardAction) continue;
        if (raw(touch).stream == 0) continue;
        const auto t = static_cast<size_t>(touch.task);
        if (written || (in_forward ? !NotAfter(forward[t], ends_[0])
                                   : !NotAfter(backward[t],
                                               backward_ends[0]))) {
          stage_->exact = false;
        }
      }
    }
  }

  // ---- memory

  // The action whose last touch frees a buffer that is not persistent.
  int LastAction(const Buffer& b) {
    std::array<bool, kActions> in = {};
    for (const Touch& touch : b.touches) {
      in[static_cast<size_t>(touch.action)] = true;
    }
    // What is left to the backwards has to be so in all of them, and what is
    // made once a step has to last to the tail or end where it begins.
    const bool loop = in[kForwardAction] || in[kBackwardAction];
    if (in[kBeginAction] && loop && !in[kTailAction]) stage_->exact = false;
    if (!in[kBeginAction] && in[kForwardAction] && microbatches_ > 1 &&
        in[kBackwardAction] != in[kTailAction]) {
      stage_->exact = false;
    }
    for (int kind = kActions; kind-- > 0;) {
      if (in[static_cast<size_t>(kind)]) return kind;
    }
    return -1;
  }

  void FoldMemory() {
    std::vector<bool> once(buffers_.size(), false);  // made in begin
    std::vector<int> last(buffers_.size());
    for (size_t b = 0; b < buffers_.size(); ++b) {
      const Buffer& what = buffers_[b];
      if (what.what.persistent) {
        stage_->persistent[static_cast<size_t>(what.what.category)] +=
            what.what.bytes.value;
        continue;
      }
      last[b] = LastAction(what);
      once[b] = !what.touches.empty() &&
                what.touches[0].action == kBeginAction;
    }
    for (int kind = 0; kind < kActions; ++kind) {
      FoldMemory(kind, last, once);
    }
  }

  void FoldMemory(int kind, const std::vector<int>& last,
                  const std::vector<bool>& once) {
    const auto& tasks = raw_[static_cast<size_t>(kind)];
    // Freed here: what dies with this action, and what the forward left to
    // the backward, which the tail's backward takes too.
    const auto dies_here = [&](size_t b) {
      if (last[b] == kind) return true;
      return kind == kBackwardAction && last[b] == kTailAction && !once[b];
    };
    std::vector<int> last_task(buffers_.size(), -1);
    std::vector<bool> held(buffers_.size(), false);
    for (size_t b = 0; b < buffers_.size(); ++b) {
      for (const Touch& touch : buffers_[b].touches) {
        if (touch.action == kind) last_task[b] = touch.task;
        // Made by an earlier action.
        if (touch.action < kind && !(kind == kTailAction &&
                                     touch.action == kBackwardAction)) {
          held[b] = true;
        }
      }
    }
    MemoryElement& memory = action(kind).memory;
    memory.total_peak = std::numeric_limits<int64_t>::min();
    const auto change = [&](size_t b, int64_t sign) {
      const TemplateBuffer& what = buffers_[b].what;
      memory.delta[static_cast<size_t>(what.category)] +=
          sign * what.bytes.value;
      memory.total_delta += sign * what.bytes.value;
    };
    for (size_t t = 0; t < tasks.size(); ++t) {
      for (const auto* list : {&tasks[t].reads, &tasks[t].writes}) {
        for (int id : *list) {
          const auto b = static_cast<size_t>(id);
          if (buffers_[b].what.persistent || held[b]) continue;
          held[b] = true;
          change(b, 1);
        }
      }
      if (memory.total_delta > memory.total_peak) {
        memory.total_peak = memory.total_delta;
        memory.peak = memory.delta;
      }
      for (const auto* list : {&tasks[t].reads, &tasks[t].writes}) {
        for (int id : *list) {
          const auto b = static_cast<size_t>(id);
          if (buffers_[b].what.persistent || !held[b] ||
              last_task[b] != static_cast<int>(t) || !dies_here(b)) {
            continue;
          }
          held[b] = false;
          last_task[b] = -1;
          change(b, -1);
        }
      }
    }
  }

  std::span<const BlockTemplate* const> blocks_;
  std::span<const BlockShape* const> shapes_;
  const int microbatches_;
  std::shared_ptr<Stage> stage_;
  std::vector<Buffer> buffers_;
  std::map<Port, int> ports_;
  std::array<std::vector<RawTask>, kActions> raw_;
  std::vector<Row> ends_;  // after a forward
  const std::vector<Row>* forward_rows_ = nullptr;
  std::map<int, int> carried_;  // by buffer
  std::vector<int> carried_rows_;  // the forward tasks whose ends they are
};

}  // namespace

std::shared_ptr<const Stage> MakeStage(
    std::span<const BlockTemplate* const> blocks,
    std::span<const BlockShape* const> shapes, int microbatches) {
  return StageBuilder(blocks, shapes, microbatches).Build();
}

}  // namespace tessera
