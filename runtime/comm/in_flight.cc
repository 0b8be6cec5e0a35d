#include "runtime/comm/in_flight.h"

#include <algorithm>
#include <utility>

namespace tessera {

void InFlight::Add(const CUstream_st* queue, Operation operation,
                   Clock::time_point now) {
  if (empty()) progress_ = now;
  Queue& its = queues_[queue];
  if (its.entries.empty()) its.front_since = now;
  its.entries.push_back({std::move(operation), added_++});
}

Result<std::vector<CUevent_st*>> InFlight::TakeEnded(
    const std::function<Result<bool>(CUevent_st*)>& is_done,
    Clock::time_point now) {
  for (auto& [stream, queue] : queues_) {
    while (!queue.entries.empty()) {
      CUevent_st* const event = queue.entries.front().operation.done;
      TESSERA_TRY(const bool done, is_done(event));
      if (!done) break;
      ended_.push_back(event);
      queue.entries.pop_front();
      queue.front_since = progress_ = now;
    }
  }
  return std::exchange(ended_, {});
}

std::vector<CUevent_st*> InFlight::TakeAll() {
  std::vector<CUevent_st*> events = std::exchange(ended_, {});
  for (const auto& [stream, queue] : queues_) {
    for (const Entry& entry : queue.entries) {
      events.push_back(entry.operation.done);
    }
  }
  queues_.clear();
  return events;
}

bool InFlight::empty() const {
  return std::ranges::all_of(
      queues_, [](const auto& queue) { return queue.second.entries.empty(); });
}

InFlight::Front InFlight::Oldest() const {
  const Queue* oldest = nullptr;
  for (const auto& [stream, queue] : queues_) {
    if (queue.entries.empty()) continue;
    if (oldest == nullptr || queue.front_since < oldest->front_since) {
      oldest = &queue;
    }
  }
  if (oldest == nullptr) return {};
  return {&oldest->entries.front().operation, progress_};
}

std::string InFlight::WhatFailed(const ncclComm* comm) const {
  const Entry* first = nullptr;
  for (const auto& [stream, queue] : queues_) {
    for (const Entry& entry : queue.entries) {
      if (entry.operation.comm != comm) continue;
      if (first == nullptr || entry.place < first->place) first = &entry;
    }
  }
  if (first != nullptr) return first->operation.what;
  const Operation* const oldest = Oldest().operation;
  return oldest == nullptr ? "" : oldest->what;
}

}  // namespace tessera
