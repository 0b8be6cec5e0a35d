// Initializers of ONNX files, in all forms that their elements have there, and
// weights that are read from them as the importer lays them out.

#include "runtime/onnx_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "planner/base/element_count.h"
#include "planner/io/importer.h"
#include "runtime/published_files.h"
#include "tests/support/onnx_bytes.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kFloat = 1;
constexpr int kFloat16 = 10;
constexpr int kDouble = 11;
constexpr int kBFloat16 = 16;

template <typename T>
std::string BytesOfValues(std::initializer_list<T> values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), std::data(values), bytes.size());
  return bytes;
}

Message TensorOf(const std::string& name, int type, const Shape& dims) {
  Message tensor;
  for (int64_t extent : dims) tensor.Number(1, extent);
  return tensor.Number(2, type).Text(8, name);
}

Message Entry(const std::string& key, const std::string& value) {
  return Message().Text(1, key).Text(2, value);
}

class OnnxTensorsTest : public ::testing::Test {
 protected:
  const std::string folder_ = TempPath("folder");
  const std::string path_ = folder_ + "/m.onnx";

  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << bytes;
  }
  Result<OnnxTensors> Open(const std::vector<Message>& tensors) {
    Parts parts;
    parts.weights = tensors;
    Write("m.onnx", BytesOf(parts));
    return OnnxTensors::Open(path_);
  }
  std::string ErrorOf(const Message& tensor) {
    const auto opened = Open({tensor});
    if (!opened) return opened.error().ToString();
    const auto view = opened->View("w");
    return view ? "" : view.error().ToString();
  }
};

// 1.5 is 0x3e00 in fp16 and 0x3fc0 in bf16; -2 is 0xc000 in both.
TEST_F(OnnxTensorsTest, ElementsAreRawOrTyped) {
  const std::string floats = BytesOfValues<float>({1.5F, -2});
  const auto opened = Open(
      {TensorOf("raw", kFloat, {2}).Text(9, floats),
       TensorOf("typed", kFloat, {2}).Text(4, floats),
       TensorOf("parts", kFloat, {2})
           .Text(4, floats.substr(0, 4))
           .Text(4, floats.substr(4)),
       TensorOf("double", kDouble, {2})
           .Text(10, BytesOfValues<double>({1.5, -2})),
       TensorOf("half", kFloat16, {2})
           .Text(9, std::string("\x00\x3e\x00\xc0", 4)),
       TensorOf("halves", kFloat16, {2}).Number(5, 0x3e00).Number(5, 0xc000),
       // Packed: 0x3fc0 and 0xc000 as varints.
       TensorOf("brain", kBFloat16, {2})
           .Text(5, std::string("\xc0\x7f\x80\x80\x03", 5))});
  ASSERT_TRUE(opened.has_value()) << opened.error().ToString();
  const auto values = [&]<typename T>(const std::string& name, T) {
    const auto view = opened->View(name);
    TESSERA_CHECK(view.has_value()) << view.error().ToString();
    EXPECT_EQ(view->shape, (Shape{2}));
    std::vector<T> copy(2);
    std::memcpy(copy.data(), view->data, 2 * sizeof(T));
    return copy;
  };
  for (const char* name : {"raw", "typed", "parts"}) {
    EXPECT_THAT(values(name, float()), ElementsAre(1.5F, -2.0F)) << name;
  }
  EXPECT_THAT(values("double", double()), ElementsAre(1.5, -2.0));
  EXPECT_THAT(values("half", uint16_t()), ElementsAre(0x3e00, 0xc000));
  EXPECT_THAT(values("halves", uint16_t()), ElementsAre(0x3e00, 0xc000));
  EXPECT_THAT(values("brain", uint16_t()), ElementsAre(0x3fc0, 0xc000));
  EXPECT_FALSE(opened->Has("another"));
}

TEST_F(OnnxTensorsTest, ElementsMayBeInFilesBeside) {
  Write("m.data", BytesOfValues<float>({9, 1, 2, 3}));
  const auto opened = Open({TensorOf("w", kFloat, {2})
                                .Add(13, Entry("location", "m.data"))
                                .Add(13, Entry("offset", "4"))
                                .Add(13, Entry("length", "8"))
                                .Number(14, 1),
                            TensorOf("all", kFloat, {2, 2})
                                .Add(13, Entry("location", "./m.data"))
                                .Number(14, 1),
                            TensorOf("some", kFloat, {3})
                                .Add(13, Entry("location", "m.data"))
                                .Number(14, 1)});
  ASSERT_TRUE(opened.has_value()) << opened.error().ToString();
  float element = 0;
  std::memcpy(&element, opened->View("w")->data + 4, 4);
  EXPECT_EQ(element, 2);
  std::memcpy(&element, opened->View("all")->data + 12, 4);
  EXPECT_EQ(element, 3);
  // Its length is what the shape says, though the file goes on.
  std::memcpy(&element, opened->View("some")->data + 8, 4);
  EXPECT_EQ(element, 2);
}

// Only what is read of: there may be a file for each tensor.
TEST_F(OnnxTensorsTest, AFileThatBecomesShorterIsAnErrorOfItsTensors) {
  Write("a.data", BytesOfValues<float>({1}));
  Write("b.data", BytesOfValues<float>({2}));
  const auto elsewhere = [](const std::string& name) {
    return TensorOf(name, kFloat, {1})
        .Add(13, Entry("location", name + ".data"))
        .Number(14, 1);
  };
  const auto opened =
      Open({elsewhere("a"), elsewhere("b"),
            TensorOf("here", kFloat, {1}).Text(9, BytesOfValues<float>({3}))});
  ASSERT_TRUE(opened.has_value()) << opened.error().ToString();
  std::filesystem::resize_file(folder_ + "/b.data", 2);
  EXPECT_TRUE(opened->View("a").has_value());
  EXPECT_TRUE(opened->View("here").has_value());
  const auto cut = opened->View("b");
  ASSERT_FALSE(cut.has_value());
  EXPECT_EQ(cut.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(cut.error().ToString(), HasSubstr("b.data"));
  std::filesystem::resize_file(path_, 2);
  EXPECT_FALSE(opened->View("here").has_value());
}

TEST_F(OnnxTensorsTest, WhatIsWrongIsNamed) {
  EXPECT_THAT(ErrorOf(TensorOf("w", kFloat, {3}).Text(9, "12345678")),
              HasSubstr("m.onnx: tensor 'w': has 8 bytes for F32[3]"));
  EXPECT_THAT(ErrorOf(TensorOf("w", 7, {1}).Text(9, "12345678")),
              HasSubstr("tensor 'w': has elements of ONNX's type 7: expected "
                        "FLOAT"));
  EXPECT_THAT(ErrorOf(TensorOf("x", kFloat, {1}).Text(9, "1234")),
              HasSubstr("tensor 'w': is missing"));
  const auto elsewhere = [](const std::string& location) {
    return TensorOf("w", kFloat, {1})
        .Add(13, Entry("location", location))
        .Add(13, Entry("length", "4"))
        .Number(14, 1);
  };
  EXPECT_THAT(ErrorOf(elsewhere("none")), HasSubstr("tensor 'w': its data"));
  for (const char* location : {"../m.onnx", "/etc/hostname", ""}) {
    EXPECT_THAT(ErrorOf(elsewhere(location)),
                HasSubstr("expected a file in the same folder"));
  }
  Write("short", "123");
  EXPECT_THAT(ErrorOf(elsewhere("short")),
              HasSubstr("ends at byte 0 + 4 of 'short', which has 3"));
  EXPECT_THAT(ErrorOf(TensorOf("w", kFloat, {1})
                          .Add(13, Entry("offset", "-4"))
                          .Number(14, 1)),
              HasSubstr("offset '-4': expected a number"));
}

TEST_F(OnnxTensorsTest, BrokenFilesAreErrors) {
  const std::string floats = BytesOfValues<float>({1.5F, -2});
  Parts parts;
  parts.weights = {TensorOf("w", kFloat, {2}).Text(9, floats),
                   TensorOf("v", kFloat16, {1}).Number(5, 0x3e00)};
  const std::string bytes = BytesOf(parts);
  // The version of the operators, which is not read here, is 4 bytes behind.
  for (size_t size = 0; size < bytes.size() - 4; ++size) {
    Write("m.onnx", bytes.substr(0, size));
    EXPECT_FALSE(OnnxTensors::Open(path_).has_value()) << size;
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (const int flip : {1, 16, 255}) {
      std::string broken = bytes;
      broken[i] = static_cast<char>(broken[i] ^ flip);
      Write("m.onnx", broken);
      // No crash, and views lie within the file.
      if (const auto opened = OnnxTensors::Open(path_)) {
        for (const char* name : {"w", "v"}) {
          const auto view = opened->View(name);
          if (!view) continue;
          const int64_t size = ElementCount(view->shape) * SizeOf(view->dtype);
          const std::vector<std::byte> copy(view->data, view->data + size);
          EXPECT_LE(std::ssize(copy), std::ssize(bytes));
        }
      }
    }
  }
}

// Of x [n, 6]: y = x w1 + b1 with w1 (in, out), z = y w2ᵀ with w2 (out, in).
// Element (o, i) of the graph's first weight is (i, o) of the file's.
TEST_F(OnnxTensorsTest, WeightsAreReadAsTheImporterLaysThemOut) {
  std::string first;
  for (int i = 0; i < 30; ++i) {
    first += BytesOfValues<float>({static_cast<float>(i)});
  }
  const Parts parts = {
      .inputs = {InputOf("x", 1, {"n", "6"})},
      .weights = {TensorOf("w1", kFloat, {6, 5}).Text(9, first),
                  TensorOf("b1", kFloat, {5}).Text(9, first.substr(0, 20)),
                  TensorOf("w2", kFloat, {3, 5}).Text(9, first.substr(0, 60))},
      .nodes = {NodeOf("MatMul", "first", {"x", "w1"}, "y1"),
                NodeOf("Add", "bias", {"b1", "y1"}, "y2"),
                NodeOf("Gemm", "second", {"y2", "w2"}, "logits",
                       {IntAttribute("transB", 1)})}};
  Write("m.onnx", BytesOf(parts));
  PublishedLayout layout;
  ImportOptions options;
  options.global_batch = 4;
  options.layout = &layout;
  const auto graph = ImportModel(path_, options);
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  ASSERT_TRUE(layout.onnx);
  const auto files = PublishedFiles::Open(path_, layout, *graph);
  ASSERT_TRUE(files.has_value()) << files.error().ToString();
  for (const Tensor& weight : graph->tensors) {
    if (weight.kind != TensorKind::kWeight) continue;
    // Outputs 1 and 2 of the first and the second layer alone.
    Box box = {{1, 3}};
    for (size_t d = 1; d < weight.shape.size(); ++d) {
      box.push_back({0, weight.shape[d]});
    }
    const auto values = files->Read(weight, WholeBlock(box));
    ASSERT_TRUE(values.has_value()) << values.error().ToString();
    if (weight.name == "w1") {
      EXPECT_THAT(*values, ElementsAre(1, 6, 11, 16, 21, 26,  //
                                       2, 7, 12, 17, 22, 27));
    } else if (weight.name == "w2") {
      EXPECT_THAT(*values, ElementsAre(5, 6, 7, 8, 9, 10, 11, 12, 13, 14));
    } else {
      EXPECT_THAT(*values, ElementsAre(1, 2));
    }
  }
  // Another model's file has no such tensors.
  Parts other = parts;
  other.weights[2] =
      TensorOf("w2", kFloat, {5, 3}).Text(9, first.substr(0, 60));
  Write("m.onnx", BytesOf(other));
  const auto others = PublishedFiles::Open(path_, layout, *graph);
  ASSERT_FALSE(others.has_value());
  EXPECT_THAT(others.error().ToString(),
              HasSubstr("m.onnx: tensor 'w2': is F32[5, 3]: expected F32[3, 5] "
                        "or another float"));
  const auto no_model = PublishedFiles::Open(path_, {}, *graph);
  ASSERT_FALSE(no_model.has_value());
  EXPECT_THAT(no_model.error().ToString(),
              HasSubstr("is an ONNX file, but --model is none"));
}

}  // namespace
}  // namespace tessera
