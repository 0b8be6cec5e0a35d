#include "tools/validate_collectives.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "costmodel/validate/accuracy.h"
#include "costmodel/validate/collectives.h"
#include "planner/base/format.h"
#include "tools/json.h"
#include "tools/text.h"

namespace tessera {
namespace {

// Characters of a source that are kept at each end.
constexpr size_t kSourceEnds = 18;

// Below, latencies decide, which depend on more than the links.
constexpr int64_t kLeast = int64_t{1} << 20;
constexpr int64_t kMost = int64_t{1} << 33;

struct Line {
  std::string source, collective;
  int refused = 0;
  std::vector<PredictedRun> large;  // kLeast to kMost
  std::vector<PredictedRun> small;  // below
};

std::vector<Line> LinesOf(
    const std::vector<CollectivePrediction>& predictions) {
  std::map<std::pair<std::string, std::string>, Line> lines;
  Line all;
  all.source = "all rows";
  for (const CollectivePrediction& prediction : predictions) {
    const PublishedCollective& row = *prediction.measured;
    const std::string collective = row.kind.substr(0, row.kind.find(' '));
    Line& line = lines[{row.source, collective}];
    line.source = row.source;
    line.collective = collective;
    if (!prediction.refused.empty()) {
      ++line.refused;
      ++all.refused;
      continue;
    }
    const PredictedRun run = {row.sweep, prediction.seconds, row.seconds};
    if (row.bytes > kMost) continue;
    for (Line* to : {&line, &all}) {
      (row.bytes >= kLeast ? to->large : to->small).push_back(run);
    }
  }
  std::vector<Line> out;
  for (auto& [key, line] : lines) out.push_back(std::move(line));
  out.push_back(std::move(all));
  return out;
}

// nccl-tests' bus bandwidth of a row in GB/s, were it to take `seconds`.
double BusBandwidth(const CollectivePrediction& prediction, double seconds) {
  const PublishedCollective& row = *prediction.measured;
  const CommKind kind = row.kind.starts_with("all_reduce")
                            ? CommKind::kAllReduce
                        : row.kind.starts_with("send") ? CommKind::kSendRecv
                                                       : CommKind::kAllGather;
  return BusFactor(kind, row.ranks) * static_cast<double>(row.bytes) / seconds *
         1e-9;
}

Json LineJson(const Line& line) {
  const auto rate = [](std::optional<double> value) {
    return value ? Json(*value) : Json();
  };
  const Accuracy large = AccuracyOf(line.large);
  const Accuracy small = AccuracyOf(line.small);
  return Json::Object({{"source", line.source},
                       {"collective", line.collective},
                       {"rows_used", large.runs},
                       {"rows_refused", line.refused},
                       {"mape", rate(large.mape)},
                       {"median_ape", rate(large.median_ape)},
                       {"bias", rate(large.bias)},
                       {"rows_below_1mb", small.runs},
                       {"median_ape_below_1mb", rate(small.median_ape)}});
}

Json RowJson(const CollectivePrediction& prediction) {
  const PublishedCollective& row = *prediction.measured;
  Json out = Json::Object({{"sweep", row.sweep},
                           {"line", row.line},
                           {"collective", row.kind},
                           {"ranks", row.ranks},
                           {"bytes", row.bytes},
                           {"measured_s", row.seconds}});
  if (!prediction.refused.empty()) {
    out.Set("refused", prediction.refused);
    return out;
  }
  out.Set("cluster", prediction.cluster);
  out.Set("assumed",
          Json::ArrayOf(prediction.assumed,
                        [](const std::string& text) -> Json { return text; }));
  out.Set("algorithm", std::string(prediction.algorithm));
  out.Set("protocol", std::string(prediction.protocol));
  out.Set("predicted_s", prediction.seconds);
  out.Set("measured_bus_gb_per_s", BusBandwidth(prediction, row.seconds));
  out.Set("predicted_bus_gb_per_s",
          BusBandwidth(prediction, prediction.seconds));
  out.Set("error", prediction.Error());
  return out;
}

std::string Text(const std::vector<Line>& lines,
                 const std::vector<CollectivePrediction>& predictions) {
  std::vector<std::vector<std::string>> table = {
      {"source", "collective", "used", "refused", "median", "mean", "bias",
       "below 1 MB", "median"}};
  const auto rate = [](std::optional<double> value) {
    return value ? FormatPercent(*value) : "-";
  };
  for (const Line& line : lines) {
    const Accuracy large = AccuracyOf(line.large);
    const Accuracy small = AccuracyOf(line.small);
    table.push_back({FormatEnds(line.source, kSourceEnds), line.collective,
                     std::to_string(large.runs), std::to_string(line.refused),
                     rate(large.median_ape), rate(large.mape), rate(large.bias),
                     std::to_string(small.runs), rate(small.median_ape)});
  }
  std::string out = FormatTable(table);

  std::vector<const CollectivePrediction*> worst;
  std::map<std::string, int> reasons;
  for (const CollectivePrediction& prediction : predictions) {
    if (!prediction.refused.empty()) {
      ++reasons[prediction.refused];
    } else if (prediction.measured->bytes >= kLeast &&
               prediction.measured->bytes <= kMost) {
      worst.push_back(&prediction);
    }
  }
  std::ranges::sort(worst, std::ranges::greater(), [](const auto* prediction) {
    return std::abs(
        std::log(prediction->seconds / prediction->measured->seconds));
  });
  table = {{"worst", "ranks", "bytes", "GB/s", "predicted", "by", "error"}};
  for (size_t i = 0; i < std::min<size_t>(10, worst.size()); ++i) {
    const CollectivePrediction& row = *worst[i];
    table.push_back(
        {row.measured->sweep, std::to_string(row.measured->ranks),
         FormatBytes({row.measured->bytes}),
         FormatFixed(BusBandwidth(row, row.measured->seconds), 1),
         FormatFixed(BusBandwidth(row, row.seconds), 1),
         std::string(row.algorithm) + " " + std::string(row.protocol),
         FormatPercent(row.Error())});
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

Result<CollectivesReport> ReportCollectives(const std::string& path,
                                            bool json) {
  TESSERA_TRY(const std::vector<PublishedCollective> rows,
              ReadPublishedCollectives(path));
  const std::vector<CollectivePrediction> predictions =
      PredictCollectives(rows);
  std::vector<Line> lines = LinesOf(predictions);
  CollectivesReport report;
  report.any = std::ranges::any_of(
      predictions, [](const auto& row) { return row.refused.empty(); });
  if (!json) {
    report.text = Text(lines, predictions);
    return report;
  }
  const Line total = std::move(lines.back());
  lines.pop_back();
  report.text = Json::Object({{"total", LineJson(total)},
                              {"sources", Json::ArrayOf(lines, LineJson)},
                              {"rows", Json::ArrayOf(predictions, RowJson)}})
                    .ToString() +
                "\n";
  return report;
}

}  // namespace tessera
