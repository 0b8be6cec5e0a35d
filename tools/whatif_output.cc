#include "tools/whatif_output.h"

#include <algorithm>

#include "costmodel/whatif/band.h"
#include "tools/format.h"
#include "tools/step_report.h"

namespace tessera {
namespace {

using Row = std::vector<std::string>;

std::string UsdText(double usd) {
  return FormatNumber(usd) + " USD";
}

std::string MemoryText(const Prediction& p) {
  return FormatBytes(p.memory) + " of " + FormatBytes(p.capacity);
}

std::string BottleneckText(const Prediction& p) {
  return p.bottleneck + " " + FormatPercent(p.bottleneck_share);
}

// The columns of a cell behind its values; a problem stands in the last.
std::vector<Row> CellRows(const WhatifResult& result) {
  Row heading;
  for (const Axis& axis : result.axes) heading.push_back(axis.path);
  if (result.axes.empty()) heading.emplace_back("cell");
  const bool runs = result.tokens > 0;
  heading.insert(heading.end(), {"devices", "step", "tokens/s", "MFU"});
  if (runs) heading.insert(heading.end(), {"days", "cost"});
  heading.insert(heading.end(), {"memory", "held up by"});
  if (result.replanned) heading.emplace_back("plan");
  std::vector<Row> rows = {heading};
  for (const Cell& cell : result.cells) {
    Row& row = rows.emplace_back(cell.values);
    if (result.axes.empty()) row.emplace_back("as given");
    if (!cell.prediction) {
      while (row.size() + 1 + (result.replanned ? 1 : 0) < heading.size()) {
        row.emplace_back("-");
      }
      row.push_back(ProblemText(cell));
      if (result.replanned) row.emplace_back("-");
      continue;
    }
    const Prediction& p = *cell.prediction;
    row.insert(row.end(),
               {std::to_string(p.devices), FormatTime(p.evaluation.step_time),
                FormatCount(p.tokens_per_s), FormatPercent(p.mfu)});
    if (runs) {
      row.push_back(FormatNumber(p.run->days));
      row.push_back(p.run->usd ? UsdText(*p.run->usd) : "no price");
    }
    row.push_back(MemoryText(p));
    row.push_back(p.evaluation.feasible() ? BottleneckText(p)
                                          : ProblemText(cell));
    if (result.replanned) row.push_back(p.strategy);
  }
  return rows;
}

std::string Line(std::string_view label, const std::string& text) {
  constexpr size_t kWidth = 14;
  return "  " + std::string(label) +
         std::string(kWidth - std::min(kWidth - 1, label.size()), ' ') + text +
         "\n";
}

std::string SourcesText(const SourceShares& sources) {
  return FormatPercent(sources.measured) + " measured, " +
         FormatPercent(sources.interpolated) + " interpolated, " +
         FormatPercent(sources.analytical) + " analytical task times; " +
         BandText();
}

std::string GoodputText(const Goodput& goodput) {
  std::string text = FormatPercent(goodput.fraction) +
                     " of the time in steps that count (Daly 2006)";
  if (goodput.interval > 0) {
    text += "; a checkpoint each " + FormatTime(goodput.interval) +
            " of work takes " + FormatPercent(goodput.saving);
  }
  return text;
}

// One cell in full.
std::string CellText(const Cell& cell) {
  std::string out;
  if (!cell.prediction) return "  " + ProblemText(cell) + "\n";
  const Prediction& p = *cell.prediction;
  out += Line("plan", p.strategy + " on " + std::to_string(p.devices) +
                          " devices of " + std::to_string(p.nodes) +
                          (p.nodes == 1 ? " node" : " nodes"));
  out += Line("step time", FormatTime(p.evaluation.step_time) + ", by " +
                               SourcesText(p.evaluation.sources));
  out += Line("throughput", FormatCount(p.tokens_per_s) + " tokens/s, MFU " +
                                FormatPercent(p.mfu));
  std::string breakdown;
  for (const BreakdownPart& part : PartsOf(p.evaluation.breakdown)) {
    if (part.time == Duration{}) continue;
    breakdown +=
        (breakdown.empty() ? "" : ", ") + std::string(part.name) + " " +
        FormatPercent(part.time.seconds() / p.evaluation.step_time.seconds());
  }
  if (!breakdown.empty()) out += Line("time goes to", Wrap(breakdown, 16));
  out += Line("held up by", BottleneckText(p));
  out += Line("memory",
              MemoryText(p) +
                  (p.evaluation.feasible() ? "" : ": " + ProblemText(cell)));
  std::string parts;
  for (const MemoryPart& part : MemoryParts(p.memory_use)) {
    if (part.bytes == Bytes{}) continue;
    parts += (parts.empty() ? "" : ", ") + std::string(part.name) + " " +
             FormatBytes(part.bytes);
  }
  out += Line("memory has", Wrap(parts, 16));
  const double step = p.evaluation.step_time.seconds();
  if (p.usd_per_hour) {
    out += Line("money", UsdText(*p.usd_per_hour * step / 3600) + " a step, " +
                             UsdText(*p.usd_per_hour) + " an hour");
  }
  if (p.watts) {
    out += Line("energy", FormatNumber(*p.watts * step / 3.6e6) +
                              " kWh a step (boards alone, at full power)");
  }
  if (p.goodput) out += Line("goodput", Wrap(GoodputText(*p.goodput), 16));
  if (p.run) {
    std::string text = FormatCount(p.run->steps) + " steps, " +
                       FormatNumber(p.run->days) + " days";
    if (p.run->usd) text += ", " + UsdText(*p.run->usd);
    if (p.run->kwh) text += ", " + FormatNumber(*p.run->kwh / 1000) + " MWh";
    out += Line("the run", text);
  }
  if (!p.missing.empty()) {
    std::string names;
    for (const std::string& name : p.missing) {
      names += (names.empty() ? "" : ", ") + name;
    }
    out += Line("not known", names + " (--set gives them)");
  }
  for (const std::string& note : cell.notes) out += Line("note", note);
  return out;
}

std::string SensitivityText(const WhatifResult& result) {
  std::vector<Row> rows = {{"1 % more of"}};
  std::vector<const Prediction*> columns;
  for (const Cell& cell : result.cells) {
    const Prediction* p = GoodPrediction(cell);
    if (p == nullptr || !p->sensitivity) continue;
    std::string name;
    for (const std::string& value : cell.values) {
      name += (name.empty() ? "" : " ") + value;
    }
    rows[0].push_back(name.empty() ? "shortens the step by" : name);
    columns.push_back(p);
  }
  if (columns.empty()) return "";
  const auto percent = [](double value) {
    return FormatFixed(value, 3) + " %";
  };
  for (const Resource& resource : Resources()) {
    Row row = {std::string(resource.name)};
    bool any = false;
    for (const Prediction* p : columns) {
      const auto found = std::ranges::find(p->sensitivity->resources, &resource,
                                           &Elasticity::resource);
      const bool has = found != p->sensitivity->resources.end();
      any |= has;
      row.push_back(has ? percent(found->value) : "-");
    }
    if (any) rows.push_back(std::move(row));
  }
  Row rest = {"(nothing of these)"};
  Row memory = {"device.memory to spare"};
  for (const Prediction* p : columns) {
    rest.push_back(percent(p->sensitivity->unexplained));
    memory.push_back(FormatBytes(p->capacity - p->memory));
  }
  rows.push_back(std::move(rest));
  rows.push_back(std::move(memory));
  return "\n" + FormatTable(rows);
}

std::string ScalingText(const WhatifResult& result) {
  const Scaling& scaling = *result.scaling;
  std::vector<Row> rows = {
      {"devices", "nodes", "step", "tokens/s", "efficiency", "held up by"}};
  for (const ScalingPoint& point : scaling.points) {
    const Prediction* p = GoodPrediction(point.cell);
    if (p == nullptr) {
      rows.push_back({std::to_string(point.devices),
                      std::to_string(point.nodes), "-", "-", "-",
                      ProblemText(point.cell)});
      continue;
    }
    rows.push_back({std::to_string(point.devices), std::to_string(point.nodes),
                    FormatTime(p->evaluation.step_time),
                    FormatCount(p->tokens_per_s),
                    FormatPercent(point.efficiency), BottleneckText(*p)});
  }
  std::string out = "\n" + FormatTable(rows) + "\n  ";
  const std::string kind = result.weak ? "weak" : "strong";
  const std::string limit = FormatPercent(result.scaling_limit);
  if (scaling.devices == 0) return out + "it does not run at the start\n";
  out += kind + " scaling is at least " + limit + " efficient up to " +
         std::to_string(scaling.devices) + " devices";
  if (scaling.too_many > 0) {
    out += ", and no more at " + std::to_string(scaling.too_many);
  }
  return out + "\n";
}

std::string CheapestText(const WhatifResult& result) {
  std::vector<Row> rows = {{"cluster", "plan", "step", "days", "USD", "MWh"}};
  for (const Offer& offer : result.cheapest->offers) {
    if (!offer.cell.prediction) {
      rows.push_back({offer.cluster, offer.refused, "-", "-", "-", "-"});
      continue;
    }
    const Prediction& p = *offer.cell.prediction;
    rows.push_back({offer.cluster, p.strategy,
                    FormatTime(p.evaluation.step_time),
                    FormatNumber(p.run->days),
                    p.run->usd ? FormatNumber(*p.run->usd) : "-",
                    p.run->kwh ? FormatNumber(*p.run->kwh / 1000) : "-"});
  }
  std::string out = "\n" + FormatTable(rows) + "\n";
  for (const Offer& offer : result.cheapest->offers) {
    if (!offer.refused.empty()) {
      out += "  " + offer.cluster + ": " + offer.refused + "\n";
    }
  }
  if (!result.cheapest->best) return out + "  none of them is an answer\n";
  return out + "  the cheapest is " +
         result.cheapest->offers[*result.cheapest->best].cluster + "\n";
}

std::string FitText(const Fit& fit) {
  std::string out = "\n";
  if (fit.fits) {
    return out + "  it fits: " + FormatBytes(fit.memory) + " of " +
           FormatBytes(fit.capacity) + ", " +
           FormatBytes(fit.capacity - fit.memory) + " to spare\n";
  }
  out += "  it does not fit: " + FormatBytes(fit.memory) + " of " +
         FormatBytes(fit.capacity) + " on the fullest device\n";
  out += "  as it is it fits devices with device.memory=" +
         FormatBytes(fit.memory_needed) + "\n";
  if (fit.changes.empty()) {
    return out +
           "  no change of one or two keys of the strategy makes it fit\n";
  }
  std::vector<Row> rows = {{"with", "step", "memory", "strategy"}};
  constexpr size_t kShown = 8;
  for (size_t i = 0; i < std::min(kShown, fit.changes.size()); ++i) {
    const FitChange& change = fit.changes[i];
    rows.push_back({change.change, FormatTime(change.step_time),
                    FormatBytes(change.memory), change.strategy});
  }
  return out + "  the smallest changes with which it fits, fastest first:\n\n" +
         FormatTable(rows);
}

template <typename T>
Json OrNull(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

Json PredictionJson(const Prediction& p) {
  const SourceShares& sources = p.evaluation.sources;
  Json json = Json::Object(
      {{"strategy", p.strategy},
       {"devices", p.devices},
       {"nodes", p.nodes},
       {"global_batch", p.global_batch},
       {"step_time_s", p.evaluation.step_time.seconds()},
       {"tokens_per_s", p.tokens_per_s},
       {"mfu", p.mfu},
       {"feasible", p.evaluation.feasible()},
       {"violations",
        Json::ArrayOf(p.evaluation.violations,
                      [](const std::string& text) { return Json(text); })},
       {"memory_bytes", p.memory.value},
       {"memory", MemoryJson(p.memory_use)},
       {"memory_capacity_bytes", p.capacity.value},
       {"bottleneck", p.bottleneck},
       {"bottleneck_share", p.bottleneck_share},
       {"breakdown", BreakdownJson(p.evaluation.breakdown)},
       {"sources", Json::Object({{"measured", sources.measured},
                                 {"interpolated", sources.interpolated},
                                 {"analytical", sources.analytical}})},
       {"usd_per_hour", OrNull(p.usd_per_hour)},
       {"watts", OrNull(p.watts)}});
  if (const auto band = StepTimeBand()) {
    json.Set("error_band", Json::Object({{"median", band->median},
                                         {"mean", band->mean},
                                         {"source", band->source}}));
  }
  if (p.sensitivity) {
    Json values = Json::Object();
    for (const Elasticity& e : p.sensitivity->resources) {
      values.Set(std::string(e.resource->name), e.value);
    }
    values.Set("unexplained", p.sensitivity->unexplained);
    json.Set("sensitivity", std::move(values));
  }
  if (p.goodput) {
    json.Set("goodput",
             Json::Object({{"fraction", p.goodput->fraction},
                           {"checkpoint_interval_s", p.goodput->interval},
                           {"checkpoint_share", p.goodput->saving},
                           {"data_stall_s", p.goodput->stall}}));
  }
  if (p.run) {
    json.Set("run", Json::Object({{"steps", p.run->steps},
                                  {"days", p.run->days},
                                  {"usd", OrNull(p.run->usd)},
                                  {"kwh", OrNull(p.run->kwh)}}));
  }
  json.Set("not_known", Json::ArrayOf(p.missing, [](const std::string& name) {
             return Json(name);
           }));
  return json;
}

Json CellJson(const Cell& cell, const std::vector<Axis>& axes) {
  Json values = Json::Object();
  for (size_t a = 0; a < cell.values.size(); ++a) {
    values.Set(axes[a].path, cell.values[a]);
  }
  Json json = Json::Object({{"values", std::move(values)},
                            {"done", cell.done},
                            {"problem", ProblemText(cell)}});
  if (cell.prediction) json.Extend(PredictionJson(*cell.prediction));
  json.Set("notes", Json::ArrayOf(cell.notes, [](const std::string& note) {
             return Json(note);
           }));
  return json;
}

// RFC 4180.
std::string CsvField(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + "\"";
}

std::string CsvLine(const Row& row) {
  std::string line;
  for (size_t i = 0; i < row.size(); ++i) {
    line += (i == 0 ? "" : ",") + CsvField(row[i]);
  }
  return line + "\n";
}

// As JSON prints it: the shortest text that reads back as the same.
std::string CsvNumber(double value) {
  return Json(value).OneLine();
}

}  // namespace

std::string ProblemText(const Cell& cell) {
  if (!cell.done) return "not done";
  if (!cell.prediction) return cell.problem;
  const Evaluation& evaluation = cell.prediction->evaluation;
  if (evaluation.feasible()) return "";
  const Prediction& p = *cell.prediction;
  if (p.memory <= p.capacity) {
    return "does not fit: " + evaluation.violations.front();
  }
  return "does not fit: " + FormatBytes(p.memory - p.capacity) + " too much";
}

const Prediction* GoodPrediction(const Cell& cell) {
  if (!cell.prediction || !cell.prediction->evaluation.feasible()) {
    return nullptr;
  }
  return &*cell.prediction;
}

std::string BandText() {
  const auto band = StepTimeBand();
  if (!band) return "no error band";
  return "off by " + FormatPercent(band->median) + " in the median (" +
         std::string(band->source) + ")";
}

std::string WhatifText(const WhatifResult& result, bool sensitivity) {
  std::string out = result.model + " on " + result.cluster + "\n\n";
  if (result.cells.size() == 1) {
    out += CellText(result.cells[0]);
  } else if (!result.cells.empty()) {
    out += FormatTable(CellRows(result));
    for (const Cell& cell : result.cells) {
      if (!cell.prediction) continue;
      out += "\n  by " + SourcesText(cell.prediction->evaluation.sources) +
             " (of the first cell)\n";
      break;
    }
    for (const Cell& cell : result.cells) {
      for (const std::string& note : cell.notes) {
        std::string where;
        for (const std::string& value : cell.values) where += value + " ";
        out += "  " + where + "- " + note + "\n";
      }
    }
  }
  if (sensitivity) out += SensitivityText(result);
  if (result.jitter) {
    const Jitter& jitter = *result.jitter;
    out += Line("with jitter",
                "half of the steps take at most " + FormatTime(jitter.p50) +
                    ", 95 % at most " + FormatTime(jitter.p95) + " (" +
                    std::to_string(jitter.samples) + " samples)");
  }
  if (result.scaling) out += ScalingText(result);
  if (result.cheapest) out += CheapestText(result);
  if (result.fit) out += FitText(*result.fit);
  return out;
}

Json WhatifJson(const WhatifResult& result) {
  Json json = Json::Object(
      {{"model", result.model},
       {"cluster", result.cluster},
       {"interrupted", result.interrupted},
       {"cells", Json::ArrayOf(result.cells, [&](const Cell& cell) {
          return CellJson(cell, result.axes);
        })}});
  if (result.jitter) {
    json.Set("jitter", Json::Object({{"p50_s", result.jitter->p50},
                                     {"p95_s", result.jitter->p95},
                                     {"mean_s", result.jitter->mean},
                                     {"samples", result.jitter->samples}}));
  }
  if (result.scaling) {
    const auto point = [&](const ScalingPoint& p) {
      Json row = Json::Object({{"nodes", p.nodes},
                               {"devices", p.devices},
                               {"efficiency", p.efficiency}});
      row.Extend(CellJson(p.cell, {}));
      return row;
    };
    json.Set("scaling",
             Json::Object(
                 {{"kind", result.weak ? "weak" : "strong"},
                  {"limit", result.scaling_limit},
                  {"devices", result.scaling->devices},
                  {"too_many", result.scaling->too_many},
                  {"points", Json::ArrayOf(result.scaling->points, point)}}));
  }
  if (result.cheapest) {
    const auto offer = [&](const Offer& o) {
      Json row = Json::Object({{"cluster", o.cluster}, {"refused", o.refused}});
      row.Extend(CellJson(o.cell, {}));
      return row;
    };
    const auto& best = result.cheapest->best;
    json.Set("cheapest",
             Json::Object(
                 {{"best", best ? Json(result.cheapest->offers[*best].cluster)
                                : Json()},
                  {"offers", Json::ArrayOf(result.cheapest->offers, offer)}}));
  }
  if (result.fit) {
    const Fit& fit = *result.fit;
    const auto change = [](const FitChange& c) {
      return Json::Object({{"change", c.change},
                           {"strategy", c.strategy},
                           {"step_time_s", c.step_time.seconds()},
                           {"memory_bytes", c.memory.value}});
    };
    json.Set("fit",
             Json::Object({{"fits", fit.fits},
                           {"memory_bytes", fit.memory.value},
                           {"memory_capacity_bytes", fit.capacity.value},
                           {"memory_needed_bytes", fit.memory_needed.value},
                           {"changes", Json::ArrayOf(fit.changes, change)}}));
  }
  return json;
}

std::string WhatifCsv(const WhatifResult& result) {
  Row heading;
  for (const Axis& axis : result.axes) heading.push_back(axis.path);
  heading.insert(
      heading.end(),
      {"devices", "strategy", "step_time_s", "tokens_per_s", "mfu",
       "memory_bytes", "memory_capacity_bytes", "feasible", "bottleneck",
       "bottleneck_share", "usd_per_step", "days", "usd", "problem"});
  std::string out = CsvLine(heading);
  for (const Cell& cell : result.cells) {
    Row row = cell.values;
    if (!cell.prediction) {
      row.resize(heading.size() - 1);
      row.push_back(ProblemText(cell));
      out += CsvLine(row);
      continue;
    }
    const Prediction& p = *cell.prediction;
    const double step = p.evaluation.step_time.seconds();
    row.insert(
        row.end(),
        {std::to_string(p.devices), p.strategy, CsvNumber(step),
         CsvNumber(p.tokens_per_s), CsvNumber(p.mfu),
         std::to_string(p.memory.value), std::to_string(p.capacity.value),
         p.evaluation.feasible() ? "true" : "false", p.bottleneck,
         CsvNumber(p.bottleneck_share),
         p.usd_per_hour ? CsvNumber(*p.usd_per_hour * step / 3600) : "",
         p.run ? CsvNumber(p.run->days) : "",
         p.run && p.run->usd ? CsvNumber(*p.run->usd) : "", ProblemText(cell)});
    out += CsvLine(row);
  }
  return out;
}

}  // namespace tessera
