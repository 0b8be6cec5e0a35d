#include "planner/base/free_list.h"

#include <algorithm>
#include <iterator>

#include "planner/base/divide.h"

namespace tessera {

std::optional<int64_t> FreeList::TakeGap(int64_t bytes) {
  bytes = Rounded(bytes);
  const auto found = by_size_.lower_bound({bytes, 0});
  if (found == by_size_.end()) return std::nullopt;
  const auto [size, offset] = *found;
  Erase(offset);
  if (size > bytes) Insert(offset + bytes, size - bytes);
  return offset;
}

int64_t FreeList::Take(int64_t bytes) {
  if (const auto gap = TakeGap(bytes)) return *gap;
  // The last gap may reach the end and be widened.
  int64_t offset = end_;
  if (!gaps_.empty()) {
    const auto [last, size] = *std::prev(gaps_.end());
    if (last + size == end_) {
      offset = last;
      Erase(last);
    }
  }
  end_ = offset + Rounded(bytes);
  return offset;
}

void FreeList::Give(int64_t offset, int64_t bytes) {
  bytes = Rounded(bytes);
  const auto next = gaps_.lower_bound(offset);
  if (next != gaps_.begin() && !added_.contains(offset)) {
    const auto [before, size] = *std::prev(next);
    if (before + size == offset) {
      Erase(before);
      offset = before;
      bytes += size;
    }
  }
  const int64_t end = offset + bytes;
  const auto after = gaps_.find(end);
  if (after != gaps_.end() && !added_.contains(end)) {
    const int64_t size = after->second;
    Erase(end);
    bytes += size;
  }
  Insert(offset, bytes);
}

void FreeList::Add(int64_t offset, int64_t bytes) {
  added_.insert(offset);
  Insert(offset, bytes);
}

int64_t FreeList::Rounded(int64_t bytes) const {
  return RoundUp(std::max(bytes, int64_t{1}), alignment_);
}

void FreeList::Insert(int64_t offset, int64_t bytes) {
  gaps_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
}

void FreeList::Erase(int64_t offset) {
  const auto gap = gaps_.find(offset);
  by_size_.erase({gap->second, offset});
  gaps_.erase(gap);
}

}  // namespace tessera
