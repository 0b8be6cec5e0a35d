#include "runtime/kernels/cuda/matmul_choices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::HasSubstr;

MatMulChoices Example() {
  MatMulChoices choices;
  choices.device = "NVIDIA H200";
  choices.version = 130100;
  MatMulKey key;
  key.problem = {.m = 1024,
                 .n = 4096,
                 .k = 768,
                 .transpose_b = true,
                 .a = DType::kBFloat16,
                 .b = DType::kBFloat16,
                 .d = DType::kBFloat16,
                 .epilogue = MatMulEpilogue::kBiasGelu};
  choices.rows[key] = {{1, 0xfedcba9876543210, 0, 7, 0, 0, 0, ~uint64_t{0}},
                       21.5};
  key.problem.epilogue = MatMulEpilogue::kNone;
  key.problem.d = DType::kFloat32;
  key.problem.batch = 8;
  key.problem.accumulate = true;
  key.alignment = 2;
  choices.rows[key] = {{3}, 0.125};
  key.problem.batch = 1;
  key.problem.lda = 2304;
  choices.rows[key] = {{4}, 2.5};
  return choices;
}

TEST(MatMulChoicesTest, WhatIsWrittenIsReadBack) {
  const std::string text = FormatMatMulChoices(Example());
  const auto read = ParseMatMulChoices(text, "choices.txt");
  ASSERT_TRUE(read) << read.error().ToString();
  EXPECT_TRUE(*read == Example()) << text;
}

TEST(MatMulChoicesTest, ErrorsNameTheLine) {
  const std::string text = FormatMatMulChoices(Example());
  const auto error = [](const std::string& wrong) {
    const auto read = ParseMatMulChoices(wrong, "choices.txt");
    return read ? std::string("no error") : read.error().ToString();
  };
  EXPECT_THAT(error(""), HasSubstr("choices.txt:1: '': expected"));
  EXPECT_THAT(error("matmul-choices 1\n"), HasSubstr("choices.txt:1:"));
  EXPECT_THAT(error(text + "1024 4096\n"), HasSubstr("choices.txt:8: '1024"));
  // One digit of an algorithm is missing.
  EXPECT_THAT(error(text.substr(0, text.size() - 2)),
              HasSubstr("choices.txt:7:"));
}

TEST(MatMulProblemTest, IsDescribedInOneLine) {
  const MatMulChoices choices = Example();
  EXPECT_EQ(Describe(choices.rows.begin()->first.problem),
            "1024x4096x768 A B^T bf16,bf16->fp32 batch 8 +=");
  EXPECT_EQ(Describe(choices.rows.rbegin()->first.problem),
            "1024x4096x768 A B^T bf16,bf16->bf16 bias_gelu");
}

}  // namespace
}  // namespace tessera
