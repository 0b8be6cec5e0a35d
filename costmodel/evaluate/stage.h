#pragma once
// Stage: what one device group does in a step, folded so that a step of many
// microbatches costs little to time.
//
// A rank's streams run tasks in order, and a task starts at the maximum of some
// earlier ends. So the ends after an action (one microbatch's forward, backward
// or part of a backward through all blocks of a chunk of the stage) are a
// max-plus linear function of the times before it:
//
//   out[i] = max over j of in[j] + weight[i][j],
//
// exact in integers (Baccelli et al., Synchronization and Linearity, 1992,
// chapter 2). Inputs are the streams' times, the ends of the sends that the
// action receives, and of what earlier tasks left; outputs are the streams'
// times, the ends of its sends and of what later actions wait for. The weights
// are found once, by walking the action's tasks with one vector of weights for
// each; the step then applies small sparse matrices. Each chunk's last
// gradients of weights and the optimizer run once a step: their tasks are
// walked as they are.
//
// An action's inputs leave out what is known to be earlier than another input:
// a task waits for an older end only where no stream that it follows says the
// same. Where the stage cannot prove that it has left out nothing that matters,
// `exact` is false and the plan has to be simulated.
//
// Memory folds the same way: an action changes the bytes held by a fixed amount
// and has a highest point on the way.

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "costmodel/evaluate/block_template.h"
#include "planner/plan/evaluation.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {

// The other end of a transfer, relative to the stage: a port of a block, and a
// block of the group on the other side.
struct StageTransfer {
  int block = 0;  // position in the stage
  TemplatePort port;
  int peer = 0;  // index into the block's BlockShape::depends
};

// Something that happened before an action, on which its tasks wait.
struct StageInput {
  enum Kind : uint8_t {
    kReceive,    // the end of a send; `index` into the action's receives
    kBegin,      // the end of a task of the begin action
    kLast,       // the end of a task of chunk `chunk`'s last action
    kCarried,    // an end in another action of the microbatch; `index` below
                 // Stage::carried
    kLatest,     // the same of the latest microbatch
    kLoss,       // the end of the last forward's loss
    kSquareSum,  // the ends of all sums of squares so far
  };
  Kind kind = kReceive;
  int index = 0;
  int chunk = 0;
  bool operator==(const StageInput&) const = default;
};

struct StageTask {
  int64_t duration = 0;  // picoseconds
  int stream = 0;        // into Stage::streams
  // Ranges of StageFold::deps (earlier tasks of the action) and `waits`
  // (into StageFold::inputs).
  int first_dep = 0;
  int last_dep = 0;
  int first_wait = 0;
  int last_wait = 0;
  bool after_compute = false;  // waits until the compute stream is free
  bool sums_squares = false;   // kSquareSum is later than its end
};

// Sparse max-plus matrix. Columns are the stage's streams, then the inputs.
struct MaxPlus {
  struct Entry {
    int column = 0;
    int64_t weight = 0;
  };
  std::vector<int> row;  // entries of row i: row[i] .. row[i + 1]
  std::vector<Entry> entries;
};

struct MemoryElement {
  // Bytes that stay, and the highest point on the way, both relative to the
  // bytes before.
  std::array<int64_t, kMemoryCategories> delta = {};
  int64_t total_delta = 0;
  std::array<int64_t, kMemoryCategories> peak = {};
  int64_t total_peak = 0;
};

struct StageFold {
  // Empty in folds that run for each microbatch, and so `send_tasks`.
  std::vector<StageTask> tasks;
  std::vector<int> deps;
  std::vector<int> waits;
  std::vector<StageInput> inputs;
  std::vector<StageTransfer> receives;
  std::vector<StageTransfer> sends;
  std::vector<int> send_tasks;  // parallel to `sends`
  MemoryElement memory;
  MemoryElement final_memory;  // of its last run in the step
  std::array<double, kCostSources> time_by_source = {};  // picoseconds
  // Of folds that run for each microbatch: rows are `touched` streams, sends,
  // carried ends, then the loss if the fold computes it.
  std::vector<int> touched;
  std::vector<int> carries;  // numbers below Stage::carried
  bool has_loss = false;
  MaxPlus matrix;
};

struct Stage {
  bool exact = true;
  std::vector<StreamKey> streams;
  int carried = 0;  // ends that a microbatch's later actions wait for
  std::array<int64_t, kMemoryCategories> persistent = {};
  StageFold begin;
  struct Chunk {
    StageFold forward;
    StageFold backward;  // whole, or the gradients of activations
    StageFold weight;    // of split backwards: the gradients of weights
    StageFold last;      // the last whole backward or gradients of weights
  };
  std::vector<Chunk> chunks;
  // Ties, the loss, sums of squares, the optimizer, each block by block.
  StageFold tail;
  enum Phase { kTie, kLoss, kNorm, kUpdate, kPhases };
  // Whether a phase runs from the last block to the first, as Lower does.
  static bool Descends(Phase phase) { return phase == kTie; }
  // Where the blocks' tasks of a phase end, by block of the stage.
  std::array<std::vector<size_t>, kPhases> phase_ends;
};

// A block of a stage.
struct StageMember {
  const BlockTemplate* block = nullptr;
  const BlockShape* shape = nullptr;
  int chunk = 0;
};

// A chunk's folds, as FoldOrder numbers them.
inline std::array<const StageFold*, 4> FoldsOf(const Stage::Chunk& chunk) {
  return {&chunk.forward, &chunk.backward, &chunk.weight, &chunk.last};
}

// Which folds the actions of a stage run, one after the other.
class FoldOrder {
 public:
  FoldOrder(const Stage& stage, int microbatches)
      : stage_(stage),
        microbatches_(microbatches),
        runs_(stage.chunks.size()) {}

  struct Next {
    const StageFold* fold = nullptr;
    int number = 0;      // 4 * chunk + its place in FoldsOf
    bool last = false;   // it is the chunk's `last`: its tasks are walked
    bool final = false;  // it does not run again in the step
  };
  Next Of(const Action& action) {
    int& runs = RunsOf(action);
    const bool final = ++runs == microbatches_;
    const bool last = final && (action.kind == ActionKind::kBackward ||
                                action.kind == ActionKind::kBackwardWeight);
    const int number = last ? LastNumber(action.chunk) : Number(action);
    return {FoldsOf(stage_.chunks[static_cast<size_t>(
                action.chunk)])[static_cast<size_t>(number % 4)],
            number, last, final};
  }
  // Of the fold that all such actions run but for the last.
  static int Number(const Action& action) {
    switch (action.kind) {
      case ActionKind::kForward:
        break;
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        return 4 * action.chunk + 1;
      case ActionKind::kBackwardWeight:
        return 4 * action.chunk + 2;
    }
    return 4 * action.chunk;
  }
  static int LastNumber(int chunk) { return 4 * chunk + 3; }
  static bool IsLast(int number) { return number % 4 == 3; }
  // Leaves out so many runs, of which none is the last.
  void Skip(const Action& action, int runs) { RunsOf(action) += runs; }

 private:
  int& RunsOf(const Action& action) {
    return runs_[static_cast<size_t>(action.chunk)]
                [static_cast<size_t>(action.kind)];
  }

  const Stage& stage_;
  const int microbatches_;
  std::vector<std::array<int, 4>> runs_;  // by chunk and ActionKind
};

// The stage of some blocks, in order, of which each chunk has one at least.
// `splits`: its backwards are split. REQUIRES: the templates have the programs
// of such backwards.
std::shared_ptr<const Stage> MakeStage(std::span<const StageMember> members,
                                       bool splits, int microbatches);

}  // namespace tessera
