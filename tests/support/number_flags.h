#pragma once
// The command line of a test program: flags with a number each.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string_view>

namespace tessera::testing {

struct NumberFlag {
  std::string_view name;
  int64_t* value = nullptr;
};

// Sets what is given. The exit code of a program that ends here, having printed
// `usage`: 0 for --help, 2 for what is no flag or has no number.
inline std::optional<int> ReadNumberFlags(int argc, char** argv,
                                          std::span<const NumberFlag> flags,
                                          const char* usage) {
  for (int i = 1; i < argc; i += 2) {
    const auto flag =
        std::ranges::find(flags, std::string_view(argv[i]), &NumberFlag::name);
    if (flag == flags.end() || i + 1 == argc) {
      const bool help = std::string_view(argv[i]) == "--help";
      std::fputs(usage, help ? stdout : stderr);
      return help ? 0 : 2;
    }
    *flag->value = std::atoll(argv[i + 1]);
  }
  return std::nullopt;
}

}  // namespace tessera::testing
