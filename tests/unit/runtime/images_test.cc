#include "runtime/data/images.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const Shape kShape = {1, 2, 3};

ImageOptions Options(int64_t validation = 0) {
  return {.shape = kShape,
          .labels = 4,
          .global_batch = 2,
          .seed = 5,
          .validation_batches = validation};
}

// Image i has the label i mod 4 and the pixels 10 i, 10 i + 1, ...
std::string Records(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += static_cast<char>(i % 4);
    for (int p = 0; p < 6; ++p) text += static_cast<char>(10 * i + p);
  }
  return text;
}

Result<Images> Open(const std::string& text, const ImageOptions& options) {
  const std::string path = TempPath("images");
  std::ofstream(path, std::ios::binary) << text;
  auto images = Images::Open(path, options);
  std::filesystem::remove(path);
  return images;
}

TEST(Images, AreRecordsOfALabelAndPixels) {
  const Images images = Open(Records(5), Options()).value();
  EXPECT_EQ(images.size(), 5);
  EXPECT_EQ(images.At(3).label(), 3);
  EXPECT_EQ(images.At(4).label(), 0);
  EXPECT_DOUBLE_EQ(images.At(4).Pixel(2), 42 / 127.5 - 1);
}

TEST(Images, TheLastAreHeldOut) {
  const Images images = Open(Records(7), Options(1)).value();
  EXPECT_EQ(images.size(), 5);
  EXPECT_EQ(images.order().Validation(1), 6);
}

// A block of columns 1 and 2 of row 1, of samples 1 and 2.
TEST(Images, BlocksAreCutFromTheWhole) {
  const Images images = Open(Records(5), Options()).value();
  std::vector<float> pixels(4);
  LocalTensor block;
  block.data = pixels.data();
  block.dtype = DType::kFloat32;
  block.shape = {2, 1, 1, 2};
  block.offset = {1, 0, 1, 1};
  block.global_shape = {4, 1, 2, 3};
  Tensor tensor;
  tensor.name = "images";
  ASSERT_TRUE(LoadTraining(images)(tensor, block, 0).has_value());
  std::vector<float> expected;
  for (int64_t sample : {1, 2}) {
    for (int64_t p : {4, 5}) {
      expected.push_back(static_cast<float>(
          images.At(images.order().Training(sample)).Pixel(p)));
    }
  }
  EXPECT_EQ(pixels, expected);
  tensor.name = "tokens";
  EXPECT_THAT(LoadTraining(images)(tensor, block, 0).error().ToString(),
              HasSubstr("expected images or labels"));
}

// What a record has no numbers for is said before a run begins.
TEST(Images, InputsThatRecordsDoNotHave) {
  const auto options = [](const std::string& name, const Shape& shape) {
    Graph graph;
    graph.global_batch = 4;
    for (const auto& [input, extents] :
         {std::pair(std::string("images"), Shape{4, 6}),
          std::pair(name, shape)}) {
      Tensor tensor;
      tensor.name = input;
      tensor.shape = extents;
      tensor.kind = TensorKind::kInput;
      graph.tensors.push_back(tensor);
    }
    return ImageOptionsOf(graph);
  };
  EXPECT_EQ(options("targets", {4, 3})->labels, 3);
  EXPECT_EQ(options("targets", {4, 1})->labels, 2);
  EXPECT_EQ(options("targets", {4})->labels, 2);
  EXPECT_THAT(options("targets", {4, 3, 2, 2}).error().ToString(),
              AllOf(HasSubstr("input 'targets': is [4, 3, 2, 2]: expected"),
                    HasSubstr("the data has no targets of its own")));
  EXPECT_THAT(options("other", {4, 6}).error().ToString(),
              HasSubstr("input 'other': no data for it"));
}

// A number for each sample is its label.
TEST(Images, TargetsOfOneNumber) {
  const Images images = Open(Records(5), Options()).value();
  std::vector<float> found(3);
  LocalTensor block;
  block.data = found.data();
  block.dtype = DType::kFloat32;
  block.shape = {3};
  block.offset = {0};
  block.global_shape = {4};
  Tensor tensor;
  tensor.name = "targets";
  ASSERT_TRUE(LoadTraining(images)(tensor, block, 0).has_value());
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(
        found[static_cast<size_t>(i)],
        static_cast<float>(images.At(images.order().Training(i)).label()));
  }
}

// Signals and features lack the last dimensions: their elements follow each
// other in a record.
TEST(Images, OfFewerDimensions) {
  const Images images = Open(Records(5), Options()).value();
  const Image image = images.At(images.order().Training(0));
  const Shape& shape = images.options().shape;
  const int64_t pixels = shape[0] * shape[1] * shape[2];
  std::vector<float> found(static_cast<size_t>(pixels));
  LocalTensor block;
  block.data = found.data();
  block.dtype = DType::kFloat32;
  block.shape = {1, pixels};
  block.offset = {0, 0};
  block.global_shape = block.shape;
  Tensor tensor;
  tensor.name = "images";
  ImageOptions options = Options();
  options.shape = {pixels, 1, 1};
  const Images features = Open(Records(5), options).value();
  ASSERT_TRUE(LoadTraining(features)(tensor, block, 0).has_value());
  for (int64_t i = 0; i < pixels; ++i) {
    EXPECT_EQ(found[static_cast<size_t>(i)],
              static_cast<float>(image.Pixel(i)));
  }
}

TEST(Images, OfAFileThatIsCut) {
  const std::string path = TempPath("cut");
  std::ofstream(path, std::ios::binary) << Records(5);
  const Images images = Images::Open(path, Options()).value();
  std::filesystem::resize_file(path, 0);
  float pixel = 0;
  LocalTensor block;
  block.data = &pixel;
  block.dtype = DType::kFloat32;
  block.shape = {1, 1, 1, 1};
  block.offset = {0, 0, 0, 0};
  block.global_shape = {4, 1, 2, 3};
  Tensor tensor;
  tensor.name = "images";
  EXPECT_THAT(LoadTraining(images)(tensor, block, 0).error().ToString(),
              HasSubstr("cut: has become shorter while it was read: 0 bytes"));
}

// Columns 1 to 3 of the targets of a sample, and a single column of labels.
TEST(Images, TargetsAreOneAtTheLabel) {
  const Images images = Open(Records(5), Options()).value();
  const int32_t label = images.At(images.order().Training(0)).label();
  std::vector<float> targets(3);
  LocalTensor block;
  block.data = targets.data();
  block.dtype = DType::kFloat32;
  block.shape = {1, 3};
  block.offset = {0, 1};
  block.global_shape = {4, 4};
  Tensor tensor;
  tensor.name = "targets";
  ASSERT_TRUE(LoadTraining(images)(tensor, block, 0).has_value());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(targets[i], label == i + 1) << i;
  block.shape = {1, 1};
  block.offset = {0, 0};
  block.global_shape = {4, 1};
  ASSERT_TRUE(LoadTraining(images)(tensor, block, 0).has_value());
  EXPECT_EQ(targets[0], label);
}

TEST(Images, MadeUpOnesShowTheirLabels) {
  const Images images = Images::Open("", Options()).value();
  EXPECT_NE(images.At(1).Pixel(0), images.At(2).Pixel(0));
  EXPECT_EQ(images.Fingerprint(), Images::Open("", Options())->Fingerprint());
  ImageOptions other = Options();
  other.seed = 6;
  EXPECT_NE(images.Fingerprint(), Images::Open("", other)->Fingerprint());
  // Images of one label have half of every pixel in common: apart by less than
  // the noise, 1 at most.
  std::vector<int64_t> zeros;
  for (int64_t i = 0; zeros.size() < 20; ++i) {
    if (images.At(i).label() == 0) zeros.push_back(i);
  }
  double least = 1;
  double most = -1;
  for (int64_t i : zeros) {
    least = std::min(least, images.At(i).Pixel(3));
    most = std::max(most, images.At(i).Pixel(3));
  }
  EXPECT_LE(most - least, 1);
}

TEST(Images, BadFiles) {
  EXPECT_THAT(Open(Records(2) + "x", Options()).error().ToString(),
              HasSubstr("has 15 bytes: expected records of 7, a label and an "
                        "image of 1x2x3"));
  std::string text = Records(3);
  text[7] = 9;
  EXPECT_THAT(Open(text, Options()).error().ToString(),
              HasSubstr("image 1 has the label 9: expected less than 4"));
  EXPECT_THAT(Open(Records(2), Options(1)).error().ToString(),
              HasSubstr("holds 2 images: --validate-batches holds 2 out, and "
                        "none is left to train on"));
}

// Of 10,000 images every second one is looked at at first.
TEST(Images, BadLabelsAreErrorsWhenTheyAreLoaded) {
  std::string text = Records(10000);
  text[7 * 4001] = 9;
  const Images images = Open(text, Options()).value();
  std::vector<int32_t> labels(10000);
  LocalTensor block;
  block.data = labels.data();
  block.dtype = DType::kInt32;
  block.shape = block.global_shape = {10000};
  block.offset = {0};
  Tensor tensor;
  tensor.name = "labels";
  EXPECT_THAT(LoadTraining(images)(tensor, block, 0).error().ToString(),
              HasSubstr("images: image 4001 has the label 9: expected less "
                        "than 4"));
}

// A pixel of each image: two files whose labels are the same differ, also where
// a thousand divides their number.
TEST(Images, FingerprintsAreOfLabelsAndPixels) {
  for (const int count : {7, 2000}) {
    const std::string text = Records(count);
    const uint64_t whole = Open(text, Options())->Fingerprint();
    EXPECT_EQ(Open(text, Options())->Fingerprint(), whole);
    std::string labels = text;
    labels[0] ^= 1;
    EXPECT_NE(Open(labels, Options())->Fingerprint(), whole);
    std::string pixels = text;
    for (size_t i = 0; i < pixels.size(); ++i) pixels[i] ^= i % 7 == 0 ? 0 : 1;
    EXPECT_NE(Open(pixels, Options())->Fingerprint(), whole);
  }
}

// An image of 4 x 4 is four patches of 2 x 2 behind one of zeros: the second
// has columns 2 and 3 of rows 0 and 1, the third rows 2 and 3.
TEST(Images, PatchesStandBehindTheClass) {
  ImageOptions options = Options();
  options.shape = {1, 4, 4};
  std::string record(1, '\1');
  for (int p = 0; p < 16; ++p) record += static_cast<char>(p);
  const Images images = Open(record, options).value();
  std::vector<double> pixels(20);
  LocalTensor block;
  block.data = pixels.data();
  block.dtype = DType::kFloat64;
  block.shape = block.global_shape = {1, 5, 1, 2, 2};
  block.offset = {0, 0, 0, 0, 0};
  Tensor tensor;
  tensor.name = "patches";
  ASSERT_TRUE(LoadTraining(images)(tensor, block, 0).has_value());
  std::vector<double> expected(4, 0);
  for (int p : {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15}) {
    expected.push_back(p / 127.5 - 1);
  }
  EXPECT_THAT(pixels, ::testing::Pointwise(::testing::DoubleEq(), expected));
  // Places 0 and 1.
  std::vector<int32_t> rows(2);
  block.data = rows.data();
  block.dtype = DType::kInt32;
  block.shape = {1, 2};
  block.offset = {0, 0};
  block.global_shape = {1, 5};
  tensor.name = "patch_rows";
  ASSERT_TRUE(LoadTraining(images)(tensor, block, 0).has_value());
  EXPECT_THAT(rows, ::testing::ElementsAre(-1, 0));
}

}  // namespace
}  // namespace tessera
