#include "tools/run_report.h"

#include <algorithm>

#include "planner/base/format.h"
#include "planner/plan/stages.h"
#include "tools/text.h"

namespace tessera {
namespace {

Breakdown Sum(Breakdown a, const Breakdown& b) {
  a.compute += b.compute;
  a.optimizer += b.optimizer;
  a.all_reduce += b.all_reduce;
  a.all_gather += b.all_gather;
  a.reduce_scatter += b.reduce_scatter;
  a.all_to_all += b.all_to_all;
  a.send_recv += b.send_recv;
  a.copies += b.copies;
  a.idle += b.idle;
  return a;
}

Breakdown Divide(Breakdown b, int64_t n) {
  for (Duration* part :
       {&b.compute, &b.optimizer, &b.all_reduce, &b.all_gather,
        &b.reduce_scatter, &b.all_to_all, &b.send_recv, &b.copies, &b.idle}) {
    part->picoseconds /= n;
  }
  return b;
}

std::string HowText(const FileUse& file) {
  return std::string(file.direct ? "direct" : "buffered") +
         (file.ring ? ", io_uring" : ", pread and pwrite");
}

// Of rank 0.
std::string GraphText(const GraphUse& use) {
  std::string out = "graphs " + std::to_string(use.graphs) + ", of " +
                    std::to_string(use.captured) + " of " +
                    std::to_string(use.tasks) + " tasks";
  std::string left;
  for (const auto& [kind, count] : use.left) {
    left += (left.empty() ? "; not captured: " : ", ") + std::to_string(count) +
            " " + kind;
  }
  return out + left + "\ntimes by category are those of a step without graphs";
}

Json NumbersJson(const std::vector<double>& numbers) {
  return Json::ArrayOf(numbers, [](double number) { return Json(number); });
}

// Where the loss is scaled.
std::string SkippedText(const TrainingResult& result) {
  const int64_t skipped = std::ssize(result.skipped_steps);
  return std::to_string(skipped) + " of " +
         std::to_string(std::ssize(result.loss_scales)) +
         (skipped == 1 ? " steps was" : " steps were") +
         " skipped, as gradients times the loss scale were not finite; the "
         "last one was taken at a scale of " +
         FormatFixed(result.loss_scales.back(), 0);
}

}  // namespace

Breakdown MeasuredBreakdown(const TaskGraph& tasks,
                            const std::vector<Timeline>& timelines) {
  Duration step;
  for (const Timeline& timeline : timelines) {
    step = Max(step, timeline.step_time);
  }
  Breakdown sum;
  for (Timeline& timeline : WithoutWaiting(tasks, timelines)) {
    timeline.step_time = step;
    sum = Sum(sum, BreakdownOf(tasks, timeline));
  }
  return Divide(sum, std::max<int64_t>(1, std::ssize(timelines)));
}

Breakdown PredictedBreakdown(const TaskGraph& tasks, const Timeline& timeline) {
  Breakdown sum;
  int64_t ranks = 0;
  for (const DeviceSet& set : DeviceSets(tasks.plan_groups())) {
    Timeline own;
    own.step_time = timeline.step_time;
    for (const Span& span : timeline.spans) {
      if (Holds(set, span.group) || span.group == tasks.world) {
        own.spans.push_back(span);
      }
    }
    const Breakdown breakdown = BreakdownOf(tasks, own);
    for (size_t i = 0; i < set.devices.size(); ++i) {
      sum = Sum(sum, breakdown);
      ++ranks;
    }
  }
  return Divide(sum, std::max<int64_t>(1, ranks));
}

Json RunJson(const RunReport& report) {
  const TrainingResult& result = *report.result;
  Json memory = Json::Array();
  for (size_t rank = 0; rank < result.memory.size(); ++rank) {
    Json row = Json::Object({{"rank", static_cast<int64_t>(rank)}});
    row.Extend(MemoryJson(result.memory[rank]));
    row.Set("host", result.host_memory[rank].total.value);
    const FileUse& file = result.files[rank];
    row.Set("file", file.length.value);
    if (file.length > Bytes{}) {
      row.Set("file_io",
              Json::Object({{"direct", file.direct}, {"io_uring", file.ring}}));
    }
    if (rank < result.os_peak.size()) {
      row.Set("os_peak", result.os_peak[rank].value);
    }
    memory.Append(std::move(row));
  }
  Json predicted_memory = Json::Array();
  for (size_t rank = 0; rank < report.predicted_memory.size(); ++rank) {
    Json row = Json::Object({{"rank", static_cast<int64_t>(rank)}});
    row.Extend(MemoryJson(report.predicted_memory[rank]));
    row.Set("host", report.predicted_host[rank].total.value);
    row.Set("file", report.predicted_file[rank].total.value);
    predicted_memory.Append(std::move(row));
  }
  Json out = Json::Object(
      {{"first_step", result.first_step},
       {"losses", NumbersJson(result.losses)},
       {"step_times_s",
        Json::ArrayOf(result.step_times,
                      [](Duration time) { return Json(time.seconds()); })},
       {"step_time_s", result.step_time.seconds()},
       {"tokens_per_s", result.tokens_per_s},
       {"validation_loss",
        result.validation_loss ? Json(*result.validation_loss) : Json()},
       {"interrupted", result.interrupted},
       {"memory", Json::Object({{"per_rank", std::move(memory)}})},
       {"measured",
        Json::Object(
            {{"step_time_s", result.step_time.seconds()},
             {"model_tflops_per_gpu", report.rates.model_tflops_per_gpu},
             {"mfu", OrNull(report.rates.mfu)},
             {"mfu_causal", OrNull(report.rates.mfu_causal)},
             {"hfu", OrNull(report.rates.hfu)},
             {"breakdown", BreakdownJson(report.measured)}})},
       {"predicted",
        Json::Object(
            {{"step_time_s", report.predicted.step_time.seconds()},
             {"breakdown", BreakdownJson(report.predicted.breakdown)},
             {"memory",
              Json::Object({{"per_rank", std::move(predicted_memory)}})},
             {"sources",
              Json::Object(
                  {{"measured", report.predicted.sources.measured},
                   {"interpolated", report.predicted.sources.interpolated},
                   {"analytical", report.predicted.sources.analytical}})}})}});
  if (!result.loss_scales.empty()) {
    out.Set("loss_scales", NumbersJson(result.loss_scales));
    out.Set("skipped_steps",
            Json::ArrayOf(result.skipped_steps,
                          [](int64_t step) { return Json(step + 1); }));
  }
  if (result.graphs.tasks > 0) {
    Json left = Json::Object();
    for (const auto& [kind, count] : result.graphs.left) left.Set(kind, count);
    out.Set("graphs", Json::Object({{"graphs", result.graphs.graphs},
                                    {"tasks", result.graphs.tasks},
                                    {"captured", result.graphs.captured},
                                    {"not_captured", std::move(left)}}));
  }
  if (report.check) out.Set("check", CheckJson(*report.check));
  if (!report.comparisons.empty()) {
    out.Set("tasks", CompareJson(report.comparisons));
  }
  return out;
}

std::string RunText(const RunReport& report) {
  const TrainingResult& result = *report.result;
  const SourceShares& sources = report.predicted.sources;
  std::string out =
      "\nstep time by category, mean over the ranks (predicted "
      "from " +
      FormatPercent(sources.measured) + " measured, " +
      FormatPercent(sources.interpolated) + " interpolated, " +
      FormatPercent(sources.analytical) + " analytical times)\n";
  std::vector<std::vector<std::string>> rows = {
      {"", "predicted", "measured", "predicted/measured"}};
  const auto add = [&](std::string_view name, Duration predicted,
                       Duration measured) {
    if (predicted == Duration{} && measured == Duration{}) return;
    rows.push_back(
        {std::string(name), FormatTime(predicted), FormatTime(measured),
         measured == Duration{}
             ? "-"
             : FormatFixed(predicted.seconds() / measured.seconds(), 2)});
  };
  const auto predicted = PartsOf(report.predicted.breakdown);
  const auto measured = PartsOf(report.measured);
  for (size_t i = 0; i < predicted.size(); ++i) {
    add(predicted[i].name, predicted[i].time, measured[i].time);
  }
  add("step", report.predicted.step_time, result.step_time);
  out += FormatTable(rows);
  if (result.memory.size() > 1) {
    out += "what is measured of an exchange is also its wait for other ranks\n";
  }

  out += "model FLOPs " + FlopsText(report.rates) + "\n";
  if (!result.skipped_steps.empty()) out += SkippedText(result) + "\n";
  if (result.graphs.tasks > 0) out += GraphText(result.graphs) + "\n";
  if (report.check) out += CheckText(*report.check) + "\n";

  out += "\npeak memory\n";
  rows = {{"rank", "predicted", "measured", "process"}};
  for (const MemoryPart& part : MemoryParts(MemoryUse{})) {
    rows[0].emplace_back(part.name);
  }
  for (size_t rank = 0; rank < result.memory.size(); ++rank) {
    auto& row = rows.emplace_back();
    row = {
        std::to_string(rank), FormatBytes(report.predicted_memory[rank].total),
        FormatBytes(result.memory[rank].total),
        rank < result.os_peak.size() ? FormatBytes(result.os_peak[rank]) : "-"};
    for (const MemoryPart& part : MemoryParts(result.memory[rank])) {
      row.push_back(FormatBytes(part.bytes));
    }
  }
  out += FormatTable(rows);

  const auto has_host = [](const MemoryUse& use) {
    return use.total > Bytes{};
  };
  const auto has_file = [](const FileUse& file) {
    return file.length > Bytes{};
  };
  if (!report.comparisons.empty()) {
    out += "\n" + CompareText(report.comparisons);
  }
  if (std::ranges::none_of(result.host_memory, has_host) &&
      std::ranges::none_of(result.files, has_file)) {
    return out;
  }
  out += "\npeak beside the device\n";
  rows = {{"rank", "host predicted", "host measured", "file predicted",
           "file measured", "file I/O"}};
  for (size_t rank = 0; rank < result.host_memory.size(); ++rank) {
    const FileUse& file = result.files[rank];
    rows.push_back(
        {std::to_string(rank), FormatBytes(report.predicted_host[rank].total),
         FormatBytes(result.host_memory[rank].total),
         FormatBytes(report.predicted_file[rank].total),
         FormatBytes(file.length), has_file(file) ? HowText(file) : "-"});
  }
  return out + FormatTable(rows);
}

}  // namespace tessera
