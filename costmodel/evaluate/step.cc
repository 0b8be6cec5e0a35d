#include "costmodel/evaluate/step.h"

#include <algorithm>
#include <limits>

#include "planner/base/rng.h"

namespace tessera {
namespace {

// A send to another group: a time for each microbatch.
struct StageLink {
  Port port;
  GroupId from;
  GroupId to;
  bool operator==(const StageLink&) const = default;
};

// Numbers links, by open addressing.
class LinkTable {
 public:
  // Of at most so many that are looked up.
  explicit LinkTable(size_t ends) {
    size_t size = 16;
    while (size < 2 * ends) size *= 2;
    slots_.assign(size, -1);
  }

  int Number(const StageLink& link) {
    const uint64_t groups = static_cast<uint64_t>(link.from.value) << 32 |
                            static_cast<uint64_t>(link.to.value);
    const size_t mask = slots_.size() - 1;
    size_t at = Mix64(Mix64(link.port.word()) ^ groups) & mask;
    for (; slots_[at] >= 0; at = (at + 1) & mask) {
      if (links_[static_cast<size_t>(slots_[at])] == link) return slots_[at];
    }
    slots_[at] = static_cast<int>(links_.size());
    links_.push_back(link);
    return slots_[at];
  }
  size_t size() const { return links_.size(); }

 private:
  std::vector<int> slots_;  // -1: free
  std::vector<StageLink> links_;
};

class Step {
 public:
  Step(std::span<const StepStage> stages, std::span<const BlockShape> shapes,
       std::span<const GroupId> group_of_block, int microbatches)
      : stages_(stages),
        shapes_(shapes),
        group_of_block_(group_of_block),
        microbatches_(static_cast<size_t>(microbatches)),
        links_(CountTransfers(stages)) {
    runs_.reserve(stages.size());
    at_.resize(group_of_block.size());
    for (size_t s = 0; s < stages.size(); ++s) {
      runs_.emplace_back(*stages[s].stage, microbatches);
      for (size_t b = 0; b < stages[s].blocks.size(); ++b) {
        at_[static_cast<size_t>(stages[s].blocks[b])] = {s, b};
      }
      NumberLinks(s);
    }
    Allocate();
    for (size_t s = 0; s < stages.size(); ++s) Connect(s);
    values_.assign(allocated_, 0);
  }

  StepTiming Time(std::span<const StageAction> order, const SteadyPhase& steady,
                  Duration world_reduce) {
    for (Run& run : runs_) {
      Walk(run, run.begin, 0, run.stage->begin.tasks.size(), 0);
    }
    size_t next = 0;
    size_t skipped = 0;
    if (const size_t reach = ReachOf(order, steady); reach > 0) {
      for (; next < steady.begin; ++next) Do(order[next]);
      skipped = DoSteady(order, steady, reach);
      next = steady.end();
    }
    for (; next < order.size(); ++next) Do(order[next]);
    WalkTail(Stage::kTie);
    WalkTail(Stage::kLoss);
    WalkTail(Stage::kNorm);
    int64_t& square_sum = values_[kSquareSum];
    if (world_reduce >= Duration{}) square_sum += world_reduce.picoseconds;
    WalkTail(Stage::kUpdate);
    int64_t end = square_sum;
    for (const Run& run : runs_) {
      for (size_t i = 0; i < run.stage->streams.size(); ++i) {
        end = std::max(end, values_[run.free_at + i]);
      }
    }
    return {{end}, skipped};
  }

 private:
  // Times are numbers in `values_`. Where one is, of microbatch m: at
  // `at` + m * `stride`, which is 0 for what microbatches share.
  struct Cell {
    size_t at = 0;
    size_t stride = 0;
  };
  // A fold of a stage: ranges of `links_of_` and `cells_`.
  struct Fold {
    const StageFold* fold = nullptr;
    size_t first_link = 0;    // of its receives, then of its sends
    size_t first_input = 0;   // parallel to StageFold::inputs
    size_t first_output = 0;  // of rows of the matrix, or of sends alone
    size_t ends = 0;          // of tasks that are walked: into `values_`
  };
  struct Run {
    Run(const Stage& of, int microbatches)
        : stage(&of), order(of, microbatches) {}

    const Stage* stage;
    FoldOrder order;
    Fold begin;
    std::vector<Fold> folds;  // by FoldOrder::Next::number
    Fold tail;
    size_t tail_at = 0;  // its next task
    // Into `values_`.
    size_t free_at = 0;  // by stream
    size_t carried = 0;  // by microbatch and number
    size_t latest = 0;   // of these, of the latest microbatch
    size_t loss = 0;
  };
  // When the sum of squares is next complete.
  static constexpr size_t kSquareSum = 0;

  static size_t CountTransfers(std::span<const StepStage> stages) {
    size_t count = 0;
    const auto add = [&](const StageFold& fold) {
      count += fold.receives.size() + fold.sends.size();
    };
    for (const StepStage& stage : stages) {
      add(stage.stage->begin);
      for (const Stage::Chunk& chunk : stage.stage->chunks) {
        for (const StageFold* fold : FoldsOf(chunk)) add(*fold);
      }
      add(stage.stage->tail);
    }
    return count;
  }

  void NumberLinks(size_t s) {
    Run& run = runs_[s];
    const auto number = [&](const StageFold& fold) {
      Fold out;
      out.fold = &fold;
      out.first_link = links_of_.size();
      for (const StageTransfer& t : fold.receives) AddLink(s, t, false);
      for (const StageTransfer& t : fold.sends) AddLink(s, t, true);
      return out;
    };
    run.begin = number(run.stage->begin);
    for (const Stage::Chunk& chunk : run.stage->chunks) {
      for (const StageFold* fold : FoldsOf(chunk)) {
        run.folds.push_back(number(*fold));
      }
    }
    run.tail = number(run.stage->tail);
  }

  void AddLink(size_t s, const StageTransfer& transfer, bool sends) {
    const int block = stages_[s].blocks[static_cast<size_t>(transfer.block)];
    const BlockShape& shape = shapes_[static_cast<size_t>(block)];
    const int peer_block = shape.depends[static_cast<size_t>(transfer.peer)];
    const GroupId own(static_cast<int64_t>(s));
    const GroupId peer = group_of_block_[static_cast<size_t>(peer_block)];
    const TensorId tensor =
        shape.tensors[static_cast<size_t>(transfer.port.tensor)];
    const Port port = {transfer.port.kind, tensor, transfer.port.index,
                       transfer.port.tile};
    links_of_.push_back(
        links_.Number({port, sends ? own : peer, sends ? peer : own}));
  }

  size_t Take(size_t count) {
    const size_t at = allocated_;
    allocated_ += count;
    return at;
  }

  void Allocate() {
    Take(1);  // kSquareSum
    for (Run& run : runs_) {
      const Stage& stage = *run.stage;
      const auto carried = static_cast<size_t>(stage.carried);
      run.free_at = Take(stage.streams.size());
      run.latest = Take(carried);
      run.loss = Take(1);
      run.begin.ends = Take(stage.begin.tasks.size());
      for (Fold& fold : run.folds) fold.ends = Take(fold.fold->tasks.size());
      run.tail.ends = Take(stage.tail.tasks.size());
    }
    for (Run& run : runs_) {
      run.carried =
          Take(static_cast<size_t>(run.stage->carried) * microbatches_);
    }
    sent_ = Take(links_.size() * microbatches_);
  }

  void Connect(size_t s) {
    Run& run = runs_[s];
    const auto connect = [&](Fold& f) {
      f.first_input = cells_.size();
      for (const StageInput& input : f.fold->inputs) {
        cells_.push_back(InputCell(run, f, input));
      }
      f.first_output = cells_.size();
      for (int stream : f.fold->touched) {
        cells_.push_back({run.free_at + static_cast<size_t>(stream), 0});
      }
      for (size_t i = 0; i < f.fold->sends.size(); ++i) {
        cells_.push_back(LinkCell(f, f.fold->receives.size() + i));
      }
      for (int number : f.fold->carries) {
        cells_.push_back(CarriedCell(run, number));
      }
      if (f.fold->has_loss) cells_.push_back({run.loss, 0});
    };
    connect(run.begin);
    for (Fold& fold : run.folds) connect(fold);
    connect(run.tail);
  }

  Cell LinkCell(const Fold& f, size_t transfer) const {
    const int link = links_of_[f.first_link + transfer];
    return {sent_ + static_cast<size_t>(link), links_.size()};
  }
  Cell CarriedCell(const Run& run, int number) const {
    return {run.carried + static_cast<size_t>(number),
            static_cast<size_t>(run.stage->carried)};
  }
  Cell InputCell(const Run& run, const Fold& f, const StageInput& input) const {
    const auto i = static_cast<size_t>(input.index);
    switch (input.kind) {
      case StageInput::kReceive:
        return LinkCell(f, i);
      case StageInput::kBegin:
        return {run.begin.ends + i, 0};
      case StageInput::kLast:
        return {
            run.folds[static_cast<size_t>(FoldOrder::LastNumber(input.chunk))]
                    .ends +
                i,
            0};
      case StageInput::kCarried:
        return CarriedCell(run, input.index);
      case StageInput::kLatest:
        return {run.latest + i, 0};
      case StageInput::kLoss:
        return {run.loss, 0};
      case StageInput::kSquareSum:
        break;
    }
    return {kSquareSum, 0};
  }

  // Runs tasks [begin, end) of a fold one by one.
  void Walk(Run& run, const Fold& f, size_t begin, size_t end, size_t m) {
    const StageFold& fold = *f.fold;
    int64_t* const free_at = values_.data() + run.free_at;
    int64_t* const ends = values_.data() + f.ends;
    for (size_t t = begin; t < end; ++t) {
      const StageTask& task = fold.tasks[t];
      int64_t start = free_at[task.stream];
      if (task.after_compute) start = std::max(start, free_at[0]);
      for (int d = task.first_dep; d < task.last_dep; ++d) {
        start = std::max(start, ends[fold.deps[static_cast<size_t>(d)]]);
      }
      for (int w = task.first_wait; w < task.last_wait; ++w) {
        const auto input =
            static_cast<size_t>(fold.waits[static_cast<size_t>(w)]);
        const Cell& cell = cells_[f.first_input + input];
        start = std::max(start, values_[cell.at + m * cell.stride]);
      }
      free_at[task.stream] = ends[t] = start + task.duration;
      if (task.sums_squares) {
        values_[kSquareSum] = std::max(values_[kSquareSum], ends[t]);
      }
    }
    for (size_t i = 0; i < fold.send_tasks.size(); ++i) {
      const auto t = static_cast<size_t>(fold.send_tasks[i]);
      if (t < begin || t >= end) continue;
      const Cell& cell = cells_[f.first_output + fold.touched.size() + i];
      values_[cell.at + m * cell.stride] = ends[t];
    }
  }

  // A phase of all stages, block by block: stages take turns, so that what one
  // sends another receives.
  void WalkTail(Stage::Phase phase) {
    for (size_t i = 0; i < at_.size(); ++i) {
      const InStage& at = at_[Stage::Descends(phase) ? at_.size() - 1 - i : i];
      Run& run = runs_[at.stage];
      const size_t end = run.stage->phase_ends[phase][at.member];
      Walk(run, run.tail, run.tail_at, end, 0);
      run.tail_at = end;
    }
  }

  void Do(const StageAction& step) {
    Run& run = runs_[static_cast<size_t>(step.stage)];
    const auto m = static_cast<size_t>(step.action.microbatch);
    const FoldOrder::Next next = run.order.Of(step.action);
    const Fold& f = run.folds[static_cast<size_t>(next.number)];
    if (next.last) {
      Walk(run, f, 0, f.fold->tasks.size(), m);
      return;
    }
    in_.resize(Columns(run, f));
    out_.resize(Rows(f));
    Apply(run, f, m, in_.data(), out_.data());
    Store(run, f, m, out_.data());
  }

  static size_t Columns(const Run& run, const Fold& f) {
    return run.stage->streams.size() + f.fold->inputs.size();
  }
  static size_t Rows(const Fold& f) { return f.fold->matrix.row.size() - 1; }

  // Runs all tasks of a fold at once, by its matrix: `in` becomes what its
  // columns are, `out` its rows.
  void Apply(const Run& run, const Fold& f, size_t m, int64_t* in,
             int64_t* out) const {
    const StageFold& fold = *f.fold;
    const size_t streams = run.stage->streams.size();
    const int64_t* const values = values_.data();
    std::copy_n(values + run.free_at, streams, in);
    const Cell* const cells = cells_.data() + f.first_input;
    const size_t inputs = fold.inputs.size();
    for (size_t i = 0; i < inputs; ++i) {
      in[streams + i] = values[cells[i].at + m * cells[i].stride];
    }
    const MaxPlus::Entry* entry = fold.matrix.entries.data();
    const int* const row = fold.matrix.row.data();
    const size_t rows = Rows(f);
    for (size_t r = 0; r < rows; ++r) {
      int64_t value = 0;
      const MaxPlus::Entry* const end = entry + (row[r + 1] - row[r]);
      for (; entry != end; ++entry) {
        value = std::max(value, in[entry->column] + entry->weight);
      }
      out[r] = value;
    }
  }

  // Puts the rows of a fold's matrix where they belong.
  void Store(const Run& run, const Fold& f, size_t m, const int64_t* out) {
    const StageFold& fold = *f.fold;
    const Cell* const cells = cells_.data() + f.first_output;
    const size_t rows = Rows(f);
    for (size_t r = 0; r < rows; ++r) {
      values_[cells[r].at + m * cells[r].stride] = out[r];
    }
    const size_t first = fold.touched.size() + fold.sends.size();
    for (size_t i = 0; i < fold.carries.size(); ++i) {
      values_[run.latest + static_cast<size_t>(fold.carries[i])] =
          out[first + i];
    }
  }

  // ---- the steady phase
  //
  // An action of it writes an entry that is the largest of some terms, each a
  // weight and
  //  - an entry that the phase has written, at most R periods before
  //    (`ReachOf`), in each period as many, or
  //  - a constant: zero, or a time that the phase reads and does not write, as
  //    those of the begin action.
  // Say that every entry was later by its own rate than a period before, in the
  // last period and in each of the R before it. Then what the next period reads
  // is later by such rates, too, constants by a rate of 0. So if in the last
  // period the largest of an entry's terms, or one of them, had the entry's
  // rate, then the entry of the n-th period behind is later by n times its rate
  // as long as no other term overtakes: one that was earlier by a gap, with a
  // rate that is greater by d, does not for n <= gap / d. By induction over the
  // actions all entries are known for the least of these n (`Lasting`). The
  // periods up to there are skipped, and those behind are walked until there
  // are rates again.

  // R; 0 where the phase does not have this form, or is too short.
  size_t ReachOf(std::span<const StageAction> order,
                 const SteadyPhase& steady) const {
    if (steady.periods < 3) return 0;
    // Folds by stage and FoldOrder::Next::number.
    size_t most = 0;
    for (const Run& run : runs_) most = std::max(most, run.folds.size());
    const auto fold_number = [&](size_t stage, size_t number) {
      return static_cast<int>(stage * most + number);
    };
    constexpr int kNobody = -1;
    constexpr int kSeveral = -2;
    // Who writes a link, and what a stage carries on.
    std::vector<int> sender(links_.size(), kNobody);
    std::vector<std::vector<int>> carrier(runs_.size());
    for (size_t s = 0; s < runs_.size(); ++s) {
      carrier[s].assign(static_cast<size_t>(runs_[s].stage->carried), kNobody);
      for (size_t number = 0; number < runs_[s].folds.size(); ++number) {
        const Fold& f = runs_[s].folds[number];
        const int writer = fold_number(s, number);
        for (int carried : f.fold->carries) {
          carrier[s][static_cast<size_t>(carried)] = writer;
        }
        if (FoldOrder::IsLast(static_cast<int>(number))) continue;
        const size_t sends = f.first_link + f.fold->receives.size();
        for (size_t i = 0; i < f.fold->sends.size(); ++i) {
          int& by = sender[static_cast<size_t>(links_of_[sends + i])];
          by = by == kNobody ? writer : kSeveral;
        }
      }
    }
    // Where the last period runs a fold, by the microbatch's remainder.
    const size_t begin = steady.end() - steady.length;
    const auto ahead = static_cast<size_t>(steady.microbatches);
    constexpr size_t kNowhere = std::numeric_limits<size_t>::max();
    std::vector<size_t> run_at(runs_.size() * most * ahead, kNowhere);
    const auto at = [&](int fold, size_t m) -> size_t& {
      return run_at[static_cast<size_t>(fold) * ahead + m % ahead];
    };
    const auto fold_of = [&](const StageAction& step) {
      return fold_number(static_cast<size_t>(step.stage),
                         static_cast<size_t>(FoldOrder::Number(step.action)));
    };
    for (size_t i = begin; i < steady.end(); ++i) {
      at(fold_of(order[i]), static_cast<size_t>(order[i].action.microbatch)) =
          i;
    }
    size_t reach = 1;
    for (size_t i = begin; i < steady.end(); ++i) {
      const auto s = static_cast<size_t>(order[i].stage);
      const auto m = static_cast<size_t>(order[i].action.microbatch);
      const Fold& f =
          runs_[s]
              .folds[static_cast<size_t>(FoldOrder::Number(order[i].action))];
      for (const StageInput& input : f.fold->inputs) {
        const auto index = static_cast<size_t>(input.index);
        int writer = kNobody;
        switch (input.kind) {
          case StageInput::kBegin:
          case StageInput::kLast:
          case StageInput::kSquareSum:
            continue;  // constants
          case StageInput::kReceive:
            writer =
                sender[static_cast<size_t>(links_of_[f.first_link + index])];
            break;
          case StageInput::kCarried:
            writer = carrier[s][index];
            break;
          case StageInput::kLatest:
          case StageInput::kLoss:
            break;
        }
        if (writer < 0) return 0;
        const size_t of_writer = at(writer, m);
        if (of_writer == kNowhere) return 0;
        const auto its =
            static_cast<size_t>(order[of_writer].action.microbatch);
        // The microbatches differ by whole periods. What is written later is
        // not what is read.
        if (its < m) return 0;
        const size_t periods = (its - m) / ahead;
        if (i + periods * steady.length <= of_writer) return 0;
        const size_t back = i + periods * steady.length - of_writer;
        reach = std::max(reach, (back + steady.length - 1) / steady.length);
      }
    }
    return reach;
  }

  // An action of the steady phase, which each period does.
  struct Periodic {
    Run* run = nullptr;
    const Fold* fold = nullptr;
    size_t microbatch = 0;  // in the first period
    // Where what it reads and writes is among all that a period does.
    size_t in = 0;
    size_t out = 0;
  };
  // What all actions of a period read or write, one behind the other.
  using Series = std::vector<int64_t>;

  // The number of periods that were skipped.
  size_t DoSteady(std::span<const StageAction> order, const SteadyPhase& steady,
                  size_t reach) {
    std::vector<Periodic> period;
    size_t in = 0;
    size_t out = 0;
    for (const StageAction& step : order.subspan(steady.begin, steady.length)) {
      Run& run = runs_[static_cast<size_t>(step.stage)];
      const Fold& fold =
          run.folds[static_cast<size_t>(FoldOrder::Number(step.action))];
      period.push_back(
          {&run, &fold, static_cast<size_t>(step.action.microbatch), in, out});
      in += Columns(run, fold);
      out += Rows(fold);
      run.order.Skip(step.action, static_cast<int>(steady.periods));
    }
    const auto ahead = static_cast<size_t>(steady.microbatches);
    // Of the last period, and of the one before. Written values are later by a
    // rate, if there was one before.
    Series read(in);
    Series read_before(in);
    Series written(out);
    Series written_before(out);
    Series rate(out, std::numeric_limits<int64_t>::min());
    size_t same = 0;  // periods whose rates are those of the one before
    size_t skipped = 0;
    for (size_t k = 0; k < steady.periods; ++k) {
      std::swap(read, read_before);
      std::swap(written, written_before);
      for (const Periodic& action : period) {
        const size_t m = action.microbatch + k * ahead;
        int64_t* const rows = written.data() + action.out;
        Apply(*action.run, *action.fold, m, read.data() + action.in, rows);
        Store(*action.run, *action.fold, m, rows);
      }
      if (k == 0) continue;
      bool changed = false;
      for (size_t w = 0; w < out; ++w) {
        const int64_t now = written[w] - written_before[w];
        changed |= now != rate[w];
        rate[w] = now;
      }
      same = changed ? 0 : same + 1;
      if (same < reach) continue;
      const size_t left = steady.periods - 1 - k;
      const size_t lasting =
          std::min(left, Lasting(period, read, read_before, written, rate));
      if (lasting == 0) continue;
      // What is read behind the skipped periods is that of the last `reach`,
      // and of those whose microbatches come up behind the phase.
      size_t first = lasting > reach ? lasting - reach + 1 : 1;
      if (steady.kept < k + first) {
        first = steady.kept > k ? steady.kept - k : 1;
      }
      // Put down as the skipped periods would have written it.
      for (size_t n = first; n <= lasting; ++n) {
        for (const Periodic& action : period) {
          out_.resize(Rows(*action.fold));
          for (size_t r = 0; r < out_.size(); ++r) {
            const size_t w = action.out + r;
            out_[r] = written[w] + static_cast<int64_t>(n) * rate[w];
          }
          Store(*action.run, *action.fold, action.microbatch + (k + n) * ahead,
                out_.data());
        }
      }
      const auto periods = static_cast<int64_t>(lasting);
      for (size_t r = 0; r < in; ++r) {
        read[r] += periods * (read[r] - read_before[r]);
      }
      for (size_t w = 0; w < out; ++w) written[w] += periods * rate[w];
      skipped += lasting;
      k += lasting;
    }
    return skipped;
  }

  // For how many periods behind the last all entries keep their rates.
  static size_t Lasting(const std::vector<Periodic>& period, const Series& read,
                        const Series& read_before, const Series& written,
                        const Series& rates) {
    size_t lasting = std::numeric_limits<size_t>::max();
    for (const Periodic& action : period) {
      const MaxPlus& matrix = action.fold->fold->matrix;
      for (size_t row = 0; row + 1 < matrix.row.size(); ++row) {
        const int64_t value = written[action.out + row];
        const int64_t rate = rates[action.out + row];
        bool reached = false;  // by a term with its rate
        const auto add = [&](int64_t term, int64_t its_rate) {
          if (its_rate <= rate) {
            reached |= its_rate == rate && term == value;
            return;
          }
          lasting = std::min(
              lasting, static_cast<size_t>((value - term) / (its_rate - rate)));
        };
        add(0, 0);
        for (int e = matrix.row[row]; e < matrix.row[row + 1]; ++e) {
          const auto& entry = matrix.entries[static_cast<size_t>(e)];
          const size_t column = action.in + static_cast<size_t>(entry.column);
          add(read[column] + entry.weight, read[column] - read_before[column]);
        }
        if (!reached || lasting == 0) return 0;
      }
    }
    return lasting;
  }

  std::span<const StepStage> stages_;
  std::span<const BlockShape> shapes_;
  std::span<const GroupId> group_of_block_;
  const size_t microbatches_;
  std::vector<Run> runs_;
  struct InStage {
    size_t stage = 0;
    size_t member = 0;
  };
  std::vector<InStage> at_;  // by block
  LinkTable links_;
  std::vector<int> links_of_;
  std::vector<Cell> cells_;
  size_t allocated_ = 0;
  size_t sent_ = 0;  // by microbatch and link: into `values_`
  std::vector<int64_t> values_;
  std::vector<int64_t> in_;
  std::vector<int64_t> out_;
};

// How many lengths of a period are tried: more than interleaved chunks of as
// many stages need.
constexpr int kMostTried = 64;

}  // namespace

SteadyPhase FindSteadyPhase(std::span<const StageAction> order) {
  const auto like = [&](size_t i, size_t j) {
    const Action& a = order[i].action;
    const Action& b = order[j].action;
    return order[i].stage == order[j].stage && a.kind == b.kind &&
           a.chunk == b.chunk;
  };
  const auto ahead = [&](size_t i, size_t j) {
    return order[j].action.microbatch - order[i].action.microbatch;
  };
  int chunks = 0;
  int stages = 0;
  int microbatches = 0;
  for (const auto& [stage, action] : order) {
    chunks = std::max(chunks, action.chunk + 1);
    stages = std::max(stages, stage + 1);
    microbatches = std::max(microbatches, action.microbatch + 1);
  }
  constexpr size_t kKinds = 4;  // of actions
  std::vector<size_t> last(
      static_cast<size_t>(stages) * static_cast<size_t>(chunks) * kKinds,
      order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const auto& [stage, action] = order[i];
    last[static_cast<size_t>(stage * chunks + action.chunk) * kKinds +
         static_cast<size_t>(action.kind)] = i;
  }
  size_t limit = order.size();
  for (size_t i : last) limit = std::min(limit, i);

  SteadyPhase found;
  const size_t middle = limit / 2;
  int tried = 0;
  for (size_t other = middle + 1; other < limit && tried < kMostTried;
       ++other) {
    const int by = ahead(middle, other);
    if (by <= 0 || !like(middle, other)) continue;
    ++tried;
    const size_t length = other - middle;
    const auto repeats = [&](size_t i) {
      return like(i, i + length) && ahead(i, i + length) == by;
    };
    size_t begin = middle;
    while (begin > 0 && repeats(begin - 1)) --begin;
    size_t end = other + 1;
    while (end < limit && repeats(end - length)) ++end;
    const size_t periods = (end - begin) / length;
    if (periods < 2 || periods * length <= found.periods * found.length) {
      continue;
    }
    found = {begin, length, periods, by, periods};
    if (2 * periods * length >= limit) break;
  }
  std::vector<bool> behind(static_cast<size_t>(microbatches));
  for (size_t i = found.end(); i < order.size(); ++i) {
    behind[static_cast<size_t>(order[i].action.microbatch)] = true;
  }
  for (size_t i = found.begin; i < found.end(); ++i) {
    if (behind[static_cast<size_t>(order[i].action.microbatch)]) {
      found.kept = (i - found.begin) / found.length;
      break;
    }
  }
  return found;
}

StepTiming StepTime(std::span<const StepStage> stages,
                    std::span<const BlockShape> shapes,
                    std::span<const GroupId> group_of_block,
                    std::span<const StageAction> order,
                    const SteadyPhase& steady, int microbatches,
                    Duration world_reduce) {
  return Step(stages, shapes, group_of_block, microbatches)
      .Time(order, steady, world_reduce);
}

MemoryUse StagePeak(const Stage& stage, std::span<const Action> actions,
                    const SteadyPhase& steady, int microbatches) {
  MemoryUse peak;
  std::array<int64_t, kMemoryCategories> now = stage.persistent;
  int64_t total = 0;
  for (int64_t part : now) total += part;
  peak.total = {total};
  for (size_t c = 0; c < now.size(); ++c) peak.parts[c] = {now[c]};
  const auto run = [&](const MemoryElement& action) {
    if (total + action.total_peak > peak.total.value) {
      peak.total = {total + action.total_peak};
      for (size_t c = 0; c < now.size(); ++c) {
        peak.parts[c] = {now[c] + action.peak[c]};
      }
    }
    for (size_t c = 0; c < now.size(); ++c) now[c] += action.delta[c];
    total += action.total_delta;
  };
  FoldOrder order(stage, microbatches);
  const auto run_actions = [&](size_t begin, size_t end) {
    for (const Action& action : actions.subspan(begin, end - begin)) {
      const FoldOrder::Next next = order.Of(action);
      run(next.final ? next.fold->final_memory : next.fold->memory);
    }
  };
  if (!stage.begin.tasks.empty()) run(stage.begin.final_memory);
  size_t next = 0;
  if (steady.periods > 2) {
    // Every period adds as much. So of all periods the first or the last is
    // the highest: those between are skipped.
    run_actions(0, steady.begin);
    const auto before = now;
    const int64_t total_before = total;
    next = steady.begin + steady.length;
    run_actions(steady.begin, next);
    const size_t skipped = steady.periods - 2;
    for (size_t c = 0; c < now.size(); ++c) {
      now[c] += static_cast<int64_t>(skipped) * (now[c] - before[c]);
    }
    total += static_cast<int64_t>(skipped) * (total - total_before);
    for (const Action& action : actions.subspan(steady.begin, steady.length)) {
      order.Skip(action, static_cast<int>(skipped));
    }
    next += skipped * steady.length;
  }
  run_actions(next, actions.size());
  run(stage.tail.final_memory);
  return peak;
}

}  // namespace tessera
