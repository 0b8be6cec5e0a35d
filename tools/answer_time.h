#pragma once
// AnswerTime: simulations for the answer of a search, which of large plans take
// seconds each, and what of its time limit they need.

#include <mutex>
#include <optional>

#include "costmodel/evaluate/evaluator.h"
#include "planner/search/search_clock.h"
#include "planner/search/search_space.h"

namespace tessera {

class AnswerTime {
 public:
  // The most of the time limit that is kept from the search. What would take
  // longer is simulated if there is time left by chance.
  static constexpr double kMostKept = 0.5;

  // `limit` in seconds of `clock`; 0: none. All outlive this.
  AnswerTime(const SearchSpace& space, const Evaluator& evaluator,
             const SearchClock& clock, double limit)
      : space_(space), evaluator_(evaluator), clock_(clock), limit_(limit) {}

  // As Evaluator::Explain; remembers what it takes. Thread-safe.
  Evaluation Explain(const Plan& plan, bool share_links);
  // What Explain takes, about: by the last plan that took long or, before there
  // was one, by `plan` with fewer microbatches, which is simulated then unless
  // it is quick itself or hopeless.
  double SecondsToExplain(const Plan& plan);
  // What the search leaves of its time where `plan` is its best: for that and
  // another one beside it.
  double SecondsToKeep(const Plan& plan);
  // Whether there is time for Explain; of what is quick there always is.
  bool Allows(const Plan& plan, bool beside_another = false);

 private:
  // Explains, and sets the pace by what that takes.
  Evaluation Timed(const Plan& plan, bool share_links);
  std::optional<double> pace();

  const SearchSpace& space_;
  const Evaluator& evaluator_;
  const SearchClock& clock_;
  const double limit_;
  std::mutex mutex_;
  std::optional<double> pace_;  // seconds an operator of each microbatch
};

}  // namespace tessera
