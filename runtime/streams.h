#pragma once
// RunStreams: runs jobs on streams, each stream in order, beside each other.
//
// A stream is an order, not a thread: whichever worker is free takes the next
// job of a stream that is ready, and goes on with the same stream if it can. So
// a chain that changes streams (compute, reduce, compute) stays on one thread,
// and a second thread is woken, or made, only where two streams are ready.
// Workers without a job sleep.
//
// Memory. A job takes memory when it is admitted and may give some back when it
// ends. Jobs are admitted in index order, whatever their streams, each when
// what is held and what it takes fit into the budget. The budget is what one
// stream in index order would need at most (SequentialPeak), so memory never
// exceeds what a plan in that order says, and there is always a job that can
// run: the first that has not ended waits for nothing.

#include <functional>
#include <vector>

#include "planner/base/result.h"
#include "planner/base/units.h"

namespace tessera {

// Memory of the two tiers that buffers lie in.
struct HeldBytes {
  Bytes device;
  Bytes host;

  HeldBytes& operator+=(const HeldBytes& other) {
    device += other.device;
    host += other.host;
    return *this;
  }
  friend HeldBytes operator-(const HeldBytes& a, const HeldBytes& b) {
    return {a.device - b.device, a.host - b.host};
  }
  bool FitsInto(const HeldBytes& budget) const {
    return device <= budget.device && host <= budget.host;
  }
};

struct StreamJob {
  int stream = 0;         // from 0
  std::vector<int> deps;  // jobs of smaller index that end before it starts
  HeldBytes takes;        // when admitted
};

struct StreamHooks {
  // Takes the job's memory. In index order, by one thread at a time.
  std::function<Result<void>(int)> admit;
  // Several at once, of different streams.
  std::function<Result<void>(int)> run;
  // After run: gives memory back, and says how much. One thread at a time, not
  // beside admit.
  std::function<HeldBytes(int)> finish;
  // The first error, as soon as it is known: makes others' runs return. Called
  // once, and run's later errors are ignored.
  std::function<void(const Error&)> fail;
};

// Returns when all jobs have ended, or with the first error when all that run
// have returned. The caller's thread is one of the workers; there are at most
// as many as streams.
Result<void> RunStreams(const std::vector<StreamJob>& jobs,
                        const HeldBytes& budget, const StreamHooks& hooks);

// The most that is held of each tier when jobs run one by one in index order.
// `gives[i]` is what job i gives back.
HeldBytes SequentialPeak(const std::vector<StreamJob>& jobs,
                         const std::vector<HeldBytes>& gives);

}  // namespace tessera
