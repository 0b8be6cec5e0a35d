// What every reader of files must satisfy, on the fuzzer's corpus: it takes a
// file or refuses it, and writes what it takes so that it reads the same back.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "planner/base/file.h"
#include "planner/base/rng.h"
#include "tests/support/paths.h"
#include "tests/support/readers.h"

namespace tessera::testing {
namespace {

class ReaderContract : public ::testing::TestWithParam<Reader> {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::vector<std::string> Corpus() const {
    std::vector<std::string> files;
    const std::string corpus =
        TestdataPath("fuzz/" + std::string(GetParam().name));
    if (std::filesystem::exists(corpus)) {
      for (const auto& file : std::filesystem::directory_iterator(corpus)) {
        files.push_back(file.path());
      }
    }
    for (const std::string& example : GetParam().examples) {
      files.push_back(ExamplePath(example));
    }
    std::ranges::sort(files);
    return files;
  }

  // What is wrong with reading these bytes.
  std::string Problem(const std::string& bytes) const {
    const std::string path = folder_ / GetParam().file;
    std::ofstream(path, std::ios::binary) << bytes;
    return GetParam().problem(path);
  }

  const std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) /
      ("readers-" + std::to_string(getpid()));
};

TEST_P(ReaderContract, TakesOrRefusesItsCorpus) {
  const std::vector<std::string> corpus = Corpus();
  EXPECT_FALSE(corpus.empty());
  for (const std::string& file : corpus) {
    EXPECT_EQ(Problem(*ReadFile(file)), "") << file;
  }
}

// Bytes changed, taken out or put in twice, a few at a time.
std::string Mutated(std::string bytes, Rng& rng) {
  const auto below = [&](size_t n) {
    return rng.Below(static_cast<uint32_t>(std::max<size_t>(1, n)));
  };
  for (uint32_t edits = 1 + below(4); edits > 0 && !bytes.empty(); --edits) {
    const size_t at = below(bytes.size());
    const size_t count = 1 + below(std::min<size_t>(16, bytes.size() - at));
    switch (below(4)) {
      case 0:
        bytes[at] = static_cast<char>(below(256));
        break;
      case 1:
        bytes.erase(at, count);
        break;
      case 2:
        bytes.insert(below(bytes.size()), bytes.substr(at, count));
        break;
      default:
        bytes[at] = "09-.{}[]\"',:=\n"[below(15)];
        break;
    }
  }
  return bytes;
}

TEST_P(ReaderContract, TakesOrRefusesMutations) {
  Rng rng(1);
  const std::vector<std::string> corpus = Corpus();
  for (int i = 0; i < 400; ++i) {
    const std::string bytes =
        Mutated(*ReadFile(corpus[static_cast<size_t>(i) % corpus.size()]), rng);
    EXPECT_EQ(Problem(bytes), "") << bytes;
  }
}

INSTANTIATE_TEST_SUITE_P(AllReaders, ReaderContract,
                         ::testing::ValuesIn(Readers()), [](const auto& info) {
                           return std::string(info.param.name);
                         });

}  // namespace
}  // namespace tessera::testing
