#include "runtime/data/images.h"

#include <algorithm>
#include <cmath>

#include "planner/base/file.h"
#include "planner/base/rng.h"
#include "runtime/data/batches.h"
#include "runtime/float16.h"

namespace tessera {
namespace {

// As many as there are in ImageNet's training set (Russakovsky et al. 2015).
constexpr int64_t kMadeUp = 1281167;

// Between -1 and 1.
double Uniform(uint64_t key, uint64_t counter) {
  return 2 * CounterUniform01(key, counter) - 1;
}

// What a block has of an image, from element `out` of the block on.
void LoadImage(const Images& images, int64_t image, const LocalTensor& block,
               int64_t& out) {
  const Shape& whole = images.options().shape;
  // Signals and features lack the last dimensions.
  Shape shape = block.shape;
  Shape offset = block.offset;
  shape.resize(4, 1);
  offset.resize(4, 0);
  for (int64_t c = 0; c < shape[1]; ++c) {
    for (int64_t y = 0; y < shape[2]; ++y) {
      const int64_t row =
          ((offset[1] + c) * whole[1] + offset[2] + y) * whole[2] + offset[3];
      for (int64_t x = 0; x < shape[3]; ++x) {
        StoreNumber(block.data, block.dtype, out++,
                    images.Pixel(image, row + x));
      }
    }
  }
}

void LoadPatches(const Images& images, int64_t image, const LocalTensor& block,
                 int64_t& out) {
  const Shape& whole = images.options().shape;
  const int64_t height = block.global_shape[3];
  const int64_t width = block.global_shape[4];
  const int64_t per_row = whole[2] / width;
  for (int64_t i = 0; i < block.shape[1]; ++i) {
    const int64_t patch = block.offset[1] + i - 1;  // -1: that of zeros
    for (int64_t c = 0; c < block.shape[2]; ++c) {
      for (int64_t y = 0; y < block.shape[3]; ++y) {
        const int64_t row = patch / per_row * height + block.offset[3] + y;
        const int64_t first =
            ((block.offset[2] + c) * whole[1] + row) * whole[2] +
            patch % per_row * width + block.offset[4];
        for (int64_t x = 0; x < block.shape[4]; ++x) {
          StoreNumber(block.data, block.dtype, out++,
                      patch < 0 ? 0 : images.Pixel(image, first + x));
        }
      }
    }
  }
}

// What a block has of a row of targets: 1 at the label and else 0, or, of a
// single number, the label. There may be a dimension of one place (ViT's).
void LoadTargets(const Images& images, int64_t image, const LocalTensor& block,
                 int64_t& out) {
  const int64_t label = images.Label(image);
  for (int64_t i = 0; i < block.shape.back(); ++i) {
    const bool own = block.offset.back() + i == label;
    const int64_t value = block.global_shape.back() == 1 ? label : own ? 1 : 0;
    StoreNumber(block.data, block.dtype, out++, static_cast<double>(value));
  }
}

// `image_of`: by sample.
template <typename ImageOf>
LoadInput Load(const Images& images, ImageOf image_of) {
  return [&images, image_of](const Tensor& tensor, const LocalTensor& block,
                             int64_t first_sample) -> Result<void> {
    int64_t out = 0;
    for (int64_t sample = 0; sample < block.shape[0]; ++sample) {
      const int64_t image = image_of(first_sample + block.offset[0] + sample);
      if (tensor.name == "labels") {
        block.as<int32_t>()[out++] = images.Label(image);
      } else if (tensor.name == "targets") {
        LoadTargets(images, image, block, out);
      } else if (tensor.name == "images") {
        LoadImage(images, image, block, out);
      } else if (tensor.name == "patches") {
        LoadPatches(images, image, block, out);
      } else if (tensor.name == "positions" || tensor.name == "patch_rows") {
        for (int64_t i = 0; i < block.shape[1]; ++i) {
          const int64_t place = block.offset[1] + i;
          const int64_t row = place == 0 ? -1 : 0;
          block.as<int32_t>()[out++] =
              static_cast<int32_t>(tensor.name == "positions" ? place : row);
        }
      } else {
        return InvalidInput("no data for it: expected images or labels",
                            "input '" + tensor.name + "'");
      }
    }
    return {};
  };
}

}  // namespace

Result<ImageOptions> ImageOptionsOf(const Graph& graph) {
  ImageOptions options;
  options.global_batch = graph.global_batch;
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind == TensorKind::kInput && tensor.name == "images" &&
        tensor.shape.size() >= 2 && tensor.shape.size() <= 4) {
      options.shape = {tensor.shape.begin() + 1, tensor.shape.end()};
      options.shape.resize(3, 1);
    }
    if (tensor.kind == TensorKind::kInput && tensor.name == "patches" &&
        tensor.shape.size() == 5) {
      const int64_t side =
          std::llround(std::sqrt(static_cast<double>(tensor.shape[1] - 1)));
      options.shape = {tensor.shape[2], side * tensor.shape[3],
                       side * tensor.shape[4]};
    }
    if (tensor.kind == TensorKind::kInput && tensor.name == "targets" &&
        (tensor.shape.size() == 2 ||
         (tensor.shape.size() == 3 && tensor.shape[1] == 1))) {
      options.labels = std::max<int64_t>(2, tensor.shape.back());
    }
  }
  for (const Node& node : graph.nodes) {
    if (node.op->name == "cross_entropy") {
      options.labels = graph.tensor(node.operands[0]).shape.back();
    }
  }
  if (options.shape.empty() || options.labels == 0) {
    return InvalidInput("the graph has no images or patches with labels");
  }
  return options;
}

Images::Images(const ImageOptions& options)
    : options_(options),
      pixels_(options.shape[0] * options.shape[1] * options.shape[2]) {}

Result<Images> Images::Open(const std::string& path,
                            const ImageOptions& options) {
  Images images(options);
  int64_t all = kMadeUp;
  if (!path.empty()) {
    TESSERA_TRY(const std::string text, ReadFile(path));
    images.records_.assign(text.begin(), text.end());
    const int64_t record = 1 + images.pixels_;
    const int64_t bytes = std::ssize(images.records_);
    if (bytes == 0 || bytes % record != 0) {
      return InvalidInput(
          "has " + std::to_string(bytes) + " bytes: expected records of " +
              std::to_string(record) + ", a label and an image of " +
              std::to_string(options.shape[0]) + "x" +
              std::to_string(options.shape[1]) + "x" +
              std::to_string(options.shape[2]),
          path);
    }
    all = bytes / record;
    for (int64_t i = 0; i < all; ++i) {
      if (images.Label(i) < options.labels) continue;
      return InvalidInput("image " + std::to_string(i) + " has the label " +
                              std::to_string(images.Label(i)) +
                              ": expected less than " +
                              std::to_string(options.labels),
                          path);
    }
  }
  const int64_t held_out = options.validation_batches * options.global_batch;
  if (all <= held_out) {
    return InvalidInput("holds " + std::to_string(all) + " images, of which " +
                            std::to_string(held_out) + " are held out",
                        path);
  }
  images.size_ = all - held_out;
  return images;
}

int64_t Images::Training(int64_t sample) const {
  const auto epoch = static_cast<uint64_t>(sample / size_);
  return Permuted(Mix64(Mix64(options_.seed) ^ epoch), sample % size_, size_);
}

int32_t Images::Label(int64_t image) const {
  if (!records_.empty()) return records_[image * (1 + pixels_)];
  return static_cast<int32_t>(
      Mix64(Mix64(options_.seed) + static_cast<uint64_t>(image)) %
      static_cast<uint64_t>(options_.labels));
}

double Images::Pixel(int64_t image, int64_t i) const {
  if (!records_.empty()) {
    return records_[image * (1 + pixels_) + 1 + i] / 127.5 - 1;
  }
  const auto place = static_cast<uint64_t>(i);
  const auto pattern = ~static_cast<uint64_t>(Label(image));
  const auto noise = static_cast<uint64_t>(image);
  return (Uniform(Mix64(options_.seed ^ Mix64(pattern)), place) +
          Uniform(Mix64(options_.seed ^ Mix64(noise)), place)) /
         2;
}

uint64_t Images::Fingerprint() const {
  uint64_t hash = Mix64(static_cast<uint64_t>(size_));
  if (records_.empty()) return Mix64(hash ^ options_.seed);
  const size_t step = std::max<size_t>(1, records_.size() / 1000);
  for (size_t i = 0; i < records_.size(); i += step) {
    hash = Mix64(hash ^ records_[i]);
  }
  return hash;
}

LoadInput LoadTraining(const Images& images) {
  return Load(images,
              [&images](int64_t sample) { return images.Training(sample); });
}

LoadInput LoadValidation(const Images& images) {
  return Load(images,
              [&images](int64_t sample) { return images.Validation(sample); });
}

}  // namespace tessera
