#pragma once
// Parallel branches of a layer on the halves of a device group: SOAP's O
// (Jia et al. 2019) where a block has two chains of operators that do not wait
// for each other, such as attention beside MLP.

#include <map>
#include <optional>
#include <vector>

#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"

namespace tessera {

// Nodes of one block that lead to one operand of a join each, and not to the
// other. Both have dense layers.
struct Branches {
  std::vector<NodeId> left;
  std::vector<NodeId> right;
};

// Of the block's nodes that join two of its results the one behind the most
// dense layers on the shorter side; nothing where there is none.
std::optional<Branches> BranchesOf(const GraphIndex& index, int block);

// The branches of blocks, which those of a class have in equal places: looked
// for once in each class. The index must outlive it.
class BranchesByClass {
 public:
  explicit BranchesByClass(const GraphIndex& index) : index_(index) {}

  const GraphIndex& index() const { return index_; }
  std::optional<Branches> Of(int block);

 private:
  const GraphIndex& index_;
  // By class, in the first block of it that was asked for.
  std::map<int, std::optional<Branches>> known_;
};

// `plan` with the branches of all blocks of `group` on its halves along `axis`,
// which become the two groups behind it; all other nodes stay. A half does the
// work of all the samples that the axis split. Nothing where the axis has not
// two positions, does not split the samples of every node that moves, or no
// block has branches. REQUIRES: no group shares blocks with `group`. Zero axes
// are to be set anew (SetZeroAxes).
std::optional<Plan> SplitBranches(const GraphIndex& index, const Plan& plan,
                                  GroupId group, int axis);
// The same for who asks of several groups.
std::optional<Plan> SplitBranches(BranchesByClass& branches, const Plan& plan,
                                  GroupId group, int axis);

// The plan that SplitBranches makes `plan` from, or nothing.
std::optional<Plan> MergeBranches(const GraphIndex& index, const Plan& plan,
                                  GroupId group, int axis);

}  // namespace tessera
