#pragma once
// Lists as sets.

#include <algorithm>
#include <vector>

namespace tessera {

// Sorts `list` and leaves one of what is in it several times.
template <typename T>
void SortUnique(std::vector<T>& list) {
  std::ranges::sort(list);
  const auto repeated = std::ranges::unique(list);
  list.erase(repeated.begin(), repeated.end());
}

}  // namespace tessera
