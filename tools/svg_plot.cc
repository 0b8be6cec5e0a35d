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
constexpr double kBase = kHeight - kBottom;        // y of the x axis
constexpr double kSpan = kWidth - kLeft - kRight;  // width of the x axis
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
  return FormatFixed(value, 1);
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

namespace {

// Where a plot's values lie.
class Scales {
 public:
  explicit Scales(const Plot& plot) : plot_(plot) {
    double most = 0;
    for (const PlotSeries& series : plot.series) {
      for (const auto& y : series.y) most = std::max(most, y.value_or(0));
    }
    if (!(most > 0)) most = 1;
    step_ = TickStep(most);
    top_ = std::ceil(most / step_ - 1e-9) * step_;
    last_ = plot.at.empty() ? 0 : std::ranges::max(plot.at);
  }

  double X(size_t i) const {
    if (!plot_.at.empty()) return kLeft + kSpan * plot_.at[i] / last_;
    return kLeft + Column() * (static_cast<double>(i) + 0.5);
  }
  double Y(double value) const { return kBase - (kBase - kTop) * value / top_; }
  // The width of each of plot.x where they are evenly spaced.
  double Column() const {
    return kSpan / static_cast<double>(std::max<size_t>(1, plot_.x.size()));
  }
  double step() const { return step_; }
  double top() const { return top_; }

 private:
  const Plot& plot_;
  double step_ = 1;  // between ticks
  double top_ = 1;
  double last_ = 0;  // of plot.at
};

struct LegendEntry {
  double x = 0;
  int row = 0;
  size_t series = 0;
};

// The names of series that have values, in rows under the x axis.
std::vector<LegendEntry> LegendOf(const Plot& plot) {
  std::vector<LegendEntry> legend;
  double at = kLeft;
  int row = 0;
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
  return legend;
}

// With their labels.
std::string AxesOf(const Plot& plot, const Scales& scales) {
  std::string out;
  for (double tick = 0; tick <= scales.top() + scales.step() / 2;
       tick += scales.step()) {
    const double y = scales.Y(tick);
    out += LineFrom(kLeft, y, kWidth - kRight, y, tick == 0 ? "axis" : "grid");
    out += Text(kLeft - 8, y + 4, TickText(tick, scales.step()),
                "class=\"label\" text-anchor=\"end\"");
  }
  // Labels that would run into the one to their right are left out.
  double free_to = kWidth;
  for (size_t i = plot.x.size(); i-- > 0;) {
    const double half =
        kLetter * (static_cast<double>(plot.x[i].size()) + 1) / 2;
    if (scales.X(i) + half > free_to) continue;
    free_to = scales.X(i) - half;
    out += Text(scales.X(i), kBase + 18, plot.x[i],
                "class=\"label\" text-anchor=\"middle\"");
  }
  out += Text(kLeft + kSpan / 2, kBase + 40, plot.x_label,
              "class=\"label\" text-anchor=\"middle\"");
  const double middle = (kBase + kTop) / 2;
  return out + Text(18, middle, plot.y_label,
                    "class=\"label\" text-anchor=\"middle\" "
                    "transform=\"rotate(-90 18 " +
                        Number(middle) + ")\"");
}

// Each from `left` of its x on.
std::string BarsOf(const PlotSeries& series, const std::string& colour,
                   double left, double width, const Scales& scales) {
  std::string out;
  for (size_t i = 0; i < series.y.size(); ++i) {
    if (!series.y[i]) continue;
    const double y = scales.Y(*series.y[i]);
    out += "<rect x=\"" + Number(scales.X(i) + left) + "\" y=\"" + Number(y) +
           "\" width=\"" + Number(width) + "\" height=\"" + Number(kBase - y) +
           "\" class=\"bar " + colour + "\"/>\n";
  }
  return out;
}

std::string CurveOf(const PlotSeries& series, const std::string& colour,
                    const Scales& scales) {
  std::string path;
  bool pen = false;
  for (size_t i = 0; i < series.y.size(); ++i) {
    if (!series.y[i]) {
      pen = false;
      continue;
    }
    path += (pen ? "L" : "M") + Number(scales.X(i)) + " " +
            Number(scales.Y(*series.y[i])) + " ";
    pen = true;
  }
  if (path.empty()) return "";
  std::string out = "<path d=\"" + path + "\" class=\"curve " + colour +
                    (series.dashed ? " limit" : "") + "\"/>\n";
  if (series.dashed) return out;
  const auto circle = [&](size_t i, const char* radius, const char* kind) {
    return "<circle cx=\"" + Number(scales.X(i)) + "\" cy=\"" +
           Number(scales.Y(*series.y[i])) + "\" r=\"" + radius + "\" class=\"" +
           kind + " " + colour + "\"/>\n";
  };
  for (size_t i = 0; i < series.y.size(); ++i) {
    if (series.y[i]) out += circle(i, "3.5", "dot");
  }
  if (!series.marked || !series.y[*series.marked]) return out;
  const size_t at = *series.marked;
  return out + circle(at, "8", "ring") +
         Text(scales.X(at) + 11, scales.Y(*series.y[at]) - 7, series.mark,
              "class=\"mark\"");
}

}  // namespace

std::string SvgOf(const Plot& plot) {
  const Scales scales(plot);
  const std::vector<LegendEntry> legend = LegendOf(plot);
  const double height =
      kHeight + (legend.empty() ? 0 : (legend.back().row + 1) * kLegendRow);
  std::string out = "<svg viewBox=\"0 0 " + Number(kWidth) + " " +
                    Number(height) + "\" role=\"img\" aria-label=\"" +
                    Escaped(plot.title) + "\">\n";
  out += Text(kLeft, 22, plot.title, "class=\"title\"");
  out += AxesOf(plot, scales);

  // Bars of several series stand side by side.
  const auto bars = static_cast<double>(
      std::ranges::count(plot.series, false, &PlotSeries::dashed));
  const double width = std::min(48.0, scales.Column() * 0.7 / bars);
  double bar = 0;
  for (size_t s = 0; s < plot.series.size(); ++s) {
    const PlotSeries& series = plot.series[s];
    if (plot.bars && !series.dashed) {
      const double left = (bar++ - bars / 2) * width;
      out += BarsOf(series, Colour(s), left, width, scales);
    } else {
      out += CurveOf(series, Colour(s), scales);
    }
  }
  for (const LegendEntry& entry : legend) {
    const double y = kBase + 56 + entry.row * kLegendRow;
    const PlotSeries& series = plot.series[entry.series];
    out += LineFrom(
        entry.x, y, entry.x + 18, y,
        "curve " + Colour(entry.series) + (series.dashed ? " limit" : ""));
    out += Text(entry.x + 24, y + 4, series.name, "class=\"label\"");
  }
  return out + "</svg>\n";
}

}  // namespace tessera
