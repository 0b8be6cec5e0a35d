#include "tools/which_strategy.h"

#include <algorithm>
#include <functional>
#include <iostream>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/band.h"
#include "costmodel/whatif/fabric.h"
#include "costmodel/whatif/parts.h"
#include "planner/base/append.h"
#include "planner/base/format.h"
#include "planner/base/threads.h"
#include "planner/search/adapt.h"
#include "planner/search/explain.h"
#include "planner/search/mcmc.h"
#include "planner/search/textbook.h"
#include "tools/explain_output.h"
#include "tools/interrupt.h"
#include "tools/json.h"
#include "tools/search_limits.h"
#include "tools/step_report.h"
#include "tools/text.h"

namespace tessera {
namespace {

// A network is fast where each device has this much of it: 100 Gb/s.
constexpr double kFastNetwork = 12.5e9;

// Of what is found so many may be the fastest with shared links.
constexpr size_t kCandidates = 5;

struct Answer {
  const Approach* approach = nullptr;
  bool advised = false;
  std::optional<FoundPlan> best;
  std::string name;        // of that plan
  std::string strategy;    // the same
  std::string impossible;  // why there is no plan of it
};

struct Comparison {
  Situation situation;
  double network = 0;  // bytes a second of a device
  const Advice* advice = nullptr;
  std::vector<Answer> answers;
  Plan plan;
  Evaluation evaluation;
  ErrorBand band;
  std::string name;
  std::string strategy;
  bool searched = false;
  bool shares_links = false;  // step times are with shared links

  // The best of the answers that are advised and fit.
  const Answer* BestAdvised() const {
    const Answer* best = nullptr;
    for (const Answer& answer : answers) {
      if (!answer.advised || !answer.best ||
          !answer.best->evaluation.feasible()) {
        continue;
      }
      if (best == nullptr ||
          Better(answer.best->evaluation, best->best->evaluation)) {
        best = &answer;
      }
    }
    return best;
  }
};

// Gives all plans the step times with what is lost on shared links, if that is
// known of each that fits; whether it is.
bool ShareLinks(const Evaluator& evaluator, std::vector<FoundPlan>& plans) {
  bool all = true;
  for (FoundPlan& found : plans) {
    PriceShared(evaluator, found);
    all = all && (found.shared || !found.evaluation.feasible());
  }
  for (FoundPlan& found : plans) {
    if (all) found.evaluation.step_time = found.score().step_time;
    found.shared = std::nullopt;
  }
  return all;
}

std::string YesNo(bool yes) {
  return yes ? "yes" : "no";
}

std::string SituationText(const Comparison& c) {
  const Situation& s = c.situation;
  std::string text =
      "a whole replica fits on a device: " + YesNo(s.fits) +
      "; parameters and gradients of the largest layer: " + YesNo(s.layer_fits);
  if (s.devices == 1 && !s.fits) {
    text += "; what is offloaded fits the host: " + YesNo(s.host_fits);
  }
  if (s.devices > s.nodes) {
    text += "; NVLink inside nodes: " + YesNo(s.fast_within);
  }
  if (s.nodes > 1) {
    text += "; fast network between nodes: " + YesNo(s.fast_between) + " (" +
            FormatNumber(c.network * 8e-9) +
            " Gb/s for each device, fast from " +
            FormatNumber(kFastNetwork * 8e-9) + ")";
  }
  return text;
}

std::string Verdict(const Comparison& c) {
  if (!c.evaluation.feasible()) return "nothing that fits was found";
  const Answer* best = c.BestAdvised();
  if (best == nullptr) {
    return "none of the textbook's answers is possible and fits";
  }
  const double found = c.evaluation.step_time.seconds();
  const double textbook = best->best->evaluation.step_time.seconds();
  std::string text = "the textbook's answer, " + best->name + ", takes " +
                     FormatTime(textbook) + ": " + ChangeText(textbook, found) +
                     " to the plan";
  const ErrorBand& band = c.band;
  if (textbook >= found) {
    text += textbook / found - 1 < band.median
                ? ", no more than predictions are off (" +
                      FormatPercent(band.median) + "): they agree"
                : ", more than predictions are off (" +
                      FormatPercent(band.median) + "): they differ";
  }
  return text;
}

// A line for each reason why answers have no plan.
std::string ImpossibleText(const std::vector<Answer>& answers) {
  std::vector<std::pair<std::string, std::string>> lines;
  for (const Answer& answer : answers) {
    if (answer.impossible.empty()) continue;
    const auto known = std::ranges::find(
        lines, answer.impossible, &std::pair<std::string, std::string>::first);
    if (known == lines.end()) {
      lines.emplace_back(answer.impossible, answer.approach->name);
    } else {
      known->second += ", " + std::string(answer.approach->name);
    }
  }
  std::string out;
  for (const auto& [why, names] : lines) {
    out += "  " + Wrap("not possible: " + names + " (" + why + ")", 4) + "\n";
  }
  return out;
}

std::string ComparisonText(const Comparison& c) {
  std::string out = Wrap(SituationText(c), 2) + "\n\n";
  std::vector<std::vector<std::string>> table = {
      {"  the textbook's situation", "its answers"}};
  for (const Advice& advice : Advices()) {
    std::string answers;
    for (const std::string_view approach : advice.approaches) {
      AppendTo(answers, " or ", approach);
    }
    table.push_back(
        {(&advice == c.advice ? "> " : "  ") + std::string(advice.situation),
         answers});
  }
  out += FormatTable(table);
  out += "\n";
  const Score found = ScoreOf(c.evaluation);
  std::vector<std::vector<std::string>> rows = {
      {"  answer", "its best strategy",
       c.shares_links ? "step time" : "links not shared", "to the plan"}};
  for (const Answer& answer : c.answers) {
    const std::string name = (answer.advised ? "> " : "  ") + answer.name;
    if (!answer.best) {
      // Without a reason Ctrl-C came first.
      if (!answer.impossible.empty()) {
        rows.push_back({name, "-", "-", "not possible"});
      }
      continue;
    }
    const Score score = answer.best->score();
    rows.push_back({name, answer.strategy, FormatTime(score.step_time),
                    !score.feasible  ? "does not fit"
                    : found.feasible ? ChangeText(score.step_time.seconds(),
                                                  found.step_time.seconds())
                                     : "-"});
  }
  out += FormatTable(rows) + ImpossibleText(c.answers);
  out += "\n" +
         Wrap(std::string(c.searched ? "the search found" : "the given plan") +
                  ": " + c.name,
              2) +
         "\n  " + c.strategy + ", " + FormatTime(found.step_time) +
         (found.feasible ? "" : ", which does not fit") + "\n\n" +
         Wrap(Verdict(c), 0) + "\n";
  return out;
}

Json ScoreFields(const Score& score) {
  return Json::Object({{"step_time_s", StepTimeJson(score.step_time)},
                       {"feasible", score.feasible}});
}

Json ComparisonJson(const Comparison& c) {
  const Situation& s = c.situation;
  Json found = ScoreFields(ScoreOf(c.evaluation));
  found.Set("name", c.name);
  found.Set("strategy", c.strategy);
  const Answer* best = c.BestAdvised();
  return Json::Object(
      {{"situation",
        Json::Object({{"devices", s.devices},
                      {"nodes", s.nodes},
                      {"fits", s.fits},
                      {"layer_fits", s.layer_fits},
                      {"host_fits", s.host_fits},
                      {"fast_within", s.fast_within},
                      {"fast_between", s.fast_between},
                      {"network_bytes_per_s_per_device", c.network}})},
       {"textbook", Json::ArrayOf(Advices(),
                                  [&](const Advice& advice) {
                                    return Json::Object(
                                        {{"situation", advice.situation},
                                         {"applies", &advice == c.advice},
                                         {"answers",
                                          Json::ArrayOf(advice.approaches,
                                                        [](std::string_view a) {
                                                          return Json(a);
                                                        })}});
                                  })},
       {"answers",
        Json::ArrayOf(c.answers,
                      [](const Answer& answer) {
                        Json json =
                            Json::Object({{"answer", answer.approach->name},
                                          {"advised", answer.advised}});
                        if (!answer.impossible.empty()) {
                          json.Set("not_possible", answer.impossible);
                        }
                        if (!answer.best) return json;
                        json.Extend(ScoreFields(answer.best->score()));
                        json.Set("name", answer.name);
                        return json.Set("strategy", answer.strategy);
                      })},
       {"found", std::move(found)},
       {"shared_links", c.shares_links},
       {"best_advised", best == nullptr ? Json() : Json(best->approach->name)},
       {"band", c.band.median},
       {"verdict", Verdict(c)}});
}

}  // namespace

double NetworkOfDevice(const Cluster& cluster) {
  const std::vector<LinkClass> classes = ClassesOfLinks(cluster);
  const int node = cluster.devices[0].node;
  // The vertices of the node: what its devices reach without the network.
  std::vector<bool> inside(cluster.vertices.size(), false);
  int64_t devices = 0;
  for (const Device& device : cluster.devices) {
    if (device.node != node) continue;
    inside[device.vertex.index()] = true;
    ++devices;
  }
  for (bool grows = true; grows;) {
    grows = false;
    for (size_t l = 0; l < classes.size(); ++l) {
      const Link& link = cluster.links[l];
      if (classes[l] == LinkClass::kInter || !inside[link.from.index()] ||
          inside[link.to.index()]) {
        continue;
      }
      inside[link.to.index()] = true;
      grows = true;
    }
  }
  double bandwidth = 0;
  for (size_t l = 0; l < classes.size(); ++l) {
    const Link& link = cluster.links[l];
    if (classes[l] != LinkClass::kInter || !inside[link.to.index()]) continue;
    bandwidth +=
        cluster.link_types[static_cast<size_t>(link.type)].bandwidth.value;
  }
  return bandwidth / static_cast<double>(devices);
}

namespace {

// Of each approach; those that offload only where they are advised.
std::vector<Answer> AnswersOf(const Advice& advice, const SearchSpace& space,
                              const Evaluator& evaluator, int threads,
                              const std::function<bool()>& stop) {
  std::vector<Answer> answers;
  for (const Approach& approach : Approaches()) {
    Answer answer;
    answer.approach = &approach;
    answer.advised = std::ranges::find(advice.approaches, approach.name) !=
                     advice.approaches.end();
    if (approach.offloads && !answer.advised) continue;
    answer.name = approach.name;
    if (const auto best = BestOf(approach, space, evaluator, threads, stop)) {
      Plan plan =
          PlanFromStrategy(space.index, *space.cluster, best->strategy).value();
      Evaluation evaluation = evaluator.Evaluate(plan);
      answer.best = {std::move(plan), std::move(evaluation)};
      answer.name = NameOf(approach, best->strategy);
      answer.strategy = ToString(best->strategy);
    } else if (auto ragged = RaggedOf(approach, space, evaluator, stop)) {
      Strategy rough = RoughStrategy(space.index, ragged->plan);
      rough.by_speed = false;
      answer.strategy = ToString(rough) + ", samples shared unevenly";
      answer.best = std::move(ragged);
    } else if (!stop()) {
      answer.impossible = WhyNone(approach, space);
    }
    answers.push_back(std::move(answer));
  }
  return answers;
}

// What the search finds from these, confirmed with shared links.
Result<std::vector<FoundPlan>> SearchFrom(const std::vector<FoundPlan>& starts,
                                          const Options& options,
                                          const Inputs& inputs,
                                          const SearchSpace& space,
                                          const Evaluator& evaluator) {
  SearchOptions search = SearchOptionsOf(options);
  search.share_links = true;
  search.candidates = kCandidates;
  search.stop = &CatchInterrupts();
  search.more_starts =
      StartsOnParts(inputs.graph, inputs.cluster,
                    {inputs.profile_or_null(), options.training,
                     space.constraints, search.threads, search.stop});
  for (const FoundPlan& start : starts) search.starts.push_back(start.plan);
  auto result = Search(space, evaluator, search);
  if (!result && search.stop->load()) {
    return Error{ErrorCode::kInterrupted, "interrupted", "explain"};
  }
  if (!result) return result.error();
  return std::move(result->candidates);
}

}  // namespace

Result<int> ExplainWhichStrategy(const Options& options, const Inputs& inputs) {
  const SearchSpace space(inputs.graph, inputs.cluster);
  const Evaluator evaluator(inputs.graph, inputs.cluster,
                            inputs.profile_or_null(), options.training,
                            Evaluator::kMostInSearch);
  const std::atomic<bool>& interrupted = CatchInterrupts();
  const auto stop = [&] { return interrupted.load(); };
  const int threads = ThreadCount(options.threads);

  Comparison c;
  c.network = NetworkOfDevice(inputs.cluster);
  // Where devices have no links of their own, none are "pcie" beside them.
  c.situation =
      SituationOf(space, evaluator,
                  ReferenceLink(inputs.cluster, LinkClass::kPcie).has_value(),
                  c.network >= kFastNetwork, threads, stop);
  c.advice = &AdviceFor(c.situation);
  c.answers = AnswersOf(*c.advice, space, evaluator, threads, stop);
  // The best plan of each answer, then what may be the answer here.
  std::vector<FoundPlan> plans;
  for (const Answer& answer : c.answers) {
    if (answer.best) plans.push_back(*answer.best);
  }
  const size_t answers = plans.size();
  if (inputs.plan) {
    plans.push_back({*inputs.plan, evaluator.Evaluate(*inputs.plan)});
  } else {
    auto found = SearchFrom(plans, options, inputs, space, evaluator);
    if (!found) return found.error();
    std::ranges::move(*found, std::back_inserter(plans));
    c.searched = true;
  }
  c.shares_links = ShareLinks(evaluator, plans);
  size_t next = 0;
  for (Answer& answer : c.answers) {
    if (answer.best) answer.best = plans[next++];
  }
  const auto best = std::min_element(
      plans.begin() + static_cast<int64_t>(c.searched ? 0 : answers),
      plans.end(), [](const FoundPlan& a, const FoundPlan& b) {
        return Better(a.score(), b.score());
      });
  c.plan = std::move(best->plan);
  c.evaluation = std::move(best->evaluation);
  c.band = StepTimeBand(inputs.cluster, c.evaluation.sources);
  c.name = TextbookName(space, c.plan);
  c.strategy = StrategyText(space.index, inputs.cluster, c.plan);
  if (options.json) {
    std::cout << ComparisonJson(c).ToString() << "\n";
  } else {
    std::cout << ComparisonText(c);
  }
  if (interrupted) {
    return Error{ErrorCode::kInterrupted, "interrupted; what was done is above",
                 "explain"};
  }
  if (c.evaluation.feasible()) return 0;
  return Error{
      ErrorCode::kInfeasible,
      (c.searched ? "no plan was found that fits: " : "the plan cannot run: ") +
          c.evaluation.violations.front(),
      "explain"};
}

}  // namespace tessera
