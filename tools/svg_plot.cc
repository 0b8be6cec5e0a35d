#include "tools/svg_plot.h"

#include <algorithm>
#include <cmath>

#include "planner/base/format.h"

namespace tessera {
namespace {

constexpr double kWidth = 640;
constexpr double kHeight = 340;
constexpr double kLeft = 72;
constexpr double kRight = 20;
constexpr double kTop = 40;
constexpr double kBottom = 62;
constexpr double kLegendRow = 18;
constexpr double kLetter = 6.6;  // width of one at the labels' size
constexpr int kColours = 8;

// 1, 2 or 5 times a power of ten, so that `most` takes about five of them.
double TickStep(double most) {
  const double raw = most / 5;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double times : {1.0, 2.0, 5.0}) {
    if (raw <= times * power) return times * power;
  }
  return 10 * power;
}

std::string Number(double value) {
  std::string text = FormatFixed(value, 1);
  return text;
}

std::string TickText(double value, double step) {
  const int decimals =
      std::max(0, static_cast<int>(-std::floor(std::log10(step))));
  return FormatFixed(value, decimals);
}

std::string Text(double x, double y, const std::string& text,
                 const std::string& attributes) {
  return "<text x=\"" + Number(x) + "\" y=\"" + Number(y) + "\" " + attributes +
         ">" + Escaped(text) + "</text>\n";
}

std::string LineFrom(double x1, double y1, double x2, double y2,
                     const std::string& kind) {
  return "<line x1=\"" + Number(x1) + "\" y1=\"" + Number(y1) + "\" x2=\"" +
         Number(x2) + "\" y2=\"" + Number(y2) + "\" class=\"" + kind + "\"/>\n";
}

std::string Colour(size_t series) {
  return "s" + std::to_string(series % kColours);
}

}  // namespace

std::string Escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string SvgOf(const Plot& plot) {
  double most = 0;
  for (const PlotSeries& series : plot.series) {
    for (const auto& y : series.y) most = std::max(most, y.value_or(0));
  }
  if (!(most > 0)) most = 1;
  const double step = TickStep(most);
  const double top = std::ceil(most / step - 1e-9) * step;

  // The legend's names, in rows under the x axis.
  struct Entry {
    double x, row;
    size_t series;
  };
  std::vector<Entry> legend;
  double at = kLeft;
  double row = 0;
  for (size_t s = 0; s < plot.series.size(); ++s) {
    const std::string& name = plot.series[s].name;
    const bool any = std::ranges::any_of(
        plot.series[s].y, [](const auto& y) { return y.has_value(); });
    if (name.empty() || !any) continue;
    const double width = 34 + kLetter * static_cast<double>(name.size());
    if (at > kLeft && at + width > kWidth - kRight) {
      at = kLeft;
      ++row;
    }
    legend.push_back({at, row, s});
    at += width;
  }
  const double legend_height = legend.empty() ? 0 : (row + 1) * kLegendRow;
  const double height = kHeight + legend_height;
  const double base = kHeight - kBottom;
  const double span = kWidth - kLeft - kRight;
  const auto columns = static_cast<double>(std::max<size_t>(1, plot.x.size()));
  const double last = plot.at.empty() ? 0 : std::ranges::max(plot.at);
  const auto x_of = [&](size_t i) {
    if (!plot.at.empty()) return kLeft + span * plot.at[i] / last;
    return kLeft + span * (static_cast<double>(i) + 0.5) / columns;
  };
  const auto y_of = [&](double value) {
    return base - (base - kTop) * value / top;
  };

  std::string out = "<svg viewBox=\"0 0 " + Number(kWidth) + " " +
                    Number(height) + "\" role=\"img\" aria-label=\"" +
                    Escaped(plot.title) + "\">\n";
  out += Text(kLeft, 22, plot.title, "class=\"title\"");
  for (double tick = 0; tick <= top + step / 2; tick += step) {
    out += LineFrom(kLeft, y_of(tick), kWidth - kRight, y_of(tick),
                    tick == 0 ? "axis" : "grid");
    out += Text(kLeft - 8, y_of(tick) + 4, TickText(tick, step),
                "class=\"label\" text-anchor=\"end\"");
  }
  // Labels that would run into the one to their right are left out.
  double free_to = kWidth;
  for (size_t i = plot.x.size(); i-- > 0;) {
    const double half =
        kLetter * (static_cast<double>(plot.x[i].size()) + 1) / 2;
    if (x_of(i) + half > free_to) continue;
    free_to = x_of(i) - half;
    out += Text(x_of(i), base + 18, plot.x[i],
                "class=\"label\" text-anchor=\"middle\"");
  }
  out += Text(kLeft + span / 2, base + 40, plot.x_label,
              "class=\"label\" text-anchor=\"middle\"");
  const double middle = (base + kTop) / 2;
  out += Text(18, middle, plot.y_label,
              "class=\"label\" text-anchor=\"middle\" transform=\"rotate(-90 "
              "18 " +
                  Number(middle) + ")\"");

  // Bars of several series stand side by side.
  const auto bars = static_cast<double>(
      std::ranges::count(plot.series, false, &PlotSeries::dashed));
  double bar = 0;
  for (size_t s = 0; s < plot.series.size(); ++s) {
    const PlotSeries& series = plot.series[s];
    if (plot.bars && !series.dashed) {
      const double width = std::min(48.0, span / columns * 0.7 / bars);
      const double left = (bar++ - bars / 2) * width;
      for (size_t i = 0; i < series.y.size(); ++i) {
        if (!series.y[i]) continue;
        const double y = y_of(*series.y[i]);
        out += "<rect x=\"" + Number(x_of(i) + left) + "\" y=\"" + Number(y) +
               "\" width=\"" + Number(width) + "\" height=\"" +
               Number(base - y) + "\" class=\"bar " + Colour(s) + "\"/>\n";
      }
      continue;
    }
    std::string path;
    bool pen = false;
    for (size_t i = 0; i < series.y.size(); ++i) {
      if (!series.y[i]) {
        pen = false;
        continue;
      }
      path += (pen ? "L" : "M") + Number(x_of(i)) + " " +
              Number(y_of(*series.y[i])) + " ";
      pen = true;
    }
    if (path.empty()) continue;
    out += "<path d=\"" + path + "\" class=\"curve " + Colour(s) +
           (series.dashed ? " limit" : "") + "\"/>\n";
    if (series.dashed) continue;
    for (size_t i = 0; i < series.y.size(); ++i) {
      if (!series.y[i]) continue;
      out += "<circle cx=\"" + Number(x_of(i)) + "\" cy=\"" +
             Number(y_of(*series.y[i])) + "\" r=\"3.5\" class=\"dot " +
             Colour(s) + "\"/>\n";
    }
    if (!series.marked || !series.y[*series.marked]) continue;
    const double x = x_of(*series.marked);
    const double y = y_of(*series.y[*series.marked]);
    out += "<circle cx=\"" + Number(x) + "\" cy=\"" + Number(y) +
           "\" r=\"8\" class=\"ring " + Colour(s) + "\"/>\n";
    out += Text(x + 11, y - 7, series.mark, "class=\"mark\"");
  }
  for (const Entry& entry : legend) {
    const double y = base + 56 + entry.row * kLegendRow;
    const PlotSeries& series = plot.series[entry.series];
    out += LineFrom(
        entry.x, y, entry.x + 18, y,
        "curve " + Colour(entry.series) + (series.dashed ? " limit" : ""));
    out += Text(entry.x + 24, y + 4, series.name, "class=\"label\"");
  }
  return out + "</svg>\n";
}

}  // namespace tessera
