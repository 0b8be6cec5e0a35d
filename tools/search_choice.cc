#include "tools/search_choice.h"

#include <iostream>
#include <utility>

#include "planner/base/threads.h"
#include "planner/plan/strategy.h"
#include "planner/plan/used_part.h"
#include "planner/search/baselines.h"
#include "tools/verify.h"

namespace tessera {
namespace {

const Baseline* BestBaseline(const SearchSpace& space,
                             const SearchResult& result) {
  const Baseline* best = nullptr;
  for (const Baseline& baseline : result.baselines) {
    if (!Allowed(space, baseline.plan)) continue;
    if (best == nullptr || Better(baseline.evaluation, best->evaluation)) {
      best = &baseline;
    }
  }
  return best;
}

// Plans whose simulations run beside each other: each takes the memory of a
// step's tasks.
constexpr size_t kAtOnce = 2;

// Simulates what may be the answer with shared links, the likeliest first, as
// long as there is time.
void Confirm(const Options& options, const Evaluator& evaluator,
             const std::vector<size_t>& simple, AnswerTime& time,
             Decided& decided) {
  std::vector<Choice>& choices = decided.choices;
  const bool prefers_simple = options.prefer == "simple";
  const auto is_simple = [&](size_t i) {
    return std::ranges::find(simple, i) != simple.end();
  };
  std::vector<size_t> order = {0};
  const auto add = [&](bool of_simple) {
    for (size_t i = 1; i < choices.size(); ++i) {
      if (is_simple(i) == of_simple) order.push_back(i);
    }
  };
  add(prefers_simple);
  add(!prefers_simple);
  // Sharing makes no plan faster: what is slower without it than a plan with
  // it, and no simpler answer either, needs no simulation.
  const auto may_be_answer = [&](size_t i) {
    const Choice& choice = choices[i];
    if (!choice.score.feasible || choice.confirmed ||
        evaluator.IsTooLargeToExplain(choice.plan)) {
      return false;
    }
    std::optional<Duration> fastest;
    for (const Choice& other : choices) {
      if (!other.confirmed) continue;
      fastest = std::min(fastest.value_or(*other.confirmed), *other.confirmed);
    }
    if (!fastest && !is_simple(i)) return true;
    const double within = is_simple(i) ? 1 + decided.band->median : 1;
    return choice.score.step_time.seconds() <
           within * fastest.value_or(choices[0].score.step_time).seconds();
  };
  const int threads = ThreadCount(options.threads);
  // By proposals the answer is the same on any number of threads.
  const bool by_proposals = options.proposals && !options.time_limit_s;
  const size_t at_once = threads == 1 && !by_proposals ? 1 : kAtOnce;
  while (true) {
    std::vector<size_t> round;
    for (const size_t i : order) {
      if (round.size() < at_once && may_be_answer(i) &&
          time.Allows(choices[i].plan, !round.empty())) {
        round.push_back(i);
      }
    }
    if (round.empty()) break;
    ForEach(threads, round.size(), [&](size_t r) {
      Choice& choice = choices[round[r]];
      choice.step = time.Explain(choice.plan, /*share_links=*/true);
      choice.confirmed = choice.step->step_time;
    });
  }
  for (size_t i = 0; i < choices.size(); ++i) {
    choices[i].no_time = may_be_answer(i);
  }
}

}  // namespace

Decided Decide(const Options& options, const Inputs& inputs,
               const SearchSpace& space, const Evaluator& evaluator,
               const SearchResult& result, bool interrupted, AnswerTime& time) {
  Decided decided;
  std::vector<Choice>& choices = decided.choices;
  const auto add = [&](std::string kind, const Plan& plan,
                       const Evaluation& evaluation,
                       std::optional<Duration> shared = {}) {
    for (size_t i = 0; i < choices.size(); ++i) {
      if (!SameUpToNames(choices[i].plan, plan)) continue;
      choices[i].kind = std::move(kind);
      return i;
    }
    choices.push_back(
        {std::move(kind), plan, ScoreOf(evaluation), shared, {}, {}});
    return choices.size() - 1;
  };
  for (const FoundPlan& found : result.candidates) {
    add("search", found.plan, found.evaluation, found.shared);
  }
  const Baseline* baseline = BestBaseline(space, result);
  if (result.uniform) {
    add("uniform", result.uniform->plan, result.uniform->evaluation);
  }
  if (baseline != nullptr) {
    decided.baseline =
        add(baseline->name, baseline->plan, baseline->evaluation);
  }
  // The best baseline, and what a strategy gives, whoever found it.
  std::vector<size_t> simple;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (i == decided.baseline ||
        StrategyOnPart(space.index, *space.cluster, choices[i].plan)) {
      simple.push_back(i);
    }
  }

  decided.band = StepTimeBand(inputs.cluster, result.evaluation.sources);
  if (options.confirm > 0 && !interrupted) {
    Confirm(options, evaluator, simple, time, decided);
  }
  // An interrupted search confirms no more than its walks did, a late one not
  // all: what is known comes first.
  const bool cut_short = interrupted || decided.no_time() > 0;
  const auto unknown = [&](size_t i) {
    return cut_short && !choices[i].confirmed;
  };
  const auto better = [&](size_t a, size_t b) {
    if (!choices[a].score.feasible || !choices[b].score.feasible) {
      return Better(choices[a].score, choices[b].score);
    }
    if (unknown(a) != unknown(b)) return unknown(b);
    return choices[a].time() < choices[b].time();
  };
  for (size_t i = 1; i < choices.size(); ++i) {
    if (better(i, decided.fastest)) decided.fastest = i;
  }
  decided.chosen = decided.fastest;
  const Choice& fastest = choices[decided.fastest];
  const auto over = [&](size_t i) {
    return choices[i].time().seconds() / fastest.time().seconds() - 1;
  };
  if (decided.baseline) decided.margin = over(*decided.baseline);
  if (options.prefer != "simple" || !fastest.score.feasible) return decided;
  // The baseline, or else the best of what strategies give.
  std::optional<size_t> chosen;
  for (const size_t i : simple) {
    if (!choices[i].score.feasible || over(i) >= decided.band->median ||
        unknown(i) != unknown(decided.fastest)) {
      continue;
    }
    const bool is_baseline = i == decided.baseline;
    if (!chosen || is_baseline ||
        (chosen != decided.baseline && better(i, *chosen))) {
      chosen = i;
    }
  }
  decided.chosen = chosen.value_or(decided.fastest);
  return decided;
}

Result<void> Verify(const Options& options, const Inputs& inputs,
                    const SearchSpace& space, Decided& decided) {
  std::vector<size_t> order;
  for (size_t i = 0; i < decided.choices.size(); ++i) {
    if (decided.choices[i].score.feasible) order.push_back(i);
  }
  std::ranges::stable_sort(order, {},
                           [&](size_t i) { return decided.choices[i].time(); });
  order.resize(std::min(order.size(), static_cast<size_t>(options.verify)));
  const bool has_baseline =
      decided.baseline && decided.choices[*decided.baseline].score.feasible;
  if (has_baseline &&
      std::ranges::find(order, *decided.baseline) == order.end()) {
    order.push_back(*decided.baseline);
  }
  std::optional<Error> failure;
  std::optional<size_t> fastest;
  for (const size_t i : order) {
    Choice& choice = decided.choices[i];
    std::cerr << "measuring "
              << StrategyText(space.index, *space.cluster, choice.plan)
              << std::endl;
    auto measured =
        MeasureStep(options, inputs.graph, inputs.cluster, choice.plan);
    if (!measured) {
      // What was found is the answer all the same.
      if (measured.error().code == ErrorCode::kInterrupted) break;
      if (measured.error().code != ErrorCode::kUnavailable) {
        return measured.error();
      }
      std::cerr << "tessera: " << measured.error().ToString() << std::endl;
      failure = measured.error();
      continue;
    }
    choice.measured = *measured;
    if (!fastest || *measured < *decided.choices[*fastest].measured) {
      fastest = i;
    }
  }
  if (!fastest) {
    return failure ? Result<void>(*failure) : Result<void>();
  }
  decided.fastest = decided.chosen = *fastest;
  decided.band.reset();
  if (has_baseline && decided.choices[*decided.baseline].measured) {
    decided.margin = decided.choices[*decided.baseline].measured->seconds() /
                         decided.choices[*fastest].measured->seconds() -
                     1;
  } else {
    decided.baseline.reset();
  }
  return {};
}

PlanPrediction PredictionOf(const Decided& decided) {
  const Choice& chosen = decided.choices[decided.chosen];
  PlanPrediction prediction;
  prediction.step_time = chosen.measured.value_or(chosen.time());
  prediction.measured = chosen.measured.has_value();
  prediction.confirmed = chosen.confirmed.has_value();
  if (decided.baseline && decided.choices[*decided.baseline].score.feasible) {
    const Choice& baseline = decided.choices[*decided.baseline];
    prediction.baseline = baseline.kind;
    prediction.baseline_step_time = baseline.measured.value_or(baseline.time());
  }
  if (decided.band) prediction.error_band = decided.band->median;
  return prediction;
}

}  // namespace tessera
