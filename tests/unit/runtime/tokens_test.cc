#include "runtime/data/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
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

// 0, 1, 2, …
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

TEST(Tokens, IdBeyondTheVocabularyFoundOnlyWhereItIsRead) {
  // Behind the ids that are looked at when opening, and between the places:
  // the stride is 100000 / 4096 = 24.
  std::vector<uint16_t> ids(100000, 1);
  ids[24 * 4000 + 1] = 300;
  const TokenData data = Open(Write(".bin", Bytes(ids)), 256);
  EXPECT_EQ(data.Token(96000).value(), 1);
  const auto token = data.Token(96001);
  ASSERT_FALSE(token.has_value());
  EXPECT_THAT(token.error().ToString(), HasSubstr("token 96001 is 300"));
}

// Without a writer, for which it does not wait.
TEST(Tokens, OfAPipe) {
  const std::string path = TempPath("pipe");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(OpenError(path, 256), HasSubstr("not a regular file"));
}

TEST(Tokens, OfAFileThatIsCut) {
  const std::string path = Write(".txt", "some bytes");
  const TokenData data = Open(path, 256);
  EXPECT_TRUE(data.CheckWhole().has_value());
  std::filesystem::resize_file(path, 20);
  EXPECT_TRUE(data.CheckWhole().has_value());
  std::filesystem::resize_file(path, 4);
  const auto cut = data.CheckWhole();
  ASSERT_FALSE(cut.has_value());
  EXPECT_EQ(cut.error().code, ErrorCode::kUnavailable);
  EXPECT_EQ(cut.error().ToString(),
            path + ": has become shorter while it was read: 4 bytes of 10");
}

TEST(Tokens, BadFiles) {
  EXPECT_THAT(OpenError("/no/such/file", 256), HasSubstr("cannot open"));
  EXPECT_THAT(OpenError(::testing::TempDir(), 256),
              HasSubstr("not a regular file"));
  EXPECT_THAT(OpenError(Write(".txt", ""), 256), HasSubstr("no tokens"));
  EXPECT_THAT(OpenError(Write(".bin", "abc"), 50257),
              HasSubstr("ends within a token: 3 bytes"));
  for (const int32_t magic : {20240520, 20240801}) {
    EXPECT_THAT(
        OpenError(Write(".bin", LlmcHeader(magic, 1, 5).substr(0, 80)), 50257),
        HasSubstr("ends within llm.c's header: 80 bytes of 1024"));
  }
  EXPECT_THAT(OpenError(Write(".bin", LlmcHeader(20240520, 2, 0)), 50257),
              HasSubstr("version 2: expected 1"));
  EXPECT_THAT(OpenError(Write(".bin", LlmcHeader(20240520, 1, 5) +
                                          Bytes(Counting<uint16_t>(3))),
                        50257),
              HasSubstr("holds 3 tokens: its header says 5"));
  EXPECT_THAT(OpenError(Write(".bin", LlmcHeader(20240520, 1, 5) +
                                          Bytes(Counting<uint16_t>(1))),
                        50257),
              HasSubstr("holds 1 token: its header says 5"));
  EXPECT_THAT(OpenError(Write(".bin", LlmcHeader(20240520, 1, 0)), 50257),
              HasSubstr("holds no tokens"));
}

}  // namespace
}  // namespace tessera
