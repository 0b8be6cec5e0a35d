#include "planner/search/sweep.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <mutex>
#include <numeric>
#include <optional>

#include "planner/base/sort_unique.h"
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

// In which strategies get their first bounds, where there may not be time for
// all: first those of the smallest microbatches, since what fits, if anything
// does, is among them, then of sizes ever closer to each other. Bounds of equal
// microbatches share tables.
std::vector<size_t> GuessingOrder(const std::vector<Strategy>& strategies) {
  std::vector<int> sizes;
  for (const Strategy& strategy : strategies) sizes.push_back(strategy.mbs);
  SortUnique(sizes);
  // By the bits of a size's place the other way round: van der Corput's
  // sequence.
  const int bits = std::bit_width(sizes.size());
  std::vector<size_t> turns;  // by strategy
  for (const Strategy& strategy : strategies) {
    const auto place = static_cast<size_t>(
        std::ranges::lower_bound(sizes, strategy.mbs) - sizes.begin());
    size_t reversed = 0;
    for (int bit = 0; bit < bits; ++bit) {
      reversed |= (place >> bit & 1) << (bits - 1 - bit);
    }
    turns.push_back(reversed);
  }
  std::vector<size_t> order(strategies.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) { return turns[i]; });
  return order;
}

class Sweeper {
 public:
  Sweeper(const SearchSpace& space, const Objective& objective,
          const std::vector<Strategy>& strategies, size_t count, int threads,
          const std::function<bool()>& stop, const std::optional<Score>& than)
      : space_(space),
        objective_(objective),
        strategies_(strategies),
        count_(count),
        threads_(threads),
        stop_(stop),
        than_(than),
        is_priced_(strategies.size(), false) {}

  // Gives a strategy's score at most, as far as it is known.
  using Guess =
      std::function<std::optional<Score>(const Strategy& strategy, Bound)>;

  // Looks first at what `guess` says is best, up to where it says that nothing
  // is better than what was found. Those that it knows nothing of are left out,
  // and those whose turn comes when it is `late`.
  void Run(Bound first, const Guess& guess, const std::function<bool()>& late) {
    result_.closely = 0;
    cut_ = false;
    GuessAll(first, guess, late);
    OnThreads(threads_, [&] {
      while (count_ > 0) {
        const std::optional<Scored> top = Take();
        if (!top) return;
        if (stop_()) {
          cut_ = true;
          return;
        }
        if (top->bound == Bound::kClose) {
          Price(top->number);
          continue;
        }
        const Bound closer =
            top->bound == Bound::kLoose ? Bound::kQuick : Bound::kClose;
        const auto score = guess(strategies_[top->number], closer);
        if (!score) continue;
        const std::lock_guard lock(mutex_);
        waiting_.push_back({*score, top->number, closer});
        std::ranges::push_heap(waiting_, After);
      }
    });
  }

  SweepResult result() const {
    SweepResult result = result_;
    result.complete = !cut_;
    for (const Scored& scored : best_) {
      result.best.push_back({strategies_[scored.number], scored.score});
    }
    return result;
  }

 private:
  static bool After(const Scored& a, const Scored& b) { return Before(b, a); }

  void GuessAll(Bound bound, const Guess& guess,
                const std::function<bool()>& late) {
    const std::vector<size_t> order = GuessingOrder(strategies_);
    waiting_.clear();
    std::atomic<size_t> next = 0;
    OnThreads(threads_, [&] {
      for (size_t begin; (begin = next.fetch_add(kSlice)) < order.size();) {
        if (stop_()) {
          cut_ = true;
          return;
        }
        std::vector<Scored> guesses;
        for (size_t o = begin; o < std::min(begin + kSlice, order.size());
             ++o) {
          // The first of some degrees may take as long as a price.
          if (late()) {
            cut_ = true;
            break;
          }
          const auto score = guess(strategies_[order[o]], bound);
          if (score) guesses.push_back({*score, order[o], bound});
        }
        const std::lock_guard lock(mutex_);
        waiting_.insert(waiting_.end(), guesses.begin(), guesses.end());
      }
    });
    std::ranges::make_heap(waiting_, After);
    result_.bounded = std::max(result_.bounded, std::ssize(waiting_));
  }

  // The next to look at, or nothing where none can be among the best.
  std::optional<Scored> Take() {
    const std::lock_guard lock(mutex_);
    if (waiting_.empty()) return std::nullopt;
    const Scored top = waiting_.front();
    if (best_.size() == count_ && !Before(top, best_.back())) {
      return std::nullopt;
    }
    if (than_ && !Better(top.score, *than_)) return std::nullopt;
    std::ranges::pop_heap(waiting_, After);
    waiting_.pop_back();
    result_.closely += top.bound == Bound::kQuick;
    return top;
  }

  void Price(size_t number) {
    {
      const std::lock_guard lock(mutex_);
      if (is_priced_[number]) return;
      is_priced_[number] = true;
      ++result_.priced;
    }
    const auto score = objective_.EvaluateUniform(space_.index, *space_.cluster,
                                                  strategies_[number]);
    if (!score) return;
    if (than_ && !Better(*score, *than_)) return;
    const Scored found = {*score, number};
    const std::lock_guard lock(mutex_);
    best_.insert(std::ranges::lower_bound(best_, found, Before), found);
    if (best_.size() > count_) best_.pop_back();
  }

  const SearchSpace& space_;
  const Objective& objective_;
  const std::vector<Strategy>& strategies_;
  const size_t count_;
  const int threads_;
  const std::function<bool()> stop_;
  const std::optional<Score> than_;
  std::mutex mutex_;             // of what follows
  std::vector<Scored> waiting_;  // a heap, the best on top
  std::vector<bool> is_priced_;
  std::atomic<bool> cut_ = false;  // something was left out for want of time
  std::vector<Scored> best_;       // in order
  SweepResult result_;             // but for the best
};

}  // namespace

SweepResult Sweep(const SearchSpace& space, const Objective& objective,
                  const std::vector<Strategy>& strategies, size_t count,
                  int threads, const std::function<bool()>& stop,
                  const std::function<bool()>& stop_bounding,
                  const std::optional<Score>& than) {
  const auto never = [] { return false; };
  const auto late = stop_bounding ? stop_bounding : never;
  Sweeper sweeper(space, objective, strategies, count, threads,
                  stop ? stop : never, than);
  if (objective.EstimatesUniform()) {
    sweeper.Run(
        Bound::kLoose,
        [&](const Strategy& strategy, Bound bound) {
          return objective.EstimateUniform(space.index, strategy, bound);
        },
        late);
  }
  sweeper.Run(
      Bound::kLoose,
      [&](const Strategy& strategy, Bound bound) {
        return objective.BoundUniform(space.index, strategy, bound);
      },
      late);
  return sweeper.result();
}

}  // namespace tessera
