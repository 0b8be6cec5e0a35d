#pragma once
// Tables of comma-separated values (RFC 4180): the first line names the
// columns; fields may be in double quotes, in which commas, line ends and
// doubled quotes stand for themselves.

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "planner/base/result.h"

namespace tessera {

struct CsvTable {
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;  // as long as `columns`
  std::vector<int> lines;  // at which each row begins, from 1

  // The index of a column; -1 where there is none.
  int Column(std::string_view name) const;
};

// Errors name the line: a quote without its end, text behind one, another
// number of fields than there are columns, a column without or of the same
// name.
Result<CsvTable> ParseCsv(std::string_view text);
// Errors of ReadFile and ParseCsv, with `where` "path:line".
Result<CsvTable> ReadCsv(const std::string& path);

}  // namespace tessera
