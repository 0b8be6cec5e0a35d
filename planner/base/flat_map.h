#pragma once
// FlatMap: a map of a few dozen entries that are found by looking through them,
// in one piece of memory. Not for more: a lookup takes time linear in its size.
// Insertion invalidates iterators and references.

#include <algorithm>
#include <utility>
#include <vector>

#include "planner/base/check.h"

namespace tessera {

template <typename Key, typename T>
class FlatMap {
 public:
  using value_type = std::pair<Key, T>;
  using iterator = typename std::vector<value_type>::iterator;
  using const_iterator = typename std::vector<value_type>::const_iterator;

  iterator end() { return entries_.end(); }
  const_iterator end() const { return entries_.end(); }
  iterator find(const Key& key) {
    return std::ranges::find(entries_, key, &value_type::first);
  }
  const_iterator find(const Key& key) const {
    return std::ranges::find(entries_, key, &value_type::first);
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
    return {std::prev(end()), true};
  }
  T& operator[](const Key& key) { return try_emplace(key).first->second; }

 private:
  std::vector<value_type> entries_;
};

}  // namespace tessera
