#include "planner/io/csv.h"

#include <algorithm>
#include <set>

#include "planner/base/file.h"

namespace tessera {
namespace {

class CsvReader {
 public:
  explicit CsvReader(std::string_view text) : text_(text) {
    if (text_.starts_with("\xef\xbb\xbf")) at_ = 3;  // a byte order mark
  }

  bool AtEnd() const { return at_ == text_.size(); }
  int line() const { return line_; }

  // The fields up to the end of a line outside quotes.
  Result<std::vector<std::string>> Record() {
    std::vector<std::string> fields;
    for (;;) {
      TESSERA_TRY(fields.emplace_back(), Field());
      if (AtEnd() || text_[at_] != ',') break;
      ++at_;
    }
    if (!AtEnd() && text_[at_] == '\r') ++at_;
    if (!AtEnd() && text_[at_] == '\n') {
      ++at_;
      ++line_;
    }
    return fields;
  }

 private:
  bool EndsField() const {
    return AtEnd() || text_[at_] == ',' || text_[at_] == '\n' ||
           (text_[at_] == '\r' &&
            (at_ + 1 == text_.size() || text_[at_ + 1] == '\n'));
  }

  Result<std::string> Field() {
    std::string field;
    if (AtEnd() || text_[at_] != '"') {
      while (!EndsField()) field += text_[at_++];
      return field;
    }
    const int begin = line_;
    ++at_;
    for (;;) {
      if (AtEnd()) {
        return InvalidInput("a quote has no end", std::to_string(begin));
      }
      const char c = text_[at_++];
      if (c == '\n') ++line_;
      if (c != '"') {
        field += c;
      } else if (!AtEnd() && text_[at_] == '"') {
        field += '"';
        ++at_;
      } else {
        break;
      }
    }
    if (!EndsField()) {
      return InvalidInput("text behind a quote", std::to_string(line_));
    }
    return field;
  }

  std::string_view text_;
  size_t at_ = 0;
  int line_ = 1;
};

}  // namespace

int CsvTable::Column(std::string_view name) const {
  const auto found = std::ranges::find(columns, name);
  return found == columns.end() ? -1
                                : static_cast<int>(found - columns.begin());
}

Result<CsvTable> ParseCsv(std::string_view text) {
  CsvReader reader(text);
  CsvTable table;
  if (reader.AtEnd()) return InvalidInput("is empty: expected columns", "1");
  TESSERA_TRY(table.columns, reader.Record());
  std::set<std::string_view> names;
  for (const std::string& name : table.columns) {
    if (name.empty()) return InvalidInput("a column has no name", "1");
    if (!names.insert(name).second) {
      return InvalidInput("column '" + name + "' is there twice", "1");
    }
  }
  while (!reader.AtEnd()) {
    const int line = reader.line();
    TESSERA_TRY(std::vector<std::string> row, reader.Record());
    if (row.size() == 1 && row[0].empty()) continue;  // an empty line
    if (row.size() != table.columns.size()) {
      return InvalidInput(std::to_string(row.size()) + " fields, but " +
                              std::to_string(table.columns.size()) + " columns",
                          std::to_string(line));
    }
    table.rows.push_back(std::move(row));
    table.lines.push_back(line);
  }
  return table;
}

Result<CsvTable> ReadCsv(const std::string& path) {
  TESSERA_TRY(const std::string text, ReadFile(path));
  auto table = ParseCsv(text);
  if (table) return table;
  Error error = table.error();
  error.where = path + ":" + error.where;
  return error;
}

}  // namespace tessera
