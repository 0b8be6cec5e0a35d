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
    Read(column, value);
    if (value != std::floor(value) || std::abs(value) > 1e15) {
      Wrong(column, "is no whole number");
    } else {
      out = static_cast<int64_t>(value);
    }
  }
  void Read(std::string_view column, double& out) {
    const std::string& text = Field(column);
    if (text.empty()) return;
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), out);
    if (error != std::errc() || end != text.data() + text.size() ||
        !std::isfinite(out) || out < 0) {
      Wrong(column, "is no number of at least 0");
    }
  }

  const std::optional<Error>& error() const { return error_; }

 private:
  const std::string& Field(std::string_view column) {
    static const std::string kNone;
    const int at = table_.Column(column);
    if (at >= 0) return table_.rows[row_][static_cast<size_t>(at)];
    Wrong(column, "there is no such column");
    return kNone;
  }
  void Wrong(std::string_view column, const std::string& what) {
    if (error_) return;
    const int at = table_.Column(column);
    const std::string value =
        at < 0 ? "" : "'" + table_.rows[row_][static_cast<size_t>(at)] + "' ";
    error_ = InvalidInput(value + what, path_ + ":" +
                                            std::to_string(table_.lines[row_]) +
                                            ": " + std::string(column));
  }

  const CsvTable& table_;
  const size_t row_;
  const std::string& path_;
  std::optional<Error> error_;
};

}  // namespace

Result<std::vector<PublishedRun>> ReadPublishedRuns(const std::string& path) {
  TESSERA_TRY(const CsvTable table, ReadCsv(path));
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
    runs.push_back(std::move(run));
  }
  return runs;
}

}  // namespace tessera
