// What every reader of files must satisfy, on the fuzzer's corpus: it takes a
// file or refuses it, and writes what it takes so that it reads the same back.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "tests/support/paths.h"
#include "tests/support/readers.h"

namespace tessera::testing {
namespace {

class ReaderContract : public ::testing::TestWithParam<Reader> {};

TEST_P(ReaderContract, TakesOrRefusesItsCorpus) {
  const Reader& reader = GetParam();
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) /
      ("readers-" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  const std::string path = folder / reader.file;
  int files = 0;
  for (const auto& file : std::filesystem::directory_iterator(
           TestdataPath("fuzz/" + std::string(reader.name)))) {
    std::filesystem::copy_file(
        file.path(), path, std::filesystem::copy_options::overwrite_existing);
    EXPECT_EQ(reader.problem(path), "") << file.path();
    ++files;
  }
  EXPECT_GT(files, 0);
  std::filesystem::remove_all(folder);
}

INSTANTIATE_TEST_SUITE_P(AllReaders, ReaderContract,
                         ::testing::ValuesIn(Readers()), [](const auto& info) {
                           return std::string(info.param.name);
                         });

}  // namespace
}  // namespace tessera::testing
