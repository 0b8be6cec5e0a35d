#include "runtime/data/clicks.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "planner/base/rng.h"
#include "runtime/data/batches.h"
#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

// As many as there are for training in the benchmark's data
// (github.com/mlcommons/training, recommendation/dlrm).
constexpr int64_t kMadeUp = 4195197692;

constexpr std::string_view kCategories = "categories.";

// The table of input "categories.N", or -1.
int64_t TableOf(std::string_view name) {
  if (!name.starts_with(kCategories)) return -1;
  const std::string_view digits = name.substr(kCategories.size());
  int64_t table = -1;
  const auto read =
      std::from_chars(digits.data(), digits.data() + digits.size(), table);
  return read.ec == std::errc() && read.ptr == digits.data() + digits.size()
             ? table
             : -1;
}

// `record_of`: by sample.
template <typename RecordOf>
LoadInput Load(const Clicks& clicks, RecordOf record_of) {
  return [&clicks, record_of](const Tensor& tensor, const LocalTensor& block,
                              int64_t first_sample) -> Result<void> {
    const int64_t table = TableOf(tensor.name);
    const bool known =
        tensor.name == "dense" || tensor.name == "targets" ||
        (table >= 0 && table < std::ssize(clicks.options().rows));
    if (!known) {
      return InvalidInput(
          "no data for it: expected dense, targets or categories.N",
          "input '" + tensor.name + "'");
    }
    const int64_t width = block.shape[1];
    for (int64_t b = 0; b < block.shape[0]; ++b) {
      const int64_t record = record_of(first_sample + block.offset[0] + b);
      for (int64_t i = 0; i < width; ++i) {
        const int64_t at = block.offset[1] + i;
        const int64_t to = b * width + i;
        if (table >= 0) {
          block.as<int32_t>()[to] = clicks.Id(record, table, at);
        } else if (tensor.name == "dense") {
          Put(block, to, clicks.Number(record, at));
        } else {
          Put(block, to, clicks.Label(record));
        }
      }
    }
    return {};
  };
}

}  // namespace

Result<ClickOptions> ClickOptionsOf(const Graph& graph) {
  ClickOptions options;
  options.global_batch = graph.global_batch;
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind == TensorKind::kInput && tensor.name == "dense" &&
        tensor.shape.size() == 2) {
      options.dense = tensor.shape[1];
    }
  }
  for (const Node& node : graph.nodes) {
    if (node.op->name != "embedding_bag") continue;
    const Tensor& ids = graph.tensor(node.operands[0]);
    const auto table = static_cast<size_t>(TableOf(ids.name));
    if (TableOf(ids.name) != std::ssize(options.rows)) {
      return InvalidInput("the ids of table " + std::to_string(table) +
                          " come after those of " +
                          std::to_string(options.rows.size()) + " tables");
    }
    options.bag = ids.shape[1];
    options.rows.push_back(graph.tensor(node.operands[1]).shape[0]);
  }
  if (options.dense == 0 || options.rows.empty()) {
    return InvalidInput(
        "the graph has no clicks: dense numbers and categories");
  }
  return options;
}

Result<Clicks> Clicks::Open(const std::string& path,
                            const ClickOptions& options) {
  Clicks clicks(options);
  int64_t all = kMadeUp;
  if (!path.empty()) {
    if (options.bag != 1) {
      return InvalidInput("has one id for each table: expected bags of " +
                              std::to_string(options.bag),
                          path);
    }
    TESSERA_TRY(MappedFile file, MappedFile::Open(path));
    clicks.file_.emplace(std::move(file));
    const std::span<const std::byte> bytes = clicks.file_->bytes();
    const auto record = clicks.width() * static_cast<int64_t>(sizeof(int32_t));
    if (bytes.empty() || std::ssize(bytes) % record != 0) {
      return InvalidInput("has " + std::to_string(bytes.size()) +
                              " bytes: expected records of " +
                              std::to_string(record) + ", a label, " +
                              std::to_string(options.dense) + " counts and " +
                              std::to_string(options.rows.size()) + " ids",
                          path);
    }
    clicks.records_ = {reinterpret_cast<const int32_t*>(bytes.data()),
                       bytes.size() / sizeof(int32_t)};
    all = std::ssize(bytes) / record;
    for (int64_t i = 0; i < all; ++i) {
      const int32_t label = clicks.Label(i);
      if (label != 0 && label != 1) {
        return InvalidInput("record " + std::to_string(i) + " has the label " +
                                std::to_string(label) + ": expected 0 or 1",
                            path);
      }
      for (int64_t table = 0; table < std::ssize(options.rows); ++table) {
        const int64_t rows = options.rows[static_cast<size_t>(table)];
        const int64_t id = clicks.Id(i, table, 0);
        if (id >= 0 && id < rows) continue;
        return InvalidInput("record " + std::to_string(i) + " has the id " +
                                std::to_string(id) + " for table " +
                                std::to_string(table) + " of " +
                                std::to_string(rows) + " rows",
                            path);
      }
    }
  }
  const int64_t held_out = options.validation_batches * options.global_batch;
  if (all <= held_out) {
    return InvalidInput("holds " + std::to_string(all) + " samples, of which " +
                            std::to_string(held_out) + " are held out",
                        path);
  }
  clicks.size_ = all - held_out;
  return clicks;
}

int64_t Clicks::Training(int64_t sample) const {
  const auto epoch = static_cast<uint64_t>(sample / size_);
  return Permuted(Mix64(Mix64(options_.seed) ^ epoch), sample % size_, size_);
}

int32_t Clicks::Label(int64_t record) const {
  if (!records_.empty()) {
    return records_[static_cast<size_t>(record * width())];
  }
  const auto place = static_cast<uint64_t>(record);
  return Mix64(Mix64(options_.seed) + place) % 4 == 0 ? 1 : 0;
}

double Clicks::Number(int64_t record, int64_t i) const {
  if (!records_.empty()) {
    const int32_t count =
        records_[static_cast<size_t>(record * width() + 1 + i)];
    return std::log1p(std::max<int32_t>(0, count));
  }
  const auto place = static_cast<uint64_t>(i);
  const auto pattern = ~static_cast<uint64_t>(Label(record));
  const auto noise = static_cast<uint64_t>(record);
  return CounterUniform01(Mix64(options_.seed ^ Mix64(pattern)), place) +
         CounterUniform01(Mix64(options_.seed ^ Mix64(noise)), place);
}

int32_t Clicks::Id(int64_t record, int64_t table, int64_t i) const {
  if (!records_.empty()) {
    return records_[static_cast<size_t>(record * width() + 1 + options_.dense +
                                        table)];
  }
  // Clicked samples have an id of the first half more often than others.
  const auto rows =
      static_cast<double>(options_.rows[static_cast<size_t>(table)]);
  const auto place =
      static_cast<uint64_t>(options_.dense + table * options_.bag + i);
  const double draw = CounterUniform01(
      Mix64(options_.seed ^ Mix64(static_cast<uint64_t>(record))), place);
  return static_cast<int32_t>(rows * (Label(record) == 1 ? draw * draw : draw));
}

uint64_t Clicks::Fingerprint() const {
  uint64_t hash = Mix64(static_cast<uint64_t>(size_));
  if (records_.empty()) return Mix64(hash ^ options_.seed);
  const size_t step = std::max<size_t>(1, records_.size() / 1000);
  for (size_t i = 0; i < records_.size(); i += step) {
    hash = Mix64(hash ^ static_cast<uint32_t>(records_[i]));
  }
  return hash;
}

LoadInput LoadTraining(const Clicks& clicks) {
  return Load(clicks,
              [&clicks](int64_t sample) { return clicks.Training(sample); });
}

LoadInput LoadValidation(const Clicks& clicks) {
  return Load(clicks,
              [&clicks](int64_t sample) { return clicks.Validation(sample); });
}

}  // namespace tessera
