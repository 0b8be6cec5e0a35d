#include "tools/whatif_report.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "planner/base/append.h"
#include "planner/base/format.h"
#include "tools/step_report.h"
#include "tools/svg_plot.h"

namespace tessera {
namespace {

constexpr std::string_view kStyle = R"(
:root { --bg: #ffffff; --fg: #1c2430; --soft: #5b6675; --line: #d9dfe7;
  --c0: #1f6fb4; --c1: #c8551b; --c2: #2e8b57; --c3: #8a4fb3;
  --c4: #b8860b; --c5: #17808c; --c6: #b03060; --c7: #5f6f7f; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14181e; --fg: #e4e9f0; --soft: #9aa6b5; --line: #333c48;
    --c0: #6cb2eb; --c1: #f0965f; --c2: #6fcf97; --c3: #c39be6;
    --c4: #e5c15a; --c5: #5cc8d4; --c6: #ee86ac; --c7: #aab7c4; } }
body { background: var(--bg); color: var(--fg); margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p.soft, li { color: var(--soft); }
code { font-size: 0.85rem; overflow-wrap: anywhere; }
.plots { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); }
svg { width: 100%; height: auto; }
svg text { fill: var(--fg); } svg .title { font-size: 15px; font-weight: 600; }
svg .label { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.curve { fill: none; stroke-width: 2.2; }
.limit { stroke-dasharray: 6 4; stroke-width: 1.6; }
.dot { stroke: var(--bg); stroke-width: 1; }
.ring { fill: none; stroke-width: 1.6; }
svg .mark { font-size: 12px; paint-order: stroke; stroke: var(--bg);
  stroke-width: 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.82rem; }
th, td { padding: 0.25rem 0.45rem; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; }
td.words { white-space: normal; }
th:first-child, td:first-child { text-align: left; }
td.no { color: var(--c1); text-align: left; white-space: normal; }
)";

std::string Colours() {
  std::string out;
  for (int i = 0; i < 8; ++i) {
    const std::string n = std::to_string(i);
    out += ".curve.s" + n + ", .ring.s" + n + " { stroke: var(--c" + n +
           "); } .dot.s" + n + ", .bar.s" + n + " { fill: var(--c" + n +
           "); }\n";
  }
  return out;
}

using Value = double (*)(const Prediction&);

double StepSeconds(const Prediction& p) {
  return p.evaluation.step_time.seconds();
}
double MemoryGb(const Prediction& p) {
  return static_cast<double>(p.memory.value) * 1e-9;
}
double CapacityGb(const Prediction& p) {
  return static_cast<double>(p.capacity.value) * 1e-9;
}
double UsdPerMillionTokens(const Prediction& p) {
  return p.usd_per_hour ? *p.usd_per_hour / 3600 / p.tokens_per_s * 1e6 : 0;
}
double KilotokensPerSecond(const Prediction& p) {
  return p.tokens_per_s * 1e-3;
}

// The cells as lines over one axis: a line for each combination of the others.
struct Lines {
  std::string x_label;
  std::vector<std::string> x;
  std::vector<std::string> names;
  std::vector<std::vector<const Cell*>> cells;  // by line, by x
};

Lines LinesOver(const WhatifResult& result, size_t axis) {
  Lines lines;
  lines.x_label = result.axes[axis].path;
  lines.x = result.axes[axis].values;
  for (const Cell& cell : result.cells) {
    std::string name;
    for (size_t a = 0; a < cell.values.size(); ++a) {
      if (a == axis) continue;
      AppendTo(name, ", ", result.axes[a].path + " " + cell.values[a]);
    }
    auto known = std::ranges::find(lines.names, name);
    if (known == lines.names.end()) {
      lines.names.push_back(name);
      lines.cells.emplace_back(lines.x.size(), nullptr);
      known = lines.names.end() - 1;
    }
    const auto at = std::ranges::find(lines.x, cell.values[axis]);
    lines.cells[static_cast<size_t>(known - lines.names.begin())]
               [static_cast<size_t>(at - lines.x.begin())] = &cell;
  }
  return lines;
}

// Whether the axis has names, such as those of stacks, between which there is
// nothing: none begins with a digit.
bool HasNames(const Lines& lines) {
  return std::ranges::none_of(lines.x, [](const std::string& x) {
    return !x.empty() && (('0' <= x[0] && x[0] <= '9') || x[0] == '.');
  });
}

// More lines than this say nothing.
constexpr size_t kMostLines = 8;

// What is not drawn, for a plot's title.
std::string NotDrawn(const Lines& lines) {
  if (lines.cells.size() <= kMostLines) return "";
  return " (" + std::to_string(kMostLines) + " of " +
         std::to_string(lines.cells.size()) + " curves; the table has all)";
}

Plot PlotOf(const Lines& lines, const std::string& title,
            const std::string& y_label, bool whatever_fits, Value value) {
  Plot plot = {.title = title + NotDrawn(lines),
               .x_label = lines.x_label,
               .y_label = y_label,
               .x = lines.x,
               .bars = HasNames(lines)};
  for (size_t l = 0; l < std::min(kMostLines, lines.cells.size()); ++l) {
    PlotSeries series = {lines.names[l], {}, false};
    for (const Cell* cell : lines.cells[l]) {
      const bool shown =
          cell != nullptr && HasFigures(*cell) &&
          (whatever_fits || cell->prediction->evaluation.feasible());
      series.y.push_back(shown ? std::optional(value(*cell->prediction))
                               : std::nullopt);
    }
    plot.series.push_back(std::move(series));
  }
  return plot;
}

bool Priced(const WhatifResult& result) {
  return std::ranges::any_of(result.cells, [](const Cell& cell) {
    return cell.prediction && cell.prediction->usd_per_hour;
  });
}

// Milliseconds where seconds would be small.
std::string StepPlot(const Lines& lines) {
  Plot plot = PlotOf(lines, "Step time over " + lines.x_label, "step time (s)",
                     false, StepSeconds);
  double most = 0;
  for (const PlotSeries& series : plot.series) {
    for (const auto& y : series.y) most = std::max(most, y.value_or(0));
  }
  if (most < 1) {
    plot.y_label = "step time (ms)";
    for (PlotSeries& series : plot.series) {
      for (auto& y : series.y) {
        if (y) *y *= 1e3;
      }
    }
  }
  return SvgOf(plot);
}

std::string MemoryPlot(const Lines& lines) {
  Plot plot =
      PlotOf(lines, "Memory of the fullest device over " + lines.x_label,
             "memory (GB)", true, MemoryGb);
  PlotSeries capacity = {"capacity", {}, true};
  for (const Cell* cell : lines.cells.front()) {
    capacity.y.push_back(cell != nullptr && cell->prediction
                             ? std::optional(CapacityGb(*cell->prediction))
                             : std::nullopt);
  }
  plot.series.push_back(std::move(capacity));
  return SvgOf(plot);
}

// Predictions over devices, by their number.
struct Curve {
  std::string name;
  std::map<int, const Prediction*> points;
};

// The knee of scaling: the first device count from which on to the next
// throughput grows less than by the square root of what devices grow by (twice
// the devices, less than 1.41 times the throughput). Other counts behind it, or
// more of them, do not move it.
std::optional<int> KneeOf(const Curve& curve) {
  auto at = curve.points.begin();
  for (auto next = std::next(at); next != curve.points.end(); at = next++) {
    const double devices = static_cast<double>(next->first) / at->first;
    const double faster = next->second->tokens_per_s / at->second->tokens_per_s;
    if (faster * faster < devices) return at->first;
  }
  return std::nullopt;
}

// Throughput and efficiency over the devices: the knee. `limit` of efficiency,
// 0: none.
std::string KneePlots(const std::vector<Curve>& curves, double limit) {
  const std::string unit(curves.front().points.begin()->second->unit);
  Plot speed = {.title = "Throughput over devices",
                .x_label = "devices",
                .y_label = "thousand " + unit + "/s"};
  Plot efficiency = {.title = "Efficiency over devices",
                     .x_label = "devices",
                     .y_label = unit + "/s per device (% of the first)"};
  std::set<int> devices;
  for (const Curve& curve : curves) {
    for (const auto& [count, p] : curve.points) devices.insert(count);
  }
  PlotSeries proportion = {
      curves.size() > 1 ? "in proportion to the first" : "in proportion",
      {},
      true};
  PlotSeries least = {"limit", {}, true};
  const auto first_rate = [](const Curve& curve) {
    const Prediction& first = *curve.points.begin()->second;
    return first.tokens_per_s / first.devices;
  };
  for (const int count : devices) {
    for (Plot* plot : {&speed, &efficiency}) {
      plot->x.push_back(std::to_string(count));
      plot->at.push_back(count);
    }
    proportion.y.emplace_back(first_rate(curves.front()) * count * 1e-3);
    least.y.emplace_back(100 * limit);
  }
  for (const Curve& curve : curves) {
    PlotSeries fast = {curve.name, {}, false};
    PlotSeries efficient = {curve.name, {}, false};
    const std::optional<int> knee = KneeOf(curve);
    for (const int count : devices) {
      if (knee == count) {
        fast.marked = efficient.marked = fast.y.size();
        fast.mark = efficient.mark = "knee: " + std::to_string(count);
      }
      const auto found = curve.points.find(count);
      const bool has = found != curve.points.end();
      fast.y.push_back(has ? std::optional(KilotokensPerSecond(*found->second))
                           : std::nullopt);
      efficient.y.push_back(
          has ? std::optional(100 * found->second->tokens_per_s /
                              (count * first_rate(curve)))
              : std::nullopt);
    }
    speed.series.push_back(std::move(fast));
    efficiency.series.push_back(std::move(efficient));
  }
  speed.series.push_back(std::move(proportion));
  if (limit > 0) efficiency.series.push_back(std::move(least));
  return SvgOf(speed) + SvgOf(efficiency);
}

// Where an axis changes the number of devices: a curve for each line.
std::string GridKnee(const Lines& lines) {
  std::vector<Curve> curves;
  bool knee = false;
  for (size_t l = 0; l < std::min(kMostLines, lines.cells.size()); ++l) {
    Curve curve = {lines.names[l], {}};
    for (const Cell* cell : lines.cells[l]) {
      if (cell == nullptr) continue;
      const Prediction* p = GoodPrediction(*cell);
      if (p != nullptr) curve.points.emplace(p->devices, p);
    }
    knee |= curve.points.size() > 1;
    if (!curve.points.empty()) curves.push_back(std::move(curve));
  }
  return knee ? KneePlots(curves, 0) : "";
}

// Text in tables, the first row as the heading. What is long may wrap.
std::string TableOf(const TableRows& rows) {
  constexpr size_t kLong = 24;
  std::string out = "<div class=\"scroll\"><table>\n";
  for (size_t r = 0; r < rows.size(); ++r) {
    out += "<tr>";
    for (const std::string& text : rows[r]) {
      const std::string tag = r == 0 ? "th" : "td";
      const bool words = r > 0 && text.size() > kLong;
      out += "<" + tag + (words ? " class=\"words\">" : ">") + Escaped(text) +
             "</" + tag + ">";
    }
    out += "</tr>\n";
  }
  return out + "</table></div>\n";
}

// Where the time of one step goes.
std::string BreakdownPlot(const Prediction& p) {
  Plot plot = {.title = "Where the step's time goes",
               .x_label = "",
               .y_label = "share (%)",
               .series = {{}},
               .bars = true};
  for (const BreakdownPart& part : PartsOf(p.evaluation.breakdown)) {
    if (part.time == Duration{}) continue;
    plot.x.emplace_back(part.name);
    plot.series[0].y.emplace_back(100 * part.time.seconds() / StepSeconds(p));
  }
  return plot.x.empty() ? "" : SvgOf(plot);
}

std::string SensitivityPlot(const Prediction& p) {
  if (!p.sensitivity) return "";
  Plot plot = {.title = "What 1 % more of a resource gives",
               .x_label = "resource",
               .y_label = "the step gets shorter by (%)",
               .series = {{}},
               .bars = true};
  for (const Elasticity& e : p.sensitivity->resources) {
    if (e.value < 0.005) continue;
    std::string name(e.resource->name);
    for (const std::string_view common : {"device.", "fabric."}) {
      if (name.starts_with(common)) name = name.substr(common.size());
    }
    plot.x.push_back(name);
    plot.series[0].y.emplace_back(e.value);
  }
  return plot.x.empty() ? "" : SvgOf(plot);
}

std::string CellTable(const WhatifResult& result) {
  const bool runs = result.tokens > 0;
  std::string out = "<div class=\"scroll\"><table>\n<tr>";
  for (const Axis& axis : result.axes) {
    out += "<th>" + Escaped(axis.path) + "</th>";
  }
  out += "<th>devices</th><th>plan</th><th>step</th><th>" + UnitText(result) +
         "/s</th>"
         "<th>MFU</th><th>memory</th><th>held up by</th><th>USD a step</th>";
  if (runs) out += "<th>days</th><th>USD</th><th>MWh</th>";
  out += "</tr>\n";
  for (const Cell& cell : result.cells) {
    out += "<tr>";
    for (const std::string& value : cell.values) {
      out += "<td>" + Escaped(value) + "</td>";
    }
    if (!HasFigures(cell)) {
      out += "<td class=\"no\" colspan=\"" + std::to_string(runs ? 11 : 8) +
             "\">" + Escaped(ProblemText(cell)) + "</td></tr>\n";
      continue;
    }
    const Prediction& p = *cell.prediction;
    const auto add = [&](const std::string& text) {
      out += "<td>" + Escaped(text) + "</td>";
    };
    add(std::to_string(p.devices));
    out += "<td class=\"words\">" +
           Escaped(p.plan_name.empty() ? p.strategy : p.plan_name) + "</td>";
    add(FormatTime(p.evaluation.step_time));
    add(FormatCount(p.tokens_per_s));
    add(MfuText(p));
    add(FormatBytes(p.memory) + " of " + FormatBytes(p.capacity));
    if (GoodPrediction(cell) == nullptr) {
      out += "<td class=\"no\">" + Escaped(ProblemText(cell)) + "</td>";
    } else if (p.bottleneck.empty()) {
      add("-");
    } else {
      add(p.bottleneck + " " + FormatPercent(p.bottleneck_share));
    }
    add(p.usd_per_hour ? FormatNumber(*p.usd_per_hour / 3600 * StepSeconds(p))
                       : "-");
    if (runs) {
      add(DaysText(*p.run));
      add(p.run->usd ? FormatNumber(*p.run->usd) : "-");
      add(p.run->kwh ? FormatNumber(*p.run->kwh / 1000) : "-");
    }
    out += "</tr>\n";
  }
  return out + "</table></div>\n";
}

// The fastest cell, and the one whose devices do most.
std::string Summary(const WhatifResult& result) {
  const Cell* fastest = nullptr;
  const Cell* thriftiest = nullptr;
  const auto per_device = [](const Cell& cell) {
    return cell.prediction->tokens_per_s / cell.prediction->devices;
  };
  for (const Cell& cell : result.cells) {
    if (GoodPrediction(cell) == nullptr) continue;
    if (fastest == nullptr ||
        cell.prediction->tokens_per_s > fastest->prediction->tokens_per_s) {
      fastest = &cell;
    }
    if (thriftiest == nullptr || per_device(cell) > per_device(*thriftiest)) {
      thriftiest = &cell;
    }
  }
  if (fastest == nullptr) return "<p>No cell fits.</p>\n";
  const auto name = [&](const Cell& cell) {
    std::string text;
    for (size_t a = 0; a < cell.values.size(); ++a) {
      AppendTo(text, ", ", result.axes[a].path + " " + cell.values[a]);
    }
    return text.empty() ? std::string("as given") : text;
  };
  const Prediction& p = *fastest->prediction;
  return "<p>Most " + UnitText(result) +
         " a second: " + Escaped(name(*fastest)) + ", with " +
         FormatCount(p.tokens_per_s) + " (a step of " +
         FormatTime(p.evaluation.step_time) +
         (p.mfu ? ", " + MfuText(p) + " MFU" : "") + ")" +
         (p.bottleneck.empty() ? "" : ", held up by " + Escaped(p.bottleneck)) +
         ". Most " + UnitText(result) +
         " a second and device: " + Escaped(name(*thriftiest)) + ", with " +
         FormatCount(per_device(*thriftiest)) + ".</p>\n";
}

std::string GridSection(const WhatifResult& result) {
  std::string plots;
  bool knee = false;
  for (size_t a = 0; a < result.axes.size(); ++a) {
    const Lines lines = LinesOver(result, a);
    if (lines.x.size() < 2) continue;
    plots += StepPlot(lines);
    plots += MemoryPlot(lines);
    if (Priced(result)) {
      plots += SvgOf(PlotOf(lines, "Cost over " + lines.x_label,
                            "USD per million " + UnitText(result), false,
                            UsdPerMillionTokens));
    }
    if (!knee) {
      const std::string more = GridKnee(lines);
      knee = !more.empty();
      plots += more;
    }
  }
  if (result.cells.size() == 1) {
    if (const Prediction* p = GoodPrediction(result.cells.front())) {
      plots += BreakdownPlot(*p) + SensitivityPlot(*p);
    }
  }
  std::string out = Summary(result);
  if (!plots.empty()) out += "<div class=\"plots\">\n" + plots + "</div>\n";
  return out + "<h2>All cells</h2>\n" + CellTable(result);
}

std::string ScalingSection(const WhatifResult& result) {
  Curve curve;
  for (const ScalingPoint& point : result.scaling->points) {
    const Prediction* p = GoodPrediction(point.cell);
    if (p != nullptr) curve.points.emplace(p->devices, p);
  }
  std::string out = "<h2>How far it scales</h2>\n<p>" +
                    Escaped(ScalingAnswer(result)) + ".</p>\n";
  if (curve.points.size() > 1) {
    out += "<div class=\"plots\">\n" +
           KneePlots({curve}, result.scaling_limit) + "</div>\n";
  }
  return out + TableOf(ScalingRows(result));
}

std::string CheapestSection(const WhatifResult& result) {
  Plot cost = {.title = "Cost of the run",
               .x_label = "cluster",
               .y_label = "thousand USD",
               .series = {{}},
               .bars = true};
  Plot days = {.title = "Length of the run",
               .x_label = "cluster",
               .y_label = "days",
               .series = {{}},
               .bars = true};
  for (const Offer& offer : result.cheapest->offers) {
    const Prediction* p = GoodPrediction(offer.cell);
    if (p == nullptr) continue;
    cost.x.push_back(offer.cluster);
    days.x.push_back(offer.cluster);
    cost.series[0].y.push_back(p->run->usd ? std::optional(*p->run->usd * 1e-3)
                                           : std::nullopt);
    days.series[0].y.emplace_back(p->run->days);
  }
  if (result.days > 0) {
    // Parentheses: braces would be a list of two values.
    std::vector<std::optional<double>> limit(days.x.size(), result.days);
    days.series.push_back({"limit", std::move(limit), true});
  }
  std::string out = "<h2>Which cluster is cheapest</h2>\n<p>" +
                    Escaped(CheapestAnswer(result)) + ".</p>\n";
  if (!cost.x.empty()) {
    out += "<div class=\"plots\">\n" + SvgOf(cost) + SvgOf(days) + "</div>\n";
  }
  out += TableOf(CheapestRows(result)) + "<ul>\n";
  for (const Offer& offer : result.cheapest->offers) {
    if (offer.refused.empty()) continue;
    out += "<li>" + Escaped(offer.cluster + ": " + offer.refused) + "</li>\n";
  }
  return out + "</ul>\n";
}

std::string FitSection(const Fit& fit) {
  std::string out = "<h2>Does it fit</h2>\n";
  for (const std::string& line : FitAnswer(fit)) {
    out += "<p>" + Escaped(line) + "</p>\n";
  }
  return out + TableOf(FitRows(fit));
}

}  // namespace

std::string WhatifReport(const WhatifResult& result) {
  const std::string title = result.model + " on " + result.cluster;
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, "
      "initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light "
      "dark\">\n<title>" +
      Escaped(title) + "</title>\n<style>" + std::string(kStyle) + Colours() +
      "</style>\n</head>\n<body>\n<h1>" + Escaped(title) + "</h1>\n<p><code>" +
      Escaped(result.command) + "</code></p>\n";
  if (result.interrupted) {
    out += "<p>Interrupted: some cells were not done.</p>\n";
  }
  if (!result.cells.empty()) out += GridSection(result);
  if (result.jitter) {
    out += "<p>With jitter half of the steps take at most " +
           FormatTime(result.jitter->p50) + " and 95 % at most " +
           FormatTime(result.jitter->p95) + ".</p>\n";
  }
  if (result.scaling) out += ScalingSection(result);
  if (result.cheapest) out += CheapestSection(result);
  if (result.fit) out += FitSection(*result.fit);
  const TableRows sensitivity = SensitivityRows(result);
  if (result.sensitivity && !sensitivity.empty()) {
    out += "<h2>Sensitivity</h2>\n" + TableOf(sensitivity) +
           "<p class=\"soft\">By the evaluator, without time lost on shared "
           "links.</p>\n";
  }
  const std::vector<std::string> notes = NoteLines(result);
  if (!notes.empty()) {
    out += "<h2>Notes</h2>\n<ul>\n";
    for (const std::string& note : notes) {
      out += "<li>" + Escaped(note) + "</li>\n";
    }
    out += "</ul>\n";
  }
  for (const std::string& sources : SourcesAnswers(result)) {
    out += "<p class=\"soft\">By " + Escaped(sources) + ".</p>\n";
  }
  return out + "</body>\n</html>\n";
}

}  // namespace tessera
