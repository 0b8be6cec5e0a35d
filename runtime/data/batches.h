#pragma once
// Batches: which rows of the data a run trains on, and what a row holds.
//
// Rows are cut from the file one after another, seq_len tokens each; the last
// of them may be held out for validation. An epoch goes through the other rows
// once, in an order that is a function of (seed, epoch): sample i of a run is
// row Order(i mod rows) of epoch i div rows. So the number of samples taken is
// all the state there is; a checkpoint holds it, and no split of the batch
// changes what is read.
//
// Documents. Where a token ends a document, a row may hold several, the first
// and the last of them cut. Each is a sequence of its own: positions count from
// 0 in each, and the token behind a document's last is not a label. Attention
// is told by "mask_positions": position + 2 seq_len × (which document of the
// row). With a window of at most seq_len, as a graph imported for documents has
// (ImportOptions::documents), a query then sees the keys of its own document
// that do not come after it, and no others: those of the document before lie
// seq_len + 1 or more away.

#include <cstdint>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "runtime/data/tokens.h"
#include "runtime/executor.h"

namespace tessera {

struct BatchOptions {
  int64_t seq_len = 0;
  int64_t global_batch = 0;
  uint64_t seed = 0;
  int64_t validation_batches = 0;  // held out
  int64_t end_of_text = -1;        // the token; -1: no documents
};

// One sequence, seq_len elements each.
struct BatchRow {
  std::vector<int32_t> tokens;
  std::vector<int32_t> labels;  // -1 where there is none to learn
  std::vector<int32_t> positions;
  std::vector<int32_t> mask_positions;
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
  // Of an epoch.
  int64_t rows() const { return rows_; }

  // Sample `sample` >= 0 of the run.
  Result<BatchRow> TrainingRow(int64_t sample) const;
  // REQUIRES: 0 <= sample < validation_batches * global_batch.
  Result<BatchRow> ValidationRow(int64_t sample) const;
  // Labels that count in validation batch `batch`.
  Result<int64_t> ValidationLabels(int64_t batch) const;

 private:
  Batches(const TokenData& data, const BatchOptions& options)
      : data_(&data), options_(options) {}
  Result<BatchRow> Row(int64_t row) const;

  const TokenData* data_;
  BatchOptions options_;
  int64_t rows_ = 0;
};

// A permutation of [0, n), another for each key. REQUIRES: 0 <= i < n.
int64_t Permuted(uint64_t key, int64_t i, int64_t n);

// Inputs by name: "tokens", "labels", "positions" and "mask_positions".
// kInvalidInput for an input of another name. `batches` outlives the result.
LoadInput LoadTraining(const Batches& batches);
LoadInput LoadValidation(const Batches& batches);

}  // namespace tessera
