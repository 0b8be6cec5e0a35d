#include "runtime/data/batches.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "planner/base/check.h"
#include "planner/base/rng.h"

namespace tessera {
namespace {

Result<void> CopyColumns(const BatchRow& row, const std::string& input,
                         int64_t first, size_t width, int32_t* out) {
  const std::vector<int32_t>* from = input == "tokens"      ? &row.tokens
                                     : input == "labels"    ? &row.labels
                                     : input == "positions" ? &row.positions
                                     : input == "mask_positions"
                                         ? &row.mask_positions
                                         : nullptr;
  if (from == nullptr) {
    return InvalidInput(
        "no data for it: expected tokens, labels, positions or mask_positions",
        "input '" + input + "'");
  }
  std::memcpy(out, from->data() + first, width * sizeof(int32_t));
  return {};
}

template <typename RowAt>
LoadInput LoadRows(RowAt row_at) {
  return [row_at](const Tensor& tensor, const LocalTensor& block,
                  int64_t first_sample) -> Result<void> {
    int32_t* out = block.as<int32_t>();
    const auto width = static_cast<size_t>(block.shape[1]);
    for (int64_t i = 0; i < block.shape[0]; ++i, out += width) {
      TESSERA_TRY(const BatchRow row,
                  row_at(first_sample + block.offset[0] + i));
      TESSERA_RETURN_IF_ERROR(
          CopyColumns(row, tensor.name, block.offset[1], width, out));
    }
    return {};
  };
}

}  // namespace

// Four rounds of a Feistel network over the least 4^k >= n numbers, repeated
// until the result is below n (Luby and Rackoff 1988; Black and Rogaway 2002).
int64_t Permuted(uint64_t key, int64_t i, int64_t n) {
  TESSERA_CHECK(i >= 0 && i < n) << i << " of " << n;
  const int bits = std::bit_width(static_cast<uint64_t>(n - 1));
  const int half = std::max(1, (bits + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto x = static_cast<uint64_t>(i);
  do {
    uint64_t left = x >> half;
    uint64_t right = x & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = Mix64(key ^ Mix64(4 * right + round));
      left = std::exchange(right, left ^ (mixed & mask));
    }
    x = left << half | right;
  } while (x >= static_cast<uint64_t>(n));
  return static_cast<int64_t>(x);
}

Result<Batches> Batches::Make(const TokenData& data,
                              const BatchOptions& options) {
  Batches batches(data, options);
  const int64_t held_out = options.validation_batches * options.global_batch;
  const int64_t rows = (data.size() - 1) / options.seq_len;
  if (rows <= held_out) {
    const std::string needs =
        held_out == 0
            ? " needs at least " + std::to_string(options.seq_len + 1)
            : " and " + std::to_string(held_out) +
                  " rows held out need at least " +
                  std::to_string((held_out + 1) * options.seq_len + 1);
    return InvalidInput("holds " + std::to_string(data.size()) +
                            " tokens: a sequence length of " +
                            std::to_string(options.seq_len) + needs,
                        data.path());
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (options.end_of_text >= 0 &&
      options.seq_len > kMost / options.seq_len / 2) {
    return InvalidInput("rows of documents have at most 32767 tokens",
                        "--seq-len");
  }
  batches.rows_ = rows - held_out;
  return batches;
}

Result<BatchRow> Batches::TrainingRow(int64_t sample) const {
  const auto epoch = static_cast<uint64_t>(sample / rows_);
  const uint64_t key = Mix64(Mix64(options_.seed) ^ epoch);
  return Row(Permuted(key, sample % rows_, rows_));
}

Result<BatchRow> Batches::ValidationRow(int64_t sample) const {
  return Row(rows_ + sample);
}

Result<int64_t> Batches::ValidationLabels(int64_t batch) const {
  int64_t labels = 0;
  for (int64_t i = 0; i < options_.global_batch; ++i) {
    TESSERA_TRY(const BatchRow row,
                ValidationRow(batch * options_.global_batch + i));
    labels += std::count_if(row.labels.begin(), row.labels.end(),
                            [](int32_t label) { return label >= 0; });
  }
  return labels;
}

Result<BatchRow> Batches::Row(int64_t row) const {
  const int64_t n = options_.seq_len;
  BatchRow out;
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
  return out;
}

LoadInput LoadTraining(const Batches& batches) {
  return LoadRows([&batches](int64_t i) { return batches.TrainingRow(i); });
}

LoadInput LoadValidation(const Batches& batches) {
  return LoadRows([&batches](int64_t i) { return batches.ValidationRow(i); });
}

}  // namespace tessera
