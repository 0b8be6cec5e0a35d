#pragma once
// FlatMap: a map in two pieces of memory: its entries in the order in which
// they were added, and where they are by hash (open addressing). Filling and
// dropping it takes a few allocations however many entries it has. Entries are
// not removed. Insertion invalidates iterators and references.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "planner/base/check.h"

namespace tessera {

// `Hash` makes a uint64_t of a key whose low bits differ well.
template <typename Key, typename T, typename Hash>
class FlatMap {
 public:
  using value_type = std::pair<Key, T>;
  using iterator = typename std::vector<value_type>::iterator;
  using const_iterator = typename std::vector<value_type>::const_iterator;

  size_t size() const { return entries_.size(); }
  iterator end() { return entries_.end(); }
  const_iterator end() const { return entries_.end(); }
  iterator find(const Key& key) {
    const size_t at = Find(key);
    return entries_.begin() + static_cast<std::ptrdiff_t>(at);
  }
  const_iterator find(const Key& key) const {
    const size_t at = Find(key);
    return entries_.begin() + static_cast<std::ptrdiff_t>(at);
  }
  bool contains(const Key& key) const { return find(key) != end(); }
  // REQUIRES: contains(key).
  const T& at(const Key& key) const {
    const auto it = find(key);
    TESSERA_CHECK(it != end()) << "an entry that is not there";
    return it->second;
  }
  std::pair<iterator, bool> try_emplace(const Key& key, T value = T()) {
    const auto it = find(key);
    if (it != end()) return {it, false};
    entries_.emplace_back(key, std::move(value));
    if (2 * entries_.size() > slots_.size()) {
      Grow();
    } else {
      Place(entries_.size() - 1);
    }
    return {std::prev(end()), true};
  }
  T& operator[](const Key& key) { return try_emplace(key).first->second; }

 private:
  static constexpr size_t kLeastSlots = 32;

  // size() where it is not there.
  size_t Find(const Key& key) const {
    if (slots_.empty()) return entries_.size();
    const size_t mask = slots_.size() - 1;
    for (size_t at = Hash()(key) & mask; slots_[at] != 0;
         at = (at + 1) & mask) {
      if (entries_[slots_[at] - 1].first == key) return slots_[at] - 1;
    }
    return entries_.size();
  }
  void Place(size_t entry) {
    const size_t mask = slots_.size() - 1;
    size_t at = Hash()(entries_[entry].first) & mask;
    while (slots_[at] != 0) at = (at + 1) & mask;
    slots_[at] = static_cast<uint32_t>(entry + 1);
  }
  void Grow() {
    const size_t size = slots_.empty() ? kLeastSlots : 2 * slots_.size();
    slots_.assign(size, 0);
    for (size_t entry = 0; entry < entries_.size(); ++entry) Place(entry);
  }

  std::vector<value_type> entries_;
  std::vector<uint32_t> slots_;  // an entry's number and one; 0: free
};

}  // namespace tessera
