#pragma once
// BlockTemplate: the programs of one block, priced, with everything that tells
// it from an equal block elsewhere taken out: tensors are numbered within the
// block, groups by the blocks that they belong to. Blocks that are equal, under
// equal decisions and in equal surroundings, share one template.

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "costmodel/price.h"
#include "planner/lower/lower.h"

namespace tessera {

// What of the graph a block's programs depend on.
struct BlockShape {
  std::vector<NodeId> forward;  // its forward nodes
  // That its nodes touch, by first appearance; then the weights of the blocks
  // around it, which its programs may gather ahead of their use.
  std::vector<TensorId> tensors;
  // The blocks whose decisions its programs depend on: itself; its neighbours;
  // then those that touch one of its tensors, or a tensor whose layout a
  // gradient sum over one of its tensors follows.
  std::vector<int> depends;
  std::vector<size_t> weights;  // that its nodes touch: into Plan::weights
  // What it has in common with other blocks: its own weights, and of the other
  // tensors, but for inputs, those that nodes elsewhere touch, too.
  std::vector<TensorId> shared;
  std::vector<TensorId> inner;  // activations that only its own nodes touch
  // Its gradient sums that other blocks read: their layouts follow from more
  // than placements (the operands' layouts), so they are part of what readers
  // depend on.
  std::vector<TensorId> sums;
  // Equal numbers: equal up to names, surroundings included.
  int wiring = -1;
  std::vector<std::pair<TensorId, int>> numbers;  // of `tensors`, ascending

  // Where a tensor is in `tensors`, and a block in `depends`. REQUIRES: it is
  // there.
  int NumberOf(TensorId tensor) const;
  int IndexOf(int block) const;
};

// One for each block, for programs that gather parameters up to `prefetch`
// blocks ahead. Empty where a block's layouts follow from those of a
// block that is looked at later, so that templates cannot be found one by one
// from the last block to the first: a gradient sum that an earlier block makes
// for a later one.
std::vector<BlockShape> ShapesOf(const Graph& graph, int prefetch);

struct TemplatePort {
  Port::Kind kind = Port::kTensor;
  int tensor = -1;  // into BlockShape::tensors
  int index = 0;
  int tile = 0;
};

struct StreamKey {
  StreamRole role = StreamRole::kCompute;
  AxisSet axes = 0;  // of kComm
  bool operator==(const StreamKey&) const = default;
};

struct TemplateTask {
  TaskCost cost;
  int stream = 0;              // into TemplateProgram::streams
  bool after_compute = false;  // Task::after_compute
  int first_dep = 0;           // a range of TemplateProgram::deps
  int last_dep = 0;
};

// A buffer that outlives the program, or existed before it.
struct TemplateBuffer {
  Bytes bytes;
  MemoryCategory category = MemoryCategory::kActivation;
  bool persistent = false;
  int last_writer = -1;  // task; -1: only read
  int last_touch = -1;
  // Of a persistent buffer: who reads it behind the last writer, who touches
  // it on a stream other than compute, and whether any does on that.
  std::vector<int> readers;
  std::vector<int> off_compute;
  bool on_compute = false;
};

struct TemplateBinding {
  TemplatePort port;
  int buffer = 0;  // into TemplateProgram::buffers
};

// A task's access to a buffer that no task of the program wrote before.
struct TemplateAccess {
  int task = 0;
  int buffer = 0;
  bool writes = false;
};

// Bytes taken when a task starts, or given back when it has ended.
struct TemplateBytes {
  int task = 0;
  MemoryCategory category = MemoryCategory::kActivation;
  int64_t bytes = 0;
};

struct TemplateTransfer {
  int task = 0;
  TemplatePort port;
  int peer = 0;  // the other side's group is that of depends[peer]
};

struct TemplateProgram {
  std::vector<StreamKey> streams;  // the first is compute
  std::vector<TemplateTask> tasks;
  std::vector<int> deps;  // tasks of other streams that a task waits for
  std::vector<TemplateBuffer> buffers;
  std::vector<TemplateAccess> outside;  // in task order
  std::vector<TemplateBinding> imports;
  std::vector<TemplateBinding> exports;
  std::vector<TemplateBytes> taken;  // by all buffers that it makes
  std::vector<TemplateBytes> given;  // by those that end with it
  std::vector<TemplateTransfer> sends;
  std::vector<TemplateTransfer> receives;
  int loss_tensor = -1;  // into BlockShape::tensors; -1: not computed here
  // Of the forward: the all-reduce of the loss, where it is computed here and
  // partial.
  bool reduces_loss = false;
  TaskCost loss_reduce;
  int loss_stream = 0;
  // As BlockProgram's.
  Bytes least_bucket;
  Bytes most_bucket;

  bool empty() const { return tasks.empty() && imports.empty(); }
};

struct BlockTemplate {
  // By ProgramKind; null where the stage does not run such.
  std::array<std::shared_ptr<const TemplateProgram>, kProgramKinds> programs;
};

// The programs of one plan, each lowered when first asked for.
class Programs {
 public:
  explicit Programs(const LoweringContext& context)
      : context_(context), programs_(context.graph().blocks.size()) {}
  const BlockProgram& Of(int block, ProgramKind kind);
  const LoweringContext& context() const { return context_; }

 private:
  const LoweringContext& context_;
  // By block and kind; null until asked for.
  std::vector<std::array<std::unique_ptr<const BlockProgram>, kProgramKinds>>
      programs_;
};

// The programs that a stage runs in a step of so many microbatches, with whole
// backwards or their parts. The last microbatch has programs of its own for
// what reduces gradients: one that is alone has no other.
std::vector<ProgramKind> KindsOf(bool splits, int microbatches);

// Bytes are those of the rank at `position` of the block's group; without one,
// of ranks with the largest shards.
TemplateProgram MakeTemplate(const Pricer& pricer, Programs& programs,
                             int block, const BlockShape& shape,
                             ProgramKind kind,
                             std::optional<int> position = {});

}  // namespace tessera
