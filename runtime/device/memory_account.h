#pragma once
// What a rank's memory holds, by category, now and at its peak.

#include "planner/plan/evaluation.h"

namespace tessera {

// Counts the bytes that are asked for, without the allocator's rounding. Not
// thread-safe.
class MemoryAccount {
 public:
  void Add(MemoryCategory category, Bytes size) {
    current_.total += size;
    current_.parts[static_cast<size_t>(category)] += size;
    if (current_.total > peak_.total) peak_ = current_;
  }
  // REQUIRES: that much was added.
  void Remove(MemoryCategory category, Bytes size) {
    Bytes& part = current_.parts[static_cast<size_t>(category)];
    current_.total = current_.total - size;
    part = part - size;
  }

  const MemoryUse& current() const { return current_; }
  // The parts at the first moment at which their sum was largest. (The sum of
  // each part's own peak would be more than was ever in use.)
  const MemoryUse& peak() const { return peak_; }

 private:
  MemoryUse current_;
  MemoryUse peak_;
};

}  // namespace tessera
