#include "costmodel/memo.h"

#include "planner/base/rng.h"

namespace tessera {

// Two numbers at a time, by the high and the low half of a product (as wyhash
// does; Wang Yi).
size_t IntKeyHash::operator()(const IntKey& key) const {
  const auto at = [&](size_t i) { return static_cast<uint64_t>(key[i]); };
  const auto fold = [](uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^
           static_cast<uint64_t>(product >> 64);
  };
  uint64_t hash = 0x9e3779b97f4a7c15ULL + key.size();
  size_t i = 0;
  for (; i + 1 < key.size(); i += 2) {
    hash = fold(at(i) ^ 0xa0761d6478bd642fULL, at(i + 1) ^ hash);
  }
  if (i < key.size()) hash = fold(at(i) ^ 0xe7037ed1a0b428dbULL, hash);
  return Mix64(hash);
}

}  // namespace tessera
