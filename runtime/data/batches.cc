#include "runtime/data/batches.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "planner/base/rng.h"

namespace tessera {
namespace {

// The inputs that a row has.
struct Column {
  std::string_view name;
  std::vector<int32_t> BatchRow::*values;
};
constexpr Column kColumns[] = {
    {"tokens", &BatchRow::tokens},
    {"labels", &BatchRow::labels},
    {"positions", &BatchRow::positions},
    {"mask_positions", &BatchRow::mask_positions},
    {"segments", &BatchRow::segments},
    {"next_sentence", &BatchRow::next_sentence},
    {"source", &BatchRow::source},
    {"source_positions", &BatchRow::source_positions},
    {"next_token", &BatchRow::next_token},
    {"zeros", &BatchRow::zeros},
};

Result<void> CopyColumns(const BatchRow& row, const std::string& input,
                         int64_t first, size_t width, int32_t* out) {
  const auto column = std::ranges::find(kColumns, input, &Column::name);
  const auto needed = static_cast<size_t>(first) + width;
  if (column == std::end(kColumns) || (row.*column->values).size() < needed) {
    return InvalidInput("no data for it in rows of tokens",
                        "input '" + input + "'");
  }
  std::memcpy(out, (row.*column->values).data() + first,
              width * sizeof(int32_t));
  return {};
}

// Tells what is drawn for a sample apart.
enum class Draw : uint64_t { kOtherRow, kWhichRow, kPlace, kRule, kToken };

// Uniform in [0, 1).
double Drawn(uint64_t key, Draw draw, int64_t place = 0) {
  const uint64_t mixed = Mix64(Mix64(key ^ static_cast<uint64_t>(draw)) ^
                               static_cast<uint64_t>(place));
  return static_cast<double>(mixed >> 11) * 0x1p-53;
}

// The rows of a step, of which each of its inputs takes a part. Thread-safe.
class KeptRows {
 public:
  // The row of a sample, from row_at(sample) where it is not there.
  template <typename RowAt>
  Result<std::shared_ptr<const BatchRow>> Get(int64_t first_sample,
                                              int64_t sample, RowAt row_at) {
    const std::lock_guard lock(mutex_);
    if (first_sample != first_sample_) rows_.clear();
    first_sample_ = first_sample;
    std::shared_ptr<const BatchRow>& row = rows_[sample];
    if (row == nullptr) {
      TESSERA_TRY(BatchRow made, row_at(sample));
      row = std::make_shared<const BatchRow>(std::move(made));
    }
    return row;
  }

 private:
  std::mutex mutex_;
  int64_t first_sample_ = -1;  // of the step
  std::unordered_map<int64_t, std::shared_ptr<const BatchRow>> rows_;
};

template <typename RowAt>
LoadInput LoadRows(const Batches& batches, RowAt row_at) {
  return [&batches, row_at, kept = std::make_shared<KeptRows>()](
             const Tensor& tensor, const LocalTensor& block,
             int64_t first_sample) -> Result<void> {
    TESSERA_RETURN_IF_ERROR(batches.CheckWhole());
    if (block.shape.size() != 2 || block.dtype != DType::kInt32) {
      return InvalidInput("rows of tokens have one number for each place",
                          "input '" + tensor.name + "'");
    }
    int32_t* out = block.as<int32_t>();
    const auto width = static_cast<size_t>(block.shape[1]);
    for (int64_t i = 0; i < block.shape[0]; ++i, out += width) {
      TESSERA_TRY(
          const std::shared_ptr<const BatchRow> row,
          kept->Get(first_sample, first_sample + block.offset[0] + i, row_at));
      TESSERA_RETURN_IF_ERROR(
          CopyColumns(*row, tensor.name, block.offset[1], width, out));
    }
    return {};
  };
}

}  // namespace

RowKind RowKindOf(const Graph& graph) {
  const auto has = [&](std::string_view name) {
    return std::ranges::any_of(graph.tensors, [&](const Tensor& tensor) {
      return tensor.kind == TensorKind::kInput && tensor.name == name;
    });
  };
  return has("source")     ? RowKind::kSequenceToSequence
         : has("segments") ? RowKind::kMaskedToken
                           : RowKind::kNextToken;
}

BatchOptions BatchOptionsOf(const Graph& graph) {
  BatchOptions options;
  options.seq_len = graph.seq_len;
  options.global_batch = graph.global_batch;
  options.kind = RowKindOf(graph);
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind == TensorKind::kInput && tensor.name == "source") {
      options.source_len = tensor.shape[1];
    }
  }
  return options;
}

Result<Batches> Batches::Make(const TokenData& data,
                              const BatchOptions& options) {
  Batches batches(data, options);
  const int64_t held_out = options.validation_batches * options.global_batch;
  const int64_t tokens = batches.row_tokens();
  const int64_t rows = (data.size() - 1) / tokens;
  if (rows <= held_out) {
    const std::string needs =
        held_out == 0 ? " needs at least " + std::to_string(tokens + 1)
                      : " and " + std::to_string(held_out) +
                            " rows held out need at least " +
                            std::to_string((held_out + 1) * tokens + 1);
    return InvalidInput("holds " + std::to_string(data.size()) +
                            (data.size() == 1 ? " token" : " tokens") +
                            ": a sequence length of " + std::to_string(tokens) +
                            needs,
                        data.path());
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (options.end_of_text >= 0 &&
      options.seq_len > kMost / options.seq_len / 2) {
    return InvalidInput("rows of documents have at most 32767 tokens",
                        "--seq-len");
  }
  batches.order_ = {options.seed, rows - held_out};
  return batches;
}

uint64_t Batches::Fingerprint() const {
  uint64_t hash = FingerprintOf(*data_);
  for (int64_t value : {options_.end_of_text, options_.mask_token}) {
    hash = Mix64(hash ^ static_cast<uint64_t>(value));
  }
  return hash;
}

Result<BatchRow> Batches::TrainingRow(int64_t sample) const {
  return Row(order_.Training(sample),
             Mix64(order_.KeyAt(sample) ^ static_cast<uint64_t>(sample)));
}

Result<BatchRow> Batches::ValidationRow(int64_t sample) const {
  return Row(order_.Validation(sample), Mix64(static_cast<uint64_t>(sample)));
}

Result<int64_t> Batches::ValidationLabels(int64_t batch) const {
  TESSERA_RETURN_IF_ERROR(CheckWhole());
  int64_t labels = 0;
  for (int64_t i = 0; i < options_.global_batch; ++i) {
    TESSERA_TRY(const BatchRow row,
                ValidationRow(batch * options_.global_batch + i));
    labels += std::count_if(row.labels.begin(), row.labels.end(),
                            [](int32_t label) { return label >= 0; });
  }
  return labels;
}

int64_t Batches::row_tokens() const {
  return options_.seq_len + options_.source_len;
}

Result<std::vector<int32_t>> Batches::Tokens(int64_t first,
                                             int64_t count) const {
  std::vector<int32_t> tokens;
  tokens.reserve(static_cast<size_t>(count));
  for (int64_t i = first; i < first + count; ++i) {
    TESSERA_TRY(const int32_t token, data_->Token(i));
    tokens.push_back(token);
  }
  return tokens;
}

Result<void> Batches::MaskTokens(int64_t row, uint64_t key,
                                 BatchRow& out) const {
  constexpr double kLabelled = 0.15;
  constexpr double kMasked = 0.8;    // of those
  constexpr double kAnyToken = 0.1;  // of those
  const int64_t n = options_.seq_len;
  const int64_t first = (n + 1) / 2;  // of the second segment
  const bool other = rows() > 1 && Drawn(key, Draw::kOtherRow) < 0.5;
  if (other) {
    // Of the rows that are trained on, each but this one.
    const auto draw = static_cast<int64_t>(Drawn(key, Draw::kWhichRow) *
                                           static_cast<double>(rows() - 1));
    const int64_t from = draw + (draw >= row ? 1 : 0);
    TESSERA_TRY(const std::vector<int32_t> segment,
                Tokens(from * n + first, n - first));
    std::ranges::copy(segment, out.tokens.begin() + first);
  }
  out.next_sentence = {other ? 1 : 0};
  for (int64_t i = 0; i < n; ++i) {
    int32_t& token = out.tokens[static_cast<size_t>(i)];
    out.segments.push_back(i < first ? 0 : 1);
    const bool labelled = Drawn(key, Draw::kPlace, i) < kLabelled;
    out.labels[static_cast<size_t>(i)] = labelled ? token : -1;
    if (!labelled) continue;
    const double rule = Drawn(key, Draw::kRule, i);
    if (rule < kMasked) {
      token = static_cast<int32_t>(options_.mask_token);
    } else if (rule < kMasked + kAnyToken) {
      token = static_cast<int32_t>(Drawn(key, Draw::kToken, i) *
                                   static_cast<double>(options_.vocabulary));
    }
  }
  return {};
}

Result<BatchRow> Batches::SourceAndTarget(int64_t row) const {
  const int64_t first = row * row_tokens();
  BatchRow out;
  TESSERA_TRY(out.source, Tokens(first, options_.source_len));
  TESSERA_TRY(out.labels,
              Tokens(first + options_.source_len, options_.seq_len));
  out.tokens = {0};
  out.tokens.insert(out.tokens.end(), out.labels.begin(), out.labels.end() - 1);
  // Whether the token before ended its document, or one before it did.
  const auto pad = [&](const std::vector<int32_t>& tokens, auto put) {
    bool padding = false;
    for (size_t i = 0; i < tokens.size(); ++i) {
      put(i, padding);
      padding |= tokens[i] == options_.end_of_text;
    }
  };
  pad(out.source, [&](size_t i, bool padding) {
    out.source_positions.push_back(padding ? -1 : static_cast<int32_t>(i));
  });
  const std::vector<int32_t> target = out.labels;
  pad(target, [&](size_t i, bool padding) {
    out.positions.push_back(static_cast<int32_t>(i));
    if (padding) out.labels[i] = -1;
  });
  return out;
}

Result<BatchRow> Batches::Row(int64_t row, uint64_t key) const {
  if (options_.kind == RowKind::kSequenceToSequence) {
    return SourceAndTarget(row);
  }
  const int64_t n = options_.seq_len;
  BatchRow out;
  out.zeros.assign(static_cast<size_t>(n), 0);
  for (auto* list :
       {&out.tokens, &out.labels, &out.positions, &out.mask_positions}) {
    list->reserve(static_cast<size_t>(n));
  }
  const int64_t first = row * n;
  int64_t position = 0;
  int64_t document = 0;
  for (int64_t i = 0; i < n; ++i, ++position) {
    TESSERA_TRY(const int32_t token, data_->Token(first + i));
    TESSERA_TRY(const int32_t next, data_->Token(first + i + 1));
    const bool ends = token == options_.end_of_text;
    out.tokens.push_back(token);
    out.labels.push_back(ends ? -1 : next);
    out.positions.push_back(static_cast<int32_t>(position));
    out.mask_positions.push_back(
        static_cast<int32_t>(position + 2 * n * document));
    if (!ends) continue;
    ++document;
    position = -1;
  }
  out.next_token = {out.labels.back()};
  if (options_.kind == RowKind::kMaskedToken) {
    TESSERA_RETURN_IF_ERROR(MaskTokens(row, key, out));
  }
  return out;
}

LoadInput LoadTraining(const Batches& batches) {
  return LoadRows(batches,
                  [&batches](int64_t i) { return batches.TrainingRow(i); });
}

LoadInput LoadValidation(const Batches& batches) {
  return LoadRows(batches,
                  [&batches](int64_t i) { return batches.ValidationRow(i); });
}

}  // namespace tessera
