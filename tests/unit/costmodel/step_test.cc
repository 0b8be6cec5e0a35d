// Steps of random folded stages: what skips the periods of the steady phase
// gives the bits of the walk through all of them.

#include "costmodel/evaluate/step.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "planner/base/rng.h"

namespace tessera {
namespace {

int Draw(Rng& rng, int least, int most) {
  return least +
         static_cast<int>(rng.Below(static_cast<uint32_t>(most - least + 1)));
}

// A pipeline of random stages, one block for each chunk.
struct Pipeline {
  PipelineShape shape;
  bool splits = false;
  StageOrders orders;
  std::vector<StageAction> order;
  std::vector<Stage> stages;
  std::vector<StepStage> parts;
  std::vector<BlockShape> blocks;  // by position
  std::vector<GroupId> groups;
};

// What block `from` sends block `to`.
struct Wire {
  int from = 0;
  int to = 0;
  bool backward = false;
};

class Maker {
 public:
  Maker(Rng& rng, const PipelineSchedule& schedule, const PipelineShape& shape)
      : rng_(rng), positions_(shape.stages * shape.chunks) {
    out_.shape = shape;
    out_.orders = OrdersOf(schedule, shape);
    out_.order = GlobalOrder(out_.orders, shape);
    for (const StageAction& step : out_.order) {
      out_.splits |= step.action.kind == ActionKind::kBackwardInput;
    }
    // Stages of equal work, or of any.
    spread_ = Draw(rng, 0, 2) == 0 ? 400 : 0;
    // Whether actions wait for what is not theirs by microbatch.
    waits_for_latest_ = Draw(rng, 0, 9) == 0;
    waits_for_loss_ = Draw(rng, 0, 9) == 0;
  }

  Pipeline Make() {
    for (int p = 0; p + 1 < positions_; ++p) {
      wires_.push_back({p, p + 1, false});
      wires_.push_back({p + 1, p, true});
    }
    // What a later block reads beside its neighbour's output.
    if (positions_ > 2 && Draw(rng_, 0, 2) == 0) {
      wires_.push_back({0, Draw(rng_, 2, positions_ - 1), false});
    }
    for (int p = 0; p < positions_; ++p) {
      BlockShape& block = out_.blocks.emplace_back();
      for (int other = 0; other < positions_; ++other) {
        block.depends.push_back(other);
      }
      for (size_t w = 0; w < wires_.size(); ++w) {
        block.tensors.push_back(TensorId(static_cast<int64_t>(w)));
      }
      out_.groups.push_back(GroupId(p % out_.shape.stages));
    }
    for (int s = 0; s < out_.shape.stages; ++s) MakeStageOf(s);
    for (int s = 0; s < out_.shape.stages; ++s) {
      StepStage& part = out_.parts.emplace_back();
      part.stage = &out_.stages[static_cast<size_t>(s)];
      for (int c = 0; c < out_.shape.chunks; ++c) {
        part.blocks.push_back(c * out_.shape.stages + s);
        part.chunks.push_back(c);
      }
    }
    return std::move(out_);
  }

 private:
  void MakeStageOf(int s) {
    Stage& stage = out_.stages.emplace_back();
    stage.streams.resize(static_cast<size_t>(Draw(rng_, 1, 3)));
    // Some begin late, so that for a while all wait for them.
    for (int t = Draw(rng_, 0, 2); t > 0; --t) {
      StageTask& task = stage.begin.tasks.emplace_back();
      task.stream = Draw(rng_, 0, Streams(stage) - 1);
      task.duration = Draw(rng_, 0, 3) == 0 ? 20'000 : 100;
    }
    for (int c = 0; c < out_.shape.chunks; ++c) {
      Stage::Chunk& chunk = stage.chunks.emplace_back();
      const int position = c * out_.shape.stages + s;
      const int before = stage.carried;
      MakeLoop(stage, chunk.forward, position, c, false, before);
      chunk.forward.has_loss = position == positions_ - 1;
      MakeMatrix(stage, chunk.forward);
      const int kept = stage.carried;
      MakeLoop(stage, chunk.backward, position, c, true, before);
      MakeMatrix(stage, chunk.backward);
      if (out_.splits) {
        const int all = stage.carried;
        AddCarriedInputs(chunk.weight, kept, all);
        Touch(stage, chunk.weight);
        MakeMatrix(stage, chunk.weight);
      } else {
        chunk.weight.matrix.row = {0};
      }
      MakeLast(stage, chunk.last, position, c, before);
    }
    MakeTail(stage);
  }

  static int Streams(const Stage& stage) {
    return static_cast<int>(stage.streams.size());
  }

  void AddTransfers(StageFold& fold, int position, int chunk, bool backward) {
    for (size_t w = 0; w < wires_.size(); ++w) {
      const Wire& wire = wires_[w];
      if (wire.backward != backward) continue;
      StageTransfer transfer;
      transfer.block = chunk;
      transfer.port.tensor = static_cast<int>(w);
      if (wire.to == position) {
        transfer.peer = wire.from;
        fold.inputs.push_back(
            {StageInput::kReceive, static_cast<int>(fold.receives.size()), 0});
        fold.receives.push_back(transfer);
      }
      if (wire.from == position) {
        transfer.peer = wire.to;
        fold.sends.push_back(transfer);
      }
    }
  }

  void AddCarriedInputs(StageFold& fold, int from, int to) {
    for (int number = from; number < to; ++number) {
      fold.inputs.push_back({StageInput::kCarried, number, 0});
    }
  }

  void Touch(Stage& stage, StageFold& fold) {
    fold.touched = {0};
    for (int s = 1; s < Streams(stage); ++s) {
      if (Draw(rng_, 0, 1) == 1) fold.touched.push_back(s);
    }
  }

  void MakeLoop(Stage& stage, StageFold& fold, int position, int chunk,
                bool backward, int first_carried) {
    AddTransfers(fold, position, chunk, backward);
    // A backward waits for what the forward left.
    if (backward) AddCarriedInputs(fold, first_carried, stage.carried);
    for (size_t t = 0; t < stage.begin.tasks.size(); ++t) {
      fold.inputs.push_back({StageInput::kBegin, static_cast<int>(t), 0});
    }
    if (waits_for_latest_ && stage.carried > 0) {
      fold.inputs.push_back(
          {StageInput::kLatest, Draw(rng_, 0, stage.carried - 1), 0});
    }
    if (waits_for_loss_) fold.inputs.push_back({StageInput::kLoss, 0, 0});
    Touch(stage, fold);
    for (int n = Draw(rng_, 0, 1); n > 0; --n) {
      fold.carries.push_back(stage.carried++);
    }
  }

  void MakeMatrix(Stage& stage, StageFold& fold) {
    const int streams = Streams(stage);
    const int columns = streams + static_cast<int>(fold.inputs.size());
    const auto rows = static_cast<int>(fold.touched.size() + fold.sends.size() +
                                       fold.carries.size()) +
                      (fold.has_loss ? 1 : 0);
    MaxPlus& matrix = fold.matrix;
    matrix.row = {0};
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c) {
        const bool own = r < static_cast<int>(fold.touched.size()) &&
                         fold.touched[static_cast<size_t>(r)] == c;
        if (!own && c != 0 && Draw(rng_, 0, 2) == 0) continue;
        matrix.entries.push_back(
            {c, 1000 + 37 * ((r * 7 + c * 3) % 11) + Draw(rng_, 0, spread_)});
      }
      matrix.row.push_back(static_cast<int>(matrix.entries.size()));
    }
  }

  void MakeLast(Stage& stage, StageFold& fold, int position, int chunk,
                int first_carried) {
    // Of a split backward the gradients of activations have sent it.
    if (!out_.splits) AddTransfers(fold, position, chunk, true);
    AddCarriedInputs(fold, first_carried, stage.carried);
    const int tasks = static_cast<int>(fold.sends.size()) + 2;
    for (int t = 0; t < tasks; ++t) {
      StageTask task;
      task.duration = Draw(rng_, 0, 700);
      task.stream = Draw(rng_, 0, Streams(stage) - 1);
      task.first_dep = static_cast<int>(fold.deps.size());
      if (t > 0) fold.deps.push_back(t - 1);
      task.last_dep = static_cast<int>(fold.deps.size());
      task.first_wait = static_cast<int>(fold.waits.size());
      for (size_t i = 0; i < fold.inputs.size(); ++i) {
        if (Draw(rng_, 0, 1) == 1) fold.waits.push_back(static_cast<int>(i));
      }
      task.last_wait = static_cast<int>(fold.waits.size());
      fold.tasks.push_back(task);
    }
    for (size_t i = 0; i < fold.sends.size(); ++i) {
      fold.send_tasks.push_back(static_cast<int>(i) + 1);
    }
  }

  // Of each block a sum of squares, which waits for its chunk's last action,
  // then an update, which waits for all sums, for the loss and for what the
  // latest microbatch has left.
  void MakeTail(Stage& stage) {
    StageFold& tail = stage.tail;
    for (auto& ends : stage.phase_ends) ends.assign(stage.chunks.size(), 0);
    const auto add = [&](bool sums_squares,
                         std::initializer_list<StageInput> waits) {
      StageTask task;
      task.duration = Draw(rng_, 0, 300);
      task.sums_squares = sums_squares;
      task.first_wait = static_cast<int>(tail.waits.size());
      for (const StageInput& input : waits) {
        tail.waits.push_back(static_cast<int>(tail.inputs.size()));
        tail.inputs.push_back(input);
      }
      task.last_wait = static_cast<int>(tail.waits.size());
      tail.tasks.push_back(task);
      return tail.tasks.size();
    };
    for (size_t c = 0; c < stage.chunks.size(); ++c) {
      stage.phase_ends[Stage::kNorm][c] =
          add(true, {{StageInput::kLast, 1, static_cast<int>(c)}});
    }
    for (size_t c = 0; c < stage.chunks.size(); ++c) {
      const StageInput sum = {StageInput::kSquareSum, 0, 0};
      const StageInput loss = {StageInput::kLoss, 0, 0};
      stage.phase_ends[Stage::kUpdate][c] =
          stage.carried == 0
              ? add(false, {sum, loss})
              : add(false, {sum,
                            loss,
                            {StageInput::kLatest,
                             Draw(rng_, 0, stage.carried - 1), 0}});
    }
  }

  Rng& rng_;
  const int positions_;
  int spread_ = 0;
  bool waits_for_latest_ = false;
  bool waits_for_loss_ = false;
  std::vector<Wire> wires_;
  Pipeline out_;
};

StepTiming TimeOf(const Pipeline& p, const SteadyPhase& steady,
                  Duration world_reduce = {-1}) {
  return StepTime(p.parts, p.blocks, p.groups, p.order, steady,
                  p.shape.microbatches, world_reduce);
}

PipelineShape RandomShape(Rng& rng) {
  PipelineShape shape;
  shape.stages = Draw(rng, 1, 5);
  shape.chunks = Draw(rng, 1, 3);
  shape.microbatches = Draw(rng, 1, 90);
  return shape;
}

TEST(SteadyPhaseTest, RepeatsItself) {
  Rng rng(3);
  for (int i = 0; i < 200; ++i) {
    const PipelineShape shape = RandomShape(rng);
    for (const PipelineSchedule* schedule : SchedulesFor(shape)) {
      const auto order = GlobalOrder(OrdersOf(*schedule, shape), shape);
      const SteadyPhase steady = FindSteadyPhase(order);
      if (steady.periods == 0) continue;
      ASSERT_LE(steady.end(), order.size());
      ASSERT_GE(steady.periods, 2u);
      ASSERT_GT(steady.microbatches, 0);
      for (size_t t = steady.begin + steady.length; t < steady.end(); ++t) {
        StageAction before = order[t - steady.length];
        before.action.microbatch += steady.microbatches;
        ASSERT_EQ(order[t], before) << schedule->name;
      }
      for (size_t t = steady.begin; t < steady.end(); ++t) {
        const auto same = [&](const StageAction& other) {
          return other.stage == order[t].stage &&
                 other.action.kind == order[t].action.kind &&
                 other.action.chunk == order[t].action.chunk;
        };
        const auto behind = order.begin() + static_cast<int64_t>(steady.end());
        // It is not the last of its kind, and a microbatch that comes up again
        // is of a kept period.
        ASSERT_TRUE(std::any_of(behind, order.end(), same)) << schedule->name;
        const bool again =
            std::any_of(behind, order.end(), [&](const StageAction& other) {
              return other.action.microbatch == order[t].action.microbatch;
            });
        if (again) {
          ASSERT_GE((t - steady.begin) / steady.length, steady.kept);
        }
      }
    }
  }
}

// 1F1B of p = 4 stages and m = 100 microbatches: all but some p at either end
// of each stage's 2 m actions.
TEST(SteadyPhaseTest, IsMostOfALongOrder) {
  for (const char* name : {"1f1b", "zb-h1", "zb-h2"}) {
    const PipelineShape shape = {4, 1, 100};
    const auto order =
        GlobalOrder(OrdersOf(*FindSchedule(name).value(), shape), shape);
    const SteadyPhase steady = FindSteadyPhase(order);
    EXPECT_GT(steady.length * steady.periods, order.size() * 8 / 10) << name;
  }
  const PipelineShape shape = {4, 2, 100};
  const auto order =
      GlobalOrder(OrdersOf(*FindSchedule("interleaved").value(), shape), shape);
  const SteadyPhase steady = FindSteadyPhase(order);
  EXPECT_EQ(steady.microbatches % 4, 0);
  EXPECT_GT(steady.length * steady.periods, order.size() * 7 / 10);
}

TEST(StepTest, SkippedPeriodsGiveTheTimeOfWalkedOnes) {
  Rng rng(11);
  int skipping = 0;
  int made = 0;
  for (int i = 0; i < 300; ++i) {
    const PipelineShape shape = RandomShape(rng);
    for (const PipelineSchedule* schedule : SchedulesFor(shape)) {
      const Pipeline p = Maker(rng, *schedule, shape).Make();
      const StepTiming walked = TimeOf(p, {});
      ASSERT_EQ(walked.skipped, 0u);
      // From the middle on as well: what was walked before does not matter.
      SteadyPhase steady = FindSteadyPhase(p.order);
      for (int cut = 0; cut < 2; ++cut) {
        const StepTiming timing = TimeOf(p, steady);
        ASSERT_EQ(timing.time.picoseconds, walked.time.picoseconds)
            << schedule->name << " of " << shape.stages << " stages, "
            << shape.chunks << " chunks, " << shape.microbatches
            << " microbatches";
        skipping += timing.skipped > 0;
        ++made;
        if (steady.periods < 4) break;
        steady.begin += steady.length;
        --steady.periods;
        if (steady.kept > 0) --steady.kept;
      }
    }
  }
  EXPECT_GT(skipping, made / 4);
}

// No update begins before all sums of squares are reduced: whatever else the
// update waits for, a reduction that takes longer than all else adds the rest
// of its time.
TEST(StepTest, UpdatesWaitForTheSumOfSquares) {
  Rng rng(17);
  for (int i = 0; i < 100; ++i) {
    const PipelineShape shape = RandomShape(rng);
    for (const PipelineSchedule* schedule : SchedulesFor(shape)) {
      const Pipeline p = Maker(rng, *schedule, shape).Make();
      const SteadyPhase steady = FindSteadyPhase(p.order);
      const auto time = [&](int64_t reduce) {
        return TimeOf(p, steady, {reduce}).time.picoseconds;
      };
      EXPECT_EQ(time(0), time(-1));
      EXPECT_GE(time(50), time(0));
      EXPECT_LE(time(50), time(0) + 50);
      constexpr int64_t kLong = 1'000'000'000;
      EXPECT_GT(time(kLong), kLong);
      EXPECT_EQ(time(kLong + 77), time(kLong) + 77);
    }
  }
}

// One stage. Each of three forwards takes 10 on stream 1, and is done with its
// loss after 4: the losses end at 4, 14 and 24, what is carried at 10, 20 and
// 30. A sum of squares ends at 5 on stream 0, where an update of 1000 follows.
TEST(StepTest, AnUpdateWaitsForWhatItReads) {
  Stage stage;
  stage.streams.resize(2);
  stage.carried = 1;
  Stage::Chunk& chunk = stage.chunks.emplace_back();
  StageFold& forward = chunk.forward;
  forward.touched = {1};
  forward.carries = {0};
  forward.has_loss = true;
  forward.matrix.row = {0, 1, 2, 3};
  forward.matrix.entries = {{1, 10}, {1, 10}, {1, 4}};
  chunk.backward.matrix.row = chunk.weight.matrix.row = {0};
  for (auto& ends : stage.phase_ends) ends = {0};
  stage.phase_ends[Stage::kNorm] = {1};
  stage.phase_ends[Stage::kUpdate] = {2};
  StageTask norm;
  norm.duration = 5;
  norm.sums_squares = true;
  StageTask update;
  update.duration = 1000;
  update.last_wait = 1;
  stage.tail.tasks = {norm, update};
  stage.tail.waits = {0};
  const StepStage part = {&stage, {0}, {0}};
  const BlockShape block;
  const GroupId group(0);
  const PipelineShape shape = {1, 1, 3};
  const auto order =
      GlobalOrder(OrdersOf(**FindSchedule("gpipe"), shape), shape);
  const auto end = [&](StageInput::Kind kind, Duration world_reduce) {
    stage.tail.inputs = {{kind, 0, 0}};
    return StepTime({&part, 1}, {&block, 1}, {&group, 1}, order, {},
                    shape.microbatches, world_reduce)
        .time.picoseconds;
  };
  EXPECT_EQ(end(StageInput::kLoss, {-1}), 24 + 1000);
  EXPECT_EQ(end(StageInput::kLatest, {-1}), 30 + 1000);
  EXPECT_EQ(end(StageInput::kSquareSum, {-1}), 5 + 1000);
  EXPECT_EQ(end(StageInput::kSquareSum, {7}), 5 + 7 + 1000);
}

TEST(StepTest, SkippedPeriodsGiveThePeakOfWalkedOnes) {
  Rng rng(5);
  const auto draw = [&](MemoryElement& memory) {
    for (size_t c = 0; c < memory.delta.size(); ++c) {
      memory.delta[c] = Draw(rng, -20, 20);
      memory.peak[c] = memory.delta[c] + Draw(rng, 0, 20);
      memory.total_delta += memory.delta[c];
      memory.total_peak += memory.peak[c];
    }
  };
  int skipping = 0;
  int made = 0;
  for (int i = 0; i < 300; ++i) {
    const PipelineShape shape = RandomShape(rng);
    for (const PipelineSchedule* schedule : SchedulesFor(shape)) {
      Stage stage;
      for (int c = 0; c < shape.chunks; ++c) {
        Stage::Chunk& chunk = stage.chunks.emplace_back();
        for (StageFold* fold :
             {&chunk.forward, &chunk.backward, &chunk.weight, &chunk.last}) {
          draw(fold->memory);
          draw(fold->final_memory);
        }
      }
      draw(stage.tail.final_memory);
      for (const auto& actions : OrdersOf(*schedule, shape)) {
        std::vector<StageAction> alone;
        for (const Action& action : actions) alone.push_back({0, action});
        const SteadyPhase steady = FindSteadyPhase(alone);
        EXPECT_EQ(StagePeak(stage, actions, steady, shape.microbatches),
                  StagePeak(stage, actions, {}, shape.microbatches))
            << schedule->name;
        skipping += steady.periods > 2;
        ++made;
      }
    }
  }
  EXPECT_GT(skipping, made / 4);
}

}  // namespace
}  // namespace tessera
