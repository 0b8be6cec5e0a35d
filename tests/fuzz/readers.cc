// tessera_reader_fuzz: mutates files under libFuzzer (preset `fuzz`, Clang).
//
//   TESSERA_READER=cluster tessera_reader_fuzz CORPUS
//   tests/testdata/fuzz/cluster
//
// New files go to CORPUS. Ends at the first input that crashes a reader, that
// takes it more than a sanitizer's or libFuzzer's limits, or that is not read
// back as it was written.

#include "tests/support/readers.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace {

const tessera::testing::Reader* reader = nullptr;
std::string path;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* name = std::getenv("TESSERA_READER");
  for (const tessera::testing::Reader& row : tessera::testing::Readers()) {
    if (name != nullptr && row.name == name) reader = &row;
  }
  if (reader == nullptr) {
    std::fprintf(stderr, "TESSERA_READER names one of:");
    for (const tessera::testing::Reader& row : tessera::testing::Readers()) {
      std::fprintf(stderr, " %s", std::string(row.name).c_str());
    }
    std::fprintf(stderr, "\n");
    std::exit(2);
  }
  // In memory where there is such a folder.
  std::string folder =
      std::filesystem::exists("/dev/shm") ? "/dev/shm" : "/tmp";
  folder += "/tessera-fuzz-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) {
    std::perror(folder.c_str());
    std::exit(1);
  }
  path = folder + "/" + std::string(reader->file);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(data),
             static_cast<std::streamsize>(size));
  if (const std::string wrong = reader->problem(path); !wrong.empty()) {
    std::fprintf(stderr, "%s\n", wrong.c_str());
    std::abort();
  }
  return 0;
}
