#include "costmodel/validate/published_run.h"

#include <charconv>
#include <cmath>

#include "planner/io/csv.h"

namespace tessera {
namespace {

class Row {
 public:
  Row(const CsvTable& table, size_t row, const std::string& path)
      : table_(table), row_(row), path_(path) {}

  void Read(std::string_view column, std::string& out) { out = Field(column); }
  void Read(std::string_view column, int64_t& out) {
    double value = 0;
    ReadNumber(column, value);
    if (value != std::floor(value) || value > kMostCount) {
      Unread(column, "is no whole number of at most 10^15");
    } else {
      out = static_cast<int64_t>(value);
    }
  }
  void Read(std::string_view column, double& out) {
    double value = 0;
    ReadNumber(column, value);
    if (value > kMostAmount) {
      Unread(column, "is no number of at most 10^9");
    } else {
      out = value;
    }
  }

  const std::optional<Error>& error() const { return error_; }
  const std::optional<Error>& unread() const { return unread_; }

 private:
  void ReadNumber(std::string_view column, double& out) {
    std::string text = Field(column);
    if (text.empty()) return;
    // "50257 (padded)".
    if (const size_t note = text.find('(');
        note != std::string::npos && note > 0) {
      text.resize(text.find_last_not_of(' ', note - 1) + 1);
    }
    // "1,048,576".
    for (size_t at = text.size(); at > 4 && text[at - 4] == ',';) {
      at -= 4;
      text.erase(at, 1);
    }
    double value = 0;
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() ||
        !std::isfinite(value) || value < 0) {
      Unread(column, "is no number of at least 0");
    } else {
      out = value;
    }
  }
  // Without spaces around it.
  std::string Field(std::string_view column) {
    const int at = table_.Column(column);
    if (at < 0) {
      if (!error_) {
        error_ = InvalidInput("there is no such column",
                              path_ + ":1: " + std::string(column));
      }
      return "";
    }
    const std::string& text = table_.rows[row_][static_cast<size_t>(at)];
    const size_t begin = text.find_first_not_of(" \t");
    if (begin == std::string::npos) return "";
    return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
  }
  void Unread(std::string_view column, const std::string& what) {
    if (unread_) return;
    unread_ = Error{ErrorCode::kInfeasible, "'" + Field(column) + "' " + what,
                    std::string(column)};
  }

  static constexpr double kMostCount = 1e15;
  // 32 years of a step's time, an exabyte of memory.
  static constexpr double kMostAmount = 1e9;
  const CsvTable& table_;
  const size_t row_;
  const std::string& path_;
  std::optional<Error> error_;
  std::optional<Error> unread_;
};

}  // namespace

Result<std::vector<PublishedRun>> ReadPublishedRuns(const std::string& path) {
  TESSERA_TRY(const CsvTable table, ReadCsv(path));
  if (table.rows.empty()) return InvalidInput("has no rows", path);
  std::vector<PublishedRun> runs;
  for (size_t r = 0; r < table.rows.size(); ++r) {
    Row row(table, r, path);
    PublishedRun run;
    run.line = table.lines[r];
    for (const auto& [column, field] :
         {std::pair<std::string_view, std::string*>{"id", &run.id},
          {"source", &run.source},
          {"locator", &run.locator},
          {"model", &run.model},
          {"kv_heads", &run.kv_heads},
          {"ffn", &run.ffn},
          {"ffn_kind", &run.ffn_kind},
          {"gpu", &run.gpu},
          {"intra_link", &run.intra_link},
          {"inter_link", &run.inter_link},
          {"zero_stage", &run.zero_stage},
          {"seq_parallel", &run.seq_parallel},
          {"recompute", &run.recompute},
          {"precision", &run.precision},
          {"flash_attn", &run.flash_attn},
          {"status", &run.status},
          {"overlap_notes", &run.overlap_notes},
          {"notes", &run.notes},
          {"group", &run.group}}) {
      row.Read(column, *field);
    }
    for (const auto& [column, field] :
         {std::pair<std::string_view, int64_t*>{"layers", &run.layers},
          {"hidden", &run.hidden},
          {"heads", &run.heads},
          {"vocab", &run.vocab},
          {"seq", &run.seq},
          {"experts", &run.experts},
          {"topk", &run.topk},
          {"gpus", &run.gpus},
          {"gpus_per_node", &run.gpus_per_node},
          {"global_batch", &run.global_batch},
          {"micro_batch", &run.micro_batch},
          {"tp", &run.tp},
          {"pp", &run.pp},
          {"vp", &run.vp},
          {"cp", &run.cp},
          {"ep", &run.ep},
          {"dp", &run.dp}}) {
      row.Read(column, *field);
    }
    row.Read("time_any_s", run.time_s);
    row.Read("mem_gb", run.mem_gb);
    std::string full;
    row.Read("full_config", full);
    run.full_config = full == "yes";
    if (row.error()) return *row.error();
    run.unread = row.unread();
    runs.push_back(std::move(run));
  }
  return runs;
}

}  // namespace tessera
