#include "planner/base/free_list.h"

#include <algorithm>
#include <iterator>

namespace tessera {

int64_t FreeList::Take(int64_t bytes) {
  bytes = Rounded(bytes);
  const auto found = by_size_.lower_bound({bytes, 0});
  if (found != by_size_.end()) {
    const auto [size, offset] = *found;
    Erase(offset);
    if (size > bytes) Insert(offset + bytes, size - bytes);
    return offset;
  }
  // The last gap may reach the end and be widened.
  int64_t offset = end_;
  if (!gaps_.empty()) {
    const auto [last, size] = *std::prev(gaps_.end());
    if (last + size == end_) {
      offset = last;
      Erase(last);
    }
  }
  end_ = offset + bytes;
  return offset;
}

void FreeList::Give(int64_t offset, int64_t bytes) {
  bytes = Rounded(bytes);
  const auto next = gaps_.lower_bound(offset);
  if (next != gaps_.begin()) {
    const auto [before, size] = *std::prev(next);
    if (before + size == offset) {
      Erase(before);
      offset = before;
      bytes += size;
    }
  }
  if (const auto after = gaps_.find(offset + bytes); after != gaps_.end()) {
    const int64_t size = after->second;
    Erase(offset + bytes);
    bytes += size;
  }
  Insert(offset, bytes);
}

int64_t FreeList::Rounded(int64_t bytes) const {
  return (std::max(bytes, int64_t{1}) + alignment_ - 1) / alignment_ *
         alignment_;
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
