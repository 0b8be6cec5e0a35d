#pragma once
// What `tessera whatif` prints: tables for people, JSON and CSV; and what its
// report shares with them.

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
  bool sensitivity = false;      // was asked for
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
// "67.0 %", or "-".
std::string MfuText(const Prediction& p);
// Whether it has times and bytes: it is done, possible, and not too long to be
// priced.
bool HasFigures(const Cell& cell);
// The prediction, where there is one, it fits, and the run that was asked for
// ends.
const Prediction* GoodPrediction(const Cell& cell);
// "12.5", or "never".
std::string DaysText(const RunCost& run);
// What throughput counts: "tokens", "images".
std::string UnitText(const WhatifResult& result);

// Tables of text: the first row is the heading.
using TableRows = std::vector<std::vector<std::string>>;
TableRows ScalingRows(const WhatifResult& result);
TableRows CheapestRows(const WhatifResult& result);
TableRows FitRows(const Fit& fit);
// Of all cells and points; empty where none has a sensitivity.
TableRows SensitivityRows(const WhatifResult& result);
// The answers in sentences.
std::string ScalingAnswer(const WhatifResult& result);
std::string CheapestAnswer(const WhatifResult& result);
std::vector<std::string> FitAnswer(const Fit& fit);
// Where task times come from and how far off steps are, of the first prediction
// of each ErrorBand, such as under each stack.
std::vector<std::string> SourcesAnswers(const WhatifResult& result);
// Each note once, with the cells that it is of where not all have it.
std::vector<std::string> NoteLines(const WhatifResult& result);

std::string WhatifText(const WhatifResult& result);
Json WhatifJson(const WhatifResult& result);
// One table: of the cells, or of the one question that was asked instead.
std::string WhatifCsv(const WhatifResult& result);

}  // namespace tessera
