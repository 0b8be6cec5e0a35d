#pragma once
// Baselines: what people choose without a search, priced by the same code.

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/plan/strategy.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

struct Baseline {
  std::string name;
  std::string summary;
  Strategy strategy;
  Plan plan;
  Evaluation evaluation;
};

// One way in which people choose.
struct BaselineRow {
  std::string_view name;
  std::string_view summary;
  // The strategies it would consider, all of equal standing (the best is
  // taken), one list after the other until a list has a feasible plan.
  std::vector<std::vector<Strategy>> (*choices)(const SearchSpace& space);
  // Priced whatever the time, where it may fit: what all others are compared
  // with.
  bool always = false;
  // It needs least memory.
  bool frugal = false;
};

// "DataParallel", "DDP", "ZeRO-1" to "ZeRO-3", "Hybrid ZeRO" and "Megatron".
std::span<const BaselineRow> BaselineRows();

// The choice of every row that has a valid plan, in their order; the last
// list's best where none is feasible. Without those that are not priced yet
// when `stop`, which may be empty, says so (called from any thread); where none
// that fits is priced then, the plainest choices of some until one does or
// `interrupted` says so, too.
std::vector<Baseline> Baselines(const SearchSpace& space,
                                const Objective& objective, int threads,
                                const std::function<bool()>& stop,
                                const std::function<bool()>& interrupted);

}  // namespace tessera
