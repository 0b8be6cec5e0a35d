#include "runtime/product_choices.h"

#include <algorithm>
#include <map>
#include <span>
#include <type_traits>

namespace tessera {
namespace {

struct Row {
  MatMulKey key;
  MatMulChoice choice;
};

// The lists of all ranks, by rank.
template <typename T>
Result<std::vector<std::vector<T>>> GatherLists(std::vector<T> mine,
                                                HostMessages& all) {
  static_assert(std::is_trivially_copyable_v<T>);
  const int64_t length = std::ssize(mine);
  std::vector<int64_t> lengths(static_cast<size_t>(all.size()));
  TESSERA_RETURN_IF_ERROR(
      all.AllGather(&length, sizeof(length), lengths.data()));
  std::vector<std::vector<T>> lists(lengths.size());
  const auto longest = static_cast<size_t>(std::ranges::max(lengths));
  if (longest == 0) return lists;
  mine.resize(longest);
  std::vector<T> gathered(longest * lists.size());
  TESSERA_RETURN_IF_ERROR(all.AllGather(
      mine.data(), static_cast<int64_t>(longest * sizeof(T)), gathered.data()));
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    const auto begin = gathered.begin() + static_cast<int64_t>(rank * longest);
    lists[rank].assign(begin, begin + lengths[rank]);
  }
  return lists;
}

}  // namespace

Result<void> ShareProducts(std::string choices, std::string_view path,
                           ProductTuner& tuner, HostMessages all) {
  int64_t size = std::ssize(choices);
  TESSERA_RETURN_IF_ERROR(all.Broadcast(&size, sizeof(size), /*root=*/0));
  if (size == 0) return {};
  choices.resize(static_cast<size_t>(size));
  TESSERA_RETURN_IF_ERROR(all.Broadcast(choices.data(), size, /*root=*/0));
  return tuner.ReadChoices(choices, path);
}

Result<void> AgreeOnProducts(const std::vector<MatMulKey>& untuned,
                             ProductTuner& tuner, HostMessages all) {
  TESSERA_TRY(const auto keys, GatherLists(untuned, all));
  const auto below = std::span(keys).first(static_cast<size_t>(all.rank()));
  std::vector<Row> tuned;
  for (const MatMulKey& key : untuned) {
    const bool is_mine = std::ranges::none_of(below, [&](const auto& theirs) {
      return std::ranges::find(theirs, key) != theirs.end();
    });
    if (!is_mine) continue;
    if (const auto choice = tuner.Tune(key)) tuned.push_back({key, *choice});
  }
  TESSERA_TRY(const auto rows, GatherLists(std::move(tuned), all));
  std::map<MatMulKey, MatMulChoice> agreed;
  for (const std::vector<Row>& of_rank : rows) {
    for (const Row& row : of_rank) agreed.emplace(row.key, row.choice);
  }
  tuner.Adopt(agreed);
  return {};
}

}  // namespace tessera
