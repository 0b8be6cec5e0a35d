#pragma once
// BlockTemplate: the programs of one block, priced, with everything that tells
// it from an equal block elsewhere taken out: tensors are numbered within the
// block, groups by the blocks that they belong to. Blocks that are equal, under
// equal decisions and in equal surroundings, share one template.

#include <array>
#include <map>
#include <utility>
#include <vector>

#include "costmodel/price.h"
#include "planner/lower/lower.h"

namespace tessera {

// What of the graph a block's programs depend on.
struct BlockShape {
  std::vector<NodeId> forward;    // its forward nodes
  std::vector<TensorId> tensors;  // that its nodes touch, by first appearance
  // The blocks whose decisions its programs depend on: itself, and those that
  // touch one of its tensors, or a tensor whose layout a gradient sum over one
  // of its tensors follows.
  std::vector<int> depends;
  std::vector<size_t> weights;    // among `tensors`: index into Plan::weights
  // Its gradient sums that other blocks read: their layouts follow from more
  // than placements (the operands' layouts), so they are part of what readers
  // depend on.
  std::vector<TensorId> sums;
  // Equal numbers: equal up to names, surroundings included.
  int wiring = -1;
};

// One for each block. Empty when the graph's gradient sums do not run from the
// last block to the first, so that templates cannot be found one by one.
std::vector<BlockShape> ShapesOf(const Graph& graph);

struct TemplatePort {
  Port::Kind kind = Port::kTensor;
  int tensor = -1;  // into BlockShape::tensors
  int index = 0;
};

struct TemplateBuffer {  // a value that is no alias
  Bytes bytes;
  MemoryCategory category = MemoryCategory::kActivation;
  bool persistent = false;
};

struct StreamKey {
  StreamRole role = StreamRole::kCompute;
  AxisSet axes = 0;  // of kComm
  bool operator==(const StreamKey&) const = default;
};

struct TemplateTask {
  TaskCost cost;
  StreamKey stream;
  std::vector<int> reads;  // into TemplateProgram::buffers
  std::vector<int> writes;
};

struct TemplateBinding {
  TemplatePort port;
  int buffer = 0;
};

struct TemplateTransfer {
  size_t task = 0;
  TemplatePort port;
  int peer = 0;  // the other side's group is that of depends[peer]
};

struct TemplateProgram {
  std::vector<TemplateTask> tasks;
  std::vector<TemplateBuffer> buffers;
  std::vector<TemplateBinding> imports;
  std::vector<TemplateBinding> exports;
  std::vector<TemplateTransfer> sends;
  std::vector<TemplateTransfer> receives;
};

struct BlockTemplate {
  std::array<TemplateProgram, kProgramKinds> programs;  // by ProgramKind
  // The all-reduce of the loss, where the block computes it and it is partial.
  bool reduces_loss = false;
  TemplateTask loss_reduce;
  int loss_tensor = -1;  // into BlockShape::tensors; -1: not computed here
  std::vector<Layout> sums;  // of BlockShape::sums
};

// The programs of one plan, each lowered when first asked for.
class Programs {
 public:
  explicit Programs(const LoweringContext& context) : context_(context) {}
  const BlockProgram& Of(int block, ProgramKind kind);
  const LoweringContext& context() const { return context_; }

 private:
  const LoweringContext& context_;
  std::map<std::pair<int, ProgramKind>, BlockProgram> programs_;
};

BlockTemplate MakeTemplate(const Pricer& pricer, Programs& programs, int block,
                           const BlockShape& shape);

}  // namespace tessera
