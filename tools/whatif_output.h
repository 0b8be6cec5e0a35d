#pragma once
// What `tessera whatif` prints: tables for people, JSON and CSV.

#include <optional>
#include <string>
#include <vector>

#include "costmodel/whatif/grid.h"
#include "costmodel/whatif/jitter.h"
#include "costmodel/whatif/questions.h"
#include "tools/json.h"

namespace tessera {

// All that was asked and answered.
struct WhatifResult {
  std::string command;
  std::string model;
  std::string cluster;
  std::vector<Axis> axes;
  std::vector<Cell> cells;  // empty where only a question was asked
  bool replanned = false;
  std::optional<Jitter> jitter;  // of the first cell
  std::optional<Scaling> scaling;
  double scaling_limit = 0;
  bool weak = false;
  std::optional<Cheapest> cheapest;
  double tokens = 0;
  double days = 0;
  std::optional<Fit> fit;
  bool interrupted = false;
};

// "does not fit: 12.3 GB too much", the problem, or "" where the cell is good.
std::string ProblemText(const Cell& cell);
// The prediction, where there is one and it fits.
const Prediction* GoodPrediction(const Cell& cell);
// "+-8 %", or "no band".
std::string BandText();

std::string WhatifText(const WhatifResult& result, bool sensitivity);
Json WhatifJson(const WhatifResult& result);
std::string WhatifCsv(const WhatifResult& result);

}  // namespace tessera
