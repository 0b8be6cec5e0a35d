#pragma once
// Which ranks have come to where all meet, by the job's store: who waits there
// can name those that have not.

#include <string>

#include "planner/base/result.h"
#include "runtime/comm/store.h"

namespace tessera {

class RollCall {
 public:
  // Of one meeting of `size` ranks, called `key` (at most 200 bytes).
  RollCall(Store& store, std::string key, int size);

  // Rank `rank` is here.
  Result<void> Answer(int rank);
  // Whether all are, by what the store has answered so far: does not wait.
  Result<bool> AllCame();
  // Who is not: "rank 3", "ranks 3, 5 and 7", of ten or more the first eight
  // and how many more. "the other ranks" where all are, or the store, which is
  // waited for, does not answer.
  std::string Missing();

 private:
  std::string KeyOf(int rank) const;

  Store& store_;
  const std::string key_;
  const int size_;
};

}  // namespace tessera
