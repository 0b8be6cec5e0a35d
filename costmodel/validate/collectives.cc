#include "costmodel/validate/collectives.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <memory>

#include "costmodel/validate/published_cluster.h"
#include "costmodel/validate/words.h"
#include "planner/io/csv.h"

namespace tessera {
namespace {

// The kinds as nccl-tests' programs, NVIDIA's and Vidur's tables print them.
struct Kind {
  std::string_view text;  // how the column begins
  CommKind kind;
};
constexpr std::array kKinds = {
    Kind{"all_reduce", CommKind::kAllReduce},
    Kind{"all_gather", CommKind::kAllGather},
    Kind{"reduce_scatter", CommKind::kReduceScatter},
    Kind{"alltoall", CommKind::kAllToAll},
    Kind{"sendrecv", CommKind::kShift},  // a ring of all ranks
    Kind{"send_recv", CommKind::kSendRecv},
};

std::optional<CommKind> KindOf(std::string_view text) {
  for (const Kind& kind : kKinds) {
    if (text.starts_with(kind.text)) return kind.kind;
  }
  return std::nullopt;
}

// What the row says of its machine. Without the size of a host eight GPUs, or
// what its ranks need.
PublishedRun MachineOf(const PublishedCollective& row) {
  PublishedRun run;
  run.gpu = row.gpu;
  run.gpus_per_node =
      row.gpus_per_node > 0
          ? row.gpus_per_node
          : std::max(8, (row.ranks + row.nodes - 1) / row.nodes);
  run.gpus = row.nodes * run.gpus_per_node;
  run.intra_link = row.intra_link;
  run.inter_link = row.inter_link;
  return run;
}

// Why a row is none that a prediction can be held against; empty if it is one.
std::string OutOfScope(const PublishedCollective& row) {
  if (row.seconds <= 0 || row.bytes <= 0) return "no time";
  if (!KindOf(row.kind)) return "no such collective here: " + row.kind;
  if (row.nodes == 0) return "number of hosts not stated";
  if (Has(row.notes, "SUSPECT")) return "a copy within one GPU by its notes";
  if (Has(row.notes, "untuned")) return "untuned by its notes";
  // The author's fabric: full rate within four hosts, a spine of unknown width
  // beyond.
  if (Has(row.inter_link, "oversubscribed") && row.nodes > 4) {
    return "oversubscription of the spine not stated";
  }
  return "";
}

CollectiveChoice ChoiceOf(const PublishedCollective& row) {
  CollectiveChoice choice;
  if (row.notes == "Ring" || row.notes.starts_with("Ring,") ||
      Has(row.notes, "NCCL_NVLS_ENABLE=0")) {
    choice.algorithm = "ring";
  }
  if (row.notes.starts_with("Ring, Simple")) choice.protocol = "simple";
  return choice;
}

// Of a machine and a choice.
struct Model {
  Cluster cluster;
  std::vector<std::string> assumed;
  std::unique_ptr<CollectiveModel> collectives;
};

class Number {
 public:
  Number(const CsvTable& table, const std::string& path)
      : table_(table), path_(path) {}

  Result<double> Read(size_t row, std::string_view column) const {
    const std::string& text =
        table_.rows[row][static_cast<size_t>(table_.Column(column))];
    if (text.empty()) return 0.0;
    double value = 0;
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() ||
        !(value >= 0 && value < 1e18)) {
      return InvalidInput("'" + text + "' is no number of at least 0",
                          path_ + ":" + std::to_string(table_.lines[row]) +
                              ": " + std::string(column));
    }
    return value;
  }

 private:
  const CsvTable& table_;
  const std::string& path_;
};

}  // namespace

double BusFactor(CommKind kind, int ranks) {
  const double others = static_cast<double>(ranks - 1) / ranks;
  switch (kind) {
    case CommKind::kAllReduce:
      return 2 * others;
    case CommKind::kAllGather:
    case CommKind::kReduceScatter:
    case CommKind::kAllToAll:
      return others;
    default:
      return 1;
  }
}

Result<bool> IsTableOfCollectives(const std::string& path) {
  TESSERA_TRY(const CsvTable table, ReadCsv(path));
  return table.Column("collective") >= 0 && table.Column("sweep_id") >= 0;
}

Result<std::vector<PublishedCollective>> ReadPublishedCollectives(
    const std::string& path) {
  TESSERA_TRY(const CsvTable table, ReadCsv(path));
  for (std::string_view column :
       {"sweep_id", "source", "gpu", "nodes", "ranks", "inter_link",
        "collective", "bytes", "time_us_oop", "busbw_oop", "notes"}) {
    if (table.Column(column) < 0) {
      return InvalidInput("there is no such column",
                          path + ":1: " + std::string(column));
    }
  }
  const Number number(table, path);
  std::vector<PublishedCollective> rows;
  for (size_t r = 0; r < table.rows.size(); ++r) {
    const auto text = [&](std::string_view column) {
      return table.rows[r][static_cast<size_t>(table.Column(column))];
    };
    PublishedCollective row;
    row.line = table.lines[r];
    row.sweep = text("sweep_id");
    row.source = text("source");
    row.gpu = text("gpu");
    row.inter_link = text("inter_link");
    if (table.Column("intra_link") >= 0) row.intra_link = text("intra_link");
    row.notes = text("notes");
    row.kind = text("collective");
    TESSERA_TRY(const double nodes, number.Read(r, "nodes"));
    TESSERA_TRY(const double ranks, number.Read(r, "ranks"));
    TESSERA_TRY(const double bytes, number.Read(r, "bytes"));
    TESSERA_TRY(const double microseconds, number.Read(r, "time_us_oop"));
    TESSERA_TRY(const double bus, number.Read(r, "busbw_oop"));
    row.nodes = static_cast<int>(std::min(nodes, 65536.0));
    if (table.Column("gpus_per_node") >= 0) {
      TESSERA_TRY(const double per_node, number.Read(r, "gpus_per_node"));
      row.gpus_per_node = static_cast<int>(std::min(per_node, 65536.0));
    }
    row.ranks = static_cast<int>(std::min(ranks, 1e6));
    row.bytes = static_cast<int64_t>(bytes);
    row.seconds = microseconds * 1e-6;
    const auto kind = KindOf(row.kind);
    if (kind == CommKind::kSendRecv && ranks != 0 && ranks != 2) {
      return InvalidInput("is " + text("ranks") + ": expected 2 for " +
                              row.kind +
                              ", one that sends and one that "
                              "receives",
                          path + ":" + std::to_string(row.line) + ": ranks");
    }
    if (row.seconds == 0 && bus > 0 && kind && row.ranks > 1) {
      row.seconds = BusFactor(*kind, row.ranks) * bytes / (bus * 1e9);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<CollectivePrediction> PredictCollectives(
    const std::vector<PublishedCollective>& rows) {
  std::map<std::string, Model> models;  // by cluster and choice
  std::vector<CollectivePrediction> predictions(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    const PublishedCollective& row = rows[r];
    CollectivePrediction& prediction = predictions[r];
    prediction.measured = &row;
    prediction.refused = OutOfScope(row);
    if (!prediction.refused.empty()) continue;
    const PublishedRun run = MachineOf(row);
    prediction.cluster = std::to_string(row.nodes) + " x " +
                         std::to_string(run.gpus_per_node) + " " + run.gpu;
    const CollectiveChoice choice = ChoiceOf(row);
    Model& model = models[prediction.cluster + "\n" + run.intra_link + "\n" +
                          run.inter_link + "\n" + choice.algorithm + "/" +
                          choice.protocol];
    if (!model.collectives) {
      auto cluster = ClusterOf(run, model.assumed);
      if (!cluster) {
        prediction.refused = cluster.error().ToString();
        continue;
      }
      model.cluster = *std::move(cluster);
      model.collectives =
          std::make_unique<CollectiveModel>(model.cluster, choice);
    }
    prediction.assumed = model.assumed;
    const auto devices = static_cast<int>(model.cluster.devices.size());
    const int per_node = devices / row.nodes;
    const int local = row.ranks / row.nodes;
    if (row.ranks < 2 || row.ranks % row.nodes != 0 || local > per_node) {
      prediction.refused = "its ranks do not fit its hosts";
      continue;
    }
    std::vector<std::vector<DeviceId>> group(1);
    for (int node = 0; node < row.nodes; ++node) {
      for (int i = 0; i < local; ++i) {
        group[0].emplace_back(int64_t{node} * per_node + i);
      }
    }
    const CollectiveOption& best = CollectiveModel::Best(
        model.collectives->Options(*KindOf(row.kind), group), {row.bytes});
    prediction.seconds = best.Seconds({row.bytes});
    prediction.algorithm = best.algorithm;
    prediction.protocol = best.protocol;
  }
  return predictions;
}

}  // namespace tessera
