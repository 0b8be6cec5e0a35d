// Files in the safetensors format, and their checksums.

#include "runtime/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "planner/base/rng.h"
#include "runtime/checksums.h"
#include "tests/support/file_bytes.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using testing::ReadBytes;
using testing::WriteBytes;

// ---- The format

TEST(Safetensors, BytesAsTheFormatSays) {
  const std::string path = TempPath("file");
  const float values[3] = {1, 2, 3};
  const int32_t count = 7;
  {
    auto writer = *SafetensorsWriter::Create(
        path, {{"a", DType::kFloat32, {3, 1}}, {"n", DType::kInt32, {}}},
        {{"step", "4"}});
    ASSERT_TRUE(writer.Write(std::as_bytes(std::span(values))).has_value());
    ASSERT_TRUE(writer.Write(std::as_bytes(std::span(&count, 1))).has_value());
    EXPECT_FALSE(std::filesystem::exists(path));
    ASSERT_TRUE(writer.Commit().has_value());
  }
  const std::string bytes = ReadBytes(path);
  const std::string header =
      R"({"__metadata__":{"step":"4"},)"
      R"("a":{"dtype":"F32","shape":[3, 1],"data_offsets":[0,12]},)"
      R"("n":{"dtype":"I32","shape":[],"data_offsets":[12,16]}})";
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  EXPECT_EQ(bytes.substr(8, header.size()), header);
  EXPECT_EQ(bytes.size(), 8 + length + 16);

  const auto file = *SafetensorsFile::Open(path);
  EXPECT_EQ(file.metadata().at("step"), "4");
  EXPECT_TRUE(file.Has("n"));
  EXPECT_FALSE(file.Has("m"));
  const std::byte* a = *file.Find({"a", DType::kFloat32, {3, 1}});
  EXPECT_EQ(std::memcmp(a, values, sizeof(values)), 0);
  EXPECT_EQ(file.Find({"a", DType::kFloat32, {3}}).error().ToString(),
            path + ": tensor 'a': is F32[3, 1]: expected F32[3]");
  EXPECT_EQ(file.Find({"a", DType::kFloat64, {3, 1}}).error().ToString(),
            path + ": tensor 'a': is F32[3, 1]: expected F64[3, 1]");
  EXPECT_EQ(file.Find({"b", DType::kFloat64, {}}).error().ToString(),
            path + ": tensor 'b': is missing");
  std::filesystem::remove(path);
}

TEST(Safetensors, UnfinishedFilesVanish) {
  const std::string path = TempPath("file");
  WriteBytes(path, "before");
  {
    auto writer =
        *SafetensorsWriter::Create(path, {{"a", DType::kFloat32, {1}}}, {});
  }
  EXPECT_EQ(ReadBytes(path), "before");
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(
           std::filesystem::path(path).parent_path())) {
    files += entry.path().string().starts_with(path);
  }
  EXPECT_EQ(files, 1);
  std::filesystem::remove(path);
}

// As files that are replaced are, and not the link.
TEST(Safetensors, IsWrittenThroughALink) {
  const std::string path = TempPath("file");
  const std::string link = TempPath("link");
  WriteBytes(path, "before");
  std::filesystem::create_symlink(path, link);
  const float value = 1;
  auto writer =
      *SafetensorsWriter::Create(link, {{"a", DType::kFloat32, {1}}}, {});
  ASSERT_TRUE(writer.Write(std::as_bytes(std::span(&value, 1))).has_value());
  ASSERT_TRUE(writer.Commit().has_value());
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_TRUE(SafetensorsFile::Open(path)->Has("a"));
  std::filesystem::remove(link);
  std::filesystem::remove(path);
}

TEST(Safetensors, BrokenFilesAreErrors) {
  const std::string path = TempPath("file");
  const auto message = [&](const std::string& bytes) {
    WriteBytes(path, bytes);
    const auto file = SafetensorsFile::Open(path);
    return file ? "" : file.error().ToString();
  };
  const auto with_header = [](std::string header, const std::string& data) {
    const uint64_t length = header.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    return bytes + header + data;
  };
  EXPECT_EQ(message("abc"),
            path + ": truncated: 3 bytes, expected a safetensors file");
  // The first eight bytes, "GGUF and", are no length of a header.
  EXPECT_EQ(message("GGUF and something else"),
            path + ": is no safetensors file");
  EXPECT_EQ(message(with_header("{}", "").substr(0, 9)),
            path + ": truncated: 9 bytes, expected a header up to byte 10");
  EXPECT_NE(message(with_header("{\"a\": ", "")), "");
  const std::string a =
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  EXPECT_EQ(message(with_header(a, "12345678")), "");
  EXPECT_EQ(message(with_header(a, "1234567")),
            path + ": tensor 'a': truncated: ends at byte " +
                std::to_string(8 + a.size() + 8) + " of a file of " +
                std::to_string(8 + a.size() + 7));
  EXPECT_NE(message(with_header(a, "123456789")), "");
  EXPECT_EQ(message(with_header(
                R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})",
                "12345678")),
            path + ": tensor 'a': 8 bytes for F32[3]");
  // 2^64 elements: their bytes do not fit in an int64.
  EXPECT_EQ(message(with_header(R"({"a":{"dtype":"F32","shape":)"
                                R"([4294967296,4294967296],)"
                                R"("data_offsets":[0,0]}})",
                                "")),
            path + ": tensor 'a': 0 bytes for F32[4294967296, 4294967296]");
  EXPECT_NE(message(with_header(
                R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})",
                "12345678")),
            "");
  // Tensors that share bytes, or leave some out.
  const auto second = [&](const std::string& offsets) {
    return with_header(
        R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
        R"("b":{"dtype":"F32","shape":[1],"data_offsets":)" +
            offsets + "}}",
        "12345678");
  };
  EXPECT_EQ(message(second("[4,8]")), "");
  EXPECT_NE(message(second("[0,4]")).find("tensor 'b': begins at byte"),
            std::string::npos);
  EXPECT_NE(message(second("[2,6]")), "");
  EXPECT_NE(message(second("[5,9]")), "");
  EXPECT_EQ(message(with_header(R"({"__metadata__":5})", "")),
            path + ": __metadata__: is 5: expected an object of texts");
  EXPECT_EQ(message(with_header(R"({"__metadata__":{"step":6}})", "")),
            path + ": __metadata__: 'step' is 6: expected a text");
  std::filesystem::remove(path);
  EXPECT_EQ(SafetensorsFile::Open(path).error().code, ErrorCode::kNotFound);
}

TEST(Safetensors, OfAFileThatIsCut) {
  const std::string path = TempPath("file");
  const SafetensorsEntry entry = {"a", DType::kFloat32, {2}};
  auto writer = *SafetensorsWriter::Create(path, {entry}, {});
  const float elements[] = {1, 2};
  ASSERT_TRUE(writer.Write(std::as_bytes(std::span(elements))).has_value());
  ASSERT_TRUE(writer.Commit().has_value());
  const auto file = *SafetensorsFile::Open(path);
  EXPECT_TRUE(file.Find(entry).has_value());
  EXPECT_TRUE(file.View("a").has_value());
  std::filesystem::resize_file(path, 8);
  const std::string expected =
      path + ": has become shorter while it was read: 8 bytes of";
  for (const Error& error :
       {file.Find(entry).error(), file.View("a").error()}) {
    EXPECT_TRUE(error.ToString().starts_with(expected)) << error.ToString();
  }
  std::filesystem::remove(path);
}

TEST(Safetensors, NamesWithControlCharacters) {
  const std::string path = TempPath("file");
  const std::string name = "a\"b\\c\n\x01";
  const float value = 1;
  {
    auto writer =
        *SafetensorsWriter::Create(path, {{name, DType::kFloat32, {1}}}, {});
    ASSERT_TRUE(writer.Write(std::as_bytes(std::span(&value, 1))).has_value());
    ASSERT_TRUE(writer.Commit().has_value());
  }
  // As JSON wants control characters (RFC 8259, section 7).
  EXPECT_NE(ReadBytes(path).find(R"("a\"b\\c\n\u0001":)"), std::string::npos);
  EXPECT_TRUE(SafetensorsFile::Open(path)->Has(name));
  std::filesystem::remove(path);
}

// ---- Checksums

TEST(Checksums, AreThoseOfZlib) {
  const auto crc = [](std::string_view text, uint32_t before = 0) {
    return Crc32(std::as_bytes(std::span(text)), before);
  };
  // The check value of CRC-32/ISO-HDLC.
  EXPECT_EQ(crc("123456789"), 0xcbf43926U);
  EXPECT_EQ(crc("789", crc("123456")), 0xcbf43926U);
  // A hole is not what it was.
  EXPECT_NE(crc(std::string(kChecksumBlock, '\0')), 0U);
}

TEST(Checksums, OfBlocksHoweverTheyCome) {
  std::vector<std::byte> bytes(2 * kChecksumBlock + 5);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(Mix64(i));
  }
  const std::span all(bytes);
  const std::vector<uint32_t> expected = {
      Crc32(all.first(kChecksumBlock)),
      Crc32(all.subspan(kChecksumBlock, kChecksumBlock)), Crc32(all.last(5))};
  for (const size_t piece :
       {size_t{1000}, size_t{kChecksumBlock}, all.size()}) {
    BlockChecksums checksums;
    for (size_t at = 0; at < all.size(); at += piece) {
      checksums.Add(all.subspan(at, std::min(piece, all.size() - at)));
    }
    EXPECT_EQ(checksums.Take(), expected) << piece;
  }
  BlockChecksums whole;
  whole.Add(all.first(kChecksumBlock));
  EXPECT_EQ(whole.Take(), std::vector<uint32_t>{expected[0]});
  EXPECT_EQ(BlockChecksums().Take(), std::vector<uint32_t>());
}

// Each bit of a file is in some check, and a check of a part is of its blocks
// alone.
TEST(Checksums, FindWhatHasChanged) {
  const std::string path = TempPath("file");
  const int64_t count = kChecksumBlock / 4;  // of fp32 in a block
  const std::vector<float> a(static_cast<size_t>(count) + 10, 1);
  const std::vector<float> b(static_cast<size_t>(count), 2);
  auto writer = *SafetensorsWriter::Create(
      path,
      {{"a", DType::kFloat32, {count + 10}}, {"b", DType::kFloat32, {count}}},
      {{"step", "4"}}, /*checksums=*/true);
  ASSERT_TRUE(writer.Write(std::as_bytes(std::span(a))).has_value());
  ASSERT_TRUE(writer.Write(std::as_bytes(std::span(b))).has_value());
  ASSERT_TRUE(writer.Commit().has_value());
  const std::string bytes = ReadBytes(path);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  const size_t data = 8 + length;
  // The header's, and those of blocks 0 to 2 of the tensors.
  const size_t sums = bytes.size() - 4 * sizeof(uint32_t);
  ASSERT_EQ(sums, data + static_cast<size_t>(2 * count + 10) * sizeof(float));
  uint32_t header = 0;
  std::memcpy(&header, bytes.data() + sums, sizeof(header));
  EXPECT_EQ(header, Crc32(std::as_bytes(std::span(bytes.data(), data))));

  const auto check = [&](size_t changed, const std::string& name, int64_t begin,
                         int64_t end) -> std::string {
    std::string other = bytes;
    if (changed < other.size()) other[changed] ^= 0x10;
    WriteBytes(path, other);
    const auto file = SafetensorsFile::Open(path);
    if (!file) return file.error().ToString();
    const auto found = file->Check(name, begin, end);
    return found ? "" : found.error().ToString();
  };
  const int64_t size_a = 4 * (count + 10);
  const int64_t size_b = 4 * count;
  EXPECT_EQ(check(bytes.size(), "a", 0, size_a), "");
  EXPECT_EQ(check(bytes.size(), "b", 0, size_b), "");
  // A digit of the step: still a header that can be read.
  const size_t digit = bytes.find("\"4\"") + 1;
  EXPECT_THAT(
      check(digit, "a", 0, 0),
      ::testing::MatchesRegex(path + ": damaged: the header has the checksum "
                                     "[0-9a-f]+: expected [0-9a-f]+"));
  // The last of b, in block 2.
  const std::string at = std::to_string(data + 2 * kChecksumBlock);
  EXPECT_THAT(check(sums - 1, "b", 0, size_b),
              ::testing::MatchesRegex(
                  path + ": tensor 'b': damaged: what is from byte " + at +
                  " to " + std::to_string(sums) +
                  " of the file has the checksum [0-9a-f]+: expected "
                  "[0-9a-f]+"));
  EXPECT_EQ(check(sums - 1, "b", 0, size_b - 4 * 10), "");
  EXPECT_EQ(check(sums - 1, "a", 0, size_a), "");
  // Where a and b meet, in block 1.
  const size_t middle = data + static_cast<size_t>(size_a);
  EXPECT_NE(check(middle, "a", size_a - 1, size_a), "");
  EXPECT_NE(check(middle, "b", 0, 1), "");
  EXPECT_EQ(check(middle, "a", 0, kChecksumBlock), "");
  EXPECT_NE(check(middle, "a", 0, kChecksumBlock + 1), "");
  // A checksum itself.
  EXPECT_NE(check(sums + 4, "a", 0, 1), "");
  EXPECT_NE(check(sums, "a", 0, 0), "");

  // Of another length than the tensors need.
  auto short_sums = *SafetensorsWriter::Create(
      path,
      {{"a", DType::kFloat32, {1}},
       {std::string(kChecksums), DType::kInt32, {1}}},
      {});
  ASSERT_TRUE(short_sums.Write(std::as_bytes(std::span(a).first(2))));
  ASSERT_TRUE(short_sums.Commit().has_value());
  EXPECT_EQ(SafetensorsFile::Open(path).error().ToString(),
            path +
                ": tensor 'optimizer.checksums': is I32[1]: expected "
                "I32[2], behind all others");
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace tessera
