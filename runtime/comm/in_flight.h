#pragma once
// What a rank enqueued on its GPU for its peers and has not seen the end of.
// A queue's operations end in its order: one that is stuck holds up those
// behind it, and no other queue's. One that is the first of its queue need not
// wait for peers: it may wait for work of this rank in any queue. While
// operations of any queue end nobody is said to be late.

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "planner/base/result.h"

struct CUevent_st;
struct CUstream_st;
struct ncclComm;

namespace tessera {

class InFlight {
 public:
  using Clock = std::chrono::steady_clock;

  struct Operation {
    const ncclComm* comm = nullptr;
    CUevent_st* done = nullptr;
    std::string what;
  };
  // What is waited for, and since when no operation has ended.
  struct Front {
    const Operation* operation = nullptr;  // null: of nothing in flight
    Clock::time_point since;
  };

  void Add(const CUstream_st* queue, Operation operation,
           Clock::time_point now);

  // Forgets the operations that have ended; their events. Where is_done fails
  // they are kept for the next call, or for TakeAll.
  Result<std::vector<CUevent_st*>> TakeEnded(
      const std::function<Result<bool>(CUevent_st*)>& is_done,
      Clock::time_point now);
  // Forgets all; their events.
  std::vector<CUevent_st*> TakeAll();

  bool empty() const;
  // The one that has been the first of its queue for the longest time.
  Front Oldest() const;
  // What an error of `comm` is likely of: its operation that was added first,
  // or, where it has none, the oldest of all; empty where nothing is in flight.
  std::string WhatFailed(const ncclComm* comm) const;

 private:
  struct Entry {
    Operation operation;
    int64_t place = 0;  // in the order of Add
  };
  struct Queue {
    std::deque<Entry> entries;
    Clock::time_point front_since;
  };
  std::map<const CUstream_st*, Queue> queues_;
  std::vector<CUevent_st*> ended_;  // not yet taken
  int64_t added_ = 0;
  Clock::time_point progress_;  // when one ended, or the first was added
};

}  // namespace tessera
