#pragma once
// Draft: the plan that a walk stands on, edited in place. What an edit does not
// touch is neither copied nor looked at again, so that a change of one
// operator, weight or layer takes as long in a graph of any size.
//
//   draft.Touch(node);  // first say what changes
//   draft.edited().ops[node.index()].tiles = 2;
//   if (draft.Finish()) { … draft.plan(), draft.change() … }
//   draft.Undo();  // or Keep()
//
// Not for several threads. The space outlives it.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/plan/axis_roles.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

class Draft {
 public:
  // REQUIRES: `plan` is valid.
  Draft(const SearchSpace& space, Plan plan);

  const SearchSpace& space() const { return *space_; }
  // With the edits so far.
  const Plan& plan() const { return plan_; }

  // Whether draws change equal layers of a stage together (moves/scope.h).
  bool folded() const { return folded_; }
  void Fold(bool folded) { folded_ = folded; }

  // How the plan is cut into stages.
  struct Pipeline {
    int stages = 1;
    int chunks = 1;
    std::vector<std::vector<GroupId>> groups;  // by stage
    // By position of the pipeline the blocks that begin there, ascending.
    std::vector<std::vector<int>> blocks;
  };
  // REQUIRES: nothing is edited.
  const Pipeline& pipeline();
  // Those of a stage, in all its chunks. REQUIRES: nothing is edited.
  std::vector<int> BlocksOf(int stage);

  // RolesOf (planner/plan/axis_roles.h) a block. REQUIRES: nothing is edited.
  const std::optional<AxisRoles>& roles(int block);

  // UniformStrategy of the plan. REQUIRES: nothing is edited.
  const std::optional<Strategy>& strategy();

  // What may be changed in edited() from here on: of the placements those that
  // are touched, and schedule, microbatches, bucket_bytes, prefetch and zigzag.
  // One block, as a whole, may change its group and chunk where each stage has
  // one group, after a call of pipeline().
  Plan& edited() { return plan_; }
  void Touch(NodeId node);
  void TouchBlock(int block);
  void TouchWeight(size_t weight);
  // Takes another plan, of which anything may differ.
  void Replace(Plan plan);

  // Whether a weight is cut within nodes only (search_space.h). A weight that
  // has no stage has no such cut either.
  bool CutWithinNode(size_t weight) const { return within_node_[weight]; }
  void CutWithinNode(size_t weight, bool within);

  // Makes a candidate of what was edited: a canonical plan that the space's
  // constraints allow and that differs from the one before. False where there
  // is none, such as where a weight can no longer be cut within nodes only:
  // there would be no way back. Then, as after true, comes Undo or Keep.
  bool Finish();
  void Undo();
  void Keep();  // REQUIRES: Finish was true.
  // Of the candidate. REQUIRES: Finish was true.
  const PlanChange& change() const { return change_; }

 private:
  // What is as large in any graph.
  struct Fields {
    std::string schedule;
    int microbatches = 1;
    Bytes bucket_bytes;
    int prefetch = 1;
    int zigzag = 0;
    bool operator==(const Fields&) const = default;
  };
  static Fields FieldsOf(const Plan& plan);
  // As they were.
  struct OldOp {
    NodeId node;
    OpPlacement placement;
  };
  struct OldWeight {
    size_t weight = 0;
    WeightPlacement placement;
    bool within_node = false;
  };

  // A block in another position of the pipeline.
  struct MovedBlock {
    int block = 0;
    size_t from = 0;
    size_t to = 0;
  };

  bool FinishWhole();
  bool FinishParts();
  // Lists what nodes differ, what of the weights depends on that, and the block
  // that moves.
  void FindNodes();
  void FindMoved(const OldOp& old);
  // Gives the weights whose cuts may differ their axes; false where one has
  // none within nodes.
  bool SetCuts();
  // Whether the block may have moved so.
  bool MayMove() const;
  AxisSet WithinNode(GroupId group);
  void Clear();

  const SearchSpace* space_;
  bool folded_ = false;
  Plan plan_;
  Fields fields_;                  // before the edits
  std::vector<bool> within_node_;  // by weight
  std::optional<Pipeline> pipeline_;
  std::vector<std::optional<AxisSet>> within_of_group_;  // AxesWithinNode
  std::vector<std::optional<AxisRoles>> roles_;          // by block
  std::vector<bool> knows_roles_;
  std::optional<Strategy> strategy_;
  bool knows_strategy_ = false;
  // Whether the plan before the edits is canonical and allowed, so that parts
  // may be looked at alone. Where it is not, the first candidate that is kept
  // makes it so.
  bool regular_ = true;

  // The edits: what was there before, each once, and what is marked so.
  std::vector<OldOp> old_ops_;
  std::vector<OldWeight> old_weights_;
  std::optional<Plan> old_plan_;  // of Replace, or where not regular
  bool replaced_ = false;
  uint64_t edit_ = 1;  // the number of the edit
  std::vector<uint64_t> touched_ops_;
  std::vector<uint64_t> touched_weights_;
  std::vector<uint64_t> cut_blocks_;

  // Of what differs: weights in its blocks, and weights that it reads.
  std::vector<size_t> cut_;
  std::vector<size_t> read_;
  std::optional<MovedBlock> moved_;
  PlanChange change_;
};

}  // namespace tessera
