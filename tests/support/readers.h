#pragma once
// Every reader of files that a user brings, as the fuzzer and its corpus see
// them (tests/fuzz/readers.cc, tests/testdata/fuzz/).

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::testing {

struct Reader {
  std::string_view name;  // of the corpus's folder
  std::string_view file;  // name of a file of its kind
  // Reads the file at `path`, and what it takes in once more as it writes it:
  // the second writing must be the first, byte for byte. Returns what is wrong
  // with that, empty for nothing; a file that is refused is nothing wrong.
  std::string (*problem)(const std::string& path);
  // Files of examples/ that are of its kind, besides its corpus.
  std::vector<std::string> examples = {};
};

std::span<const Reader> Readers();

}  // namespace tessera::testing
