#include "planner/search/stage_cuts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <utility>

namespace tessera {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// By how much longer stages are looked at next.
constexpr double kPaceGrowth = 1.3;

// Sums over blocks, from which a stage's are differences.
class Sums {
 public:
  explicit Sums(const std::vector<LayerCost>& costs) : sums_(1) {
    for (const LayerCost& cost : costs) {
      LayerCost sum = sums_.back();
      sum.compute += cost.compute;
      sum.exchange += cost.exchange;
      sum.reduction += cost.reduction;
      sum.update += cost.update;
      sum.kept += cost.kept;
      sum.stored += cost.stored;
      sums_.push_back(sum);
      // The last block's backward comes first, when most is kept.
      peaks_.push_back(cost.backward_peak);
    }
  }

  double Memory(size_t begin, size_t end, int in_flight) const {
    return sums_[end].stored - sums_[begin].stored +
           in_flight * (sums_[end].kept - sums_[begin].kept) + peaks_[end - 1];
  }
  // For each of m microbatches, with what comes once a step.
  double Time(size_t begin, size_t end, int64_t m) const {
    const LayerCost& a = sums_[begin];
    const LayerCost& b = sums_[end];
    const double pace =
        std::max(b.compute - a.compute, b.exchange - a.exchange);
    // The reductions run beside the last backward, two thirds of a
    // microbatch.
    const double reduction =
        std::max(0.0, b.reduction - a.reduction - 2 * pace / 3);
    return pace + (reduction + b.update - a.update) / static_cast<double>(m);
  }

 private:
  std::vector<LayerCost> sums_;
  std::vector<double> peaks_;
};

// What no stages do better than: each block by the option that does it for the
// least of all units, evenly on these, and by that which takes least.
struct Even {
  double pace = 0;
  double sum = 0;
};
Even EvenlyDone(const StageProblem& problem) {
  Even even;
  const size_t blocks = problem.options[0].costs.size();
  for (size_t b = 0; b < blocks; ++b) {
    double pace = kNever;
    double sum = kNever;
    for (const StageOption& option : problem.options) {
      const double time = option.costs[b].compute;
      pace = std::min(pace, time * option.units / problem.units);
      sum = std::min(sum, time);
    }
    even.pace += pace;
    even.sum += sum;
  }
  return even;
}

class StageProgramme {
 public:
  StageProgramme(const StageProblem& problem, const std::function<bool()>& stop)
      : problem_(problem),
        stop_(stop),
        blocks_(problem.options[0].costs.size()),
        units_(static_cast<size_t>(problem.units)),
        most_stages_(std::min(blocks_, units_)) {
    for (size_t o = 0; o < problem.options.size(); ++o) {
      const StageOption& option = problem.options[o];
      costs_.emplace_back(option.costs);
      std::vector<int>& barred = barred_.emplace_back(1, 0);
      for (size_t b = 0; b < blocks_; ++b) {
        const bool may = option.may.empty() || option.may[b];
        barred.push_back(barred.back() + (may ? 0 : 1));
      }
      again_.push_back(option.again.empty()
                           ? std::nullopt
                           : std::optional<Sums>(option.again));
      const auto alike = std::ranges::find_if(places_, [&](const Place& place) {
        return place.units == static_cast<size_t>(option.units) &&
               place.begins == option.begins;
      });
      Place& place =
          alike != places_.end()
              ? *alike
              : places_.emplace_back(Place{
                    static_cast<size_t>(option.units), option.begins, {}});
      place.options.push_back(o);
    }
  }

  std::vector<StagesFound> Run() {
    const Even even = EvenlyDone(problem_);
    // Steps from no pace, or from one without end, would lead nowhere.
    if (!(even.pace > 0) || even.pace == kNever) return {};
    const auto m = static_cast<double>(problem_.microbatches);
    // At a slower pace nothing is done in time.
    double most_pace = problem_.limit / m;
    if (m > 1) {
      most_pace = std::min(most_pace, (problem_.limit - even.sum) / (m - 1));
    }
    most_pace *= 1 + 1e-12;
    if (even.pace > most_pace) return {};
    double least_pace = kNever;
    for (double limit = 0; least_pace == kNever && !stop_();) {
      if (limit >= most_pace) return {};
      limit = std::min(std::max(limit, even.pace) * kPaceGrowth, most_pace);
      FindChoices(limit);
      Fill(limit, /*pace=*/true);
      for (size_t stages = 2; stages <= most_stages_; ++stages) {
        least_pace = std::min(least_pace, At(stages, 0, units_).value);
      }
      if (none_left_ && limit >= longest_) break;
    }
    if (least_pace == kNever) return {};
    // What filling and draining take at least, at any pace in time.
    double fill = even.sum;
    if (most_pace != kNever) {
      FindChoices(most_pace);
      Fill(most_pace, /*pace=*/false);
      double sum = kNever;
      for (size_t stages = 2; stages <= most_stages_; ++stages) {
        sum = std::min(sum, At(stages, 0, units_).value);
      }
      fill = std::max(fill, sum);
    }
    std::vector<std::optional<StagesFound>> best(most_stages_ + 1);
    double least = problem_.limit;
    for (double pace = least_pace; !stop_(); pace *= 1 + kPaceStep) {
      // At a slower pace only filling and draining can take less.
      if ((m - 1) * pace + std::max(even.sum, pace) >= least) break;
      // What was not found yet is slower than the pace before.
      if ((m - 1) * pace / (1 + kPaceStep) + fill > problem_.limit) break;
      const double limit = pace * (1 + 1e-12);
      if (limit > seen_) FindChoices(limit * kPaceGrowth);
      Fill(limit, /*pace=*/false);
      for (size_t stages = 2; stages <= most_stages_; ++stages) {
        auto found = Trace(stages);
        if (!found || found->time > problem_.limit) continue;
        least = std::min(least, found->time);
        if (!best[stages] || found->time < best[stages]->time) {
          best[stages] = std::move(found);
        }
      }
      if (none_left_ && limit >= longest_) break;
    }
    std::vector<StagesFound> all;
    for (auto& found : best) {
      if (found) all.push_back(*std::move(found));
    }
    std::ranges::stable_sort(all, {}, &StagesFound::time);
    return all;
  }

 private:
  // Options that take as many units, as they lie.
  struct Place {
    size_t units = 1;
    uint64_t begins = 0;
    std::vector<size_t> options;
  };
  // The best of a place's options for some blocks.
  struct Choice {
    double time = kNever;
    int option = -1;
    double least = kNever;  // with memory without end: more blocks take longer
  };
  // What the stages from a block to the end take on so many units.
  struct Cell {
    double value = kNever;
    int end = 0;  // of the first of them
    int option = -1;
  };

  Cell& At(size_t stages, size_t block, size_t units) {
    return cells_[(stages * (blocks_ + 1) + block) * (units_ + 1) + units];
  }
  // Those of stages that keep so many microbatches and begin with a block: of
  // one block, of two and so on, as far as they were looked at.
  std::span<const Choice> ChoicesFrom(int in_flight, size_t place,
                                      size_t begin) const {
    const auto at =
        (static_cast<size_t>(in_flight) * places_.size() + place) * blocks_ +
        begin;
    return std::span(choices_).subspan(first_choice_[at], choices_of_[at]);
  }

  double Time(size_t option, size_t begin, size_t end, int in_flight) const {
    const int64_t m = problem_.microbatches;
    const Sums& costs = costs_[option];
    const double needed = costs.Memory(begin, end, in_flight);
    const double time = costs.Time(begin, end, m);
    const double memory = problem_.options[option].memory;
    if (needed <= memory) return time;
    if (!again_[option]) return kNever;
    const double least = again_[option]->Memory(begin, end, in_flight);
    if (least > memory) return kNever;
    // What saves most bytes for its time runs again first.
    const double part = (needed - memory) / (needed - least);
    return time + part * part * (again_[option]->Time(begin, end, m) - time);
  }

  // Of all stages that take no longer than `limit`, and of some that do.
  void FindChoices(double limit) {
    int most = 0;
    for (size_t stages = 1; stages <= most_stages_; ++stages) {
      most = std::max(most, problem_.in_flight(static_cast<int>(stages)));
    }
    const size_t lists =
        static_cast<size_t>(most + 1) * places_.size() * blocks_;
    choices_.clear();
    first_choice_.assign(lists, 0);
    choices_of_.assign(lists, 0);
    seen_ = limit;
    none_left_ = true;
    longest_ = 0;
    int known = -1;
    for (size_t stages = 1; stages <= most_stages_ && !stop_(); ++stages) {
      const int in_flight = problem_.in_flight(static_cast<int>(stages));
      if (in_flight == known) continue;
      known = in_flight;
      size_t list = static_cast<size_t>(in_flight) * places_.size() * blocks_;
      for (const Place& place : places_) {
        for (size_t begin = 0; begin < blocks_; ++begin, ++list) {
          first_choice_[list] = choices_.size();
          AddChoices(place, in_flight, begin, blocks_ + 1 - stages, limit);
          choices_of_[list] = choices_.size() - first_choice_[list];
        }
      }
    }
  }

  // Of stages from a block on that end no later than `last`.
  void AddChoices(const Place& place, int in_flight, size_t begin, size_t last,
                  double limit) {
    for (size_t end = begin + 1; end <= last; ++end) {
      Choice choice;
      for (size_t option : place.options) {
        if (barred_[option][begin] != barred_[option][end]) continue;
        choice.least =
            std::min(choice.least,
                     costs_[option].Time(begin, end, problem_.microbatches));
        const double time = Time(option, begin, end, in_flight);
        if (time >= choice.time) continue;
        choice.time = time;
        choice.option = static_cast<int>(option);
      }
      if (choice.least > limit) {
        none_left_ = none_left_ && choice.least == kNever;
        return;
      }
      if (choice.time != kNever) longest_ = std::max(longest_, choice.time);
      choices_.push_back(choice);
    }
  }

  // The least sum of the stages' times, or of their slowest's, of stages that
  // take no longer than `limit`.
  void Fill(double limit, bool pace) {
    cells_.assign((most_stages_ + 1) * (blocks_ + 1) * (units_ + 1), {});
    At(0, blocks_, 0).value = 0;
    for (size_t stages = 1; stages <= most_stages_ && !stop_(); ++stages) {
      for (size_t place = 0; place < places_.size(); ++place) {
        AddStage(stages, place, limit, pace);
      }
    }
  }

  // A stage in front of those behind it.
  void AddStage(size_t stages, size_t place, double limit, bool pace) {
    const auto& [size, begins, options] = places_[place];
    const int in_flight = problem_.in_flight(static_cast<int>(stages));
    for (size_t begin = 0; begin + stages <= blocks_; ++begin) {
      size_t end = begin;
      for (const Choice& choice : ChoicesFrom(in_flight, place, begin)) {
        if (++end + stages > blocks_ + 1 || choice.least > limit) break;
        if (choice.time > limit) continue;
        for (size_t behind = stages - 1; behind + size <= units_; ++behind) {
          const double rest = At(stages - 1, end, behind).value;
          const size_t units = behind + size;
          if (rest == kNever || (begins >> (units_ - units) & 1) == 0) continue;
          const double value =
              pace ? std::max(choice.time, rest) : choice.time + rest;
          Cell& cell = At(stages, begin, units);
          if (value < cell.value) {
            cell = {value, static_cast<int>(end), choice.option};
          }
        }
      }
    }
  }

  std::optional<StagesFound> Trace(size_t stages) {
    if (At(stages, 0, units_).value == kNever) return std::nullopt;
    StagesFound found;
    double slowest = 0;
    size_t block = 0;
    size_t units = units_;
    for (size_t left = stages; left > 0; --left) {
      const Cell& cell = At(left, block, units);
      const auto option = static_cast<size_t>(cell.option);
      const auto end = static_cast<size_t>(cell.end);
      const double time =
          Time(option, block, end, problem_.in_flight(static_cast<int>(left)));
      found.time += time;
      slowest = std::max(slowest, time);
      found.stages.push_back({cell.end, cell.option});
      block = end;
      units -= static_cast<size_t>(problem_.options[option].units);
    }
    found.time += static_cast<double>(problem_.microbatches - 1) * slowest;
    return found;
  }

  const StageProblem& problem_;
  const std::function<bool()>& stop_;
  const size_t blocks_;
  const size_t units_;
  const size_t most_stages_;
  std::vector<Place> places_;
  std::vector<Sums> costs_;                 // by option
  std::vector<std::optional<Sums>> again_;  // by option
  std::vector<std::vector<int>> barred_;    // by option, sums over blocks
  std::vector<Choice> choices_;             // list by list
  std::vector<size_t> first_choice_;        // of a list
  std::vector<size_t> choices_of_;          // how many it has
  double seen_ = 0;  // all that take no longer are among them
  // Whether the lists have all stages that may be.
  bool none_left_ = false;
  double longest_ = 0;  // of them, picoseconds
  std::vector<Cell> cells_;
};

}  // namespace

double LeastTime(const StageProblem& problem) {
  if (problem.options.empty()) return kNever;
  const Even even = EvenlyDone(problem);
  return static_cast<double>(problem.microbatches - 1) * even.pace +
         std::max(even.sum, even.pace);
}

std::vector<StagesFound> CheapestStages(const StageProblem& problem,
                                        const std::function<bool()>& stop) {
  if (problem.options.empty()) return {};
  return StageProgramme(problem, stop).Run();
}

}  // namespace tessera
