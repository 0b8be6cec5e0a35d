#include "costmodel/evaluate/step.h"

#include <algorithm>
#include <map>

namespace tessera {
namespace {

// A send to another group: a time for each microbatch.
struct StageLink {
  Port port;
  GroupId from;
  GroupId to;
  bool operator==(const StageLink&) const = default;
};

class Step {
 public:
  Step(std::span<const StepStage> stages, std::span<const BlockShape> shapes,
       std::span<const GroupId> group_of_block, int microbatches)
      : shapes_(shapes),
        group_of_block_(group_of_block),
        microbatches_(static_cast<size_t>(microbatches)) {
    runs_.reserve(stages.size());
    at_.resize(group_of_block.size());
    for (size_t s = 0; s < stages.size(); ++s) {
      const Stage& stage = *stages[s].stage;
      Run& run = runs_.emplace_back(stage, microbatches);
      const GroupId own(static_cast<int64_t>(s));
      for (const Stage::Chunk& chunk : stage.chunks) {
        for (const StageFold* fold :
             {&chunk.forward, &chunk.backward, &chunk.weight, &chunk.last}) {
          run.links[fold] = LinksOf(*fold, stages[s].blocks, own);
        }
        run.last_ends.emplace_back(chunk.last.tasks.size());
      }
      run.links[&stage.tail] = LinksOf(stage.tail, stages[s].blocks, own);
      for (size_t b = 0; b < stages[s].blocks.size(); ++b) {
        at_[static_cast<size_t>(stages[s].blocks[b])] = {s, b};
      }
      run.free_at.assign(stage.streams.size(), 0);
      run.begin_ends.resize(stage.begin.tasks.size());
      run.tail_ends.resize(stage.tail.tasks.size());
      run.latest.assign(static_cast<size_t>(stage.carried), 0);
      run.carried.assign(microbatches_ * static_cast<size_t>(stage.carried), 0);
    }
    sent_.assign(links_.size() * microbatches_, 0);
  }

  Duration Time(std::span<const StageAction> order, Duration world_reduce) {
    for (Run& run : runs_) {
      Walk(run, run.stage->begin, Links(), 0, run.stage->begin.tasks.size(), 0,
           run.begin_ends);
    }
    for (const StageAction& step : order) {
      Run& run = runs_[static_cast<size_t>(step.stage)];
      const auto m = static_cast<size_t>(step.action.microbatch);
      const FoldOrder::Next next = run.order.Of(step.action);
      if (next.last) {
        WalkLast(run, step.action.chunk, m);
      } else {
        Apply(run, *next.fold, run.links.at(next.fold), m);
      }
    }
    WalkTail(Stage::kTie);
    WalkTail(Stage::kLoss);
    WalkTail(Stage::kNorm);
    if (world_reduce >= Duration{}) square_sum_ += world_reduce.picoseconds;
    WalkTail(Stage::kUpdate);
    int64_t end = square_sum_;
    for (const Run& run : runs_) {
      for (int64_t time : run.free_at) end = std::max(end, time);
    }
    return {end};
  }

 private:
  // Of one action: links by position in its `receives` and `sends`.
  struct Links {
    std::vector<size_t> receives;
    std::vector<size_t> sends;
  };
  struct Run {
    Run(const Stage& of, int microbatches)
        : stage(&of), order(of, microbatches) {}

    const Stage* stage;
    FoldOrder order;
    std::map<const StageFold*, Links> links;
    std::vector<int64_t> free_at;  // by stream
    std::vector<int64_t> begin_ends;
    std::vector<int64_t> carried;  // by microbatch
    std::vector<int64_t> latest;   // of these, of the latest microbatch
    int64_t loss = 0;
    std::vector<std::vector<int64_t>> last_ends;  // by chunk
    std::vector<int64_t> tail_ends;
    size_t tail_at = 0;
  };

  Links LinksOf(const StageFold& fold, std::span<const int> blocks,
                GroupId own) {
    const auto link = [&](const StageTransfer& transfer, bool sends) {
      const int block = blocks[static_cast<size_t>(transfer.block)];
      const BlockShape& shape = shapes_[static_cast<size_t>(block)];
      const int peer_block = shape.depends[static_cast<size_t>(transfer.peer)];
      const GroupId peer = group_of_block_[static_cast<size_t>(peer_block)];
      const TensorId tensor =
          shape.tensors[static_cast<size_t>(transfer.port.tensor)];
      return LinkNumber({{transfer.port.kind, tensor, transfer.port.index},
                         sends ? own : peer,
                         sends ? peer : own});
    };
    Links out;
    for (const StageTransfer& t : fold.receives) {
      out.receives.push_back(link(t, false));
    }
    for (const StageTransfer& t : fold.sends) {
      out.sends.push_back(link(t, true));
    }
    return out;
  }

  size_t LinkNumber(const StageLink& link) {
    const auto it = std::find(links_.begin(), links_.end(), link);
    if (it != links_.end()) return static_cast<size_t>(it - links_.begin());
    links_.push_back(link);
    return links_.size() - 1;
  }

  int64_t& Sent(size_t link, size_t m) {
    return sent_[link * microbatches_ + m];
  }

  int64_t InputOf(const Run& run, const StageInput& input, const Links& links,
                  size_t m) {
    const auto i = static_cast<size_t>(input.index);
    switch (input.kind) {
      case StageInput::kReceive:
        return Sent(links.receives[i], m);
      case StageInput::kBegin:
        return run.begin_ends[i];
      case StageInput::kLast:
        return run.last_ends[static_cast<size_t>(input.chunk)][i];
      case StageInput::kCarried:
        return run.carried[m * static_cast<size_t>(run.stage->carried) + i];
      case StageInput::kLatest:
        return run.latest[i];
      case StageInput::kLoss:
        return run.loss;
      case StageInput::kSquareSum:
        return square_sum_;
    }
    return 0;
  }

  // Runs tasks [begin, end) of a fold one by one.
  void Walk(Run& run, const StageFold& fold, const Links& links, size_t begin,
            size_t end, size_t m, std::vector<int64_t>& ends) {
    for (size_t t = begin; t < end; ++t) {
      const StageTask& task = fold.tasks[t];
      int64_t& free_at = run.free_at[static_cast<size_t>(task.stream)];
      int64_t start = free_at;
      if (task.after_compute) start = std::max(start, run.free_at[0]);
      for (int d = task.first_dep; d < task.last_dep; ++d) {
        const int dep = fold.deps[static_cast<size_t>(d)];
        start = std::max(start, ends[static_cast<size_t>(dep)]);
      }
      for (int w = task.first_wait; w < task.last_wait; ++w) {
        const int input = fold.waits[static_cast<size_t>(w)];
        start = std::max(
            start,
            InputOf(run, fold.inputs[static_cast<size_t>(input)], links, m));
      }
      free_at = ends[t] = start + task.duration;
      if (task.sums_squares) square_sum_ = std::max(square_sum_, free_at);
    }
  }

  void WalkLast(Run& run, int chunk, size_t m) {
    const auto c = static_cast<size_t>(chunk);
    const StageFold& last = run.stage->chunks[c].last;
    const Links& links = run.links.at(&last);
    Walk(run, last, links, 0, last.tasks.size(), m, run.last_ends[c]);
    for (size_t i = 0; i < last.sends.size(); ++i) {
      const auto t = static_cast<size_t>(last.send_tasks[i]);
      Sent(links.sends[i], m) = run.last_ends[c][t];
    }
  }

  // A phase of all stages, block by block: stages take turns, so that what one
  // sends another receives.
  void WalkTail(Stage::Phase phase) {
    for (size_t i = 0; i < at_.size(); ++i) {
      const InStage& at = at_[Stage::Descends(phase) ? at_.size() - 1 - i : i];
      Run& run = runs_[at.stage];
      WalkTail(run, run.stage->phase_ends[phase][at.member]);
    }
  }

  void WalkTail(Run& run, size_t end) {
    const StageFold& tail = run.stage->tail;
    const Links& links = run.links.at(&tail);
    Walk(run, tail, links, run.tail_at, end, 0, run.tail_ends);
    for (size_t i = 0; i < tail.sends.size(); ++i) {
      const auto t = static_cast<size_t>(tail.send_tasks[i]);
      if (t >= run.tail_at && t < end) {
        Sent(links.sends[i], 0) = run.tail_ends[t];
      }
    }
    run.tail_at = end;
  }

  // Runs all tasks of a fold at once, by its matrix.
  void Apply(Run& run, const StageFold& fold, const Links& links, size_t m) {
    in_.assign(run.free_at.begin(), run.free_at.end());
    for (const StageInput& input : fold.inputs) {
      in_.push_back(InputOf(run, input, links, m));
    }
    size_t row = 0;
    const auto next = [&] {
      int64_t value = 0;
      const auto end = static_cast<size_t>(fold.matrix.row[row + 1]);
      for (auto e = static_cast<size_t>(fold.matrix.row[row]); e < end; ++e) {
        const MaxPlus::Entry& entry = fold.matrix.entries[e];
        value = std::max(value,
                         in_[static_cast<size_t>(entry.column)] + entry.weight);
      }
      ++row;
      return value;
    };
    for (int stream : fold.touched) {
      run.free_at[static_cast<size_t>(stream)] = next();
    }
    for (size_t link : links.sends) Sent(link, m) = next();
    const auto carried = static_cast<size_t>(run.stage->carried);
    for (int number : fold.carries) {
      const auto n = static_cast<size_t>(number);
      run.carried[m * carried + n] = run.latest[n] = next();
    }
    if (fold.has_loss) run.loss = next();
  }

  std::span<const BlockShape> shapes_;
  std::span<const GroupId> group_of_block_;
  const size_t microbatches_;
  std::vector<Run> runs_;
  struct InStage {
    size_t stage = 0;
    size_t member = 0;
  };
  std::vector<InStage> at_;  // by block
  std::vector<StageLink> links_;
  std::vector<int64_t> sent_;  // by link and microbatch
  std::vector<int64_t> in_;
  int64_t square_sum_ = 0;  // when the sum of squares is next complete
};

}  // namespace

Duration StepTime(std::span<const StepStage> stages,
                  std::span<const BlockShape> shapes,
                  std::span<const GroupId> group_of_block,
                  std::span<const StageAction> order, int microbatches,
                  Duration world_reduce) {
  return Step(stages, shapes, group_of_block, microbatches)
      .Time(order, world_reduce);
}

}  // namespace tessera
