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
// Which of them a run trains on, and in which order, runtime/data/epoch_order.h
// says.
//
// Immutable; const functions may be called from several threads.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "runtime/data/epoch_order.h"
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

// One sample. Valid as long as the Clicks that it is of.
class Click {
 public:
  int32_t label() const { return label_; }
  double Number(int64_t i) const;
  // Id `i` of the bag for table `table`.
  int32_t Id(int64_t table, int64_t i) const;

 private:
  friend class Clicks;

  const ClickOptions* options_ = nullptr;
  const int32_t* record_ = nullptr;  // of a file; null: made up
  int32_t label_ = 0;
  uint64_t pattern_ = 0;  // keys of what is made up: of all of its label,
  uint64_t noise_ = 0;    // and of this one
};

class Clicks {
 public:
  // Of the file at `path`; made up where that is empty. kInvalidInput for a
  // file that is no whole number of records, that has too few beside those held
  // out, a label but 0 and 1 or an id that its table does not have among those
  // looked at, some thousand records (CheckLabel and CheckId look at each one
  // that is loaded), or where tables have bags of several ids.
  static Result<Clicks> Open(const std::string& path,
                             const ClickOptions& options);

  const ClickOptions& options() const { return options_; }
  // Of an epoch.
  int64_t size() const { return order_.size; }
  const EpochOrder& order() const { return order_; }

  Click At(int64_t record) const;
  // kInvalidInput where a file has a label but 0 and 1, or an id that table
  // `table` does not have.
  Result<void> CheckLabel(int64_t record) const;
  Result<void> CheckId(int64_t record, int64_t table) const;

  // As MappedFile::CheckWhole, where there is a file.
  Result<void> CheckWhole() const {
    return file_ ? file_->CheckWhole() : Result<void>();
  }

  // Tells one file's clicks, or one seed's, from another's.
  uint64_t Fingerprint() const;

 private:
  Clicks(const std::string& path, const ClickOptions& options)
      : path_(path), options_(options) {}

  int64_t width() const {  // of a record
    return 1 + options_.dense + std::ssize(options_.rows);
  }

  std::string path_;
  ClickOptions options_;
  EpochOrder order_;
  std::optional<MappedFile> file_;
  std::span<const int32_t> records_;  // of the file; empty: made up
};

// Inputs by name: "dense", "categories.N" and "targets" [b, 1], the label.
// kInvalidInput for an input of another name. `clicks` outlives the result.
LoadInput LoadTraining(const Clicks& clicks);
LoadInput LoadValidation(const Clicks& clicks);

}  // namespace tessera
