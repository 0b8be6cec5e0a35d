#include "profiler/case_order.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <tuple>

#include "costmodel/source/cost_source.h"

namespace tessera {

ProfileKey CopyOfMessage(const ProfileKey& message) {
  ProfileKey copy = message;
  copy.name = "copy";
  copy.ranks = 1;
  copy.nodes = 1;
  copy.rule = "n->n";
  copy.extents = {message.payload.value / SizeOf(DType::kFloat32)};
  copy.payload = {};
  return copy;
}

std::vector<TimedCase> AllCases(const ProfileCases& cases) {
  std::vector<TimedCase> all;
  for (const auto& [key, seconds] : cases.collectives) {
    all.push_back({&key, nullptr, seconds});
  }
  for (const auto& [key, kernel] : cases.kernels) {
    all.push_back({&key, &kernel, kernel.seconds, kernel.run_s});
  }
  return all;
}

std::vector<size_t> InOrder(std::span<const TimedCase> all,
                            const ProfileDb& known) {
  constexpr double kLikeWork = 1.1;  // as costmodel/source counts it
  std::vector<size_t> by_seconds(all.size());
  std::iota(by_seconds.begin(), by_seconds.end(), size_t{0});
  std::ranges::stable_sort(by_seconds, std::greater(),
                           [&](size_t i) { return all[i].seconds; });

  using Family = std::tuple<std::string, DType, std::string>;
  std::map<Family, std::vector<double>> works;  // by kernel, type and rule
  const auto works_of = [&](const ProfileKey& key) -> std::vector<double>& {
    return works[{key.name, key.dtype, key.rule}];
  };
  for (const auto& [key, row] : known.rows) {
    if (!key.rule.empty()) works_of(key).push_back(WorkOf(key).value_or(0));
  }
  std::array<std::vector<size_t>, 3> classes;
  std::map<ProfileKey, size_t> places;
  for (const size_t i : by_seconds) {
    const TimedCase& c = all[i];
    if (known.Find(*c.key) != nullptr) continue;
    places.emplace(*c.key, i);
    if (c.seconds <= 0 || c.kernel == nullptr) {
      classes[c.seconds <= 0 ? 2 : 0].push_back(i);
      continue;
    }
    const double work = WorkOf(*c.key).value_or(0);
    std::vector<double>& others = works_of(*c.key);
    const bool like = std::ranges::any_of(others, [&](double other) {
      return work <= other * kLikeWork && other <= work * kLikeWork;
    });
    classes[like ? 1 : 0].push_back(i);
    if (!like) others.push_back(work);
  }

  std::vector<size_t> order;
  std::vector<bool> placed(all.size());
  const auto place = [&](size_t i) {
    if (!placed[i]) order.push_back(i);
    placed[i] = true;
  };
  for (const std::vector<size_t>& some : classes) {
    for (const size_t i : some) {
      if (all[i].key->name == NameOf(CommKind::kSendRecv)) {
        const auto copy = places.find(CopyOfMessage(*all[i].key));
        if (copy != places.end()) place(copy->second);
      }
      place(i);
    }
  }
  return order;
}

}  // namespace tessera
