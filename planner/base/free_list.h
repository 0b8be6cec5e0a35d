#pragma once
// FreeList: extents of an address space that grows at its end, such as an
// arena or a file, or that consists of what was added. Best fit: the smallest
// gap that is large enough, the lowest among equals (Knuth, The Art of Computer
// Programming, section 2.5); what is given back joins the gaps beside it. A
// plain value, not thread-safe.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace tessera {

class FreeList {
 public:
  // Sizes are rounded up to the alignment, and to at least that.
  explicit FreeList(int64_t alignment) : alignment_(alignment) {}

  // Where an extent of so many bytes lies from here on.
  int64_t Take(int64_t bytes);
  // The same without growing; nothing where no gap is large enough.
  std::optional<int64_t> TakeGap(int64_t bytes);

  // Gives an extent back. REQUIRES: Take(bytes) or TakeGap(bytes) returned
  // `offset`.
  void Give(int64_t offset, int64_t bytes);

  // Adds a gap, which never joins one in front of it, nor one that is added
  // behind it. REQUIRES: whole multiples of the alignment, in none that was
  // added before; the list does not grow.
  void Add(int64_t offset, int64_t bytes);

  // The end of the highest extent that was ever taken.
  int64_t end() const { return end_; }

 private:
  int64_t Rounded(int64_t bytes) const;
  void Insert(int64_t offset, int64_t bytes);
  void Erase(int64_t offset);

  int64_t alignment_;
  int64_t end_ = 0;
  std::map<int64_t, int64_t> gaps_;  // bytes by offset
  std::set<std::pair<int64_t, int64_t>> by_size_;
  std::set<int64_t> added_;  // where they begin
};

}  // namespace tessera
