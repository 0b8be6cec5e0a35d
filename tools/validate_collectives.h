#pragma once
// The report of `tessera validate` on a table of collectives.

#include <string>

#include "planner/base/result.h"

namespace tessera {

// By source and collective: rows used and refused, errors of the time from 1 MB
// to 8 GB and below; the worst rows; why rows are refused. As text, or as JSON
// with `total`, `sources[]` and `rows[]`.
struct CollectivesReport {
  std::string text;
  bool any = false;  // rows were used
};
Result<CollectivesReport> ReportCollectives(const std::string& path, bool json);

}  // namespace tessera
