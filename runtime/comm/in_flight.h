#pragma once
// What a rank enqueued on its GPU for its peers and has not seen the end of.
// A queue's operations end in its order: one that is stuck holds up those
// behind it, and no other queue's.

#include <chrono>
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
  struct Front {
    const Operation* operation = nullptr;  // null: of nothing in flight
    Clock::time_point since;               // it or its peers are waited for
  };

  void Add(const CUstream_st* queue, Operation operation,
           Clock::time_point now);

  // Forgets the operations that have ended; their events.
  Result<std::vector<CUevent_st*>> TakeEnded(
      const std::function<Result<bool>(CUevent_st*)>& is_done,
      Clock::time_point now);
  // Forgets all; their events.
  std::vector<CUevent_st*> TakeAll();

  bool empty() const;
  // The one that has been the first of its queue for the longest time.
  Front Oldest() const;
  // What an error of `comm` is likely of: its first operation, or the oldest of
  // all; empty where nothing is in flight.
  std::string WhatFailed(const ncclComm* comm) const;

 private:
  struct Queue {
    std::deque<Operation> operations;
    Clock::time_point front_since;
  };
  std::map<const CUstream_st*, Queue> queues_;
};

}  // namespace tessera
