#pragma once
// Surroundings: what a block's programs depend on beyond its own decisions.
//
// The decisions of the blocks around it reach a block only through the tensors
// that it shares with them: their layouts, who makes and reads them, where
// their weights are stored, and which of these it fetches ahead. So blocks
// with equal decisions whose surroundings are equal have equal programs, though
// their neighbours differ. And programs of one kind do not see all of it: those
// of the forward pass no gradients, those of the optimizer no activations.

#include <functional>
#include <vector>

#include "costmodel/evaluate/block_template.h"
#include "costmodel/price.h"
#include "planner/base/ids.h"
#include "planner/lower/lower.h"

namespace tessera {

// By block, equal numbers: equal up to names, and to what Surroundings has.
// `facts` and `pricer` are of one graph.
std::vector<int> FormsOf(const LoweringFacts& facts, const Pricer& pricer);

// Appends what programs of some kinds see of the surroundings of one block.
// REQUIRES: every block lies on one group, and nothing has a root or leaves the
// device.
class Surroundings {
 public:
  using OfGroup = std::function<int64_t(GroupId)>;
  // Of block `block`, whose shape is `shape`. Parameters are fetched up to
  // `prefetch` blocks ahead, 0 where none is. `number_of` numbers groups
  // relative to the block, `class_of` is the class of its group and another
  // (Pricer::ClassOf).
  Surroundings(const LoweringContext& context, int block,
               const BlockShape& shape, int prefetch, const OfGroup& number_of,
               const OfGroup& class_of)
      : context_(context),
        graph_(context.graph()),
        block_(block),
        own_(context.group_of_block(block)),
        shape_(shape),
        prefetch_(prefetch),
        number_of_(number_of),
        class_of_(class_of) {}

  // kBegin and kForward, beside how the block's own operators are split.
  void AppendForward(IntKey& key) const;
  // A microbatch's backward, whole or its gradients of activations, beside the
  // block's own decisions.
  void AppendBackward(ActionKind action, IntKey& key) const;
  // A microbatch's gradients of weights, where they are apart.
  void AppendBackwardWeight(IntKey& key) const;
  // What the reduction of gradients and the optimizer see of the weights, which
  // is all that kTie, kNorm and kUpdate see.
  void AppendUpdate(IntKey& key) const;

 private:
  const std::vector<NodeId>& NodesOf(Pass pass) const;
  void AppendTensor(TensorId id, ActionKind action, IntKey& key) const;
  void AppendReaders(const LoweringContext::Presence& presence,
                     ActionKind action, IntKey& key) const;
  void AppendShared(TensorId id, ActionKind action, IntKey& key) const;
  void AppendInner(TensorId id, IntKey& key) const;
  void AppendReadWeight(TensorId id, int seen_from, IntKey& key) const;
  void AppendWeight(TensorId id, IntKey& key) const;
  void AppendGradients(TensorId id, IntKey& key) const;
  void AppendAccumulators(NodeId node, IntKey& key) const;
  void AppendPartial(Pass pass, IntKey& key) const;
  void AppendFetched(ActionKind action, IntKey& key) const;

  // Zero stages from which on a weight is not read, or its gradient not left,
  // as it is laid out for its operator.
  static constexpr int kParametersAreCut = 3;
  static constexpr int kGradientsAreCut = 2;

  const LoweringContext& context_;
  const Graph& graph_;
  const int block_;
  const GroupId own_;
  const BlockShape& shape_;
  const int prefetch_;
  const OfGroup& number_of_;
  const OfGroup& class_of_;
};

}  // namespace tessera
