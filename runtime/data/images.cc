#include "runtime/data/images.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "planner/base/rng.h"
#include "runtime/data/numbers.h"
#include "runtime/shape_text.h"

namespace tessera {
namespace {

// As many as there are in ImageNet's training set (Russakovsky et al. 2015).
constexpr int64_t kMadeUp = 1281167;

// What Open looks at: enough to catch images of other labels, few enough pages
// to be quick on a file of any size.
constexpr int64_t kCheckedImages = 4096;

// Between -1 and 1.
double Uniform(uint64_t key, uint64_t counter) {
  return 2 * CounterUniform01(key, counter) - 1;
}

// What a block has of an image.
void AddPixels(const Shape& whole, const Image& image, const LocalTensor& block,
               std::vector<double>& numbers) {
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
        numbers.push_back(image.Pixel(row + x));
      }
    }
  }
}

void AddPatches(const Shape& whole, const Image& image,
                const LocalTensor& block, std::vector<double>& numbers) {
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
          numbers.push_back(patch < 0 ? 0 : image.Pixel(first + x));
        }
      }
    }
  }
}

// How many targets a sample has: [b], [b, n], or with a dimension of one place
// (ViT's); 0 of another shape.
int64_t TargetsOf(const Shape& shape) {
  if (shape.size() == 1) return 1;
  const bool row = shape.size() == 2 || (shape.size() == 3 && shape[1] == 1);
  return row ? shape.back() : 0;
}

// That records of a label and an image have what the input reads.
Result<void> CheckInput(const Tensor& tensor) {
  constexpr std::string_view kOthers[] = {"labels", "patch_rows", "positions"};
  const size_t rank = tensor.shape.size();
  std::string expected;
  if (tensor.name == "images") {
    if (rank < 2 || rank > 4) expected = "[b, channels, height, width]";
  } else if (tensor.name == "patches") {
    if (rank != 5) expected = "[b, 1 + patches, channels, height, width]";
  } else if (tensor.name == "targets") {
    if (TargetsOf(tensor.shape) == 0) {
      expected =
          "[b], [b, 1] or [b, labels], which are made of the data's labels: "
          "the data has no targets of its own";
    }
  } else if (std::ranges::count(kOthers, tensor.name) == 0) {
    return InvalidInput(
        "no data for it: records have an image and a label, the inputs "
        "'images' and 'labels' or 'targets'",
        "input '" + tensor.name + "'");
  }
  if (expected.empty()) return {};
  return InvalidInput(
      "is " + ShapeText(tensor.shape) + ": expected " + expected,
      "input '" + tensor.name + "'");
}

// What a block has of a row of targets: 1 at the label and else 0, or, of a
// single number, the label.
void AddTargets(int64_t label, const LocalTensor& block,
                std::vector<double>& numbers) {
  if (block.global_shape.size() == 1) {
    numbers.push_back(static_cast<double>(label));
    return;
  }
  for (int64_t i = 0; i < block.shape.back(); ++i) {
    const bool own = block.offset.back() + i == label;
    const int64_t value = block.global_shape.back() == 1 ? label : own ? 1 : 0;
    numbers.push_back(static_cast<double>(value));
  }
}

// `image_of`: by sample.
template <typename ImageOf>
LoadInput Load(const Images& images, ImageOf image_of) {
  return [&images, image_of](const Tensor& tensor, const LocalTensor& block,
                             int64_t first_sample) -> Result<void> {
    TESSERA_RETURN_IF_ERROR(images.CheckWhole());
    const Shape& whole = images.options().shape;
    std::vector<double> numbers;  // of a sample
    int64_t out = 0;
    for (int64_t sample = 0; sample < block.shape[0]; ++sample) {
      const int64_t place = image_of(first_sample + block.offset[0] + sample);
      const Image image = images.At(place);
      numbers.clear();
      if (tensor.name == "labels") {
        TESSERA_RETURN_IF_ERROR(images.CheckLabel(place));
        numbers.push_back(image.label());
      } else if (tensor.name == "targets") {
        TESSERA_RETURN_IF_ERROR(images.CheckLabel(place));
        AddTargets(image.label(), block, numbers);
      } else if (tensor.name == "images") {
        AddPixels(whole, image, block, numbers);
      } else if (tensor.name == "patches") {
        AddPatches(whole, image, block, numbers);
      } else if (tensor.name == "positions" || tensor.name == "patch_rows") {
        for (int64_t i = 0; i < block.shape[1]; ++i) {
          const int64_t position = block.offset[1] + i;
          const int64_t row = position == 0 ? -1 : 0;
          numbers.push_back(
              static_cast<double>(tensor.name == "positions" ? position : row));
        }
      } else {
        return InvalidInput("no data for it: expected images or labels",
                            "input '" + tensor.name + "'");
      }
      PutNumbers(block, out, numbers);
      out += std::ssize(numbers);
    }
    return {};
  };
}

}  // namespace

Result<ImageOptions> ImageOptionsOf(const Graph& graph) {
  ImageOptions options;
  options.global_batch = graph.global_batch;
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind != TensorKind::kInput) continue;
    TESSERA_RETURN_IF_ERROR(CheckInput(tensor));
    if (tensor.name == "images") {
      options.shape = {tensor.shape.begin() + 1, tensor.shape.end()};
      options.shape.resize(3, 1);
    } else if (tensor.name == "patches") {
      const int64_t side =
          std::llround(std::sqrt(static_cast<double>(tensor.shape[1] - 1)));
      options.shape = {tensor.shape[2], side * tensor.shape[3],
                       side * tensor.shape[4]};
    } else if (tensor.name == "targets") {
      options.labels = std::max<int64_t>(2, TargetsOf(tensor.shape));
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

Images::Images(const std::string& path, const ImageOptions& options)
    : path_(path),
      options_(options),
      pixels_(options.shape[0] * options.shape[1] * options.shape[2]) {}

Result<Images> Images::Open(const std::string& path,
                            const ImageOptions& options) {
  Images images(path, options);
  int64_t all = kMadeUp;
  if (!path.empty()) {
    TESSERA_TRY(MappedFile file, MappedFile::Open(path));
    const int64_t record = 1 + images.pixels_;
    const int64_t bytes = std::ssize(file.bytes());
    if (bytes == 0 || bytes % record != 0) {
      return InvalidInput(
          "has " + std::to_string(bytes) + " bytes: expected records of " +
              std::to_string(record) + ", a label and an image of " +
              std::to_string(options.shape[0]) + "x" +
              std::to_string(options.shape[1]) + "x" +
              std::to_string(options.shape[2]),
          path);
    }
    images.file_.emplace(std::move(file));
    all = bytes / record;
    const int64_t stride = std::max<int64_t>(1, all / kCheckedImages);
    for (int64_t i = 0; i < all; i += stride) {
      TESSERA_RETURN_IF_ERROR(images.CheckLabel(i));
    }
  }
  const int64_t held_out = options.validation_batches * options.global_batch;
  TESSERA_TRY(images.order_,
              EpochOrder::Of(options.seed, all, held_out, "images", path));
  return images;
}

Image Images::At(int64_t image) const {
  Image at;
  if (file_) {
    const std::byte* const record =
        file_->bytes().data() + image * (1 + pixels_);
    at.label_ = std::to_integer<int32_t>(record[0]);
    at.pixels_ = record + 1;
    return at;
  }
  const auto place = static_cast<uint64_t>(image);
  at.label_ = static_cast<int32_t>(Mix64(Mix64(options_.seed) + place) %
                                   static_cast<uint64_t>(options_.labels));
  const auto pattern = ~static_cast<uint64_t>(at.label_);
  at.pattern_ = Mix64(options_.seed ^ Mix64(pattern));
  at.noise_ = Mix64(options_.seed ^ Mix64(place));
  return at;
}

double Image::Pixel(int64_t i) const {
  if (pixels_ != nullptr) return std::to_integer<int>(pixels_[i]) / 127.5 - 1;
  const auto place = static_cast<uint64_t>(i);
  return (Uniform(pattern_, place) + Uniform(noise_, place)) / 2;
}

Result<void> Images::CheckLabel(int64_t image) const {
  const int32_t label = At(image).label();
  if (label < options_.labels) return {};
  return InvalidInput("image " + std::to_string(image) + " has the label " +
                          std::to_string(label) + ": expected less than " +
                          std::to_string(options_.labels),
                      path_);
}

uint64_t Images::Fingerprint() const {
  uint64_t hash = Mix64(static_cast<uint64_t>(size()));
  if (!file_) return Mix64(hash ^ options_.seed);
  // Of a thousand images the label and a pixel.
  constexpr int64_t kLooks = 1000;
  const int64_t all = std::ssize(file_->bytes()) / (1 + pixels_);
  const int64_t stride = std::max<int64_t>(1, all / kLooks);
  for (int64_t i = 0; i < all; i += stride) {
    const Image image = At(i);
    hash = Mix64(hash ^ static_cast<uint64_t>(image.label_));
    hash =
        Mix64(hash ^ std::to_integer<uint64_t>(
                         image.pixels_[hash % static_cast<uint64_t>(pixels_)]));
  }
  return hash;
}

LoadInput LoadTraining(const Images& images) {
  return Load(images, [&images](int64_t sample) {
    return images.order().Training(sample);
  });
}

LoadInput LoadValidation(const Images& images) {
  return Load(images, [&images](int64_t sample) {
    return images.order().Validation(sample);
  });
}

}  // namespace tessera
