#include "planner/search/sweep.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <optional>

#include "planner/base/threads.h"

namespace tessera {
namespace {

// Strategies that a thread bounds at a time.
constexpr size_t kSlice = 64;

using Bound = Objective::Bound;

// A strategy by its place in the list.
struct Scored {
  Score score;
  size_t number = 0;
  Bound bound = Bound::kLoose;  // what the score is, if not the price
};

bool Before(const Scored& a, const Scored& b) {
  if (Better(a.score, b.score)) return true;
  return !Better(b.score, a.score) && a.number < b.number;
}

}  // namespace

SweepResult Sweep(const SearchSpace& space, const Objective& objective,
                  const std::vector<Strategy>& strategies, size_t count,
                  int threads, const std::function<bool()>& stop,
                  const std::function<bool()>& stop_bounding) {
  const auto stopped = [&] { return stop && stop(); };
  const auto late = [&] { return stop_bounding && stop_bounding(); };
  // Small microbatches first: what fits, if anything does, is among them.
  std::vector<size_t> order(strategies.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {},
                           [&](size_t i) { return strategies[i].mbs; });
  std::mutex mutex;
  std::vector<Scored> waiting;  // a heap by bound, the best on top
  std::atomic<size_t> next = 0;
  OnThreads(threads, [&] {
    while (!stopped() && !late()) {
      const size_t begin = next.fetch_add(kSlice);
      if (begin >= strategies.size()) return;
      std::vector<Scored> bounds;
      // The first bound of some degrees takes as long as a price.
      for (size_t o = begin;
           o < std::min(begin + kSlice, strategies.size()) && !late(); ++o) {
        const size_t i = order[o];
        bounds.push_back(
            {objective.BoundUniform(space.index, strategies[i], Bound::kLoose),
             i});
      }
      const std::lock_guard lock(mutex);
      waiting.insert(waiting.end(), bounds.begin(), bounds.end());
    }
  });
  const auto after = [](const Scored& a, const Scored& b) {
    return Before(b, a);
  };
  std::make_heap(waiting.begin(), waiting.end(), after);

  SweepResult result;
  result.bounded = static_cast<int64_t>(waiting.size());
  std::vector<Scored> best;  // in order
  // The next to look at, or nothing where none can be among the best.
  const auto take = [&]() -> std::optional<Scored> {
    const std::lock_guard lock(mutex);
    if (waiting.empty()) return std::nullopt;
    const Scored top = waiting.front();
    if (best.size() == count && !Before(top, best.back())) return std::nullopt;
    std::pop_heap(waiting.begin(), waiting.end(), after);
    waiting.pop_back();
    result.closely += top.bound == Bound::kQuick;
    result.priced += top.bound == Bound::kClose;
    return top;
  };
  OnThreads(threads, [&] {
    while (count > 0 && !stopped()) {
      const std::optional<Scored> top = take();
      if (!top) return;
      if (top->bound != Bound::kClose) {
        const Bound closer =
            top->bound == Bound::kLoose ? Bound::kQuick : Bound::kClose;
        const Score score = objective.BoundUniform(
            space.index, strategies[top->number], closer);
        const std::lock_guard lock(mutex);
        waiting.push_back({score, top->number, closer});
        std::push_heap(waiting.begin(), waiting.end(), after);
        continue;
      }
      const auto score = objective.EvaluateUniform(space.index, *space.cluster,
                                                   strategies[top->number]);
      if (!score) continue;
      const Scored found = {*score, top->number};
      const std::lock_guard lock(mutex);
      best.insert(std::ranges::lower_bound(best, found, Before), found);
      if (best.size() > count) best.pop_back();
    }
  });
  for (const Scored& scored : best) {
    result.best.push_back({strategies[scored.number], scored.score});
  }
  return result;
}

}  // namespace tessera
