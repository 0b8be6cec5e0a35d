// Matrices that a file has twice, once transposed, are one.

#include "planner/io/onnx_transposes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "planner/base/file.h"
#include "planner/io/json_value.h"
#include "planner/io/onnx.h"
#include "planner/io/published_weights.h"
#include "tests/support/onnx_bytes.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

std::vector<float> Different(int64_t count) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(0.01F * static_cast<float>(i * i % 1009) - 1);
  }
  return values;
}

std::vector<float> Transposed(const std::vector<float>& values, int64_t rows) {
  const int64_t columns = std::ssize(values) / rows;
  std::vector<float> turned(values.size());
  for (int64_t i = 0; i < std::ssize(values); ++i) {
    const int64_t at = i % columns * rows + i / columns;
    turned[static_cast<size_t>(at)] = values[static_cast<size_t>(i)];
  }
  return turned;
}

// Tokens are looked up in "table", [9, 8], and a matrix [8, 9] is the head.
Parts Embedded(const Message& table, const Message& head,
               const std::string& name) {
  return {.inputs = {InputOf("ids", 7, {"n", "s"})},
          .weights = {table, head},
          .nodes = {NodeOf("Gather", "lookup", {"table", "ids"}, "x"),
                    NodeOf("MatMul", "head", {"x", name}, "logits")}};
}

// As PyTorch's newer exporter notes that "val_3" was computed from the table.
Parts Noted(const Message& table, const Message& head) {
  Parts parts = Embedded(table, head, "val_3");
  parts.values = {
      Message()
          .Text(1, "val_3")
          .Add(4, NoteOf("pkg.onnxscript.optimizer.folded_from", "['table']"))};
  parts.notes = {NoteOf("pkg.torch.export.ExportedProgram.graph_signature",
                        "p_table: PARAMETER target='table'\n")};
  return parts;
}

struct Read {
  int64_t parameters = 0;
  std::vector<std::string> warnings;
  PublishedLayout layout;
};
Read ReadOf(const Parts& parts, const std::string& frozen = "") {
  const std::string path = TempPath("transposes.onnx");
  EXPECT_TRUE(WriteFileAtomically(path, BytesOf(parts)).has_value());
  Read read;
  ImportOptions options;
  options.global_batch = 4;
  options.seq_len = 6;
  options.warnings = &read.warnings;
  options.layout = &read.layout;
  if (!frozen.empty()) {
    options.overrides["frozen"] =
        ParseJson("{\"x\": \"" + frozen + "\"}")->Field("x");
  }
  const auto graph = ImportOnnx(path, options);
  EXPECT_TRUE(graph.has_value()) << graph.error().ToString();
  if (graph) read.parameters = ParameterCount(*graph);
  return read;
}

const std::vector<float> kTable = Different(72);

TEST(OnnxTransposes, AFileSaysWhatWasComputed) {
  const Message table = FloatsOf("table", {9, 8}, kTable);
  const Read tied =
      ReadOf(Noted(table, FloatsOf("val_3", {8, 9}, Transposed(kTable, 9))));
  EXPECT_EQ(tied.parameters, 72);
  EXPECT_THAT(tied.warnings, ElementsAre());
  // Both tensors are written back.
  ASSERT_EQ(tied.layout.pieces.size(), 1u);
  std::vector<std::string> names;
  for (const auto& piece : tied.layout.pieces.begin()->second) {
    if (names.empty() || names.back() != piece.tensor) {
      names.push_back(piece.tensor);
    }
  }
  EXPECT_THAT(names, UnorderedElementsAre("table", "val_3"));

  // Of another number it is computed in another way, and trained apart.
  std::vector<float> other = Transposed(kTable, 9);
  other[40] += 1;
  const Read apart = ReadOf(Noted(table, FloatsOf("val_3", {8, 9}, other)));
  EXPECT_EQ(apart.parameters, 144);
  EXPECT_THAT(apart.warnings,
              ElementsAre(AllOf(HasSubstr("trained apart from parameters that "
                                          "they were computed from"),
                                HasSubstr("'val_3'"))));
}

// Where no elements are there.
TEST(OnnxTransposes, TheFilesWordAlone) {
  EXPECT_EQ(ReadOf(Noted(WeightOf("table", {9, 8}), WeightOf("val_3", {8, 9})))
                .parameters,
            72);
}

TEST(OnnxTransposes, ElementsSayItWhereTheFileDoesNot) {
  const auto read = [](const std::vector<float>& table,
                       const std::vector<float>& head,
                       const std::string& frozen = "") {
    const std::string name = "onnx::MatMul_7";
    return ReadOf(Embedded(FloatsOf("table", {9, 8}, table),
                           FloatsOf(name, {8, 9}, head), name),
                  frozen);
  };
  const Read tied = read(kTable, Transposed(kTable, 9));
  EXPECT_EQ(tied.parameters, 72);
  EXPECT_THAT(tied.warnings,
              ElementsAre(AllOf(HasSubstr("as one with those whose transposes "
                                          "they are"),
                                HasSubstr("'onnx::MatMul_7'"))));
  EXPECT_EQ(read(kTable, kTable).parameters, 144);
  // Zeros are what two matrices may start as.
  const std::vector<float> zeros(72, 0);
  EXPECT_EQ(read(zeros, zeros).parameters, 144);
  EXPECT_EQ(read(kTable, Transposed(kTable, 9), "onnx::*").parameters, 72);
  EXPECT_THAT(read(kTable, Transposed(kTable, 9), "onnx::*").warnings,
              ElementsAre());
}

// Of which some elements are compared.
TEST(OnnxTransposes, ElementsInAnotherFile) {
  constexpr int64_t kRows = 300;
  constexpr int64_t kColumns = 200;
  const std::vector<float> table = Different(kRows * kColumns);
  std::vector<float> numbers = table;
  const std::vector<float> turned = Transposed(table, kRows);
  numbers.insert(numbers.end(), turned.begin(), turned.end());
  const std::string data = TempPath("transposes.data");
  const auto write = [&] {
    const std::string bytes(reinterpret_cast<const char*>(numbers.data()),
                            numbers.size() * sizeof(float));
    ASSERT_TRUE(WriteFileAtomically(data, bytes).has_value());
  };
  const auto elsewhere = [&](const std::string& name, const Shape& dims,
                             int64_t place) {
    return WeightOf(name, dims)
        .Add(13, NoteOf("location", data.substr(data.rfind('/') + 1)))
        .Add(13, NoteOf("offset", std::to_string(place * 4)));
  };
  const Parts parts =
      Noted(elsewhere("table", {kRows, kColumns}, 0),
            elsewhere("val_3", {kColumns, kRows}, kRows * kColumns));
  write();
  EXPECT_EQ(ReadOf(parts).parameters, kRows * kColumns);
  std::ranges::reverse(numbers);
  write();
  EXPECT_EQ(ReadOf(parts).parameters, 2 * kRows * kColumns);
}

}  // namespace
}  // namespace tessera
