#include "runtime/comm/in_flight.h"

#include <algorithm>
#include <utility>

namespace tessera {

void InFlight::Add(const CUstream_st* queue, Operation operation,
                   Clock::time_point now) {
  Queue& its = queues_[queue];
  if (its.operations.empty()) its.front_since = now;
  its.operations.push_back(std::move(operation));
}

Result<std::vector<CUevent_st*>> InFlight::TakeEnded(
    const std::function<Result<bool>(CUevent_st*)>& is_done,
    Clock::time_point now) {
  std::vector<CUevent_st*> events;
  for (auto& [stream, queue] : queues_) {
    while (!queue.operations.empty()) {
      TESSERA_TRY(const bool done, is_done(queue.operations.front().done));
      if (!done) break;
      events.push_back(queue.operations.front().done);
      queue.operations.pop_front();
      queue.front_since = now;
    }
  }
  return events;
}

std::vector<CUevent_st*> InFlight::TakeAll() {
  std::vector<CUevent_st*> events;
  for (const auto& [stream, queue] : queues_) {
    for (const Operation& operation : queue.operations) {
      events.push_back(operation.done);
    }
  }
  queues_.clear();
  return events;
}

bool InFlight::empty() const {
  return std::ranges::all_of(queues_, [](const auto& queue) {
    return queue.second.operations.empty();
  });
}

InFlight::Front InFlight::Oldest() const {
  Front oldest;
  for (const auto& [stream, queue] : queues_) {
    if (queue.operations.empty()) continue;
    if (oldest.operation != nullptr && oldest.since <= queue.front_since) {
      continue;
    }
    oldest = {&queue.operations.front(), queue.front_since};
  }
  return oldest;
}

std::string InFlight::WhatFailed(const ncclComm* comm) const {
  for (const auto& [stream, queue] : queues_) {
    for (const Operation& operation : queue.operations) {
      if (operation.comm == comm) return operation.what;
    }
  }
  const Operation* const oldest = Oldest().operation;
  return oldest == nullptr ? "" : oldest->what;
}

}  // namespace tessera
