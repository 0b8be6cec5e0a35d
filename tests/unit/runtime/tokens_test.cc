#include "runtime/data/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <set>
#include <vector>

#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

std::string Write(const std::string& ending, const std::string& bytes) {
  const std::string path = TempPath("tokens" + ending);
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string LlmcHeader(int32_t magic, int32_t version, int32_t tokens) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = tokens;
  return Bytes(header);
}

// 0, 1, 2, …: a row shows where it was taken from.
template <typename T>
std::vector<T> Counting(int n) {
  std::vector<T> values;
  for (int i = 0; i < n; ++i) values.push_back(static_cast<T>(i));
  return values;
}

TokenData Open(const std::string& path, int64_t vocab_size) {
  auto data = OpenTokens(path, vocab_size);
  TESSERA_CHECK(data.has_value()) << data.error().ToString();
  return *std::move(data);
}

void ExpectCounting(const TokenData& data, int64_t size) {
  ASSERT_EQ(data.size(), size);
  for (int64_t i = 0; i < size; ++i) EXPECT_EQ(data[i], i);
  constexpr int kSeqLen = 7;
  for (int sample = 0; sample < 20; ++sample) {
    int32_t tokens[kSeqLen];
    int32_t labels[kSeqLen];
    ASSERT_TRUE(data.Sample(1, 2, sample, kSeqLen, tokens, labels).has_value());
    for (int i = 0; i < kSeqLen; ++i) {
      EXPECT_EQ(tokens[i], tokens[0] + i);
      EXPECT_EQ(labels[i], tokens[i] + 1);
    }
  }
}

TEST(Tokens, Text) {
  const TokenData data =
      Open(Write(".txt", Bytes(Counting<uint8_t>(200))), 256);
  EXPECT_EQ(data.format(), TokenFormat::kText);
  ExpectCounting(data, 200);
}

TEST(Tokens, NanoGpt) {
  const TokenData data =
      Open(Write(".bin", Bytes(Counting<uint16_t>(40000))), 50257);
  EXPECT_EQ(data.format(), TokenFormat::kNanoGpt);
  ExpectCounting(data, 40000);
}

TEST(Tokens, LlmcOfGpt2) {
  const TokenData data = Open(Write(".bin", LlmcHeader(20240520, 1, 300) +
                                                Bytes(Counting<uint16_t>(300))),
                              50257);
  EXPECT_EQ(data.format(), TokenFormat::kLlmc16);
  ExpectCounting(data, 300);
}

TEST(Tokens, LlmcOfLlama3) {
  const TokenData data =
      Open(Write(".bin", LlmcHeader(20240801, 7, 70000) +
                             Bytes(Counting<uint32_t>(70000))),
           128256);
  EXPECT_EQ(data.format(), TokenFormat::kLlmc32);
  ExpectCounting(data, 70000);
}

TEST(Tokens, RowsAreAFunctionOfSeedStepAndSample) {
  const TokenData data =
      Open(Write(".bin", Bytes(Counting<uint16_t>(50000))), 50257);
  const auto start = [&](uint64_t seed, int64_t step, int64_t sample) {
    int32_t token;
    int32_t label;
    TESSERA_CHECK(
        data.Sample(seed, step, sample, 1, &token, &label).has_value());
    return token;
  };
  EXPECT_EQ(start(1, 2, 3), start(1, 2, 3));
  std::set<int32_t> starts;
  double sum = 0;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    for (int64_t step = 0; step < 10; ++step) {
      for (int64_t sample = 0; sample < 10; ++sample) {
        starts.insert(start(seed, step, sample));
        sum += start(seed, step, sample);
      }
    }
  }
  // 1000 draws from 50000 places: about 10 expected to coincide; the mean is
  // 25000 with a deviation of 50000 / sqrt(12 * 1000) = 456.
  EXPECT_GT(starts.size(), 950u);
  EXPECT_NEAR(sum / 1000, 25000, 5 * 456);
}

TEST(Tokens, EveryPlaceIsReached) {
  // 10 tokens have 8 places for rows of 2 and their labels.
  const TokenData data = Open(Write(".txt", Bytes(Counting<uint8_t>(10))), 256);
  std::set<int32_t> starts;
  for (int sample = 0; sample < 500; ++sample) {
    int32_t tokens[2];
    int32_t labels[2];
    ASSERT_TRUE(data.Sample(0, 0, sample, 2, tokens, labels).has_value());
    starts.insert(tokens[0]);
  }
  EXPECT_EQ(starts, (std::set<int32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(Tokens, TooShortForARow) {
  const TokenData data = Open(Write(".txt", "abcd"), 256);
  int32_t tokens[4];
  int32_t labels[4];
  EXPECT_TRUE(data.Sample(0, 0, 0, 3, tokens, labels).has_value());
  const auto sampled = data.Sample(0, 0, 0, 4, tokens, labels);
  ASSERT_FALSE(sampled.has_value());
  EXPECT_THAT(sampled.error().ToString(),
              HasSubstr("holds 4 tokens: a sequence length of 4 needs at "
                        "least 5"));
}

std::string OpenError(const std::string& path, int64_t vocab_size) {
  const auto data = OpenTokens(path, vocab_size);
  if (data.has_value()) return "";
  EXPECT_THAT(data.error().where, HasSubstr(path));
  return data.error().ToString();
}

TEST(Tokens, IdBeyondTheVocabulary) {
  EXPECT_THAT(OpenError(Write(".txt", "ab\x80"), 128),
              HasSubstr("token 2 is 128: expected less than the vocabulary "
                        "size 128"));
}

TEST(Tokens, IdBeyondTheVocabularyFoundOnlyInItsRow) {
  // Behind the ids that are looked at when opening, and between the places:
  // the stride is 100000 / 4096 = 24.
  std::vector<uint16_t> ids(100000, 1);
  ids[24 * 4000 + 1] = 300;
  const TokenData data = Open(Write(".bin", Bytes(ids)), 256);
  const int64_t seq_len = 99999;  // The only row.
  std::vector<int32_t> tokens(seq_len);
  std::vector<int32_t> labels(seq_len);
  const auto sampled =
      data.Sample(0, 0, 0, seq_len, tokens.data(), labels.data());
  ASSERT_FALSE(sampled.has_value());
  EXPECT_THAT(sampled.error().ToString(), HasSubstr("token 96001 is 300"));
}

TEST(Tokens, BadFiles) {
  EXPECT_THAT(OpenError("/no/such/file", 256), HasSubstr("cannot open"));
  EXPECT_THAT(OpenError(::testing::TempDir(), 256),
              HasSubstr("not a file of tokens"));
  EXPECT_THAT(OpenError(Write(".txt", ""), 256), HasSubstr("no tokens"));
  EXPECT_THAT(OpenError(Write(".bin", "abc"), 50257),
              HasSubstr("ends within a token: 3 bytes"));
  EXPECT_THAT(OpenError(Write(".bin", LlmcHeader(20240520, 2, 0)), 50257),
              HasSubstr("version 2: expected 1"));
  EXPECT_THAT(OpenError(Write(".bin", LlmcHeader(20240520, 1, 5) +
                                          Bytes(Counting<uint16_t>(3))),
                        50257),
              HasSubstr("holds 3 tokens: its header says 5"));
  EXPECT_THAT(OpenError(Write(".bin", LlmcHeader(20240520, 1, 0)), 50257),
              HasSubstr("holds no tokens"));
}

}  // namespace
}  // namespace tessera
