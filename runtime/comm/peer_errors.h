#pragma once
// What ranks tell of each other, in every kind of world: the errors by which a
// rank names the one that ends the job, and whom such an error names.

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "planner/base/units.h"

namespace tessera {

// Their messages begin with the rank that they tell of; kUnavailable.
Error RankAborted(int rank, std::string_view reason);
Error RankLeft(int rank, int waiting);  // while rank `waiting` waits for it
Error RankDied(int rank, int pid, std::string_view task);
Error RankHasNotCome(int rank, std::string_view why);
Error RankWaitedTooLong(int rank, Duration limit, std::string_view for_whom);
Error StoreOfRankZero(std::string_view address, std::string_view trouble);

// No error yet: for CommOptions::stalled.
std::string StallText(int rank, Duration waited, Duration limit,
                      std::string_view for_whom);

// `error`, which `rank` met, as its peers are to be told of it: as it is where
// it tells of a rank, a disagreement or an interrupt already.
Error RankFailed(int rank, const Error& error);

// The rank that one of the above tells of; none of any other error.
std::optional<int> RankToldOf(const Error& error);
// Of RankDied() TaskText(task); else empty.
std::string TaskOfDead(const Error& error);

// "in task 'T'", or "before its first task" where `task` is empty.
std::string TaskText(std::string_view task);

// An error, without its place, as ranks hand it on through the store. Of any
// other bytes: none.
std::string PackError(const Error& error);
std::optional<Error> UnpackError(std::string_view bytes);

// Ranks that disagree; kInvalidInput, the same on all of them.
Error Disagreement(std::string_view how);
struct CollectiveCall {
  std::string_view operation;
  int64_t bytes = 0;
  bool operator==(const CollectiveCall&) const = default;
};
Error CallsDiffer(int rank, const CollectiveCall& call, int other,
                  const CollectiveCall& other_call, std::span<const int> group);
Error PartsDiffer(int from, int64_t sent, int to, int64_t expected);

// A message of another size than its receiver expects, which stays where it is;
// kInvalidInput.
Error MessageSizesDiffer(int from, int64_t sent, uint64_t tag,
                         int64_t expected);

}  // namespace tessera
