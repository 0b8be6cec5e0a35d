#include <csignal>

#include "tools/verb.h"

int main(int argc, char** argv) {
  // Files that may not grow are errors like others (EFBIG). Ranks inherit it.
  std::signal(SIGXFSZ, SIG_IGN);
  return tessera::RunTessera({argv + 1, argv + argc});
}
