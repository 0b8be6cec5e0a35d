#include "planner/lower/file_layout.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "planner/base/check.h"

namespace tessera {
namespace {

// Free extents of a file that grows at its end.
class Gaps {
 public:
  explicit Gaps(int64_t length) : length_(length) {}

  int64_t Take(int64_t bytes) {
    for (auto gap = begins_.begin(); gap != begins_.end(); ++gap) {
      const auto [begin, end] = *gap;
      // The last one grows with the file.
      if (end - begin < bytes && end < length_) continue;
      length_ = std::max(length_, begin + bytes);
      begins_.erase(gap);
      if (begin + bytes < end) begins_[begin + bytes] = end;
      return begin;
    }
    const int64_t begin = length_;
    length_ += bytes;
    return begin;
  }

  void Give(int64_t begin, int64_t end) {
    auto next = begins_.lower_bound(begin);
    if (next != begins_.end() && next->first == end) {
      end = next->second;
      next = begins_.erase(next);
    }
    if (next != begins_.begin() && std::prev(next)->second == begin) {
      std::prev(next)->second = end;
    } else {
      begins_[begin] = end;
    }
  }

  int64_t length() const { return length_; }

 private:
  int64_t length_;
  std::map<int64_t, int64_t> begins_;  // ends by begins
};

}  // namespace

Bytes WholeFileBlocks(Bytes bytes) {
  return {(bytes.value + kFileBlockBytes - 1) / kFileBlockBytes *
          kFileBlockBytes};
}

FileLayout LayOutFile(const TaskGraph& tasks, std::span<const Bytes> bytes) {
  TESSERA_CHECK(bytes.size() == tasks.values.size()) << bytes.size();
  FileLayout layout;
  layout.offsets.assign(tasks.values.size(), -1);
  bool moves = false;
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const Value& value = tasks.values[v];
    if (value.tier != MemoryTier::kFile || value.alias_of.valid()) continue;
    moves = moves || !value.persistent;
    if (!value.persistent || bytes[v] == Bytes{}) continue;
    layout.offsets[v] = layout.persistent.value;
    layout.persistent += WholeFileBlocks(bytes[v]);
  }
  layout.length = layout.persistent;
  if (!moves) return layout;

  Gaps gaps(layout.persistent.value);
  const auto frees = LastUses(tasks);
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    for (const auto* ids : {&task.reads, &task.writes}) {
      for (ValueId id : *ids) {
        const size_t root = tasks.Root(id).index();
        if (tasks.values[root].tier != MemoryTier::kFile ||
            bytes[root] == Bytes{} || layout.offsets[root] >= 0) {
          continue;
        }
        layout.offsets[root] = gaps.Take(WholeFileBlocks(bytes[root]).value);
      }
    }
    for (ValueId id : frees[t]) {
      const int64_t begin = layout.offsets[id.index()];
      if (begin < 0) continue;
      gaps.Give(begin, begin + WholeFileBlocks(bytes[id.index()]).value);
    }
  }
  layout.length = {gaps.length()};
  return layout;
}

}  // namespace tessera
