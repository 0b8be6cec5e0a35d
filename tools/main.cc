#include "tools/verb.h"

int main(int argc, char** argv) {
  return tessera::RunTessera({argv + 1, argv + argc});
}
