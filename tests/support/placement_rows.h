#pragma once
// The kinds of placement that random plans are counted by.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"

namespace tessera {

struct PlacementRow {
  std::string_view name;
  // Whether a valid plan exercises the row.
  bool (*exercised)(const GraphIndex& index, const Plan& plan);
};

// All rows; at most 64.
std::span<const PlacementRow> PlacementRows();

// Bit i: the plan exercises row i.
using RowSet = uint64_t;
RowSet RowsOf(const GraphIndex& index, const Plan& plan);

// Whether some plan exercises both rows.
bool IsLegalPair(size_t a, size_t b);

// How often each row and each pair of rows was exercised.
class Coverage {
 public:
  Coverage();
  void Add(RowSet rows);
  int64_t row(size_t i) const { return pairs_[i][i]; }
  int64_t pair(size_t a, size_t b) const { return pairs_[a][b]; }
  // The count of the rarest row or pair among `rows`; the fewer, the more
  // worthwhile is a plan that exercises them.
  int64_t Rarest(RowSet rows) const;
  // One line a row, then the legal pairs with fewer than `least` plans.
  std::string ToString(int64_t least) const;

 private:
  std::vector<std::vector<int64_t>> pairs_;  // the diagonal counts rows
};

}  // namespace tessera
