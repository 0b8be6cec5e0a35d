#pragma once
// Clicks: samples of recommendation models (planner/io/dlrm.cc), and which of
// them a run trains on.
//
// A file is a list of records in the form of the MLPerf benchmark's binary
// version of Criteo's click logs (github.com/facebookresearch/dlrm,
// data_loader_terabyte.py, CriteoBinDataset), for any number of features:
// little-endian int32 numbers, the label 0 or 1, the counts, and an id for each
// table. A count c is the number log(1 + c), negative ones count as 0. Without
// a file clicks are made up: a quarter of the samples are clicked, the numbers
// of these are drawn around others, and so are the ids; all a function of the
// seed.
//
// The last samples of a file may be held out for validation. An epoch goes
// through the others once, in an order that is a function of (seed, epoch), as
// that of rows of tokens is (runtime/data/batches.h); no split of the batch
// changes what is read.
//
// Immutable; const functions may be called from several threads.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "runtime/executor.h"
#include "runtime/mapped_file.h"

namespace tessera {

struct ClickOptions {
  int64_t dense = 0;          // numbers of a sample
  std::vector<int64_t> rows;  // of each table: ids are below
  int64_t bag = 1;            // ids of a sample for each table
  int64_t global_batch = 0;
  uint64_t seed = 0;
  int64_t validation_batches = 0;  // held out
};

// Those of a graph's inputs "dense" [b, numbers] and "categories.N" [b, bag],
// with the seed and the validation left open; an error where it lacks them.
Result<ClickOptions> ClickOptionsOf(const Graph& graph);

class Clicks {
 public:
  // Of the file at `path`; made up where that is empty. kInvalidInput for a
  // file that is no whole number of records, that has too few beside those held
  // out, a label but 0 and 1, an id that its table does not have, or where
  // tables have bags of several ids.
  static Result<Clicks> Open(const std::string& path,
                             const ClickOptions& options);

  const ClickOptions& options() const { return options_; }
  // Of an epoch.
  int64_t size() const { return size_; }

  // The record that sample `sample` >= 0 of the run is, and the one of the
  // validation. REQUIRES: sample < validation_batches * global_batch there.
  int64_t Training(int64_t sample) const;
  int64_t Validation(int64_t sample) const { return size_ + sample; }

  int32_t Label(int64_t record) const;
  double Number(int64_t record, int64_t i) const;
  // Id `i` of the record's bag for table `table`.
  int32_t Id(int64_t record, int64_t table, int64_t i) const;

  // Tells one file's clicks, or one seed's, from another's.
  uint64_t Fingerprint() const;

 private:
  explicit Clicks(const ClickOptions& options) : options_(options) {}

  int64_t width() const {  // of a record
    return 1 + options_.dense + std::ssize(options_.rows);
  }

  ClickOptions options_;
  int64_t size_ = 0;  // without those held out
  std::optional<MappedFile> file_;
  std::span<const int32_t> records_;  // of the file; empty: made up
};

// Inputs by name: "dense", "categories.N" and "targets" [b, 1], the label.
// kInvalidInput for an input of another name. `clicks` outlives the result.
LoadInput LoadTraining(const Clicks& clicks);
LoadInput LoadValidation(const Clicks& clicks);

}  // namespace tessera
