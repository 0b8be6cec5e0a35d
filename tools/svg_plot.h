#pragma once
// Plots as SVG for a page that is read offline: lines or bars over an axis, in
// colours that the page's style sheet gives (classes s0 to s7).

#include <optional>
#include <string>
#include <vector>

namespace tessera {

struct PlotSeries {
  std::string name;                      // empty: not in the legend
  std::vector<std::optional<double>> y;  // by x; nothing: a gap
  bool dashed = false;                   // a limit
  std::optional<size_t> marked = {};     // the x of a point with a ring
  std::string mark = {};                 // what the ring says
};

struct Plot {
  std::string title;
  std::string x_label;
  std::string y_label;                  // with its unit
  std::vector<std::string> x = {};      // labels
  std::vector<double> at = {};          // where they are; empty: evenly spaced
  std::vector<PlotSeries> series = {};  // each as long as x
  bool bars = false;                    // all but dashed series as bars
};

// An <svg> element, without a script and without anything from elsewhere. The
// y axis begins at zero.
std::string SvgOf(const Plot& plot);

// Text of HTML.
std::string Escaped(const std::string& text);

}  // namespace tessera
