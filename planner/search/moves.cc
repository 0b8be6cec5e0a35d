#include <array>

#include "planner/base/table.h"
#include "planner/search/move.h"

namespace tessera {

// planner/search/moves/<name>.cc
extern const Move kSplitOp;
extern const Move kSplitClass;
extern const Move kSplitPair;
extern const Move kAxisRole;
extern const Move kSequence;
extern const Move kBranches;
extern const Move kContext;
extern const Move kStageBoundary;
extern const Move kStageCount;
extern const Move kStageDevices;
extern const Move kChunks;
extern const Move kMicrobatches;
extern const Move kSchedule;
extern const Move kActions;
extern const Move kZero;
extern const Move kRooted;
extern const Move kRecompute;
extern const Move kRecomputeOp;
extern const Move kTiles;
extern const Move kOffload;
extern const Move kBucket;
extern const Move kPrefetch;
extern const Move kFabricOrder;
extern const Move kShares;

std::span<const Move> Moves() {
  static const std::array table = {
      kSplitOp,  kSplitClass,   kSplitPair,     kAxisRole,   kSequence,
      kBranches, kContext,      kStageBoundary, kStageCount, kStageDevices,
      kChunks,   kMicrobatches, kSchedule,      kActions,    kZero,
      kRooted,   kRecompute,    kRecomputeOp,   kTiles,      kOffload,
      kBucket,   kPrefetch,     kFabricOrder,   kShares};
  return table;
}

Result<const Move*> FindMove(std::string_view name) {
  return Find("move", Moves(), name);
}

std::optional<double> Move::Propose(Draft& draft, Rng& rng) const {
  auto log_ratio = edit(draft, rng);
  if (log_ratio.has_value() && draft.Finish()) return log_ratio;
  draft.Undo();
  return std::nullopt;
}

std::optional<Proposal> Move::Propose(const Plan& plan,
                                      const SearchSpace& space,
                                      Rng& rng) const {
  Draft draft(space, plan);
  const auto log_ratio = Propose(draft, rng);
  if (!log_ratio.has_value()) return std::nullopt;
  return Proposal{draft.plan(), *log_ratio};
}

const Move& DrawMove(std::span<const Move> moves, Rng& rng) {
  uint32_t total = 0;
  for (const Move& move : moves) total += static_cast<uint32_t>(move.weight);
  uint32_t draw = rng.Below(total);
  for (const Move& move : moves) {
    const auto weight = static_cast<uint32_t>(move.weight);
    if (draw < weight) return move;
    draw -= weight;
  }
  TESSERA_CHECK(false) << "weights of the moves";
  return moves.back();
}

}  // namespace tessera
