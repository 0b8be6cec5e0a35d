#include "runtime/data/clicks.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "planner/base/rng.h"
#include "planner/base/whole_number.h"
#include "runtime/data/numbers.h"

namespace tessera {
namespace {

// As many as there are for training in the benchmark's data
// (github.com/mlcommons/training, recommendation/dlrm).
constexpr int64_t kMadeUp = 4195197692;

// What Open looks at: enough to catch records of other tables, few enough pages
// to be quick on a file of any size.
constexpr int64_t kCheckedRecords = 4096;

constexpr std::string_view kCategories = "categories.";

// The table of input "categories.N", or -1.
int64_t TableOf(std::string_view name) {
  if (!name.starts_with(kCategories)) return -1;
  return ParseWhole<int64_t>(name.substr(kCategories.size())).value_or(-1);
}

// `record_of`: by sample.
template <typename RecordOf>
LoadInput Load(const Clicks& clicks, RecordOf record_of) {
  return [&clicks, record_of](const Tensor& tensor, const LocalTensor& block,
                              int64_t first_sample) -> Result<void> {
    TESSERA_RETURN_IF_ERROR(clicks.CheckWhole());
    const int64_t table = TableOf(tensor.name);
    const bool known =
        tensor.name == "dense" || tensor.name == "targets" ||
        (table >= 0 && table < std::ssize(clicks.options().rows));
    if (!known) {
      return InvalidInput(
          "no data for it: expected dense, targets or categories.N",
          "input '" + tensor.name + "'");
    }
    const bool dense = tensor.name == "dense";
    const int64_t width = block.shape[1];
    std::vector<double> numbers(static_cast<size_t>(width));
    for (int64_t b = 0; b < block.shape[0]; ++b) {
      const int64_t record = record_of(first_sample + block.offset[0] + b);
      if (table >= 0) {
        TESSERA_RETURN_IF_ERROR(clicks.CheckId(record, table));
      } else if (!dense) {
        TESSERA_RETURN_IF_ERROR(clicks.CheckLabel(record));
      }
      const Click click = clicks.At(record);
      for (int64_t i = 0; i < width; ++i) {
        const int64_t at = block.offset[1] + i;
        numbers[static_cast<size_t>(i)] = table >= 0 ? click.Id(table, at)
                                          : dense    ? click.Number(at)
                                                     : click.label();
      }
      PutNumbers(block, b * width, numbers);
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
  Clicks clicks(path, options);
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
    const int64_t stride = std::max<int64_t>(1, all / kCheckedRecords);
    for (int64_t i = 0; i < all; i += stride) {
      TESSERA_RETURN_IF_ERROR(clicks.CheckLabel(i));
      for (int64_t table = 0; table < std::ssize(options.rows); ++table) {
        TESSERA_RETURN_IF_ERROR(clicks.CheckId(i, table));
      }
    }
  }
  const int64_t held_out = options.validation_batches * options.global_batch;
  TESSERA_TRY(clicks.order_,
              EpochOrder::Of(options.seed, all, held_out, "samples", path));
  return clicks;
}

Click Clicks::At(int64_t record) const {
  Click click;
  click.options_ = &options_;
  if (!records_.empty()) {
    click.record_ = records_.data() + record * width();
    click.label_ = click.record_[0];
    return click;
  }
  const auto place = static_cast<uint64_t>(record);
  click.label_ = Mix64(Mix64(options_.seed) + place) % 4 == 0 ? 1 : 0;
  const auto pattern = ~static_cast<uint64_t>(click.label_);
  click.pattern_ = Mix64(options_.seed ^ Mix64(pattern));
  click.noise_ = Mix64(options_.seed ^ Mix64(place));
  return click;
}

double Click::Number(int64_t i) const {
  if (record_ != nullptr) {
    return std::log1p(std::max<int32_t>(0, record_[1 + i]));
  }
  const auto place = static_cast<uint64_t>(i);
  return CounterUniform01(pattern_, place) + CounterUniform01(noise_, place);
}

int32_t Click::Id(int64_t table, int64_t i) const {
  if (record_ != nullptr) return record_[1 + options_->dense + table];
  // Clicked samples have an id of the first half more often than others.
  const auto rows =
      static_cast<double>(options_->rows[static_cast<size_t>(table)]);
  const auto place =
      static_cast<uint64_t>(options_->dense + table * options_->bag + i);
  const double draw = CounterUniform01(noise_, place);
  return static_cast<int32_t>(rows * (label_ == 1 ? draw * draw : draw));
}

Result<void> Clicks::CheckLabel(int64_t record) const {
  const int32_t label = At(record).label();
  if (label == 0 || label == 1) return {};
  return InvalidInput("record " + std::to_string(record) + " has the label " +
                          std::to_string(label) + ": expected 0 or 1",
                      path_);
}

Result<void> Clicks::CheckId(int64_t record, int64_t table) const {
  const int64_t rows = options_.rows[static_cast<size_t>(table)];
  const int64_t id = At(record).Id(table, 0);
  if (id >= 0 && id < rows) return {};
  return InvalidInput("record " + std::to_string(record) + " has the id " +
                          std::to_string(id) + " for table " +
                          std::to_string(table) + " of " +
                          std::to_string(rows) + " rows",
                      path_);
}

uint64_t Clicks::Fingerprint() const {
  uint64_t hash = Mix64(static_cast<uint64_t>(size()));
  if (records_.empty()) return Mix64(hash ^ options_.seed);
  constexpr int64_t kLooks = 1000;
  const int64_t all = std::ssize(records_) / width();
  const int64_t stride = std::max<int64_t>(1, all / kLooks);
  for (int64_t i = 0; i < all; i += stride) {
    for (const int32_t number : records_.subspan(
             static_cast<size_t>(i * width()), static_cast<size_t>(width()))) {
      hash = Mix64(hash ^ static_cast<uint32_t>(number));
    }
  }
  return hash;
}

LoadInput LoadTraining(const Clicks& clicks) {
  return Load(clicks, [&clicks](int64_t sample) {
    return clicks.order().Training(sample);
  });
}

LoadInput LoadValidation(const Clicks& clicks) {
  return Load(clicks, [&clicks](int64_t sample) {
    return clicks.order().Validation(sample);
  });
}

}  // namespace tessera
