#include "tools/whatif_output.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "costmodel/whatif/band.h"
#include "planner/base/append.h"
#include "planner/base/format.h"
#include "tools/step_report.h"
#include "tools/text.h"

namespace tessera {
namespace {

using Row = std::vector<std::string>;

std::string UsdText(double usd) {
  return FormatNumber(usd) + " USD";
}

std::string MemoryText(const Prediction& p) {
  return FormatBytes(p.memory) + " of " + FormatBytes(p.capacity);
}

// Bytes for `--set device.memory=`, never less than these.
std::string RoundedUp(Bytes bytes) {
  return FormatFixed(std::ceil(static_cast<double>(bytes.value) / 1e8) / 10,
                     1) +
         "GB";
}

std::optional<double> UsdOfStep(const Prediction& p) {
  if (!p.usd_per_hour) return {};
  return *p.usd_per_hour * p.evaluation.step_time.seconds() / 3600;
}

std::optional<double> KwhOfStep(const Prediction& p) {
  if (!p.watts) return {};
  return *p.watts * p.evaluation.step_time.seconds() / 3.6e6;
}

std::string BottleneckText(const Prediction& p) {
  if (p.bottleneck.empty()) return "-";
  return p.bottleneck + " " + FormatPercent(p.bottleneck_share);
}

// What is longer would make the table wider than a screen, and stands below it.
constexpr size_t kLongestProblem = 36;

std::string OrDash(const std::optional<double>& value) {
  return value ? FormatNumber(*value) : "-";
}

// What an axis changes besides the step, which a table has only beside it.
struct UpkeepColumn {
  std::string_view field;  // of the axis's path in a cluster file
  std::string_view heading;
  std::string (*text)(const Prediction& p);
};
constexpr std::array kUpkeepColumns = {
    UpkeepColumn{".upkeep.price", "USD a step",
                 [](const Prediction& p) { return OrDash(UsdOfStep(p)); }},
    UpkeepColumn{".upkeep.power", "kWh a step",
                 [](const Prediction& p) { return OrDash(KwhOfStep(p)); }},
    UpkeepColumn{
        ".upkeep.mtbf", "goodput",
        [](const Prediction& p) { return FormatPercent(p.goodput.fraction); }},
    UpkeepColumn{
        ".storage_", "goodput",
        [](const Prediction& p) { return FormatPercent(p.goodput.fraction); }},
};

std::vector<UpkeepColumn> UpkeepColumnsOf(const std::vector<Axis>& axes) {
  std::vector<UpkeepColumn> columns;
  for (const UpkeepColumn& column : kUpkeepColumns) {
    const bool varies = std::ranges::any_of(axes, [&](const Axis& axis) {
      return FilePathOf(axis.path).find(column.field) != std::string::npos;
    });
    const bool is_there = std::ranges::any_of(
        columns,
        [&](const UpkeepColumn& c) { return c.heading == column.heading; });
    if (varies && !is_there) columns.push_back(column);
  }
  return columns;
}

// The columns of a cell behind its values; a problem stands in the last.
std::vector<Row> CellRows(const WhatifResult& result) {
  Row heading;
  const std::vector<UpkeepColumn> upkeep = UpkeepColumnsOf(result.axes);
  for (const Axis& axis : result.axes) heading.push_back(axis.path);
  if (result.axes.empty()) heading.emplace_back("cell");
  const bool runs = result.tokens > 0;
  heading.insert(heading.end(),
                 {"devices", "step", UnitText(result) + "/s", "MFU"});
  for (const UpkeepColumn& column : upkeep) {
    heading.emplace_back(column.heading);
  }
  if (runs) heading.insert(heading.end(), {"days", "cost"});
  heading.insert(heading.end(), {"memory", "held up by"});
  const auto problem = [](const Cell& cell) {
    const std::string text = ProblemText(cell);
    return text.size() > kLongestProblem ? "not possible, see below" : text;
  };
  if (result.replanned) heading.emplace_back("plan");
  std::vector<Row> rows = {heading};
  for (const Cell& cell : result.cells) {
    Row& row = rows.emplace_back(cell.values);
    if (result.axes.empty()) row.emplace_back("as given");
    if (!HasFigures(cell)) {
      while (row.size() + 1 + (result.replanned ? 1 : 0) < heading.size()) {
        row.emplace_back("-");
      }
      row.push_back(problem(cell));
      if (result.replanned) row.emplace_back("-");
      continue;
    }
    const Prediction& p = *cell.prediction;
    row.insert(row.end(),
               {std::to_string(p.devices), FormatTime(p.evaluation.step_time),
                FormatCount(p.tokens_per_s), MfuText(p)});
    for (const UpkeepColumn& column : upkeep) row.push_back(column.text(p));
    if (runs) {
      row.push_back(DaysText(*p.run));
      row.push_back(p.run->usd       ? UsdText(*p.run->usd)
                    : p.usd_per_hour ? "-"
                                     : "no price");
    }
    row.push_back(MemoryText(p));
    row.push_back(GoodPrediction(cell) != nullptr ? BottleneckText(p)
                                                  : problem(cell));
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

std::string SourcesText(const SourceShares& sources, const ErrorBand& band) {
  return FormatPercent(sources.measured) + " measured, " +
         FormatPercent(sources.interpolated) + " interpolated, " +
         FormatPercent(sources.analytical) + " analytical task times; off by " +
         FormatPercent(band.median) + " in the median (" + band.source + ")";
}

std::string GoodputText(const Goodput& goodput) {
  std::string text = FormatPercent(goodput.fraction) +
                     " of the time in steps that count (Daly 2006)";
  if (goodput.stall > 0) {
    text += "; data is waited for " + FormatTime(goodput.stall) + " a step";
  }
  if (goodput.interval > 0) {
    text += "; a checkpoint each " + FormatTime(goodput.interval) +
            " of work takes " + FormatPercent(goodput.saving);
  }
  return text;
}

// What people call a plan that has no strategy.
std::string PlanNameLine(const std::string& of, const Cell& cell) {
  if (!cell.prediction || cell.prediction->plan_name.empty()) return "";
  return "  " + Wrap(of + ": " + cell.prediction->plan_name, 4) + "\n";
}

// One cell in full.
std::string CellText(const Cell& cell) {
  std::string out;
  if (!cell.prediction) return "  " + ProblemText(cell) + "\n";
  const Prediction& p = *cell.prediction;
  const std::string& name = p.plan_name.empty() ? p.strategy : p.plan_name;
  out +=
      Line("plan",
           name + (p.used == p.devices ? " on " : "; the cluster has ") +
               std::to_string(p.devices) + " devices of " +
               std::to_string(p.nodes) + (p.nodes == 1 ? " node" : " nodes"));
  if (!p.priced()) return out + Line("problem", Wrap(ProblemText(cell), 16));
  out += Line("step time", FormatTime(p.evaluation.step_time) + ", by " +
                               SourcesText(p.evaluation.sources, p.band));
  out += Line("throughput", FormatCount(p.tokens_per_s) + " " +
                                std::string(p.unit) + "/s" +
                                (p.mfu ? ", MFU " + MfuText(p) : ""));
  std::string breakdown;
  for (const BreakdownPart& part : PartsOf(p.evaluation.breakdown)) {
    if (part.time == Duration{}) continue;
    AppendTo(breakdown, ", ",
             std::string(part.name) + " " +
                 FormatPercent(part.time.seconds() /
                               p.evaluation.step_time.seconds()));
  }
  if (!breakdown.empty()) out += Line("time goes to", Wrap(breakdown, 16));
  if (!p.bottleneck.empty()) out += Line("held up by", BottleneckText(p));
  out += Line("memory",
              MemoryText(p) +
                  (p.evaluation.feasible() ? "" : ": " + ProblemText(cell)));
  std::string parts;
  for (const MemoryPart& part : MemoryParts(p.memory_use)) {
    if (part.bytes == Bytes{}) continue;
    AppendTo(parts, ", ",
             std::string(part.name) + " " + FormatBytes(part.bytes));
  }
  out += Line("memory has", Wrap(parts, 16));
  if (const auto usd = UsdOfStep(p)) {
    out += Line("money", UsdText(*usd) + " a step, " +
                             UsdText(*p.usd_per_hour) + " an hour");
  }
  if (const auto kwh = KwhOfStep(p)) {
    out += Line("energy", FormatNumber(*kwh) +
                              " kWh a step (boards alone, at full power)");
  }
  if (p.goodput.fraction < 1) {
    out += Line("goodput", Wrap(GoodputText(p.goodput), 16));
  }
  if (const std::string_view endless = EndlessText(p); !endless.empty()) {
    out += Line("problem", std::string(endless));
  } else if (p.run) {
    std::string text = FormatCount(p.run->steps) + " steps, " +
                       FormatNumber(p.run->days) + " days";
    if (p.run->usd) text += ", " + UsdText(*p.run->usd);
    if (p.run->kwh) text += ", " + FormatNumber(*p.run->kwh / 1000) + " MWh";
    out += Line("the run", text);
  }
  if (!p.missing.empty()) {
    std::string names;
    for (const std::string& name : p.missing) {
      AppendTo(names, ", ", name);
    }
    out += Line("not known", names + " (--set gives them)");
  }
  return out;
}

std::string CellName(const Cell& cell) {
  std::string name;
  for (const std::string& value : cell.values) {
    AppendTo(name, " ", value);
  }
  return name;
}

// Everything that was predicted, by what it is called.
std::vector<std::pair<std::string, const Cell*>> AllCells(
    const WhatifResult& result) {
  std::vector<std::pair<std::string, const Cell*>> all;
  for (const Cell& cell : result.cells) all.emplace_back(CellName(cell), &cell);
  if (result.scaling) {
    for (const ScalingPoint& point : result.scaling->points) {
      all.emplace_back(std::to_string(point.devices) + " devices", &point.cell);
    }
  }
  if (result.cheapest) {
    for (const Offer& offer : result.cheapest->offers) {
      all.emplace_back(offer.cluster, &offer.cell);
    }
  }
  return all;
}

Json PredictionJson(const Prediction& p) {
  const SourceShares& sources = p.evaluation.sources;
  const auto of_price = [&](Json value) {
    return p.priced() ? std::move(value) : Json();
  };
  Json json = Json::Object(
      {{"strategy", p.strategy},
       {"plan_name", p.plan_name},
       {"devices", p.devices},
       {"devices_used", p.used},
       {"nodes", p.nodes},
       {"global_batch", p.global_batch},
       {"step_time_s", StepTimeJson(p.evaluation.step_time)},
       {"tokens_per_s", of_price(p.tokens_per_s)},
       {"unit", std::string(p.unit)},
       {"mfu", OrNull(p.mfu)},
       {"feasible", p.evaluation.feasible()},
       {"violations",
        Json::ArrayOf(p.evaluation.violations,
                      [](const std::string& text) { return Json(text); })},
       {"memory_bytes", of_price(p.memory.value)},
       {"memory", of_price(MemoryJson(p.memory_use))},
       {"memory_capacity_bytes", p.capacity.value},
       {"bottleneck", p.bottleneck},
       {"bottleneck_share", p.bottleneck_share},
       {"breakdown", of_price(BreakdownJson(p.evaluation.breakdown))},
       {"sources",
        of_price(Json::Object({{"measured", sources.measured},
                               {"interpolated", sources.interpolated},
                               {"analytical", sources.analytical}}))},
       {"usd_per_hour", OrNull(p.usd_per_hour)},
       {"watts", OrNull(p.watts)}});
  json.Set("error_band", Json::Object({{"median", p.band.median},
                                       {"mean", p.band.mean},
                                       {"source", p.band.source}}));
  if (p.sensitivity) {
    Json values = Json::Object();
    for (const Elasticity& e : p.sensitivity->resources) {
      values.Set(std::string(e.resource->name), e.value);
    }
    values.Set("unexplained", p.sensitivity->unexplained);
    json.Set("sensitivity", std::move(values));
  }
  json.Set("goodput",
           of_price(Json::Object({{"fraction", p.goodput.fraction},
                                  {"checkpoint_interval_s", p.goodput.interval},
                                  {"checkpoint_share", p.goodput.saving},
                                  {"data_stall_s", p.goodput.stall}})));
  if (p.run && p.priced()) {
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
  if (!cell.plan_file.empty()) json.Set("plan_file", cell.plan_file);
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

// Empty where there is none.
std::string CsvNumber(const std::optional<double>& value) {
  return value ? CsvNumber(*value) : "";
}

// The columns of a cell behind `first`.
Row CellHeading(Row first) {
  first.insert(first.end(),
               {"devices", "strategy", "step_time_s", "tokens_per_s", "mfu",
                "memory_bytes", "memory_capacity_bytes", "feasible",
                "bottleneck", "bottleneck_share", "usd_per_step",
                "kwh_per_step", "goodput", "days", "usd", "kwh", "problem"});
  return first;
}

Row CellFields(Row first, const Cell& cell) {
  if (!HasFigures(cell)) {
    first.resize(CellHeading({}).size() + first.size() - 1);
    first.push_back(ProblemText(cell));
    return first;
  }
  const Prediction& p = *cell.prediction;
  first.insert(
      first.end(),
      {std::to_string(p.devices), p.strategy,
       CsvNumber(p.evaluation.step_time.seconds()), CsvNumber(p.tokens_per_s),
       CsvNumber(p.mfu), std::to_string(p.memory.value),
       std::to_string(p.capacity.value),
       p.evaluation.feasible() ? "true" : "false", p.bottleneck,
       CsvNumber(p.bottleneck_share), CsvNumber(UsdOfStep(p)),
       CsvNumber(KwhOfStep(p)), CsvNumber(p.goodput.fraction),
       p.run && EndlessText(p).empty() ? CsvNumber(p.run->days) : "",
       p.run ? CsvNumber(p.run->usd) : "", p.run ? CsvNumber(p.run->kwh) : "",
       ProblemText(cell)});
  return first;
}

}  // namespace

std::string ProblemText(const Cell& cell) {
  if (!cell.done) return "not done";
  if (!cell.prediction) return cell.problem;
  const Evaluation& evaluation = cell.prediction->evaluation;
  const Prediction& p = *cell.prediction;
  if (evaluation.feasible()) return std::string(EndlessText(p));
  if (!p.priced()) return evaluation.violations.front();
  if (p.memory <= p.capacity) {
    return "does not fit: " + evaluation.violations.front();
  }
  return "does not fit: " + FormatBytes(p.memory - p.capacity) + " too much";
}

std::string MfuText(const Prediction& p) {
  return p.mfu ? FormatPercent(*p.mfu) : "-";
}

bool HasFigures(const Cell& cell) {
  return cell.prediction && cell.prediction->priced();
}

std::string UnitText(const WhatifResult& result) {
  for (const auto& [name, cell] : AllCells(result)) {
    if (cell->prediction) return std::string(cell->prediction->unit);
  }
  return "tokens";
}

const Prediction* GoodPrediction(const Cell& cell) {
  if (!cell.prediction || !cell.prediction->evaluation.feasible() ||
      !EndlessText(*cell.prediction).empty()) {
    return nullptr;
  }
  return &*cell.prediction;
}

std::string DaysText(const RunCost& run) {
  return std::isfinite(run.days) ? FormatNumber(run.days) : "never";
}

TableRows SensitivityRows(const WhatifResult& result) {
  TableRows rows = {{"1 % more of"}};
  std::vector<const Prediction*> columns;
  for (const auto& [name, cell] : AllCells(result)) {
    const Prediction* p = GoodPrediction(*cell);
    if (p == nullptr || !p->sensitivity) continue;
    rows[0].push_back(name.empty() ? "shortens the step by" : name);
    columns.push_back(p);
  }
  if (columns.empty()) return {};
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
  Row rest = {"(unexplained)"};
  Row memory = {"device.memory to spare"};
  for (const Prediction* p : columns) {
    rest.push_back(percent(p->sensitivity->unexplained));
    memory.push_back(FormatBytes(p->capacity - p->memory));
  }
  rows.push_back(std::move(rest));
  rows.push_back(std::move(memory));
  return rows;
}

TableRows ScalingRows(const WhatifResult& result) {
  TableRows rows = {{"devices", "nodes", "step", UnitText(result) + "/s",
                     "efficiency", "held up by"}};
  for (const ScalingPoint& point : result.scaling->points) {
    Row& row = rows.emplace_back();
    row = {std::to_string(point.devices), std::to_string(point.nodes)};
    if (const Prediction* p = GoodPrediction(point.cell)) {
      row.insert(
          row.end(),
          {FormatTime(p->evaluation.step_time), FormatCount(p->tokens_per_s),
           FormatPercent(point.efficiency), BottleneckText(*p)});
    } else {
      row.insert(row.end(), {"-", "-", "-", ProblemText(point.cell)});
    }
  }
  return rows;
}

std::string ScalingAnswer(const WhatifResult& result) {
  const Scaling& scaling = *result.scaling;
  if (scaling.devices == 0) return "it does not run at the start";
  std::string text = std::string(result.weak ? "weak" : "strong") +
                     " scaling is at least " +
                     FormatPercent(result.scaling_limit) + " efficient up to " +
                     std::to_string(scaling.devices) + " devices";
  if (scaling.too_many > 0) {
    text += ", and no more at " + std::to_string(scaling.too_many);
  }
  if (scaling.most) text += ", the most that are tried";
  return text;
}

TableRows CheapestRows(const WhatifResult& result) {
  TableRows rows = {{"cluster", "plan", "step", "days", "USD", "MWh"}};
  for (const Offer& offer : result.cheapest->offers) {
    if (!offer.cell.prediction) {
      rows.push_back({offer.cluster, "-", "-", "-", "-", "-"});
      continue;
    }
    const Prediction& p = *offer.cell.prediction;
    rows.push_back({offer.cluster, p.strategy,
                    FormatTime(p.evaluation.step_time), DaysText(*p.run),
                    p.run->usd ? FormatNumber(*p.run->usd) : "-",
                    p.run->kwh ? FormatNumber(*p.run->kwh / 1000) : "-"});
  }
  return rows;
}

namespace {

// The other answers, which cost no more beyond the best than predictions of
// step times are off.
std::vector<const Offer*> AsCheap(const Cheapest& cheapest) {
  std::vector<const Offer*> as_cheap;
  const Prediction& best = *cheapest.offers[*cheapest.best].cell.prediction;
  for (size_t i = 0; i < cheapest.offers.size(); ++i) {
    const Offer& offer = cheapest.offers[i];
    if (i == *cheapest.best || !offer.refused.empty()) continue;
    const Prediction& p = *offer.cell.prediction;
    const double band = std::max(p.band.median, best.band.median);
    if (*p.run->usd <= (1 + band) * *best.run->usd) as_cheap.push_back(&offer);
  }
  return as_cheap;
}

}  // namespace

std::string CheapestAnswer(const WhatifResult& result) {
  const auto& best = result.cheapest->best;
  if (!best) return "none of them is an answer";
  const bool all_have_prices =
      std::ranges::all_of(result.cheapest->offers, [](const Offer& offer) {
        return !offer.cell.prediction || offer.cell.prediction->run->usd;
      });
  std::string text = std::string("the cheapest ") +
                     (all_have_prices ? "is " : "of those with a price is ") +
                     result.cheapest->offers[*best].cluster;
  std::string others;
  for (const Offer* offer : AsCheap(*result.cheapest)) {
    AppendTo(others, ", ", offer->cluster);
  }
  if (!others.empty()) {
    text += "; no dearer than predictions are off: " + others;
  }
  return text;
}

TableRows FitRows(const Fit& fit) {
  TableRows rows = {{"with", "step", "memory", "strategy"}};
  rows.push_back({"as it is", FormatTime(fit.step_time),
                  FormatBytes(fit.memory),
                  fit.strategy ? *fit.strategy : fit.plan});
  for (const FitChange& change : fit.changes) {
    rows.push_back({change.change, FormatTime(change.step_time),
                    FormatBytes(change.memory), change.strategy});
  }
  return rows;
}

std::vector<std::string> FitAnswer(const Fit& fit) {
  const std::string memory =
      FormatBytes(fit.memory) + " of " + FormatBytes(fit.capacity);
  if (fit.fits) {
    return {"it fits: " + memory + ", " +
            FormatBytes(fit.capacity - fit.memory) + " to spare"};
  }
  if (fit.step_time == Duration{}) {
    return {"whether it fits is not known: " + fit.problem};
  }
  if (fit.memory <= fit.capacity) return {"it does not fit: " + fit.problem};
  std::vector<std::string> lines = {
      "it does not fit: " + memory + " on the fullest device",
      "as it is it fits devices with device.memory=" +
          RoundedUp(fit.memory_needed)};
  if (!fit.strategy) {
    lines.emplace_back(
        "other changes are of a uniform strategy, which it has "
        "not");
  } else if (fit.changes.empty() && fit.interrupted) {
    lines.emplace_back("interrupted before a change was found that fits");
  } else if (fit.changes.empty()) {
    lines.emplace_back(
        "no change of one or two keys of the strategy makes it "
        "fit");
  } else {
    lines.emplace_back("with one key changed it fits, or faster with two:");
  }
  return lines;
}

std::vector<std::string> SourcesAnswers(const WhatifResult& result) {
  std::vector<std::string> known;  // of bands
  std::vector<std::string> answers;
  const auto add = [&](const SourceShares& sources, const ErrorBand& band) {
    if (std::ranges::find(known, band.source) != known.end()) return;
    known.push_back(band.source);
    answers.push_back(SourcesText(sources, band));
  };
  for (const auto& [name, cell] : AllCells(result)) {
    if (!cell->prediction) continue;
    add(cell->prediction->evaluation.sources, cell->prediction->band);
  }
  if (result.fit) add(result.fit->sources, result.fit->band);
  return answers;
}

std::vector<std::string> NoteLines(const WhatifResult& result) {
  const auto cells = AllCells(result);
  std::vector<std::string> lines;
  std::vector<std::string> known;
  for (const auto& [name, cell] : cells) {
    for (const std::string& note : cell->notes) {
      if (std::ranges::find(known, note) != known.end()) continue;
      known.push_back(note);
      std::vector<std::string> names;
      for (const auto& [other_name, other] : cells) {
        const auto& notes = other->notes;
        if (std::ranges::find(notes, note) != notes.end()) {
          names.push_back(other_name);
        }
      }
      std::string line = note;
      if (names.size() < cells.size()) {
        constexpr size_t kNamed = 3;
        line += " (" + names[0];
        for (size_t i = 1; i < std::min(kNamed, names.size()); ++i) {
          line += "; " + names[i];
        }
        if (names.size() > kNamed) {
          line += "; " + std::to_string(names.size() - kNamed) + " more";
        }
        line += ")";
      }
      lines.push_back(std::move(line));
    }
  }
  return lines;
}

std::string WhatifText(const WhatifResult& result) {
  std::vector<std::string> parts;
  if (result.cells.size() == 1) {
    parts.push_back(CellText(result.cells[0]));
  } else if (!result.cells.empty()) {
    std::string table = FormatTable(CellRows(result));
    for (const Cell& cell : result.cells) {
      table += PlanNameLine(CellName(cell), cell);
      const std::string problem = ProblemText(cell);
      if (problem.size() <= kLongestProblem) continue;
      table += "  " + Wrap(CellName(cell) + ": " + problem, 4) + "\n";
    }
    parts.push_back(std::move(table));
  }
  if (result.jitter) {
    const Jitter& jitter = *result.jitter;
    parts.push_back(
        Line("with jitter",
             "half of the steps take at most " + FormatTime(jitter.p50) +
                 ", 95 % at most " + FormatTime(jitter.p95) + " (" +
                 std::to_string(jitter.samples) +
                 (result.cells.size() > 1 ? " samples, without --vary)"
                                          : " samples)")));
  }
  if (result.scaling) {
    parts.push_back(FormatTable(ScalingRows(result)) + "\n  " +
                    ScalingAnswer(result) + "\n");
  }
  if (result.cheapest) {
    std::string text = FormatTable(CheapestRows(result)) + "\n";
    for (const Offer& offer : result.cheapest->offers) {
      text += PlanNameLine(offer.cluster, offer.cell);
      if (offer.refused.empty()) continue;
      text += "  " + offer.cluster + ": " + offer.refused + "\n";
    }
    parts.push_back(text + "  " + CheapestAnswer(result) + "\n");
  }
  if (result.fit) {
    std::string text;
    for (const std::string& line : FitAnswer(*result.fit)) {
      text += "  " + line + "\n";
    }
    parts.push_back(text + "\n" + FormatTable(FitRows(*result.fit)));
  }
  if (const TableRows rows = SensitivityRows(result);
      result.sensitivity && !rows.empty()) {
    parts.push_back(
        FormatTable(rows) +
        "\n  by the evaluator, without time lost on shared links\n");
  }
  std::string notes;
  for (const std::string& note : NoteLines(result)) {
    notes += Line("note", Wrap(note, 16));
  }
  // One cell has them beside its step.
  for (const std::string& sources : SourcesAnswers(result)) {
    if (result.cells.size() == 1) break;
    notes += Line("times", Wrap("by " + sources, 16));
  }
  if (!notes.empty()) parts.push_back(std::move(notes));
  std::string out = result.model + " on " + result.cluster + "\n";
  for (const std::string& part : parts) out += "\n" + part;
  return out;
}

namespace {

Json ScalingJson(const WhatifResult& result) {
  const auto point = [&](const ScalingPoint& p) {
    Json row = Json::Object({{"efficiency", p.efficiency}});
    // A prediction has its own.
    if (!p.cell.prediction) {
      row.Set("nodes", p.nodes).Set("devices", p.devices);
    }
    row.Extend(CellJson(p.cell, {}));
    return row;
  };
  return Json::Object(
      {{"kind", result.weak ? "weak" : "strong"},
       {"limit", result.scaling_limit},
       {"devices", result.scaling->devices},
       {"too_many", result.scaling->too_many},
       {"most_tried", result.scaling->most},
       {"points", Json::ArrayOf(result.scaling->points, point)}});
}

Json CheapestJson(const Cheapest& cheapest) {
  const auto offer = [&](const Offer& o) {
    Json row = Json::Object({{"cluster", o.cluster}, {"refused", o.refused}});
    row.Extend(CellJson(o.cell, {}));
    return row;
  };
  const auto& best = cheapest.best;
  return Json::Object(
      {{"best", best ? Json(cheapest.offers[*best].cluster) : Json()},
       {"as_cheap",
        Json::ArrayOf(best ? AsCheap(cheapest) : std::vector<const Offer*>(),
                      [](const Offer* o) { return o->cluster; })},
       {"offers", Json::ArrayOf(cheapest.offers, offer)}});
}

Json FitJson(const Fit& fit) {
  const auto change = [](const FitChange& c) {
    return Json::Object({{"change", c.change},
                         {"keys", c.keys},
                         {"strategy", c.strategy},
                         {"step_time_s", c.step_time.seconds()},
                         {"memory_bytes", c.memory.value}});
  };
  const auto of_price = [&](int64_t bytes) {
    return fit.step_time > Duration{} ? Json(bytes) : Json();
  };
  return Json::Object(
      {{"fits", fit.fits},
       {"problem", fit.problem},
       {"plan", fit.plan},
       {"strategy", OrNull(fit.strategy)},
       {"step_time_s", StepTimeJson(fit.step_time)},
       {"memory_bytes", of_price(fit.memory.value)},
       {"memory_capacity_bytes", fit.capacity.value},
       {"memory_needed_bytes", of_price(fit.memory_needed.value)},
       {"changes", Json::ArrayOf(fit.changes, change)}});
}

std::string FitCsv(const Fit& fit) {
  std::string out;
  out += CsvLine({"change", "strategy", "step_time_s", "memory_bytes",
                  "memory_capacity_bytes", "fits", "problem"});
  const auto line = [&](const std::string& change, const std::string& strategy,
                        Duration step, Bytes memory,
                        const std::string& problem) {
    out += CsvLine({change, strategy, CsvNumber(step.seconds()),
                    std::to_string(memory.value),
                    std::to_string(fit.capacity.value),
                    problem.empty() ? "true" : "false", problem});
  };
  line("", fit.strategy.value_or(fit.plan), fit.step_time, fit.memory,
       fit.problem);
  for (const FitChange& change : fit.changes) {
    line(change.change, change.strategy, change.step_time, change.memory, "");
  }
  return out;
}

}  // namespace

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
  if (result.scaling) json.Set("scaling", ScalingJson(result));
  if (result.cheapest) json.Set("cheapest", CheapestJson(*result.cheapest));
  if (result.fit) json.Set("fit", FitJson(*result.fit));
  return json;
}

std::string WhatifCsv(const WhatifResult& result) {
  if (result.fit) return FitCsv(*result.fit);
  std::string out;
  if (result.scaling) {
    out += CsvLine(CellHeading({"nodes", "efficiency"}));
    for (const ScalingPoint& point : result.scaling->points) {
      out += CsvLine(
          CellFields({std::to_string(point.nodes), CsvNumber(point.efficiency)},
                     point.cell));
    }
    return out;
  }
  if (result.cheapest) {
    out += CsvLine(CellHeading({"cluster", "refused"}));
    for (const Offer& offer : result.cheapest->offers) {
      out += CsvLine(CellFields({offer.cluster, offer.refused}, offer.cell));
    }
    return out;
  }
  Row first;
  for (const Axis& axis : result.axes) first.push_back(axis.path);
  out += CsvLine(CellHeading(first));
  for (const Cell& cell : result.cells) {
    out += CsvLine(CellFields(cell.values, cell));
  }
  return out;
}

}  // namespace tessera
