#pragma once
// Labelled images, and which of them a run trains on.
//
// A file is a list of records in the form of CIFAR-10's binary version
// (Krizhevsky 2009), for any size of image: one byte of label, then a byte for
// each pixel, channel by channel and row by row. A byte p is the number
// p / 127.5 - 1. Without a file images are made up: each label has a pattern of
// its own, which its images show under as much noise, all a function of the
// seed.
//
// Which of them a run trains on, and in which order, runtime/data/epoch_order.h
// says.
//
// Immutable; const functions may be called from several threads.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "runtime/data/epoch_order.h"
#include "runtime/executor.h"
#include "runtime/mapped_file.h"

namespace tessera {

struct ImageOptions {
  Shape shape;  // channels, height (or a signal's length), width; or 1
  int64_t labels = 0;
  int64_t global_batch = 0;
  uint64_t seed = 0;
  int64_t validation_batches = 0;  // held out
};

// Those of a graph's inputs "labels", or "targets" [b, labels] or [b], and
// "images" [b, c, h, w], of signals [b, c, w], of features [b, c], or "patches"
// [b, 1 + patches, c, h, w] of square images, with the seed and the validation
// left open; an error where it lacks them.
Result<ImageOptions> ImageOptionsOf(const Graph& graph);

// One image. Valid as long as the Images that it is of.
class Image {
 public:
  int32_t label() const { return label_; }
  // Element `i`, between -1 and 1.
  double Pixel(int64_t i) const;

 private:
  friend class Images;

  const std::byte* pixels_ = nullptr;  // of a file; null: made up
  int32_t label_ = 0;
  uint64_t pattern_ = 0;  // keys of what is made up: of all of its label,
  uint64_t noise_ = 0;    // and of this one
};

class Images {
 public:
  // Of the file at `path`; made up where that is empty. kInvalidInput for a
  // file that is no whole number of records, that has too few beside those held
  // out, or a label that the model does not have among those looked at, some
  // thousand images (CheckLabel looks at each one that is loaded).
  static Result<Images> Open(const std::string& path,
                             const ImageOptions& options);

  const ImageOptions& options() const { return options_; }
  // Of an epoch.
  int64_t size() const { return order_.size; }
  const EpochOrder& order() const { return order_; }

  Image At(int64_t image) const;
  // kInvalidInput where the model does not have the label.
  Result<void> CheckLabel(int64_t image) const;

  // As MappedFile::CheckWhole, where there is a file.
  Result<void> CheckWhole() const {
    return file_ ? file_->CheckWhole() : Result<void>();
  }

  // Tells one file's images, or one seed's, from another's.
  uint64_t Fingerprint() const;

 private:
  Images(const std::string& path, const ImageOptions& options);

  std::string path_;
  ImageOptions options_;
  int64_t pixels_ = 0;  // of an image
  EpochOrder order_;
  std::optional<MappedFile> file_;  // of records; none: made up
};

// Inputs by name: "labels" and "images", or "patches", row by row behind a
// patch of zeros, with their "positions" from 0 and "patch_rows", -1 of the
// first one and else 0. "targets" are 1 at the label and 0 elsewhere, or a
// column of labels 0 and 1. kInvalidInput for an input of another name.
// `images` outlives the result.
LoadInput LoadTraining(const Images& images);
LoadInput LoadValidation(const Images& images);

}  // namespace tessera
