#include "runtime/comm/roll_call.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "planner/base/append.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

// More in a message say no more.
constexpr size_t kNamed = 8;

std::string NamesOf(const std::vector<int>& ranks) {
  if (ranks.empty()) return "the other ranks";
  if (ranks.size() == 1) return Text("rank ", ranks[0]);
  // Two at least are counted where not all are named.
  const size_t named = ranks.size() <= kNamed + 1 ? ranks.size() : kNamed;
  std::string text;
  for (size_t i = 0; i + 1 < named; ++i) {
    AppendTo(text, ", ", Text(ranks[i]));
  }
  if (named == ranks.size()) {
    return Text("ranks ", text, " and ", ranks.back());
  }
  return Text("ranks ", text, ", ", ranks[named - 1], " and ",
              ranks.size() - named, " more");
}

}  // namespace

RollCall::RollCall(Store& store, std::string key, int size)
    : store_(store), key_(std::move(key)), size_(size) {}

std::string RollCall::KeyOf(int rank) const {
  return Text(key_, "/", rank);
}

// First by its own key: whom the counter has, Missing does not.
Result<void> RollCall::Answer(int rank) {
  TESSERA_TRY([[maybe_unused]] int64_t came, store_.Add(KeyOf(rank), 1));
  TESSERA_TRY(came, store_.Add(key_, 1));
  return {};
}

Result<bool> RollCall::AllCame() {
  TESSERA_TRY(const auto came, store_.Poll(key_, 0));
  return came.value_or(0) >= size_;
}

std::string RollCall::Missing() {
  std::vector<int> missing;
  for (int rank = 0; rank < size_; ++rank) {
    const auto came = store_.Add(KeyOf(rank), 0);
    if (!came) return NamesOf({});
    if (*came == 0) missing.push_back(rank);
  }
  return NamesOf(missing);
}

}  // namespace tessera
