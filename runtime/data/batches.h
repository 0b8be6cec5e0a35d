#pragma once
// Batches: which rows of the data a run trains on, and what a row holds.
//
// Rows are cut from the file one after another, seq_len tokens each. Which of
// them a run trains on, and in which order, runtime/data/epoch_order.h says.
//
// Documents. Where a token ends a document, a row may hold several, the first
// and the last of them cut. Each is a sequence of its own: positions count from
// 0 in each, and the token behind a document's last is not a label. Attention
// is told by "mask_positions": position + 2 seq_len × (which document of the
// row). With a window of at most seq_len, as a graph imported for documents has
// (ImportOptions::documents), a query then sees the keys of its own document
// that do not come after it, and no others: those of the document before lie
// seq_len + 1 or more away.
//
// What a row teaches follows from the inputs that the graph has (RowKind):
//
// kNextToken. The label of a token is the next one.
//
// kMaskedToken, of a graph with the input "segments" (Devlin et al. 2019,
// section 3.1). 15 % of the places have a label, their token; of these 80 %
// read mask_token instead, 10 % any token, 10 % their own. The row is two
// segments, its halves (the first is the longer one), numbered 0 and 1 in
// "segments". Of half of the samples the second segment is that of another row;
// then "next_sentence", one number a sample, is 1, else 0. Nothing stands
// between the segments. What is drawn is a function of (seed, sample), another
// each epoch.
//
// kSequenceToSequence, of a graph with the input "source". A row is the tokens
// of "source" and behind them those of the target, which are the labels;
// "tokens" are the labels moved by one place, behind the token 0. Where a token
// ends a document, what stands behind the first such of each is padding: it has
// no label, and its "source_positions" are -1, which no query sees.

#include <cstdint>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "runtime/data/epoch_order.h"
#include "runtime/data/tokens.h"
#include "runtime/executor.h"

namespace tessera {

enum class RowKind : uint8_t { kNextToken, kMaskedToken, kSequenceToSequence };
RowKind RowKindOf(const Graph& graph);

struct BatchOptions {
  int64_t seq_len = 0;
  int64_t global_batch = 0;
  uint64_t seed = 0;
  int64_t validation_batches = 0;  // held out
  int64_t end_of_text = -1;        // the token; -1: no documents
  RowKind kind = RowKind::kNextToken;
  int64_t source_len = 0;  // of kSequenceToSequence
  int64_t mask_token = 0;  // of kMaskedToken
  int64_t vocabulary = 1;  // of kMaskedToken: any token is below
};
// The kind of rows and the lengths of the graph's inputs.
BatchOptions BatchOptionsOf(const Graph& graph);

// One sample: seq_len elements each, or source_len, or one.
struct BatchRow {
  std::vector<int32_t> tokens;
  std::vector<int32_t> labels;  // -1 where there is none to learn
  std::vector<int32_t> positions;
  std::vector<int32_t> mask_positions;
  std::vector<int32_t> segments;
  std::vector<int32_t> next_sentence;
  std::vector<int32_t> source;
  std::vector<int32_t> source_positions;
  std::vector<int32_t> next_token;  // behind the last, one number
  std::vector<int32_t> zeros;       // where all places are alike
};

// Immutable; const functions may be called from several threads.
class Batches {
 public:
  // `data` outlives the result. kInvalidInput where the data is too short for
  // one row beside those held out, or rows of documents are too long for 32-bit
  // positions.
  static Result<Batches> Make(const TokenData& data,
                              const BatchOptions& options);

  const BatchOptions& options() const { return options_; }
  // Tells other data, or the same read in another way, from this.
  uint64_t Fingerprint() const;
  // Of an epoch.
  int64_t rows() const { return order_.size; }

  // Sample `sample` >= 0 of the run.
  Result<BatchRow> TrainingRow(int64_t sample) const;
  // REQUIRES: 0 <= sample < validation_batches * global_batch.
  Result<BatchRow> ValidationRow(int64_t sample) const;
  // Labels that count in validation batch `batch`.
  Result<int64_t> ValidationLabels(int64_t batch) const;
  // As MappedFile::CheckWhole, of the data.
  Result<void> CheckWhole() const { return data_->CheckWhole(); }

 private:
  Batches(const TokenData& data, const BatchOptions& options)
      : data_(&data), options_(options) {}
  // Tokens [first, first + count) of the data.
  Result<std::vector<int32_t>> Tokens(int64_t first, int64_t count) const;
  // `key` is of the sample.
  Result<BatchRow> Row(int64_t row, uint64_t key) const;
  Result<void> MaskTokens(int64_t row, uint64_t key, BatchRow& out) const;
  Result<BatchRow> SourceAndTarget(int64_t row) const;
  // So many tokens of the data are a row.
  int64_t row_tokens() const;

  const TokenData* data_;
  BatchOptions options_;
  EpochOrder order_;  // of rows
};

// Inputs by name, those of BatchRow. kInvalidInput for an input of another
// name. `batches` outlives the result.
LoadInput LoadTraining(const Batches& batches);
LoadInput LoadValidation(const Batches& batches);

}  // namespace tessera
