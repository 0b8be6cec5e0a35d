#include "tools/compare.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "costmodel/simulate/simulator.h"
#include "planner/base/format.h"
#include "planner/plan/stages.h"
#include "tools/text.h"

namespace tessera {
namespace {

// What takes equally long wherever it runs: a collective in one subgroup (told
// by its first rank), or the receives of one tensor on one rank.
using Alike = std::tuple<int, int32_t, int>;

Alike AlikeOf(const TaskGraph& tasks, const Span& span) {
  const Task& task = tasks.task(span.task);
  if (task.kind == TaskKind::kRecv) {
    const Value& value = tasks.value(task.writes[0]);
    return {1, value.tensor.value, span.rank};
  }
  const DeviceGroup& group = tasks.group(task.group);
  const auto self = std::ranges::find(group.devices, DeviceId(span.rank)) -
                    group.devices.begin();
  for (const auto& subgroup : Subgroups(group, task.axes)) {
    if (std::ranges::find(subgroup, self) != subgroup.end()) {
      return {0, span.task.value, subgroup.front()};
    }
  }
  return {0, span.task.value, -1};
}

bool Waits(const Task& task) {
  return task.kind == TaskKind::kComm || task.kind == TaskKind::kRecv;
}

// The spread of Measurement: of sorted values.
double SpreadOf(const std::vector<double>& sorted) {
  const auto at = [&](double share) {
    return sorted[static_cast<size_t>(share *
                                      static_cast<double>(sorted.size() - 1))];
  };
  return at(0.5) > 0 ? (at(0.75) - at(0.25)) / at(0.5) : 0;
}

}  // namespace

std::vector<Timeline> WithoutWaiting(const TaskGraph& tasks,
                                     std::vector<Timeline> timelines) {
  std::map<Alike, Duration> shortest;
  for (const Timeline& timeline : timelines) {
    for (const Span& span : timeline.spans) {
      if (!Waits(tasks.task(span.task))) continue;
      const Duration time = span.end - span.start;
      const auto [found, is_new] =
          shortest.try_emplace(AlikeOf(tasks, span), time);
      if (!is_new) found->second = std::min(found->second, time);
    }
  }
  for (Timeline& timeline : timelines) {
    for (Span& span : timeline.spans) {
      if (!Waits(tasks.task(span.task))) continue;
      span.start = span.end - shortest.at(AlikeOf(tasks, span));
    }
  }
  return timelines;
}

std::vector<TaskComparison> CompareTasks(
    const Pricer& pricer, const TaskGraph& tasks, const Graph& graph,
    const std::vector<Timeline>& measured) {
  const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
  const std::vector<ProfileKey> keys = ProfileKeysOf(pricer, tasks);
  std::map<ProfileKey, std::vector<double>> seconds;
  for (const Timeline& timeline : WithoutWaiting(tasks, measured)) {
    for (const Span& span : timeline.spans) {
      const Task& task = tasks.task(span.task);
      if (task.kind == TaskKind::kRecv || pricer.fusions().IsElsewhere(task))
        continue;
      seconds[keys[span.task.index()]].push_back(
          (span.end - span.start).seconds());
    }
  }
  std::map<ProfileKey, TaskComparison> found;
  std::map<ProfileKey, std::map<GroupId, int>> counts;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    if (!seconds.contains(keys[t]) ||
        pricer.fusions().IsElsewhere(tasks.tasks[t])) {
      continue;
    }
    TaskComparison& row = found[keys[t]];
    if (row.example.empty()) {
      row.key = keys[t];
      row.example = NameOf(tasks, graph, TaskId(t));
    }
    // Tasks of one key may differ in what the profile cannot tell apart.
    row.predicted = Max(row.predicted, costs[t].duration);
    row.source = std::max(row.source, costs[t].source);
    row.tasks = std::max(row.tasks, ++counts[keys[t]][tasks.tasks[t].group]);
  }
  std::vector<TaskComparison> rows;
  for (auto& [key, row] : found) {
    std::vector<double>& times = seconds[key];
    std::ranges::sort(times);
    row.measured = {times[times.size() / 2], SpreadOf(times),
                    static_cast<int>(times.size())};
    rows.push_back(std::move(row));
  }
  std::ranges::stable_sort(
      rows, std::ranges::greater(),
      [](const TaskComparison& row) { return std::abs(row.ErrorSeconds()); });
  return rows;
}

ProfileDb Learn(const Pricer& pricer, const TaskGraph& tasks,
                const std::vector<TaskComparison>& comparisons,
                ProfileOrigin origin) {
  ProfileDb profile;
  profile.origin = std::move(origin);
  for (const TaskComparison& row : comparisons) {
    if (row.measured.median_s > 0) profile.rows[row.key] = row.measured;
  }
  const Pricer learned(pricer.graph(), pricer.cluster(), &profile,
                       pricer.options());
  const std::vector<TaskCost> costs = PriceTasks(learned, tasks);
  const std::vector<ProfileKey> keys = ProfileKeysOf(pricer, tasks);
  ProfileDb kept = profile;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Measurement* const row = profile.Find(keys[t]);
    if (row == nullptr || tasks.tasks[t].kind == TaskKind::kRecv) continue;
    if (costs[t].source != CostSource::kMeasured ||
        costs[t].duration != Duration::FromSeconds(row->median_s)) {
      kept.rows.erase(keys[t]);
    }
  }
  return kept;
}

std::string CompareText(const std::vector<TaskComparison>& comparisons,
                        size_t most) {
  std::vector<std::vector<std::string>> table = {{"task", "in a step",
                                                  "predicted", "by", "measured",
                                                  "spread", "error in all"}};
  for (size_t i = 0; i < std::min(most, comparisons.size()); ++i) {
    const TaskComparison& row = comparisons[i];
    const double error = row.ErrorSeconds();
    table.push_back(
        {row.example, std::to_string(row.tasks), FormatTime(row.predicted),
         std::string(CostSources()[static_cast<size_t>(row.source)].name),
         FormatTime(row.measured.median_s),
         row.measured.samples > 1 ? FormatPercent(row.measured.spread) : "-",
         (error < 0 ? "-" : "+") + FormatTime(std::abs(error))});
  }
  return "tasks by the error of their prediction; those of one kernel at one "
         "size, or of one exchange, are one line\n" +
         FormatTable(table);
}

Json CompareJson(const std::vector<TaskComparison>& comparisons) {
  return Json::ArrayOf(comparisons, [](const TaskComparison& row) {
    return Json::Object(
        {{"name", row.key.name},
         {"example", row.example},
         {"rule", row.key.rule},
         {"extents",
          Json::ArrayOf(row.key.extents, [](int64_t n) { return Json(n); })},
         {"ranks", row.key.ranks},
         {"payload_bytes", row.key.payload.value},
         {"tasks", row.tasks},
         {"predicted_s", row.predicted.seconds()},
         {"source", CostSources()[static_cast<size_t>(row.source)].name},
         {"measured_s", row.measured.median_s},
         {"spread", row.measured.spread},
         {"samples", row.measured.samples},
         {"error_s", row.ErrorSeconds()}});
  });
}

}  // namespace tessera
