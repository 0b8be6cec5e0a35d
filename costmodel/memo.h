#pragma once
// Memo: values remembered under exact keys.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera {

// A sequence of integers, compared exactly.
using IntKey = std::vector<int64_t>;
struct IntKeyHash {
  size_t operator()(const IntKey& key) const;
};

// Thread-safe.
template <typename T, typename Key = IntKey, typename Hash = IntKeyHash>
class Memo {
 public:
  // Keeps all that it is given.
  Memo() = default;
  // Is emptied where the weights of its entries would exceed `limit`.
  explicit Memo(size_t limit) : limit_(limit) {}

  // The value under `key`; of a new one what `make` gives.
  template <typename Make>
  T Get(const Key& key, const Make& make, size_t weight = 1) {
    return Find<T>(key, make, weight);
  }
  // The same, which stays where it is as long as this is there. REQUIRES: no
  // limit.
  template <typename Make>
  const T& Keep(const Key& key, const Make& make) {
    return Find<const T&>(key, make, 0);
  }

 private:
  template <typename Found, typename Make>
  Found Find(const Key& key, const Make& make, size_t weight) {
    {
      std::shared_lock lock(mutex_);
      if (auto it = entries_.find(key); it != entries_.end()) {
        return it->second;
      }
    }
    // Made outside the lock. Of two threads that make the same, the first wins,
    // so that what a key names has one number.
    T made = make();
    std::unique_lock lock(mutex_);
    if (weight_ + weight > limit_) {
      entries_.clear();
      weight_ = 0;
    }
    const auto [entry, is_new] = entries_.try_emplace(key, std::move(made));
    if (is_new) weight_ += weight;
    return entry->second;
  }

  const size_t limit_ = std::numeric_limits<size_t>::max();
  std::shared_mutex mutex_;
  std::unordered_map<Key, T, Hash> entries_;
  size_t weight_ = 0;  // of all
};

}  // namespace tessera
