#pragma once
// Constraints: what a user rules out before the search.
//
// Moves propose, and the search starts from, allowed plans only: the space
// becomes smaller and stays symmetric. Immutable, so thread-safe.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/search/constraint_rows.h"
#include "planner/search/constraint_text.h"

namespace tessera {

class Constraints {
 public:
  Constraints() = default;
  // Errors name the text: unknown keys, values that are none, patterns that
  // match no operator, or none that has what is to be split, more ways than
  // the cluster has devices, and constraints that contradict one another.
  static Result<Constraints> Make(const GraphIndex& index,
                                  const Cluster& cluster,
                                  const ConstraintTexts& texts);

  bool empty() const;
  // The operators of each fixed key, one key after the other.
  std::vector<std::vector<NodeId>> FixedNodes() const;
  // The most ways that some operator is to be split by a key of FixKeys(), such
  // as "cp"; 1 where none is.
  int MostFixed(std::string_view key) const;
  // All numbers of ways that operators are to be split by such a key, each
  // once, ascending.
  std::vector<int> FixedDegrees() const;
  // Whether they say that no plan may have what a row of Forbidden() names,
  // such as "pp". Where they do not, they may still allow none that has it.
  bool RuleOut(std::string_view name) const;
  // These with microbatches of any size.
  Constraints WithAnyMicrobatch() const;
  // How many of them a plan breaks, a fixed key once for each layer; 0: it is
  // allowed. REQUIRES: the plan is valid for the graph of Make.
  int Violations(const GraphIndex& index, const Cluster& cluster,
                 const Plan& plan) const;
  // Whether a plan breaks none that differs from one that breaks none in the
  // placements of `nodes` and `weights` alone, and in where one block of stages
  // of one group stands.
  bool StillHold(const GraphIndex& index, const Cluster& cluster,
                 const Plan& plan, std::span<const NodeId> nodes,
                 std::span<const size_t> weights) const;
  // These as they were given: "--fix h.*.attn=tp:8", "c.txt:3: forbid zero3".
  std::vector<std::string> Broken(const GraphIndex& index,
                                  const Cluster& cluster,
                                  const Plan& plan) const;

 private:
  struct Fixed {
    std::string where;
    size_t key = 0;  // of FixKeys()
    int value = 0;
    // Those that are to have it, by block, where there are some.
    std::vector<std::vector<NodeId>> nodes;
  };
  struct Forbid {
    std::string where;
    const ForbiddenRow* row = nullptr;
    std::string schedule;  // where there is no row
  };
  static Result<Fixed> MakeFixed(const GraphIndex& index,
                                 const Cluster& cluster,
                                 const ConstraintText& given);
  Result<void> CheckConsistent(const GraphIndex& index,
                               const Cluster& cluster) const;
  // Calls `broken(where)` for each that a plan breaks.
  template <typename Visit>
  void ForEachBroken(const GraphIndex& index, const Cluster& cluster,
                     const Plan& plan, Visit broken) const;

  std::vector<Fixed> fixed_;
  std::vector<Forbid> forbidden_;
  int max_microbatch_ = 0;
  std::string max_microbatch_where_;
  const Subspace* subspace_ = nullptr;
  std::string space_where_;
};

}  // namespace tessera
