#include "planner/plan/validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iostream>
#include <map>
#include <optional>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/validate/accuracy.h"
#include "costmodel/validate/collectives.h"
#include "costmodel/validate/measured_memory.h"
#include "costmodel/validate/published_cluster.h"
#include "costmodel/validate/published_run.h"
#include "costmodel/validate/replay.h"
#include "planner/base/format.h"
#include "planner/base/threads.h"
#include "planner/topology/stacks.h"
#include "tools/json.h"
#include "tools/step_report.h"
#include "tools/text.h"
#include "tools/validate_collectives.h"
#include "tools/verb.h"

namespace tessera {
namespace {

// Characters of a source that are kept at each end.
constexpr size_t kSourceEnds = 26;

struct RunResult {
  const PublishedRun* run = nullptr;
  std::optional<double> predicted_s;
  MemoryUse predicted_memory;  // of the fullest device that is looked at
  std::string refused;         // why, if there is no prediction
  std::vector<std::string> assumptions;

  // Whether there is a prediction beside a measured time, or memory.
  bool HasTime() const { return predicted_s && run->time_s > 0; }
  bool HasMemory() const { return predicted_s && run->mem_gb > 0; }
  PredictedRun Time() const { return {run->group, *predicted_s, run->time_s}; }
  // REQUIRES: HasMemory.
  PredictedRun Memory() const {
    const MeasuredMemory measured = MeasuredMemoryOf(*run);
    const Bytes counted = CountedBy(measured.measure, predicted_memory);
    return {"", static_cast<double>(counted.value),
            static_cast<double>(measured.bytes.value)};
  }
};

Result<void> Predict(std::span<const Stack> stacks, RunResult& result) {
  const PublishedRun& run = *result.run;
  if (run.unread) return *run.unread;
  TESSERA_TRY(Cluster cluster, ClusterOf(run, result.assumptions));
  cluster.stack = StackOf(run, stacks, result.assumptions);
  TESSERA_TRY(const Strategy strategy, StrategyOf(run, result.assumptions));
  TESSERA_TRY(const Graph graph, GraphOf(run, result.assumptions));
  TESSERA_RETURN_IF_ERROR(CheckPrecision(run, cluster, graph));
  const GraphIndex index(graph);
  TESSERA_TRY(Plan plan, PlanFromStrategy(index, cluster, strategy));
  SetRecomputeOf(run, index, plan);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const Evaluation evaluation = evaluator.Evaluate(plan);
  result.predicted_s = evaluation.step_time.seconds();
  result.predicted_memory =
      ReadBy(MeasuredMemoryOf(run).measure, cluster, plan, evaluation);
  return {};
}

// What is not asked of the model: rows without a result, or that do not say
// what was run.
std::string OutOfScope(const PublishedRun& run) {
  if (run.status != "ok" && run.status != "memory-only") {
    return "status: " + run.status;
  }
  if (run.time_s <= 0 && run.mem_gb <= 0) return "no time";
  if (!run.full_config) return "configuration not stated in full";
  return "";
}

std::vector<RunResult> PredictAll(const std::vector<PublishedRun>& runs,
                                  std::span<const Stack> stacks, int threads) {
  std::vector<RunResult> results(runs.size());
  ForEach(threads, runs.size(), [&](size_t i) {
    RunResult& result = results[i];
    result.run = &runs[i];
    result.refused = OutOfScope(runs[i]);
    if (!result.refused.empty()) return;
    if (auto done = Predict(stacks, result); !done) {
      result.refused = done.error().ToString();
    }
  });
  return results;
}

struct SourceResult {
  std::string source;
  Accuracy accuracy;
  Accuracy memory;
  int refused = 0;  // rows with a full configuration and a result
};

struct Report {
  std::vector<SourceResult> sources;
  SourceResult total;  // rates: means over the sources
};

bool InScope(const RunResult& result) {
  return OutOfScope(*result.run).empty();
}

Report ReportOf(const std::vector<RunResult>& results) {
  struct Rows {
    std::vector<PredictedRun> times;
    std::vector<PredictedRun> memory;
    int refused = 0;
  };
  std::map<std::string, Rows> rows;
  for (const RunResult& result : results) {
    if (!InScope(result)) continue;
    Rows& of_source = rows[result.run->source];
    if (!result.predicted_s) ++of_source.refused;
    if (result.HasTime()) of_source.times.push_back(result.Time());
    if (result.HasMemory()) of_source.memory.push_back(result.Memory());
  }
  Report report;
  report.total.source = "mean over sources";
  const std::array fields = {&Accuracy::mape, &Accuracy::median_ape,
                             &Accuracy::bias, &Accuracy::kendall_tau,
                             &Accuracy::median_regret};
  // Means over the sources, of times and of memory.
  for (const auto& [source, list] : rows) {
    SourceResult& row = report.sources.emplace_back();
    row.source = source;
    row.accuracy = AccuracyOf(list.times);
    row.memory = AccuracyOf(list.memory);
    row.refused = list.refused;
    report.total.refused += row.refused;
  }
  for (Accuracy SourceResult::*of :
       {&SourceResult::accuracy, &SourceResult::memory}) {
    Accuracy& total = report.total.*of;
    for (const SourceResult& row : report.sources) total.runs += (row.*of).runs;
    for (const auto field : fields) {
      double sum = 0;
      int count = 0;
      for (const SourceResult& row : report.sources) {
        const auto value = row.*of.*field;
        sum += value.value_or(0);
        count += value.has_value();
      }
      if (count > 0) total.*field = sum / count;
    }
  }
  return report;
}

Json RateJson(std::optional<double> rate) {
  return rate ? Json(*rate) : Json();
}

Json MemoryAccuracyJson(const Accuracy& memory) {
  return Json::Object({{"rows", memory.runs},
                       {"mape", RateJson(memory.mape)},
                       {"median_ape", RateJson(memory.median_ape)},
                       {"bias", RateJson(memory.bias)}});
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
                       {"median_regret", RateJson(accuracy.median_regret)},
                       {"memory", MemoryAccuracyJson(row.memory)}});
}

// By category; and where it was measured, what of it the measure counts.
Json RowMemoryJson(const RunResult& result) {
  Json json = MemoryJson(result.predicted_memory);
  if (!result.HasMemory()) return json;
  const MeasuredMemory measured = MeasuredMemoryOf(*result.run);
  json.Set("measure", std::string(NameOf(measured.measure)));
  json.Set("measured_bytes", measured.bytes.value);
  json.Set("predicted_bytes",
           CountedBy(measured.measure, result.predicted_memory).value);
  json.Set("error", result.Memory().Error());
  return json;
}

Json ReportJson(const Report& report, const std::vector<RunResult>& results) {
  Json rows = Json::ArrayOf(results, [](const RunResult& result) {
    const PublishedRun& run = *result.run;
    Json row = Json::Object({{"id", run.id},
                             {"source", run.source},
                             {"line", run.line},
                             {"group", run.group}});
    if (run.time_s > 0) row.Set("measured_s", run.time_s);
    if (result.predicted_s) {
      row.Set("predicted_s", *result.predicted_s);
      if (result.HasTime()) row.Set("error", result.Time().Error());
      row.Set("memory", RowMemoryJson(result));
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

std::string MemoryTable(const Report& report) {
  std::vector<std::vector<std::string>> table = {
      {"peak memory of a device", "rows", "MAPE", "median", "bias"}};
  const auto add = [&](const SourceResult& row) {
    if (row.memory.runs == 0) return;
    table.push_back({FormatEnds(row.source, kSourceEnds),
                     std::to_string(row.memory.runs), RateText(row.memory.mape),
                     RateText(row.memory.median_ape),
                     RateText(row.memory.bias)});
  };
  for (const SourceResult& row : report.sources) add(row);
  add(report.total);
  return FormatTable(table);
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
  if (report.total.memory.runs > 0) {
    out += "\n" + MemoryTable(report);
  }

  std::map<std::string, int> reasons;
  std::vector<const RunResult*> worst;
  for (const RunResult& result : results) {
    if (result.HasTime()) worst.push_back(&result);
    if (!result.predicted_s) ++reasons[result.refused];
  }
  std::ranges::sort(worst, std::ranges::greater(), [](const RunResult* result) {
    return std::abs(result->Time().Error());
  });
  table = {{"worst", "measured", "predicted", "error"}};
  for (size_t i = 0; i < std::min<size_t>(10, worst.size()); ++i) {
    const RunResult& result = *worst[i];
    table.push_back({result.run->id, FormatTime(result.run->time_s),
                     FormatTime(*result.predicted_s),
                     FormatPercent(result.Time().Error())});
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
    for (const std::string_view flag : {"--stack", "--threads"}) {
      if (options.Given(flag)) {
        return InvalidInput("has no effect on a table of collectives",
                            std::string(flag));
      }
    }
    TESSERA_TRY(const CollectivesReport report,
                ReportCollectives(options.positional[0], options.json));
    std::cout << report.text << std::flush;
    return report.any ? 0 : 1;
  }
  TESSERA_TRY(const std::vector<PublishedRun> runs,
              ReadPublishedRuns(options.positional[0]));
  std::vector<Stack> stacks(Stacks().begin(), Stacks().end());
  if (!options.stack.empty()) {
    auto stack = ParseStack(options.stack);
    if (!stack) return stack.error().At("--stack");
    *std::ranges::find(stacks, stack->name, &Stack::name) = *stack;
  }
  const std::vector<RunResult> results =
      PredictAll(runs, stacks, ThreadCount(options.threads));
  const Report report = ReportOf(results);
  if (options.json) {
    std::cout << ReportJson(report, results).ToString() << std::endl;
  } else {
    std::cout << ReportText(report, results) << std::flush;
  }
  // Of a table of which nothing is predicted the report says why.
  const bool any = std::ranges::any_of(results, [](const RunResult& result) {
    return result.predicted_s.has_value();
  });
  return any ? 0 : 1;
}

}  // namespace tessera
