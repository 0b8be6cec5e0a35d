#include "planner/plan/validate.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <iostream>
#include <map>
#include <optional>
#include <thread>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/validate/accuracy.h"
#include "costmodel/validate/collectives.h"
#include "costmodel/validate/published_cluster.h"
#include "costmodel/validate/published_run.h"
#include "costmodel/validate/replay.h"
#include "planner/topology/stacks.h"
#include "tools/format.h"
#include "tools/json.h"
#include "tools/validate_collectives.h"
#include "tools/verb.h"

namespace tessera {
namespace {

// Characters of a source that are kept at each end.
constexpr size_t kSourceEnds = 26;

struct RunResult {
  const PublishedRun* run = nullptr;
  std::optional<double> predicted_s;
  double predicted_memory_gb = 0;
  std::string refused;  // why, if there is no prediction
  std::vector<std::string> assumptions;

  PredictedRun Predicted() const {
    return {run->group, *predicted_s, run->time_s};
  }
};

Result<void> Predict(std::span<const Stack> stacks, RunResult& result) {
  const PublishedRun& run = *result.run;
  if (run.unread) return *run.unread;
  TESSERA_TRY(Cluster cluster, ClusterOf(run, result.assumptions));
  cluster.stack = StackOf(run, stacks, result.assumptions);
  TESSERA_TRY(const Strategy strategy, StrategyOf(run, result.assumptions));
  TESSERA_TRY(const Graph graph, GraphOf(run, result.assumptions));
  const GraphIndex index(graph);
  TESSERA_TRY(Plan plan, PlanFromStrategy(index, cluster, strategy));
  SetRecomputeOf(run, index, plan);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const Evaluation evaluation = evaluator.Evaluate(plan);
  result.predicted_s = evaluation.step_time.seconds();
  for (const MemoryUse& use : evaluation.memory) {
    result.predicted_memory_gb =
        std::max(result.predicted_memory_gb,
                 static_cast<double>(use.total.value) * 1e-9);
  }
  return {};
}

// What is not asked of the model: rows without a result, or that do not say
// what was run.
std::string OutOfScope(const PublishedRun& run) {
  if (run.status != "ok") return "status: " + run.status;
  if (run.time_s <= 0) return "no time";
  if (!run.full_config) return "configuration not stated in full";
  return "";
}

std::vector<RunResult> PredictAll(const std::vector<PublishedRun>& runs,
                                  std::span<const Stack> stacks, int threads) {
  std::vector<RunResult> results(runs.size());
  std::atomic<size_t> next = 0;
  std::vector<std::jthread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&] {
      for (size_t i = next++; i < runs.size(); i = next++) {
        RunResult& result = results[i];
        result.run = &runs[i];
        result.refused = OutOfScope(runs[i]);
        if (!result.refused.empty()) continue;
        if (auto done = Predict(stacks, result); !done) {
          result.refused = done.error().ToString();
        }
      }
    });
  }
  return results;
}

struct SourceResult {
  std::string source;
  Accuracy accuracy;
  int refused = 0;  // rows with a full configuration and a time
};

struct Report {
  std::vector<SourceResult> sources;
  SourceResult total;  // rates: means over the sources
};

bool InScope(const RunResult& result) {
  return OutOfScope(*result.run).empty();
}

Report ReportOf(const std::vector<RunResult>& results) {
  std::map<std::string, std::vector<PredictedRun>> runs;
  std::map<std::string, int> refused;
  for (const RunResult& result : results) {
    if (!InScope(result)) continue;
    auto& of_source = runs[result.run->source];
    if (result.predicted_s) {
      of_source.push_back(result.Predicted());
    } else {
      ++refused[result.run->source];
    }
  }
  Report report;
  report.total.source = "mean over sources";
  const std::array fields = {&Accuracy::mape, &Accuracy::median_ape,
                             &Accuracy::bias, &Accuracy::kendall_tau,
                             &Accuracy::median_regret};
  std::array<std::vector<double>, fields.size()> values;
  for (const auto& [source, list] : runs) {
    SourceResult& row = report.sources.emplace_back();
    row.source = source;
    row.accuracy = AccuracyOf(list);
    row.refused = refused[source];
    report.total.refused += row.refused;
    report.total.accuracy.runs += row.accuracy.runs;
    for (size_t f = 0; f < fields.size(); ++f) {
      if (const auto value = row.accuracy.*fields[f])
        values[f].push_back(*value);
    }
  }
  for (size_t f = 0; f < fields.size(); ++f) {
    if (values[f].empty()) continue;
    double sum = 0;
    for (const double value : values[f]) sum += value;
    report.total.accuracy.*fields[f] =
        sum / static_cast<double>(values[f].size());
  }
  return report;
}

Json RateJson(std::optional<double> rate) {
  return rate ? Json(*rate) : Json();
}

Json SourceJson(const SourceResult& row) {
  const Accuracy& accuracy = row.accuracy;
  return Json::Object({{"source", row.source},
                       {"rows_used", accuracy.runs},
                       {"rows_refused", row.refused},
                       {"mape", RateJson(accuracy.mape)},
                       {"median_ape", RateJson(accuracy.median_ape)},
                       {"bias", RateJson(accuracy.bias)},
                       {"kendall_tau", RateJson(accuracy.kendall_tau)},
                       {"median_regret", RateJson(accuracy.median_regret)}});
}

Json ReportJson(const Report& report, const std::vector<RunResult>& results) {
  Json rows = Json::ArrayOf(results, [](const RunResult& result) {
    const PublishedRun& run = *result.run;
    Json row = Json::Object({{"id", run.id},
                             {"source", run.source},
                             {"line", run.line},
                             {"group", run.group},
                             {"measured_s", run.time_s}});
    if (result.predicted_s) {
      row.Set("predicted_s", *result.predicted_s);
      row.Set("error", result.Predicted().Error());
      row.Set("measured_memory_gb", run.mem_gb);
      row.Set("predicted_memory_gb", result.predicted_memory_gb);
    } else {
      row.Set("refused", result.refused);
    }
    row.Set("assumptions",
            Json::ArrayOf(result.assumptions,
                          [](const std::string& text) { return Json(text); }));
    return row;
  });
  return Json::Object({{"total", SourceJson(report.total)},
                       {"sources", Json::ArrayOf(report.sources, SourceJson)},
                       {"rows", std::move(rows)}});
}

std::string RateText(std::optional<double> rate) {
  return rate ? FormatPercent(*rate) : "-";
}

std::string ReportText(const Report& report,
                       const std::vector<RunResult>& results) {
  std::vector<std::vector<std::string>> table = {
      {"source", "used", "refused", "MAPE", "median", "bias", "tau", "regret"}};
  const auto add = [&](const SourceResult& row) {
    const Accuracy& accuracy = row.accuracy;
    table.push_back(
        {FormatEnds(row.source, kSourceEnds), std::to_string(accuracy.runs),
         std::to_string(row.refused), RateText(accuracy.mape),
         RateText(accuracy.median_ape), RateText(accuracy.bias),
         accuracy.kendall_tau ? FormatFixed(*accuracy.kendall_tau, 2) : "-",
         RateText(accuracy.median_regret)});
  };
  for (const SourceResult& row : report.sources) add(row);
  add(report.total);
  std::string out = FormatTable(table);

  std::map<std::string, int> reasons;
  std::vector<const RunResult*> worst;
  for (const RunResult& result : results) {
    if (result.predicted_s) {
      worst.push_back(&result);
    } else {
      ++reasons[result.refused];
    }
  }
  std::ranges::sort(worst, std::ranges::greater(), [](const RunResult* result) {
    return std::abs(result->Predicted().Error());
  });
  table = {{"worst", "measured", "predicted", "error"}};
  for (size_t i = 0; i < std::min<size_t>(10, worst.size()); ++i) {
    const RunResult& result = *worst[i];
    table.push_back({result.run->id, FormatTime(result.run->time_s),
                     FormatTime(*result.predicted_s),
                     FormatPercent(result.Predicted().Error())});
  }
  out += "\n" + FormatTable(table);
  table = {{"not used, because", "rows"}};
  for (const auto& [reason, rows] : reasons) {
    table.push_back({reason, std::to_string(rows)});
  }
  if (table.size() > 1) out += "\n" + FormatTable(table);
  return out;
}

}  // namespace

Result<int> RunValidate(const Options& options) {
  if (options.positional.empty()) {
    return InvalidInput("needs a table of measured runs", "TABLE.csv");
  }
  TESSERA_TRY(const bool collectives,
              IsTableOfCollectives(options.positional[0]));
  if (collectives) {
    TESSERA_TRY(const std::string report,
                CollectivesReport(options.positional[0], options.json));
    std::cout << report << std::flush;
    return 0;
  }
  TESSERA_TRY(const std::vector<PublishedRun> runs,
              ReadPublishedRuns(options.positional[0]));
  const int threads =
      options.threads > 0
          ? options.threads
          : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::vector<Stack> stacks(Stacks().begin(), Stacks().end());
  if (!options.stack.empty()) {
    auto stack = ParseStack(options.stack);
    if (!stack) return stack.error().At("--stack");
    *std::ranges::find(stacks, stack->name, &Stack::name) = *stack;
  }
  const std::vector<RunResult> results = PredictAll(runs, stacks, threads);
  const Report report = ReportOf(results);
  if (options.json) {
    std::cout << ReportJson(report, results).ToString() << std::endl;
  } else {
    std::cout << ReportText(report, results) << std::flush;
  }
  return 0;
}

}  // namespace tessera
